"""Microbatches of equal size, and those of a plan."""

import torch

from dataplane_core.batch import SlicedDataDict


def batch_of(num_rows, width=6):
    return SlicedDataDict(
        ids=torch.arange(num_rows * width).reshape(num_rows, width),
        routed=torch.zeros(num_rows, width, 2, 3),
        weight=torch.arange(num_rows),
        names=[f"n{i}" for i in range(num_rows)],
    )


def test_equal_microbatches_cover_the_batch_in_order():
    parts = list(batch_of(6).make_microbatch_iterator(2))
    assert [part["names"] for part in parts] == [["n0", "n1"], ["n2", "n3"], ["n4", "n5"]]
    assert all(part["ids"].shape == (2, 6) for part in parts)
    assert all(type(part) is SlicedDataDict for part in parts)


def test_planned_microbatches_are_cut_to_their_length_on_dim_1():
    batch = batch_of(5)
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2], [2, 3], [3, 5]]], [[2, 4, 6]]
    parts = list(batch.make_microbatch_iterator_with_dynamic_shapes())
    assert [part["names"] for part in parts] == [["n0", "n1"], ["n2"], ["n3", "n4"]]
    assert [part["ids"].shape for part in parts] == [(2, 2), (1, 4), (2, 6)]
    assert parts[1]["ids"].tolist() == [[12, 13, 14, 15]]
    assert parts[0]["routed"].shape == (2, 2, 2, 3)
    assert [part["weight"].tolist() for part in parts] == [[0, 1], [2], [3, 4]]
    assert batch["ids"].shape == (5, 6)


def test_a_part_of_a_plan_of_several_batches_is_iterated():
    batch = SlicedDataDict(x=torch.zeros(4, 2))
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2]], [[0, 2]]], [[2], [2]]
    assert [part.size for part in batch.get_batch(1, 2).make_microbatch_iterator_with_dynamic_shapes()] == [2]


def test_packed_microbatches_are_the_sequences_of_a_bin_uncut():
    batch = batch_of(5)
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2], [2, 5]]], [[7, 9]]
    parts = list(batch.make_microbatch_iterator_for_packable_sequences())
    assert [part["names"] for part in parts] == [["n0", "n1"], ["n2", "n3", "n4"]]
    assert [part["ids"].shape for part in parts] == [(2, 6), (3, 6)]


def test_the_plan_says_how_many_microbatches_come_and_how_long_the_longest_is():
    batch = batch_of(5)
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2], [2, 4], [4, 5]]], [[7, 9, 3]]
    assert batch.get_microbatch_iterator_dynamic_shapes_len() == 3
    assert batch.get_microbatch_iterator_for_packable_sequences_len() == (3, 9)
