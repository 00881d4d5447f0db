"""The payload of a put: rows that are deleted take no memory for long."""

from __future__ import annotations

import pytest
import torch

from dataplane_noop._backend import Segment


@pytest.mark.parametrize(
    "gone", [range(900), range(100, 1000), range(0, 1000, 2)], ids=["first", "last", "each second"]
)
def test_memory_is_freed_once_half_of_the_rows_are_deleted_whichever_they_are(gone: range) -> None:
    segment = Segment({"x": torch.arange(1000)}, 1000)
    for part in (gone[::2], gone[1::2]):  # a clear often takes a few rows of a put
        segment = segment.without(part)
    left = sorted(set(range(1000)) - set(gone))
    piece = segment.piece(0, left, range(len(left)))
    assert isinstance(piece.column, torch.Tensor)
    assert len(piece.column) <= 2 * len(left)
    assert [piece.column[row] for row in piece.rows] == left
    assert segment.gone([*gone, *left]) == list(gone)
