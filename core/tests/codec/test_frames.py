"""Cells as frames: the format byte for byte, columns at once, and every kind of damage refused."""

from __future__ import annotations

import contextlib
import struct

import pytest
import torch
from framing import frame_cell, frame_column, unframe_cell, unframe_column

from dataplane_core.codec import ALL_DTYPES
from dataplane_core.codec.header import MAX_CELL_BYTES
from dataplane_core.codec.tensors import DTYPE_CODES
from dataplane_core.errors import FrameError, InvalidTypeError
from dataplane_core.spec import FieldSpec

DTYPES = sorted(ALL_DTYPES, key=str)


def frame(kind=1, code=12, dims=(2,), payload=b"\x00" * 8, magic=b"DPF", version=1, rank=None, zero=0):
    head = struct.pack("<3sBBBBB", magic, version, kind, code, len(dims) if rank is None else rank, zero)
    return head + struct.pack(f"<{len(dims)}q", *dims) + payload


def test_the_format_is_pinned():
    assert frame_cell(torch.tensor([1, -2], dtype=torch.int16)) == bytes.fromhex(
        "445046010107010002000000000000000100feff"
    )
    assert frame_cell(torch.tensor(True)) == b"DPF\x01\x01\x01\x00\x00\x01"
    assert frame_cell("a") == b"DPF\x01\x02\x02\x01\x00\x02\x00\x00\x00\x00\x00\x00\x00\xa1a"


def test_dtype_codes_are_pinned():
    names = [str(dtype).removeprefix("torch.") for dtype in sorted(DTYPE_CODES, key=DTYPE_CODES.__getitem__)]
    assert names == [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ]
    assert sorted(DTYPE_CODES.values()) == list(range(1, 22))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (700,), (2, 3), (2, 0, 3)], ids=str)
def test_a_cell_comes_back_bit_for_bit(dtype, shape, random_cell, bits):
    cell = random_cell(shape, dtype)
    for kind in (bytes, bytearray, memoryview):
        found = unframe_cell(kind(frame_cell(cell)))
        assert (found.dtype, found.shape) == (dtype, shape)
        assert bits(found) == bits(cell)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        [()] * 3,
        [(2,)] * 3,
        [(600, 2)] * 3,
        [(3,), (0,), (5,)],
        [(700,), (0,), (2000,)],
        [(3, 2), (1, 2)],
        [(0,), (0,)],
        [(2, 0), (1, 0)],
    ],
    ids=str,
)
def test_the_frames_of_a_column_are_those_of_its_cells(dtype, shapes, random_cell, assert_rows):
    rows = [random_cell(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    spec = FieldSpec.of_cells(dtype, shapes[0])
    frames = frame_column(rows)
    assert [bytes(each) for each in frames] == [frame_cell(row) for row in rows]
    for believed in (spec, None):
        assert_rows(unframe_column(frames, believed), rows)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([400_000] * 3, id="dense"),
        pytest.param([400_000, 0, 1, 400_000], id="a few large ones"),
        pytest.param([512 + row % 2 for row in range(600)], id="of the least large size"),
        pytest.param([100] * 3000 + [3], id="many small ones"),
    ],
)
def test_large_columns_share_no_memory_with_those_before(lengths, assert_rows):
    columns = [[torch.full((length,), float(fill + length)) for length in lengths] for fill in range(3)]
    framed = [frame_column(rows) for rows in columns]  # all held at the same time
    found = [unframe_column(frames) for frames in framed]
    del framed
    again = [unframe_column(frame_column(rows)) for rows in reversed(columns)]
    for rows, before, after in zip(columns, found, reversed(again), strict=True):
        assert_rows(before, rows)
        assert_rows(after, rows)


def test_frames_of_other_bytes_like_types_are_read():
    frames = [bytearray(each) for each in frame_column(torch.arange(6.0).view(3, 2))]
    assert unframe_column(frames).tolist() == [[0, 1], [2, 3], [4, 5]]
    floats = memoryview(bytearray(frames[0])).cast("H")
    assert unframe_cell(floats).tolist() == [0, 1]


def test_what_is_read_is_new_and_writable_memory():
    data = bytearray(frame_cell(torch.zeros(2)))
    column = unframe_column([data])
    data[-1] = 1
    column += 1
    assert column.tolist() == [[1, 1]]


def test_a_cell_that_no_reader_would_accept_is_refused_by_the_writer():
    with pytest.raises(InvalidTypeError, match="at most 64 dims"):
        frame_cell(torch.empty(0, MAX_CELL_BYTES))


MALFORMED = {
    "nothing": (b"", "truncated"),
    "half a header": (b"DPF\x01\x01", "truncated"),
    "header without dims": (frame(rank=3, dims=(), payload=b""), "truncated"),
    "another magic": (frame(magic=b"XYZ"), "magic"),
    "a later version": (frame(version=2), "version 2. Expected 1"),
    "version 0": (frame(version=0), "version 0"),
    "an unknown kind": (frame(kind=3), "kind 3"),
    "kind 0": (frame(kind=0), "kind 0"),
    "flags": (frame(zero=1), "flags 1"),
    "dtype code 0": (frame(code=0), "dtype code 0"),
    "an unknown dtype": (frame(code=22), "dtype code 22"),
    "too many dims": (frame(dims=(1,) * 65, payload=b"\x00" * 4), "rank 65"),
    "a negative dim": (frame(dims=(-2,)), "negative"),
    "two negative dims": (frame(dims=(-1, -2)), "negative"),
    "a huge dim": (frame(dims=(2**62,)), "more than"),
    "a huge dim without content": (frame(dims=(2**62, 0), payload=b""), "more than"),
    "an overflow to 8 bytes": (frame(dims=(2**32, 2**31, 2)), "more than"),
    "an overflow to 0": (frame(dims=(2**32, 2**32), payload=b""), "more than"),
    "a short payload": (frame(payload=b"\x00" * 7), "truncated"),
    "no payload": (frame(payload=b""), "truncated"),
    "a long payload": (frame(payload=b"\x00" * 9), "too long"),
    "an object of rank 0": (frame(kind=2, code=2, dims=(), payload=b"\xc0"), "object frame"),
    "an object of floats": (frame(kind=2, code=12, dims=(1,), payload=b"\x00" * 4), "object frame"),
    "a broken object": (frame(kind=2, code=2, dims=(1,), payload=b"\xc1"), "malformed"),
    "an empty object": (frame(kind=2, code=2, dims=(0,), payload=b""), "malformed"),
}


@pytest.mark.parametrize(("data", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_malformed_frame_says_what_is_wrong(data, reason, kind):
    with pytest.raises(FrameError, match=reason):
        unframe_cell(kind(data))
    for frames in ([kind(data)], [kind(data)] * 2):
        with pytest.raises(FrameError, match=rf"row 0.*{reason}"):
            unframe_column(frames)
    if "object" not in reason and "malformed" not in reason:
        with pytest.raises(FrameError, match=rf"row 1.*{reason}"):
            unframe_column([kind(frame()), kind(data), kind(frame())])


@pytest.mark.parametrize(
    "other",
    [
        frame_cell(torch.zeros(2, dtype=torch.int32)),
        frame_cell(torch.zeros(2, 1)),
        frame_cell(torch.tensor(0.0)),
        frame_cell("ab"),
        frame_cell(torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_frames_that_do_not_fit_one_column_name_the_row(other):
    with pytest.raises(FrameError, match=r"row 2: .*does not fit row 0"):
        unframe_column([frame(), frame(), other])


def test_rows_that_claim_too_much_together_are_refused():
    huge = frame(dims=(2**45, 0), payload=b"")
    assert unframe_cell(huge).shape == (2**45, 0)
    with pytest.raises(FrameError, match="together"):
        unframe_column([huge] * 9)


def test_every_single_byte_of_a_frame_may_be_damaged():
    for data in (frame_cell(torch.arange(3, dtype=torch.int16)), frame_cell({"k": [1, "a"]})):
        for at in range(len(data)):
            for value in (0, 1, 2, 3, 12, 0x7F, 0x80, 0xC1, 0xDD, 0xFF, data[at] ^ 1, data[at] ^ 64):
                damaged = bytearray(data)
                damaged[at] = value
                with contextlib.suppress(FrameError):
                    unframe_cell(bytes(damaged))
                with contextlib.suppress(FrameError):
                    unframe_column([data, bytes(damaged)])


def test_every_truncation_of_a_frame_is_refused():
    for data in (frame_cell(torch.arange(3, dtype=torch.int16)), frame_cell({"k": [1, "a"]})):
        for size in range(len(data)):
            with pytest.raises(FrameError):
                unframe_cell(data[:size])
            with pytest.raises(FrameError):
                unframe_column([data, data[:size]])
