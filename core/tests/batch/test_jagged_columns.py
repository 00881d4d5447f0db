"""A batch with jagged columns: cut, picked and reordered by rows; what pads refuses them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core.batch import BatchedDataDict, SlicedDataDict

COUNTS = [3, 0, 1, 4, 2, 2]


def batch_of(counts=COUNTS, dtype=torch.float32):
    rows = [torch.full((count, 2), row).to(dtype) for row, count in enumerate(counts)]
    return BatchedDataDict(
        pixel_values=torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        ids=torch.arange(len(counts)),
        names=[f"n{row}" for row in range(len(counts))],
        texts=np.array([f"t{row}" for row in range(len(counts))], dtype=object),
    )


def held(batch):
    """(row, patches) of each row, by the column itself; and that the other columns say the same rows."""
    found = [(set(row.flatten().tolist()), len(row)) for row in batch["pixel_values"].unbind()]
    for row, (values, count) in zip(batch["ids"].tolist(), found, strict=True):
        assert values == ({float(row)} if count else set())
    assert batch["names"] == [f"n{row}" for row in batch["ids"].tolist()]
    return [(row, count) for row, (_, count) in zip(batch["ids"].tolist(), found, strict=True)]


def rows(*numbers):
    return [(number, COUNTS[number]) for number in numbers]


@pytest.mark.parametrize(("start", "end"), [(0, 6), (1, 4), (2, 2), (5, 6)])
def test_a_slice_is_a_view_of_whole_rows(start, end):
    batch = batch_of()
    part = batch.slice(start, end)
    assert held(part) == rows(*range(start, end))
    whole, cut = batch["pixel_values"].values(), part["pixel_values"].values()
    assert cut.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_chunks_and_microbatches_are_slices():
    assert held(batch_of().chunk(1, 3)) == rows(2, 3)
    assert [held(part) for part in batch_of().make_microbatch_iterator(4 - 2)] == [rows(0, 1), rows(2, 3), rows(4, 5)]


@given(st.lists(st.integers(-6, 5), max_size=9))
def test_selected_rows_are_copied_in_order_with_repeats(picks):
    assert held(batch_of().select_indices(picks)) == rows(*[pick % 6 for pick in picks])


def test_repeated_rows_lie_side_by_side():
    assert held(batch_of().repeat_interleave(2)) == rows(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)


def test_truncation_and_moving_leave_jagged_rows_whole():
    batch = batch_of()
    batch["input_ids"] = torch.zeros(6, 8)
    batch.truncate_tensors(1, 2)
    assert batch["input_ids"].shape == (6, 2)
    assert held(batch.to("cpu")) == rows(*range(6))


def test_planned_microbatches_cut_the_token_columns_only():
    batch = SlicedDataDict(
        batch_of(),
        input_ids=torch.zeros(6, 8),
        routed_experts=torch.zeros(6, 12, 2, 3),
        embedding=torch.zeros(6, 16),
        image_grid_thw=torch.zeros(6, 8, 3),
        mask=torch.zeros(6, 8),
    )
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2], [2, 6]]], [[2, 6]]
    first, second = batch.make_microbatch_iterator_with_dynamic_shapes()
    assert (held(first), held(second)) == (rows(0, 1), rows(2, 3, 4, 5))
    assert [first[name].shape[1] for name in ("input_ids", "mask", "routed_experts")] == [2] * 3
    assert first["embedding"].shape == (2, 16), "another width than that of the tokens"
    assert first["image_grid_thw"].shape == (2, 8, 3), "as wide as the tokens by chance"
    named = next(batch.make_microbatch_iterator_with_dynamic_shapes(token_aligned_fields=["input_ids", "not there"]))
    assert (named["input_ids"].shape, named["mask"].shape) == ((2, 2), (2, 8))


def test_joining_refuses_them_with_what_to_do():
    with pytest.raises(NotImplementedError, match=r"'pixel_values' is a nested tensor\. Expected a padded one"):
        BatchedDataDict.from_batches([batch_of(), batch_of()])


def test_rows_that_do_not_lie_end_to_end_are_refused():
    offsets = torch.tensor([0, 2, 6])
    ragged_later = torch.nested.nested_tensor_from_jagged(torch.zeros(2, 6), offsets, jagged_dim=2)
    with_holes = torch.nested.nested_tensor_from_jagged(torch.zeros(6, 2), offsets, torch.tensor([1, 3]))
    for column in (ragged_later, with_holes):
        with pytest.raises(TypeError, match=r"'x' is a nested tensor .* end to end"):
            BatchedDataDict(x=column).slice(0, 1)
