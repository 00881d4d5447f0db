"""Rows out of a batch: `size`, `slice`, `chunk`, `select_indices`, `get_batch`."""

import copy
import pickle

import numpy as np
import pytest
import torch

from dataplane_core.batch import BatchedDataDict, SlicedDataDict


def batch_of(num_rows):
    items = np.empty(num_rows, dtype=object)
    items[:] = [f"o{i}" for i in range(num_rows)]
    patches = torch.nested.as_nested_tensor([torch.full((i % 3, 2), i) for i in range(num_rows)], layout=torch.jagged)
    names = [f"n{i}" for i in range(num_rows)]
    return BatchedDataDict(t=torch.arange(num_rows), names=names, objects=items, patches=patches)


def rows_of(batch):
    """The row numbers that a part of `batch_of` holds, once its columns agree on them."""
    rows = batch["t"].tolist()
    assert batch["names"] == [f"n{i}" for i in rows]
    assert list(batch["objects"]) == [f"o{i}" for i in rows]
    assert [row.tolist() for row in batch["patches"].unbind()] == [[[i, i]] * (i % 3) for i in rows]
    return rows


def test_a_slice_is_a_view_of_the_rows_from_start_to_end():
    batch = batch_of(6)
    part = batch.slice(2, 5)
    assert type(part) is SlicedDataDict
    assert rows_of(part) == [2, 3, 4]
    for whole, cut in ((batch["t"], part["t"]), (batch["patches"].values(), part["patches"].values())):
        assert cut.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert rows_of(batch_of(3).slice(3, 3)) == []


def test_a_chunk_keeps_its_values_when_the_batch_changes_and_the_other_way_round():
    jagged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    batch = BatchedDataDict(t=torch.ones(2, 3), a=np.ones(2), j=jagged, names=["a", "b"])
    chunk = batch.chunk(1, 2)
    batch["t"].zero_()
    batch["a"][:] = 0
    batch["j"].values().zero_()
    batch["names"][1] = "changed"
    assert chunk["t"].sum() == 3
    assert chunk["a"].tolist() == [1]
    assert chunk["j"].values().tolist() == [1, 1, 1]
    assert chunk["names"] == ["b"]
    chunk["t"][:] = 7
    assert batch["t"].sum() == 0
    assert chunk["t"].untyped_storage().nbytes() == chunk["t"].nbytes  # a pickled chunk is no larger than its rows


@pytest.mark.parametrize("indices", [[3, 0, 3, -1], torch.tensor([3, 0, 3, -1]), np.array([3, 0, 3, -1])])
def test_rows_are_selected_in_any_order_and_may_repeat(indices):
    assert rows_of(batch_of(5).select_indices(indices)) == [3, 0, 3, 4]


def test_repeated_rows_lie_side_by_side():
    assert rows_of(batch_of(3).repeat_interleave(2)) == [0, 0, 1, 1, 2, 2]


def test_get_batch_without_a_plan_cuts_by_batch_size():
    batch = batch_of(6)
    assert [rows_of(batch.get_batch(i, 2)) for i in range(3)] == [[0, 1], [2, 3], [4, 5]]


def planned():
    shard = SlicedDataDict(batch_of(6).data)
    shard.micro_batch_indices = [[[0, 1], [1, 3]], [[0, 3]]]
    shard.micro_batch_lengths = [[4, 8], [2]]
    return shard


def test_get_batch_keeps_that_batchs_part_of_the_plan_alone():
    part = planned().get_batch(1, 3)
    assert rows_of(part) == [3, 4, 5]
    assert part.micro_batch_indices == [[[0, 3]]]
    assert part.micro_batch_lengths == [[2]]
    assert rows_of(planned().get_batch(0)) == [0, 1, 2]


def test_get_batch_hands_out_a_copy_of_the_plan():
    shard = planned()
    part = shard.get_batch(0, 3)
    part.micro_batch_indices[0][0][1] = 99
    part.micro_batch_lengths[0][0] = 99
    assert shard.micro_batch_indices == [[[0, 1], [1, 3]], [[0, 3]]]
    assert shard.micro_batch_lengths == [[4, 8], [2]]


def test_copies_and_pickles_keep_the_plan():
    shard = planned()
    for twin in (pickle.loads(pickle.dumps(shard)), copy.copy(shard), copy.deepcopy(shard)):
        assert type(twin) is SlicedDataDict
        assert rows_of(twin) == rows_of(shard)
        assert twin.micro_batch_indices == shard.micro_batch_indices
        assert twin.micro_batch_lengths == shard.micro_batch_lengths
