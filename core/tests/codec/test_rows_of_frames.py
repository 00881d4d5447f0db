"""Several cells of a sample in one byte string, for engines whose cost is per cell."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from framing import frame_column, unframe_column

from dataplane_core.codec import join_row, join_rows, split_rows
from dataplane_core.errors import FrameError, InvalidRequestError

FRAMES = [b"one", b"", b"a longer frame", bytes(range(256)) * 8]


def test_the_format_is_pinned():
    expected = b"DPR\x01\x02\x00\x00\x00" + b"\x01" + b"\x00" * 7 + b"\x02" + b"\x00" * 7 + b"abc"
    assert join_row([b"a", b"bc"]) == expected


@pytest.mark.parametrize("frames", [[], [b""], FRAMES], ids=["none", "empty", "several"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer])
def test_the_frames_of_a_row_come_back(frames, kind):
    row = join_row([bytearray(frame) for frame in frames])
    row = np.frombuffer(row, dtype=np.uint8) if kind is np.frombuffer else kind(row)
    assert [[bytes(frame) for frame in each] for each in split_rows([row])] == [frames]


def test_rows_joined_at_once_are_those_joined_one_by_one():
    columns = [[b"a", b"bb", b""], [b"x" * 3000, b"", b"y"], [bytearray(b"1"), memoryview(b"22"), b"333"]]
    data, offsets = join_rows([columns])
    assert type(data) is memoryview
    assert offsets.dtype == np.int64
    rows = [data[start:stop] for start, stop in pairwise(offsets)]
    assert rows == [join_row(row) for row in zip(*columns, strict=True)]
    assert offsets[0] == 0
    assert offsets[-1] == len(data)


def test_memory_of_large_rows_is_used_again_once_nobody_holds_it():
    one, two = ([bytes([value]) * (1 << 20), b"end"] for value in (1, 2))
    data, offsets = join_rows([[[frame] for frame in one]])
    place, row = np.frombuffer(data, dtype=np.uint8).ctypes.data, data[1:]
    assert (bytes(data), offsets.tolist()) == (join_row(one), [0, len(data)])
    del data
    other, _ = join_rows([[[frame] for frame in two]])
    assert (bytes(row), bytes(other)) == (join_row(one)[1:], join_row(two))
    del row
    again, _ = join_rows([[[frame] for frame in two]])
    assert np.frombuffer(again, dtype=np.uint8).ctypes.data == place


def test_frames_of_large_cells_hold_their_memory():
    cells = [torch.full((1 << 19,), float(value)) for value in range(2)]
    frames = [frame_column(cell[None])[0] for cell in cells]
    assert all(memoryview(frame).readonly for frame in frames)
    for frame, cell in zip(frames, cells, strict=True):
        assert torch.equal(unframe_column([frame])[0], cell)


def test_splitting_copies_no_large_frame():
    one, two = b"a" * 2000, b"b" * 2000
    data, offsets = join_rows([[[one, b"small"], [two, b"short"]]])
    view = memoryview(data)
    (first, second), (_, last) = split_rows([view[start:stop] for start, stop in pairwise(offsets)])
    data[:] = bytes(data).replace(b"a", b"A").replace(b"b", b"B")
    assert (bytes(first), bytes(second), bytes(last)) == (one.upper(), two.upper(), b"short")


def test_columns_come_back_through_rows():
    floats, items = torch.arange(12.0).view(3, 4), ["a", None, [1]]
    data, offsets = join_rows([[frame_column(floats), frame_column(items)]])
    rows = [memoryview(data)[start:stop] for start, stop in pairwise(offsets)]
    columns = list(zip(*split_rows(rows), strict=True))
    assert torch.equal(unframe_column(columns[0]), floats)
    assert unframe_column(columns[1]) == items


def test_no_rows_make_no_bytes():
    data, offsets = join_rows([[[], []]])
    assert (data, offsets.tolist()) == (bytearray(), [0])
    assert split_rows([]) == []


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(InvalidRequestError, match=r"got \[1, 2\]"):
        join_rows([[[b"a"], [b"b", b"c"]]])
    with pytest.raises(InvalidRequestError, match=r"got \[\]"):
        join_rows([[]])


GOOD = join_row([b"a", b"bc"])
MALFORMED = {
    "nothing": (b"", "truncated"),
    "half an index": (GOOD[:12], "truncated"),
    "another magic": (b"X" + GOOD[1:], "Expected b'DPR'"),
    "a later version": (GOOD[:3] + b"\x02" + GOOD[4:], "version 2"),
    "a huge count": (GOOD[:4] + b"\xff" * 4 + GOOD[8:], "truncated"),
    "a negative size": (GOOD[:8] + b"\xff" * 8 + GOOD[16:], "no frame of -1 bytes"),
    "a huge size": (GOOD[:8] + b"\xff" * 7 + b"\x7f" + GOOD[16:], "no frame of 9223372036854775807 bytes"),
    "a short frame": (GOOD[:-1], "no frame of 2 bytes"),
    "more bytes": (GOOD + b"z", "too many"),
}


@pytest.mark.parametrize(("data", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_row_says_what_is_wrong_and_which_row_it_is(data, reason):
    with pytest.raises(FrameError, match=reason) as caught:
        split_rows([GOOD, data])
    assert caught.value.row == 1
