"""`reorder_data` undoes a permutation, whichever it is."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dataplane_core.batch import BatchedDataDict


def batch_of(num_rows):
    return BatchedDataDict(
        t=torch.arange(num_rows),
        w=torch.arange(2 * num_rows).reshape(num_rows, 2),
        names=[f"n{i}" for i in range(num_rows)],
    )


def test_a_permutation_that_is_not_its_own_inverse_is_undone():
    came_from = [1, 2, 0]  # its inverse is [2, 0, 1]
    batch = batch_of(3).select_indices(came_from)
    assert batch["t"].tolist() == [1, 2, 0]
    assert batch.reorder_data(came_from) is None
    assert batch["t"].tolist() == [0, 1, 2]
    assert batch["w"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch["names"] == ["n0", "n1", "n2"]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_rows_of_unsigned_numbers_are_picked(dtype):
    batch = BatchedDataDict(x=torch.tensor([5, 6, 7]).to(dtype), w=torch.arange(6).reshape(3, 2).to(dtype))
    picked = batch.select_indices([2, 0, 2])
    assert (picked["x"].tolist(), picked["x"].dtype) == ([7, 5, 7], dtype)
    assert picked["w"].tolist() == [[4, 5], [0, 1], [4, 5]]


@given(st.permutations(range(23)), st.sampled_from([list, torch.tensor, np.array]))
def test_any_permutation_is_undone_in_any_form(came_from, form):
    batch = batch_of(23).select_indices(came_from)
    batch.reorder_data(form(came_from))
    assert batch["t"].tolist() == list(range(23))
    assert batch["names"] == [f"n{i}" for i in range(23)]


def test_object_arrays_are_reordered_too():
    batch = BatchedDataDict(o=np.array([{"r": 2}, {"r": 0}, {"r": 1}], dtype=object))
    batch.reorder_data([2, 0, 1])
    assert list(batch["o"]) == [{"r": 0}, {"r": 1}, {"r": 2}]


@pytest.mark.parametrize("indices", [[0, 1], [0, 1, 2, 3], [0, 0, 1], torch.tensor([1, 1, 0])], ids=str)
def test_indices_that_are_not_one_per_row_are_refused(indices):
    batch = batch_of(3)
    with pytest.raises(ValueError, match="each of the 3 rows"):
        batch.reorder_data(indices)
    assert batch["t"].tolist() == [0, 1, 2]


def test_a_plan_for_the_old_order_does_not_survive():
    batch = batch_of(2)
    batch.micro_batch_indices, batch.micro_batch_lengths, batch.elem_counts_per_gb = [[[0, 2]]], [[2]], [2]
    batch.reorder_data([1, 0])
    assert (batch.micro_batch_indices, batch.micro_batch_lengths, batch.elem_counts_per_gb) == (None, None, None)
