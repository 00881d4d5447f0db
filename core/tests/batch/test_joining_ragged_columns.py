"""Columns of images, joined row by row; samples of text only have rows of length 0."""

import numpy as np
import pytest
import torch

from dataplane_core import BatchedDataDict
from dataplane_core.batch import stack_or_nest

PIXELS = [torch.arange(6 * count).view(count, 3, 2).to(torch.bfloat16) for count in (4, 0, 2, 3)]
IMAGES = BatchedDataDict(input_ids=torch.tensor([[1, 2], [3, 0]]), pixel_values=stack_or_nest(PIXELS[:2]))
MORE = BatchedDataDict(input_ids=torch.tensor([[4, 5, 6], [7, 0, 0]]), pixel_values=stack_or_nest(PIXELS[2:]))
TEXT = BatchedDataDict(input_ids=torch.tensor([[8]]))


def rows_of(column):
    return [row.clone() for row in column.unbind()]


def same(column, rows):
    assert [(row.dtype, row.shape) for row in column.unbind()] == [(row.dtype, row.shape) for row in rows]
    return all(torch.equal(found, row) for found, row in zip(column.unbind(), rows, strict=True))


def test_rows_of_images_are_joined_as_they_are_and_tokens_are_padded():
    joined = BatchedDataDict.from_batches([IMAGES, MORE])
    assert joined["input_ids"].shape == (4, 3)
    assert same(joined["pixel_values"], PIXELS)


def test_a_dense_column_of_images_is_not_padded_to_another_ones_width():
    dense = BatchedDataDict(pixel_values=torch.stack([PIXELS[0]] * 2))
    joined = BatchedDataDict.from_batches([dense, BatchedDataDict(pixel_values=torch.stack([PIXELS[2]]))])
    assert same(joined["pixel_values"], [PIXELS[0], PIXELS[0], PIXELS[2]])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_batch_of_text_only_gets_rows_of_length_0_wherever_it_stands(place):
    batches = [IMAGES, MORE]
    batches.insert(place, TEXT)
    joined = BatchedDataDict.from_batches(batches, allow_missing_packed_tensors=True)
    rows = list(PIXELS)
    rows.insert(2 * place, PIXELS[1])
    assert same(joined["pixel_values"], rows)
    kept = joined.select_indices([4, 0, 2]).slice(0, 2)
    assert same(kept["pixel_values"], [rows[4], rows[0]])


@pytest.mark.parametrize(
    "empty",
    [
        torch.ones(0, 7, 2, dtype=torch.bfloat16),
        torch.ones(0, 7, 5),
        IMAGES.slice(0, 0)["pixel_values"],
        IMAGES.select_indices([])["pixel_values"],
        [],
        np.ones((0, 7, 2)),
    ],
    ids=["wider", "another form", "a slice", "a selection", "a list", "an array"],
)
def test_a_batch_without_rows_changes_nothing(empty):
    nothing = {"input_ids": torch.ones(0, 1, dtype=torch.int64), "pixel_values": empty}
    dense = {"input_ids": torch.ones(1, 1, dtype=torch.int64), "pixel_values": PIXELS[0][None]}
    for batches in ([dense, nothing], [nothing, dense]):
        joined = BatchedDataDict.from_batches(batches)
        assert torch.equal(joined["pixel_values"], PIXELS[0][None])
    assert same(BatchedDataDict.from_batches([nothing, IMAGES])["pixel_values"], PIXELS[:2])
    assert BatchedDataDict.from_batches([nothing, nothing]).size == 0


def test_arrays_join_as_an_array_if_their_rows_are_alike_and_else_as_tensors():
    wide, narrow = np.ones((2, 4, 3), np.float32), np.zeros((1, 2, 3), np.float32)
    alike = BatchedDataDict.from_batches([{"pixel_values": wide}, {"pixel_values": wide}])["pixel_values"]
    assert isinstance(alike, np.ndarray)
    assert alike.shape == (4, 4, 3)
    rows = [torch.ones(4, 3), torch.ones(4, 3), torch.zeros(2, 3)]
    for other in (narrow, torch.from_numpy(narrow)):
        assert same(
            BatchedDataDict.from_batches([{"pixel_values": wide}, {"pixel_values": other}])["pixel_values"], rows
        )
    lacking = BatchedDataDict.from_batches(
        [{"ids": [1, 2], "pixel_values": wide}, {"ids": [3]}], allow_missing_packed_tensors=True
    )
    assert same(lacking["pixel_values"], [*rows[:2], torch.zeros(0, 3)])


def test_columns_that_lack_and_that_hold_empty_lists_are_the_same():
    nothing = BatchedDataDict(input_ids=torch.tensor([[9]]), pixel_values=stack_or_nest([None]))
    joined = BatchedDataDict.from_batches([nothing, MORE])
    assert same(joined["pixel_values"], [PIXELS[1], PIXELS[2], PIXELS[3]])
    assert BatchedDataDict.from_batches([nothing, nothing])["pixel_values"] == [[], []]


def test_other_columns_join_so_if_they_are_named():
    frames = BatchedDataDict(frames=stack_or_nest([torch.ones(2, 4), torch.ones(1, 4)]))
    joined = BatchedDataDict.from_batches(
        [frames, {"frames": torch.ones(1, 3, 4)}, {"other": [1]}],
        ragged_fields=["frames", "other"],
        allow_missing_packed_tensors=True,
    )
    assert [len(row) for row in joined["frames"].unbind()] == [2, 1, 3, 0]
    assert joined["other"] == [[], [], [], 1]
    with pytest.raises(NotImplementedError, match="ragged_fields"):
        BatchedDataDict.from_batches([frames, frames])


def test_none_stands_for_a_sample_without_images():
    assert same(stack_or_nest([None, PIXELS[2], None]), [PIXELS[1], PIXELS[2], PIXELS[1]])
    assert stack_or_nest([None, None]) == [[], []]
