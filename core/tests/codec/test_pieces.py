"""The rows of a read, joined from stored columns of several puts."""

import random

import pytest
import torch
from tensordict import TensorDict

from dataplane_core.codec import ALL_DTYPES, Piece, Ragged, merge_pieces, offsets_of, rows_in_order


def cells_of(column):
    return list(column.values.split(column.lengths.tolist()) if isinstance(column, Ragged) else column.unbind())


def column(draw, kind, num_rows, trailing, dtype):
    def values(*shape):
        numbers = torch.arange(1, torch.Size(shape).numel() + 1) + draw.randrange(50)
        return numbers.to(torch.uint8).repeat_interleave(dtype.itemsize).view(dtype).view(shape)

    if kind == "scalars":
        return values(num_rows)
    if kind == "dense":
        return values(num_rows, draw.choice([0, 1, 3]), *trailing)
    lengths = torch.tensor([draw.choice([0, 1, 2, 700]) for _ in range(num_rows)])
    return Ragged(values(int(lengths.sum()), *trailing), offsets_of(lengths))


@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES, key=str), ids=str)
@pytest.mark.parametrize("kinds", [("scalars",), ("dense",), ("dense", "ragged"), ("ragged",)], ids="-".join)
def test_rows_come_in_the_order_of_the_request_whatever_put_they_are_from(kinds, dtype, bits):
    draw = random.Random(f"{kinds}{dtype}")
    for _ in range(10):
        trailing = draw.choice([(), (2,), (2, 3)])
        pieces, expected, order = [], {}, []
        counts = [draw.randrange(1, 8) for _ in range(draw.randrange(1, 4))]
        order = list(range(sum(counts)))
        if draw.random() < 0.5:
            draw.shuffle(order)
        for count in counts:
            stored = column(draw, draw.choice(kinds), draw.randrange(count, 10), trailing, dtype)
            cells = cells_of(stored)
            rows = list(range(count)) if draw.random() < 0.3 else draw.sample(range(len(cells)), count)
            positions, order = order[:count], order[count:]
            pieces.append(Piece(stored, rows, positions))
            expected.update({position: cells[row] for row, position in zip(rows, positions, strict=True)})
        merged = merge_pieces(pieces)
        assert len(merged.unbind()) == len(expected)
        for position, cell in enumerate(merged.unbind()):
            wanted = expected[position]
            assert (cell.dtype, cell.shape, bits(cell)) == (wanted.dtype, wanted.shape, bits(wanted))
            assert cell.numel() == 0 or cell.data_ptr() != expected[position].data_ptr()


def test_items_are_copied():
    stored = [TensorDict({"x": torch.ones(1)}), {"a": [1]}]
    merged = merge_pieces([Piece(stored, [1, 0], [0, 1])])
    assert merged[0] == {"a": [1]}
    assert merged[0] is not stored[1]


def test_rows_in_order_are_known_in_any_form():
    assert rows_in_order([3, 4, 5], 3, 3)
    assert rows_in_order(range(3, 6), 3, 3)
    assert rows_in_order([], 0, 0)
    assert not rows_in_order([3, 5, 4], 3, 3)
    assert not rows_in_order([3, 4], 3, 3)
