"""`from_batches`: token columns are padded; columns of images are joined row by row, and text has rows of length 0."""

import numpy as np
import pytest
import torch

from dataplane_core.batch import BatchedDataDict, stack_or_nest

# --- padded -----------------------------------------------------------------------------------------------------------


def test_tensors_are_right_padded_on_dim_1_to_the_widest_with_the_columns_own_pad_value():
    wide, narrow = torch.ones(2, 4, 3, 2), torch.ones(1, 2, 3, 2)
    batches = [
        {"ids": torch.tensor([[1, 2, 3]]), "mask": torch.tensor([[True, True, True]]), "deep": narrow},
        {"ids": torch.tensor([[4], [5]]), "mask": torch.tensor([[True], [True]]), "deep": wide},
    ]
    joined = BatchedDataDict.from_batches(batches, pad_value_dict={"ids": -7, "deep": 9})
    assert joined["ids"].tolist() == [[1, 2, 3], [4, -7, -7], [5, -7, -7]]
    assert joined["mask"].tolist() == [[True, True, True], [True, False, False], [True, False, False]]
    assert torch.equal(joined["deep"], torch.cat([torch.cat([narrow, torch.full((1, 2, 3, 2), 9)], dim=1), wide]))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.bool, torch.int32),
        (torch.float32, torch.float64, torch.int64),
        *((dtype, dtype) for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.complex64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shapes", [[(2,)] * 3, [(2, 3)] * 3, [(2, 3), (1, 5), (1, 2)]], ids=["1-D", "2-D", "padded"])
def test_dtypes_are_kept_and_mixed_ones_promoted_as_torch_cat_does(dtypes, shapes):
    parts = [torch.ones(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    joined = BatchedDataDict.from_batches([{"x": part} for part in parts], pad_value_dict={"x": 1})["x"]
    assert joined.dtype == torch.cat([part.flatten() for part in parts]).dtype
    assert (joined.to(torch.complex64) == 1).all()


# --- ragged -----------------------------------------------------------------------------------------------------------

PIXELS = [torch.arange(6 * count).view(count, 3, 2).to(torch.bfloat16) for count in (4, 0, 2, 3)]
IMAGES = BatchedDataDict(input_ids=torch.tensor([[1, 2], [3, 0]]), pixel_values=stack_or_nest(PIXELS[:2]))
MORE = BatchedDataDict(input_ids=torch.tensor([[4, 5, 6], [7, 0, 0]]), pixel_values=stack_or_nest(PIXELS[2:]))
DENSE = [{"input_ids": torch.ones(1, 1).long(), "pixel_values": PIXELS[number][None]} for number in (0, 2)]
TEXT = BatchedDataDict(input_ids=torch.tensor([[8]]))
#: A sample without images, whose row is an empty list.
EMPTY = BatchedDataDict(input_ids=torch.tensor([[9]]), pixel_values=stack_or_nest([None]))
WIDE, NARROW = np.ones((2, 4, 3), np.float32), np.zeros((1, 2, 3), np.float32)
JOINED = {
    "jagged": ([IMAGES, MORE], PIXELS),
    "dense of two widths": (DENSE, [PIXELS[0], PIXELS[2]]),
    "text first": ([TEXT, IMAGES, MORE], [PIXELS[1], *PIXELS]),
    "text between": ([IMAGES, TEXT, MORE], [*PIXELS[:2], PIXELS[1], *PIXELS[2:]]),
    "text last": ([IMAGES, MORE, TEXT], [*PIXELS, PIXELS[1]]),
    "an empty list": ([EMPTY, MORE], [PIXELS[1], *PIXELS[2:]]),
    "arrays": (
        [{"pixel_values": WIDE}, {"pixel_values": NARROW}],
        [*torch.from_numpy(WIDE), torch.from_numpy(NARROW)[0]],
    ),
    "an array and a tensor": (
        [{"pixel_values": WIDE}, {"pixel_values": torch.from_numpy(NARROW)}],
        [*torch.from_numpy(WIDE), torch.from_numpy(NARROW)[0]],
    ),
    "an array and text": (
        [{"ids": [1, 2], "pixel_values": WIDE}, {"ids": [3]}],
        [*torch.from_numpy(WIDE), NARROW[0, :0]],
    ),
}


def same(column, rows):
    rows = [torch.as_tensor(row) for row in rows]
    assert [(row.dtype, row.shape) for row in column.unbind()] == [(row.dtype, row.shape) for row in rows]
    return all(torch.equal(found, row) for found, row in zip(column.unbind(), rows, strict=True))


@pytest.mark.parametrize("kind", JOINED)
def test_columns_of_images_are_joined_row_by_row(kind):
    batches, rows = JOINED[kind]
    joined = BatchedDataDict.from_batches(batches, allow_missing_packed_tensors=True)
    assert same(joined["pixel_values"], rows)
    assert same(joined.select_indices([1, 0]).slice(0, 2)["pixel_values"], [rows[1], rows[0]])


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
def test_a_batch_without_rows_changes_nothing_and_may_lack_columns(empty):
    nothing = {"input_ids": torch.ones(0, 1, dtype=torch.int64), "pixel_values": empty}
    for batches in ([DENSE[0], nothing], [nothing, DENSE[0]], [{}, DENSE[0]]):
        assert torch.equal(BatchedDataDict.from_batches(batches)["pixel_values"], PIXELS[0][None])
    assert same(BatchedDataDict.from_batches([nothing, IMAGES])["pixel_values"], PIXELS[:2])
    assert BatchedDataDict.from_batches([nothing, nothing]).size == 0


def test_arrays_whose_rows_are_alike_join_as_an_array_and_columns_of_nothing_as_empty_lists():
    alike = BatchedDataDict.from_batches([{"pixel_values": WIDE}, {"pixel_values": WIDE}])["pixel_values"]
    assert (type(alike), alike.shape) == (np.ndarray, (4, 4, 3))
    assert BatchedDataDict.from_batches([EMPTY, EMPTY])["pixel_values"] == [[], []]


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
