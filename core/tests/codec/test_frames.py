"""Cells as frames, and frames as rows: the formats byte for byte, and every kind of damage refused with its place."""

import contextlib
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from framing import frame_cell, unframe_cell, unframe_column
from hypothesis import given, strategies as st

from dataplane_core.codec import join_row, split_rows
from dataplane_core.codec.cells import MAX_CELL_BYTES, join_rows
from dataplane_core.codec.tensors import DTYPE_CODES
from dataplane_core.errors import CorruptDataError, FrameError, InvalidTypeError
from dataplane_core.spec import FieldSpec


def frame(kind=1, code=12, dims=(2,), payload=b"\x00" * 8, magic=b"DPF", version=1, zero=0):
    head = struct.pack("<3sBBBBB", magic, version, kind, code, len(dims), zero)
    return head + struct.pack(f"<{len(dims)}q", *dims) + payload


def test_the_formats_are_pinned():
    assert frame_cell(torch.tensor([1, -2], dtype=torch.int16)) == bytes.fromhex(
        "445046010107010002000000000000000100feff"
    )
    assert frame_cell(torch.tensor(True)) == b"DPF\x01\x01\x01\x00\x00\x01"
    assert frame_cell("a") == b"DPF\x01\x02\x02\x01\x00\x02\x00\x00\x00\x00\x00\x00\x00\xa1a"
    row = b"DPR\x01\x02\x00\x00\x00" + b"\x01" + b"\x00" * 7 + b"\x02" + b"\x00" * 7 + b"abc"
    assert join_row([b"a", b"bc"]) == row
    names = [str(dtype).removeprefix("torch.") for dtype in sorted(DTYPE_CODES, key=DTYPE_CODES.__getitem__)]
    assert names == [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ]
    assert sorted(DTYPE_CODES.values()) == list(range(1, 22))


# --- rows of frames ---------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=40) | st.just(bytes(3000)), min_size=2, max_size=2), max_size=4))
def test_the_frames_of_a_row_come_back_whoever_joined_them(columns):
    rows = [join_row([bytearray(frame) for frame in row]) for row in zip(*columns, strict=True)]
    for kind in (bytes, bytearray, memoryview, lambda row: np.frombuffer(row, dtype=np.uint8)):
        found = split_rows([kind(row) for row in rows])
        assert [[bytes(frame) for frame in row] for row in found] == [list(row) for row in zip(*columns, strict=True)]
    if columns:
        data, offsets = join_rows([columns])
        assert (offsets.dtype, offsets[0], offsets[-1]) == (np.int64, 0, len(data))
        assert [data[start:stop] for start, stop in pairwise(offsets)] == rows


# --- damage -----------------------------------------------------------------------------------------------------------

GOOD = join_row([b"a", b"bc"])
MALFORMED = {
    "another magic": frame(magic=b"XYZ"),
    "a later version": frame(version=2),
    "an unknown kind": frame(kind=3),
    "flags": frame(zero=1),
    "an unknown dtype": frame(code=22),
    "a long payload": frame(payload=b"\x00" * 9),
    "an object of floats": frame(kind=2, code=12, dims=(1,), payload=b"\x00" * 4),
}
MALFORMED_ROWS = {
    "another magic": b"X" + GOOD[1:],
    "a later version": GOOD[:3] + b"\x02" + GOOD[4:],
    "more bytes": GOOD + b"z",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_frame_is_refused_and_its_row_named(data):
    for frames in ([data], [bytearray(data)] * 2, [memoryview(data)]):
        with pytest.raises(FrameError, match="row 0"):
            unframe_column(frames)
    with pytest.raises(FrameError, match="row 1"):
        unframe_column([frame(), data, frame()])


@pytest.mark.parametrize("data", MALFORMED_ROWS.values(), ids=MALFORMED_ROWS.keys())
def test_a_malformed_row_of_frames_is_refused_and_named(data):
    with pytest.raises(FrameError) as caught:
        split_rows([GOOD, data])
    assert caught.value.row == 1


def test_rows_that_claim_too_much_together_are_refused_and_so_is_a_cell_by_its_writer():
    huge = frame(dims=(2**45, 0), payload=b"")
    assert unframe_cell(huge).shape == (2**45, 0)
    with pytest.raises(FrameError, match="together"):
        unframe_column([huge] * 9)
    for cell in (torch.empty(0, MAX_CELL_BYTES), {"t": torch.empty(0, MAX_CELL_BYTES)}):
        with pytest.raises(InvalidTypeError, match="at most 64 dims"):
            frame_cell(cell)


def test_every_byte_of_a_frame_may_be_damaged_and_every_truncation_is_refused():
    for data in (frame_cell(torch.arange(3, dtype=torch.int16)), frame_cell({"k": [1, "a"]})):
        for at in range(len(data)):
            for value in (0, 1, 2, 3, 12, 0x7F, 0x80, 0xC1, 0xDD, 0xFF, data[at] ^ 1, data[at] ^ 64):
                damaged = bytearray(data)
                damaged[at] = value
                with contextlib.suppress(FrameError):
                    unframe_cell(bytes(damaged))
                with contextlib.suppress(FrameError):
                    unframe_column([data, bytes(damaged)])
            with pytest.raises(FrameError):
                unframe_cell(data[:at])
            with pytest.raises(FrameError):
                unframe_column([data, data[:at]])


# --- bytes that nobody of this package wrote --------------------------------------------------------------------------


def test_a_text_that_is_no_spec_is_refused():
    numbers = "tensor:int64:"
    after = ["1", "-2:", "1:3", "3:3", "2:-3", "2:1e3", "2:" + "9" * 30, "999:", "2:\u0663"]
    others = ["", "tensor", "object:int64:0:", "tensor:__doc__:1:", "a:b:c:d:e"]
    for text in (*others, *(numbers + each for each in after)):
        with pytest.raises(CorruptDataError, match="is no spec of a field"):
            FieldSpec.from_text(text)


def test_a_spec_whose_dtype_torch_lacks_says_so():
    assert FieldSpec.from_text("tensor:int64:2:3").torch_dtype is torch.int64
    with pytest.raises(CorruptDataError, match="'save', which torch lacks"):
        _ = FieldSpec.from_text("tensor:save:2:3").torch_dtype
