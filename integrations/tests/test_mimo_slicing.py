"""`slice_batch_for_megatron_mimo`: contiguous parts of a global micro-batch, of every kind of value."""

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


def half(batch):
    """The second of two parts."""
    return slice_batch_for_megatron_mimo(batch, 1, 2)


def test_one_rank_gets_the_very_batch():
    batch = {"input_ids": rows(3), "nested": {"x": rows(5)}}
    assert slice_batch_for_megatron_mimo(batch, 0, 1) is batch
    assert slice_batch_for_megatron_mimo(batch, {"language": (0, 1), "vision": (0, 1)}) is batch


@pytest.mark.parametrize(
    ("key", "shape", "dim"),
    [
        *(("position_ids", shape, 1) for shape in ((3, 4, 5), (3, 4, 5, 2))),  # of MRoPE
        *(("position_ids", shape, 0) for shape in ((4, 5), (4, 1, 5))),
        ("other", (4, 3, 5), 0),
    ],
)
def test_only_position_ids_of_mrope_are_cut_along_their_second_dim(key, shape, dim):
    assert torch.equal(half({key: rows(*shape)})[key], rows(*shape).narrow(dim, 2, 2))


def test_patches_go_with_their_whole_images():
    batch = {"vision": images((1, 2, 2), (1, 3, 1), (2, 1, 1), (1, 5, 2))}
    first, second = (slice_batch_for_megatron_mimo(batch, rank, 2)["vision"] for rank in range(2))
    assert first["grid_thw"].tolist() == [[1, 2, 2], [1, 3, 1]]
    assert first["hidden_states"][:, 0].tolist() == [0] * 4 + [1] * 3
    assert second["grid_thw"].tolist() == [[2, 1, 1], [1, 5, 2]]
    assert second["hidden_states"].T.tolist() == [[2] * 2 + [3] * 10, [0, 1, *range(10)]]
    none = half({"vision": {"hidden_states": torch.zeros(0, 6), "grid_thw": torch.zeros(0, 3, dtype=torch.int64)}})
    assert (none["vision"]["hidden_states"].shape, none["vision"]["grid_thw"].shape) == ((0, 6), (0, 3))
    other = half({"vision": {"hidden_states": rows(4, 6), "grid_thw": rows(2, 2)}})["vision"]  # no grids of images
    assert other["hidden_states"].tolist() == rows(4, 6)[2:].tolist()
    assert other["grid_thw"].tolist() == [[2, 3]]


def test_what_else_lies_beside_the_images_and_other_values_pass_as_they_are():
    """However many rows it has: what a row of it stands for is not known."""
    beside = {
        "sizes": torch.tensor([[20, 10], [10, 10]]),
        "patch_weight": torch.tensor([1, 2, 3]),
        "scale": torch.tensor(2.0),
        "kind": "photo",
        "cu_seqlens": rows(5),
        "names": ["a", "b"],
    }
    others = {
        "scalar": torch.tensor(3),
        "none": None,
        "text": "abc",
        "number": 7,
        "list": [1, 2, 3],
        "np": np.float32(2.0),
        "array": np.zeros((4, 2)),
        "objects": np.array(["a", "b", "c"], dtype=object),
    }
    part = half({"vision": {**images((1, 2, 1), (1, 1, 1)), **beside}, **others})
    assert part["vision"]["grid_thw"].tolist() == [[1, 1, 1]]
    assert all(part["vision"][key] is value for key, value in beside.items())
    assert all(part[key] is value for key, value in others.items())


def test_lists_and_columns_of_the_data_plane_are_cut_by_rows_where_they_can_be_divided():
    patches = torch.nested.as_nested_tensor([torch.full((n, 2), float(n)) for n in (3, 0, 2, 5)], layout=torch.jagged)
    columns = {"texts": np.array(["a", "b", "c", "d"], dtype=object), "files": ["a", "b", "c", "d"]}
    part = half(BatchedDataDict(pixel_values=patches, input_ids=rows(4, 3), **columns))
    assert (type(part), part.size) == (SlicedDataDict, 2)
    assert part["pixel_values"].offsets().tolist() == [0, 2, 7]
    assert part["pixel_values"].values()[:, 0].tolist() == [2.0] * 2 + [5.0] * 5
    assert part["texts"].tolist() == part["files"] == ["c", "d"]
    nested = {"modality_inputs": {"vision": {"files": ["a", "b", "c"]}}, "none": []}
    part = slice_batch_for_megatron_mimo(nested, {"language": (0, 2), "vision": (1, 3)})
    assert part == {"modality_inputs": {"vision": {"files": ["b"]}}, "none": []}


def test_modules_that_share_ranks_are_cut_each_by_its_own_parallelism():
    batch = {
        "input_ids": rows(4, 3),
        "position_ids": rows(3, 4, 3),
        "modality_inputs": {"vision": images(*[(1, 1, n) for n in (1, 2, 3, 4)]), "audio": {"mel": rows(4, 2)}},
        "nested": {"deeper": {"pixels": rows(4, 3)}},
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
    assert part["nested"]["deeper"]["pixels"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert batch["nested"]["deeper"]["pixels"].shape == (4, 3), "the batch itself is not changed"


TOO_MANY_PATCHES = {**images((1, 2, 1), (1, 1, 1)), "hidden_states": rows(4, 2)}
TWO = {"input_ids": rows(4), "modality_inputs": {"vision": {"pixels": rows(4)}}}


@pytest.mark.parametrize(
    ("batch", "arguments", "named"),
    [
        ({"input_ids": rows(6), "labels": rows(5)}, (0, 2), "'labels' has 5 rows.* 2 data-parallel ranks"),
        ({"position_ids": rows(3, 5, 2)}, (0, 2), "'position_ids' has 5 rows on dim 1"),
        ({"modality_inputs": {"vision": {"pixels": rows(3)}}}, (0, 2), r"'modality_inputs\.vision\.pixels' has 3 rows"),
        ({"vision": images((1, 1, 1), (1, 1, 1), (1, 2, 1))}, (0, 2), r"'vision\.grid_thw' has 3 images"),
        ({"vision": TOO_MANY_PATCHES}, (0, 2), r"'vision\.hidden_states' has 4 rows.*3"),
        # a parallelism that makes no sense
        (TWO, (2, 2), "dp_rank 2 of dp_size 2"),
        (TWO, (-1, 2), "dp_rank -1"),
        (TWO, (0, 0), "dp_size 0"),
        (TWO, (0,), "dp_size None"),
        (TWO, ({"language": (5, 2)},), "dp_rank 5 of dp_size 2"),
        (TWO, ({"language": (0, 2)}, 2), "parallelism by module and dp_size 2"),
        (TWO, ({"vision": (0, 2)},), "'input_ids' is of module 'language'.*'vision'"),
        (TWO, ({"language": (0, 2)},), r"'modality_inputs\.vision' is of module 'vision'"),
    ],
)
def test_what_cannot_be_divided_is_named_with_the_numbers(batch, arguments, named):
    with pytest.raises(ValueError, match=named):
        slice_batch_for_megatron_mimo(batch, *arguments)
