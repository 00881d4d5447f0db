"""`take_rows` repeats and reorders rows; the container follows them."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorStack

from dataplane_core.codec import ALL_DTYPES, take_rows


@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES, key=str), ids=str)
@pytest.mark.parametrize("lengths", [[2, 0, 3], [2, 2, 2]], ids=["ragged", "dense"])
@pytest.mark.parametrize("trailing", [(), (2, 3)], ids=["flat", "deep"])
def test_rows_are_repeated_and_reordered_bit_for_bit(dtype, lengths, trailing, random_cell, assert_rows):
    rows = [random_cell((length, *trailing), dtype, seed) for seed, length in enumerate(lengths)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    column = torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)
    if len(set(lengths)) == 1:
        column = torch.stack(rows)
    for positions in ([2, 0, 0, 1], [1], [0, 0], [2, 1, 0]):
        assert_rows(take_rows(column, positions), [rows[position] for position in positions])


def test_scalars_are_taken():
    assert take_rows(torch.tensor([1, 2, 3]), [2, 2, 0]).tolist() == [3, 3, 1]


def test_repeated_objects_are_independent():
    taken = take_rows(NonTensorStack({"a": 1}, {"b": 2}), [0, 0, 1])
    assert type(taken) is NonTensorStack
    one, two, three = taken.tolist()
    assert (one, two, three) == ({"a": 1}, {"a": 1}, {"b": 2})
    one["a"] = 5
    assert two == {"a": 1}
