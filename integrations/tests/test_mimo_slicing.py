"""`slice_batch_for_megatron_mimo`: contiguous parts of a global micro-batch, of every kind of value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataplane_core import BatchedDataDict, SlicedDataDict
from dataplane_integrations.trainer.mimo import slice_batch_for_megatron_mimo


def rows(count, *trailing):
    return torch.arange(count * int(np.prod(trailing, initial=1))).view(count, *trailing)


def images(*sizes):
    """Patches of images of these (time, height, width), told apart by their image and place."""
    counts = [time * height * width for time, height, width in sizes]
    patches = [torch.stack([torch.tensor([image, place]) for place in range(n)]) for image, n in enumerate(counts)]
    return {"hidden_states": torch.cat(patches), "grid_thw": torch.tensor(sizes)}


@pytest.mark.parametrize("dp_size", [2, 3, 6])
def test_parts_are_contiguous_and_joined_again_they_are_the_batch(dp_size):
    batch = {"input_ids": rows(6, 5), "lengths": rows(6), "pixels": rows(6, 2, 3, 4).float()}
    parts = [slice_batch_for_megatron_mimo(batch, rank, dp_size) for rank in range(dp_size)]
    for key, column in batch.items():
        assert all(len(part[key]) == 6 // dp_size for part in parts)
        assert torch.equal(torch.cat([part[key] for part in parts]), column)


def test_one_rank_gets_the_very_batch():
    batch = {"input_ids": rows(3), "nested": {"x": rows(5)}}
    assert slice_batch_for_megatron_mimo(batch, 0, 1) is batch
    assert slice_batch_for_megatron_mimo(batch, {"language": (0, 1), "vision": (0, 1)}) is batch


def test_nested_dicts_are_cut_all_the_way_down():
    batch = {"modality_inputs": {"vision": {"clip": {"pixels": rows(4, 3)}}, "audio": {"mel": rows(2, 8)}}}
    part = slice_batch_for_megatron_mimo(batch, 1, 2)
    assert part["modality_inputs"]["vision"]["clip"]["pixels"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert part["modality_inputs"]["audio"]["mel"].shape == (1, 8)
    assert batch["modality_inputs"]["audio"]["mel"].shape == (2, 8), "the batch itself is not changed"


def test_position_ids_of_mrope_are_cut_along_their_second_dim():
    for positions in (rows(3, 4, 5), rows(3, 4, 5, 2)):
        part = slice_batch_for_megatron_mimo({"position_ids": positions}, 1, 2)
        assert torch.equal(part["position_ids"], positions[:, 2:4])


@pytest.mark.parametrize(
    ("key", "shape"), [("position_ids", (4, 5)), ("position_ids", (4, 1, 5)), ("other", (4, 3, 5))]
)
def test_other_position_ids_and_other_columns_are_cut_along_their_first_dim(key, shape):
    part = slice_batch_for_megatron_mimo({key: rows(*shape)}, 1, 2)
    assert torch.equal(part[key], rows(*shape)[2:])


def test_patches_go_with_their_whole_images():
    batch = {"vision": images((1, 2, 2), (1, 3, 1), (2, 1, 1), (1, 5, 2))}
    first, second = (slice_batch_for_megatron_mimo(batch, rank, 2)["vision"] for rank in range(2))
    assert first["grid_thw"].tolist() == [[1, 2, 2], [1, 3, 1]]
    assert first["hidden_states"][:, 0].tolist() == [0] * 4 + [1] * 3
    assert second["grid_thw"].tolist() == [[2, 1, 1], [1, 5, 2]]
    assert second["hidden_states"][:, 0].tolist() == [2] * 2 + [3] * 10
    assert second["hidden_states"][:, 1].tolist() == [0, 1, *range(10)]


def test_what_else_lies_beside_the_images_passes_as_it_is():
    """However many rows it has: what a row of it stands for is not known."""
    inputs = {
        **images((1, 2, 1), (1, 1, 1)),
        "sizes": torch.tensor([[20, 10], [10, 10]]),
        "patch_weight": torch.tensor([1, 2, 3]),
        "scale": torch.tensor(2.0),
        "kind": "photo",
        "cu_seqlens": rows(5),
        "names": ["a", "b"],
    }
    part = slice_batch_for_megatron_mimo({"vision": inputs}, 1, 2)["vision"]
    assert part["grid_thw"].tolist() == [[1, 1, 1]]
    assert all(part[key] is inputs[key] for key in inputs.keys() - {"hidden_states", "grid_thw"})


def test_grids_of_another_shape_are_an_ordinary_column():
    part = slice_batch_for_megatron_mimo({"vision": {"hidden_states": rows(4, 6), "grid_thw": rows(2, 2)}}, 1, 2)
    assert part["vision"]["hidden_states"].tolist() == rows(4, 6)[2:].tolist()
    assert part["vision"]["grid_thw"].tolist() == [[2, 3]]


def test_a_batch_without_images_is_cut_to_none():
    inputs = {"hidden_states": torch.zeros(0, 6), "grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
    part = slice_batch_for_megatron_mimo({"vision": inputs}, 1, 2)["vision"]
    assert part["hidden_states"].shape == (0, 6)
    assert part["grid_thw"].shape == (0, 3)


def test_other_values_pass_as_they_are():
    batch = {
        "scalar": torch.tensor(3),
        "none": None,
        "text": "abc",
        "number": 7,
        "list": [1, 2, 3],
        "np": np.float32(2.0),
        "array": np.zeros((4, 2)),
        "objects": np.array(["a", "b", "c"], dtype=object),
    }
    part = slice_batch_for_megatron_mimo(batch, 1, 2)
    assert all(part[key] is value for key, value in batch.items())


def test_lists_that_can_be_divided_are_cut_by_rows():
    batch = BatchedDataDict(input_ids=rows(4, 3), files=["a", "b", "c", "d"])
    part = slice_batch_for_megatron_mimo(batch, 1, 2)
    assert part["files"] == ["c", "d"]
    assert part.size == 2
    nested = {"modality_inputs": {"vision": {"files": ["a", "b", "c"]}}, "none": []}
    part = slice_batch_for_megatron_mimo(nested, {"language": (0, 2), "vision": (1, 3)})
    assert part == {"modality_inputs": {"vision": {"files": ["b"]}}, "none": []}


def test_columns_of_the_data_plane_are_cut_by_rows_whatever_holds_them():
    patches = torch.nested.as_nested_tensor([torch.full((n, 2), float(n)) for n in (3, 0, 2, 5)], layout=torch.jagged)
    texts = np.array(["a", "b", "c", "d"], dtype=object)
    batch = BatchedDataDict(pixel_values=patches, texts=texts, input_ids=rows(4, 3))
    part = slice_batch_for_megatron_mimo(batch, 1, 2)
    assert type(part) is SlicedDataDict
    assert part["pixel_values"].offsets().tolist() == [0, 2, 7]
    assert part["pixel_values"].values()[:, 0].tolist() == [2.0] * 2 + [5.0] * 5
    assert part["texts"].tolist() == ["c", "d"]
    assert part.size == 2


def test_modules_that_share_ranks_are_cut_each_by_its_own_parallelism():
    batch = {
        "input_ids": rows(4, 3),
        "position_ids": rows(3, 4, 3),
        "modality_inputs": {"vision": images(*[(1, 1, n) for n in (1, 2, 3, 4)]), "audio": {"mel": rows(4, 2)}},
        "audio": {"lengths": rows(4)},
        "num_items": 4,
    }
    part = slice_batch_for_megatron_mimo(batch, {"vision": (3, 4), "language": (1, 2), "audio": (0, 1)})
    assert torch.equal(part["input_ids"], batch["input_ids"][2:])
    assert torch.equal(part["position_ids"], batch["position_ids"][:, 2:])
    assert part["modality_inputs"]["vision"]["grid_thw"].tolist() == [[1, 1, 4]]
    assert part["modality_inputs"]["vision"]["hidden_states"].shape == (4, 2)
    assert part["modality_inputs"]["audio"] is batch["modality_inputs"]["audio"]
    assert part["audio"] is batch["audio"]
    assert part["num_items"] == 4


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"input_ids": rows(6), "labels": rows(5)}, "'labels' has 5 rows"),
        ({"position_ids": rows(3, 5, 2)}, "'position_ids' has 5 rows on dim 1"),
        ({"modality_inputs": {"vision": {"pixels": rows(3)}}}, r"'modality_inputs\.vision\.pixels' has 3 rows"),
        ({"vision": images((1, 1, 1), (1, 1, 1), (1, 2, 1))}, r"'vision\.grid_thw' has 3 images"),
    ],
)
def test_what_cannot_be_divided_is_named_with_the_numbers(batch, named):
    with pytest.raises(ValueError, match=f"{named}.* 2 data-parallel ranks"):
        slice_batch_for_megatron_mimo(batch, 0, 2)


def test_images_that_do_not_fit_their_patches_are_refused():
    inputs = {**images((1, 2, 1), (1, 1, 1)), "hidden_states": rows(4, 2)}
    with pytest.raises(ValueError, match=r"'vision\.hidden_states' has 4 rows.*3"):
        slice_batch_for_megatron_mimo({"vision": inputs}, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((2, 2), "dp_rank 2 of dp_size 2"),
        ((-1, 2), "dp_rank -1"),
        ((0, 0), "dp_size 0"),
        ((0,), "dp_size None"),
        (({"language": (5, 2)},), "dp_rank 5 of dp_size 2"),
        (({"language": (0, 2)}, 2), "parallelism by module and dp_size 2"),
        (({"vision": (0, 2)},), "'input_ids' is of module 'language'.*'vision'"),
        (({"language": (0, 2)},), r"'modality_inputs\.vision' is of module 'vision'"),
    ],
)
def test_a_parallelism_that_makes_no_sense_is_refused(arguments, named):
    batch = {"input_ids": rows(4), "modality_inputs": {"vision": {"pixels": rows(4)}}}
    with pytest.raises(ValueError, match=named):
        slice_batch_for_megatron_mimo(batch, *arguments)
