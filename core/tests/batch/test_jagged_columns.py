"""A batch with jagged columns: their rows pass whole."""

import torch

from dataplane_core.batch import SlicedDataDict

COUNTS = [3, 0, 1, 4, 2, 2]


def batch_of(**more):
    rows = [torch.full((count, 2), row) for row, count in enumerate(COUNTS)]
    return SlicedDataDict(pixel_values=torch.nested.as_nested_tensor(rows, layout=torch.jagged), **more)


def counts(batch):
    return batch["pixel_values"].offsets().diff().tolist()


def test_truncation_and_moving_leave_jagged_rows_whole():
    batch = batch_of(input_ids=torch.zeros(6, 8))
    batch.truncate_tensors(1, 2)
    assert batch["input_ids"].shape == (6, 2)
    assert counts(batch.to("cpu")) == COUNTS


def test_planned_microbatches_cut_the_token_columns_only():
    batch = batch_of(
        input_ids=torch.zeros(6, 8),
        routed_experts=torch.zeros(6, 12, 2, 3),
        embedding=torch.zeros(6, 16),
        image_grid_thw=torch.zeros(6, 8, 3),
        mask=torch.zeros(6, 8),
    )
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2], [2, 6]]], [[2, 6]]
    first, second = batch.make_microbatch_iterator_with_dynamic_shapes()
    assert (counts(first), counts(second)) == (COUNTS[:2], COUNTS[2:])
    assert [first[name].shape[1] for name in ("input_ids", "mask", "routed_experts")] == [2] * 3
    assert first["embedding"].shape == (2, 16), "another width than that of the tokens"
    assert first["image_grid_thw"].shape == (2, 8, 3), "as wide as the tokens by chance"
    named = next(batch.make_microbatch_iterator_with_dynamic_shapes(token_aligned_fields=["input_ids", "not there"]))
    assert (named["input_ids"].shape, named["mask"].shape) == ((2, 2), (2, 8))
