"""Module-local data parallelism over real grids: 8 gloo ranks, several layouts, one micro-batch through a store."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataplane_core import BatchedDataDict, connect, kv_first_write, read_columns
from dataplane_core.errors import ConfigError
from dataplane_integrations.trainer.mimo import (
    _find_rank_module,
    _needs_data_for_module,
    get_megatron_mimo_dp_info,
    get_megatron_mimo_sampling_info,
    get_megatron_mimo_shared_dp_info,
    slice_batch_for_megatron_mimo,
)

WORLD = 8
#: Module name -> sizes of tp, pp and dp, and its first rank.
Layout = dict[str, tuple[tuple[int, int, int], int]]
DIMS = ["tp", "pp", "dp"]
#: Several ranks share a core, and Redis or Gloo may be slow to answer.
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def eight_ranks(ranks):
    """``eight_ranks(fn, *args)``: per rank what ``fn(rank, *args)`` returned."""
    return lambda fn, *args: ranks(WORLD, fn, *args, timeout_s=PATIENCE_S)


def make_grids(layout, groups=("pp", "dp")):
    """Collective: every rank creates the groups of all grids, in one order."""
    from megatron.core.hyper_comm_grid import HyperCommGrid

    grids = {
        name: HyperCommGrid(list(shape), DIMS, rank_offset=first, backend="gloo")
        for name, (shape, first) in layout.items()
    }
    for grid in grids.values():
        for group in groups:
            grid.create_pg([group])
    return grids


def stand(rank, layout):
    grids = make_grids(layout)
    grid, module = _find_rank_module(grids)
    assert (grid is None) == (module is None)
    assert module is None or grid is grids[module]
    return {
        "module": module,
        "info": get_megatron_mimo_dp_info(None, grids),
        "sampling": get_megatron_mimo_sampling_info(None, grids),
        "needs": {name: _needs_data_for_module(grid, name) for name, grid in grids.items()},
        "shared": get_megatron_mimo_shared_dp_info(grids),
        "named": {name: get_megatron_mimo_dp_info(None, grids, module_name=name) for name in grids},
        "every stage": (
            get_megatron_mimo_dp_info(None, grids, every_language_stage=True),
            get_megatron_mimo_sampling_info(None, grids, every_language_stage=True),
        ),
    }


APART: Layout = {"vision": ((1, 1, 4), 0), "language": ((2, 1, 2), 4)}


def test_vision_dp4_beside_language_tp2_dp2(eight_ranks):
    found = eight_ranks(stand, APART)
    assert [each["module"] for each in found] == ["vision"] * 4 + ["language"] * 4
    assert [each["info"] for each in found] == [
        *[(rank, 4, True, "vision") for rank in range(4)],
        *[(rank // 2, 2, True, "language") for rank in range(4)],
    ]
    # every rank samples the same micro-batch, whatever its module's parallelism
    assert [each["sampling"] for each in found] == [(0, 1, True)] * WORLD
    assert [each["needs"]["vision"] for each in found] == [True] * 4 + [False] * 4
    assert [each["needs"]["language"] for each in found] == [False] * 4 + [True] * 4


def test_language_tp2_pp2_and_ranks_outside_every_grid(eight_ranks):
    found = eight_ranks(stand, {"language": ((2, 2, 1), 0), "vision": ((1, 2, 1), 4)})
    # first stage and last: tokens go into the one, labels into the other
    assert [each["info"] for each in found[:4]] == [(0, 1, True, "language")] * 4
    # an encoder's later stages get no data
    assert [each["info"] for each in found[4:6]] == [(0, 1, True, "vision"), (0, 1, False, "vision")]
    assert [each["info"] for each in found[6:]] == [(0, 1, False, "language")] * 2
    assert [each["sampling"] for each in found] == [(0, 1, rank < 5) for rank in range(WORLD)]
    assert [each["named"]["vision"] for each in found[3:6]] == [
        (0, 1, False, "vision"),
        (0, 1, True, "vision"),
        (0, 1, False, "vision"),
    ]
    assert [each["named"]["language"] for each in found[3:5]] == [(0, 1, True, "language"), (0, 1, False, "language")]
    assert [each["module"] for each in found[6:]] == [None, None]
    assert [each["shared"] for each in found[6:]] == [{}, {}]


def test_modules_that_share_ranks_have_each_their_own_parallelism(eight_ranks):
    found = eight_ranks(stand, {"language": ((1, 4, 2), 0), "vision": ((1, 1, 8), 0)})
    for rank, each in enumerate(found):
        stage, language_rank = rank % 4, rank // 4
        inner = stage in (1, 2)
        assert each["module"] == "language"
        assert each["shared"] == {"language": (language_rank, 2), "vision": (rank, 8)}
        assert each["needs"] == {"language": not inner, "vision": True}
        # the inner stages of the language model load for the encoder that they share the rank with
        assert each["info"] == ((rank, 8, True, "vision") if inner else (language_rank, 2, True, "language"))
        assert each["sampling"] == (0, 1, True)
        assert each["named"] == {
            "language": (language_rank, 2, not inner, "language"),
            "vision": (rank, 8, True, "vision"),
        }


def test_inner_stages_of_the_language_model_can_need_data_too(eight_ranks):
    found = eight_ranks(stand, {"vision": ((1, 2, 2), 0), "language": ((1, 4, 1), 4)})
    assert [each["info"][2] for each in found] == [True, False, True, False, True, False, False, True]
    assert [each["every stage"] for each in found[:4]] == [(each["info"], each["sampling"]) for each in found[:4]]
    assert [each["every stage"] for each in found[4:]] == [((0, 1, True, "language"), (0, 1, True))] * 4


def test_groups_that_were_not_created_are_named_with_what_to_call(eight_ranks):
    def run(rank):
        grids = make_grids(APART, groups=["pp"])
        messages = []
        for ask in (lambda: get_megatron_mimo_dp_info(None, grids), lambda: get_megatron_mimo_shared_dp_info(grids)):
            with pytest.raises(ConfigError) as error:
                ask()
            messages.append(str(error.value))
        return _find_rank_module(grids)[1], messages

    for module, messages in eight_ranks(run):
        for message in messages:
            assert f"the grid of module '{module}' has no process group 'dp'" in message
            assert "grid.create_pg(['dp'])" in message


def test_a_grid_without_a_pipeline_has_one_stage(eight_ranks):
    def run(rank):
        from megatron.core.hyper_comm_grid import HyperCommGrid

        grid = HyperCommGrid([2, 4], ["tp", "dp"], backend="gloo")
        grid.create_pg(["dp"])
        return get_megatron_mimo_dp_info(None, {"vision": grid})

    assert eight_ranks(run) == [(rank // 2, 4, True, "vision") for rank in range(WORLD)]


# --- one global micro-batch through the data plane --------------------------------------------------------------------

IDS = [f"q{row}_g0" for row in range(8)]
LENGTHS = [5, 3, 7, 2, 6, 6, 4, 1]
IMAGES = [1, 2, 1, 1, 0, 3, 2, 2]  # of each sample: 12 in all
HIDDEN = 6


def rollout():
    generator = torch.Generator().manual_seed(3)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    grids = [
        torch.stack([torch.tensor([1, 2 + (row + image) % 3, 2]) for image in range(count)])
        if count
        else torch.zeros(0, 3, dtype=torch.int64)
        for row, count in enumerate(IMAGES)
    ]
    patches = [torch.randn(int(grid.prod(-1).sum()), HIDDEN, generator=generator) for grid in grids]
    return BatchedDataDict(
        input_ids=torch.randint(1, 50, inside.shape, generator=generator) * inside,
        input_lengths=torch.tensor(LENGTHS),
        mrope_positions=torch.randint(0, 9, (*inside.shape, 3), generator=generator) * inside[..., None],
        pixel_values=torch.nested.as_nested_tensor(patches, layout=torch.jagged),
        image_grid_thw=torch.nested.as_nested_tensor(grids, layout=torch.jagged),
    )


def micro_batch(columns):
    """What a step of the model gets, of columns as the data plane gives them."""
    return {
        "input_ids": columns["input_ids"],
        "position_ids": columns["mrope_positions"].permute(2, 0, 1),
        "images": columns["image_grid_thw"].offsets().diff(),
        "modality_inputs": {
            "vision": {
                "hidden_states": columns["pixel_values"].values(),
                "grid_thw": columns["image_grid_thw"].values(),
            }
        },
        "num_items": len(IDS),
    }


def encode(inputs):
    """The encoder: one embedding (4,) of each image."""
    weight = torch.linspace(-1, 1, HIDDEN * 4).view(HIDDEN, 4)
    counts = inputs["grid_thw"].prod(-1).tolist()
    return torch.stack([(part @ weight).tanh().sum(0) for part in inputs["hidden_states"].split(counts)])


def read_out(batch, images):
    """The language model: one number per row, from its tokens, their positions, and its images' embeddings."""
    tokens = (batch["input_ids"] * (1 + batch["position_ids"].sum(0))).sum(1).float()
    seen = torch.stack([part.sum() for part in images.split(batch["images"].tolist())])
    return tokens + seen


@pytest.fixture
def stored():
    """The rollout in a private Redis: the config to attach with, and the rows' meta."""
    config = {"backend": "redis_store", "options": {"namespace": f"mimo-{os.getpid()}"}, "op_timeout_s": 60}
    with connect(config) as client:
        client.register_partition("train", ["input_ids", "input_lengths"], len(IDS), ["train"])
        yield config, kv_first_write(rollout(), sample_ids=IDS, dp_client=client, partition_id="train")


def test_vision_and_language_ranks_slice_one_micro_batch_that_they_fetched(eight_ranks, stored):
    def run(rank, config, meta):
        grids = make_grids(APART)
        dp_rank, dp_size, needs_data, module = get_megatron_mimo_dp_info(None, grids)
        assert needs_data
        with connect(config, bootstrap=False) as client:
            batch = micro_batch(read_columns(client, meta))
        mine = slice_batch_for_megatron_mimo(batch, dp_rank, dp_size)
        inputs = mine["modality_inputs"]["vision"]
        said: list[Any] = [None] * WORLD
        dist.all_gather_object(said, encode(inputs) if module == "vision" else None)
        if module == "vision":
            return len(inputs["grid_thw"])
        # Megatron's bridge does this: the encoders' outputs joined in the order of their ranks, dealt to the rows
        images = torch.cat([part for part in said if part is not None])
        cuts = [0, *batch["images"].cumsum(0).tolist()]
        first, last = dp_rank * len(IDS) // dp_size, (dp_rank + 1) * len(IDS) // dp_size
        return read_out(mine, images[cuts[first] : cuts[last]])

    whole = micro_batch(rollout())
    alone = read_out(whole, encode(whole["modality_inputs"]["vision"]))
    assert alone.unique().numel() == len(IDS), "rows that look alike would hide a wrong slice"

    config, meta = stored
    outcomes = eight_ranks(run, config, meta)
    assert outcomes[:4] == [3] * 4, "each vision rank encodes its 3 of 12 images"
    torch.testing.assert_close(torch.cat([outcomes[4], outcomes[6]]), alone)
    torch.testing.assert_close(torch.cat([outcomes[5], outcomes[7]]), alone)


def test_modules_that_share_ranks_slice_one_micro_batch_each_for_itself(eight_ranks, stored):
    layout: Layout = {"vision": ((1, 1, 4), 0), "language": ((2, 1, 2), 0)}

    def run(rank, config, meta):
        grids = make_grids(layout)
        if not get_megatron_mimo_sampling_info(None, grids)[2]:
            return None
        with connect(config, bootstrap=False) as client:
            batch = micro_batch(read_columns(client, meta))
        mine = slice_batch_for_megatron_mimo(batch, get_megatron_mimo_shared_dp_info(grids))
        inputs = mine["modality_inputs"]["vision"]
        return mine["input_ids"], mine["position_ids"], inputs["grid_thw"], inputs["hidden_states"]

    whole = micro_batch(rollout())
    config, meta = stored
    outcomes = eight_ranks(run, config, meta)
    assert outcomes[4:] == [None] * 4, "ranks outside the grids load nothing"
    for twins in ((0, 2), (1, 3)):  # the data-parallel ranks of the language model, by tensor-parallel rank
        ids, positions = ([outcomes[rank][column] for rank in twins] for column in (0, 1))
        assert torch.equal(torch.cat(ids), whole["input_ids"])
        assert torch.equal(torch.cat(positions, dim=1), whole["position_ids"])
    vision = whole["modality_inputs"]["vision"]
    assert torch.equal(torch.cat([outcomes[rank][2] for rank in range(4)]), vision["grid_thw"])
    assert torch.equal(torch.cat([outcomes[rank][3] for rank in range(4)]), vision["hidden_states"])
