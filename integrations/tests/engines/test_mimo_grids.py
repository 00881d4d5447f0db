"""Module-local data parallelism over real grids: 8 gloo ranks, several layouts, one micro-batch through a store."""

import os

import pytest
import torch
from layouts import told

from dataplane_core import BatchedDataDict, connect, kv_first_write, read_columns
from dataplane_integrations.trainer.mimo import (
    _find_rank_module,
    _needs_data_for_module,
    get_megatron_mimo_dp_info,
    get_megatron_mimo_sampling_info,
    get_megatron_mimo_shared_dp_info,
    slice_batch_for_megatron_mimo,
)

WORLD = 8
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
        name: HyperCommGrid(list(shape), ["tp", "pp", "dp"], rank_offset=first, backend="gloo")
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


#: Module name -> sizes of tp, pp and dp, and its first rank.
APART = {"vision": ((1, 1, 4), 0), "language": ((2, 1, 2), 4)}
SHARED = {"vision": ((1, 1, 4), 0), "language": ((2, 1, 2), 0)}


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


def test_groups_that_were_not_created_are_named_with_what_to_call_and_no_pipeline_is_one_stage(eight_ranks):
    def run(rank):
        from megatron.core.hyper_comm_grid import HyperCommGrid

        grids = make_grids(APART, groups=["pp"])
        asked = (lambda: get_megatron_mimo_dp_info(None, grids), lambda: get_megatron_mimo_shared_dp_info(grids))
        said = [told(ask) for ask in asked]
        grid = HyperCommGrid([2, 4], ["tp", "dp"], backend="gloo")
        grid.create_pg(["dp"])
        return _find_rank_module(grids)[1], said, get_megatron_mimo_dp_info(None, {"vision": grid})

    for rank, (module, said, info) in enumerate(eight_ranks(run)):
        assert info == (rank // 2, 4, True, "vision")
        for kind, _, text in said:
            assert kind == "ConfigError"
            assert f"the grid of module '{module}' has no process group 'dp'" in text
            assert "grid.create_pg(['dp'])" in text


# --- one global micro-batch through the data plane --------------------------------------------------------------------

IDS = [f"q{row}_g0" for row in range(8)]
LENGTHS = [5, 3, 7, 2, 6, 6, 4, 1]
IMAGES = [1, 2, 1, 1, 0, 3, 2, 2]  # of each sample: 12 in all


def rollout():
    generator = torch.Generator().manual_seed(3)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    grids = [
        torch.tensor([[1, 2 + (row + image) % 3, 2] for image in range(count)], dtype=torch.int64).view(-1, 3)
        for row, count in enumerate(IMAGES)
    ]
    patches = [torch.randn(int(grid.prod(-1).sum()), 6, generator=generator) for grid in grids]
    return BatchedDataDict(
        input_ids=torch.randint(1, 50, inside.shape, generator=generator) * inside,
        input_lengths=torch.tensor(LENGTHS),
        mrope_positions=torch.randint(0, 9, (*inside.shape, 3), generator=generator) * inside[..., None],
        pixel_values=torch.nested.as_nested_tensor(patches, layout=torch.jagged),
        image_grid_thw=torch.nested.as_nested_tensor(grids, layout=torch.jagged),
    )


def micro_batch(columns):
    """What a step of the model gets, of columns as the data plane gives them."""
    vision = {"hidden_states": columns["pixel_values"].values(), "grid_thw": columns["image_grid_thw"].values()}
    return {
        "input_ids": columns["input_ids"],
        "position_ids": columns["mrope_positions"].permute(2, 0, 1),
        "modality_inputs": {"vision": vision},
    }


@pytest.mark.parametrize("layout", [APART, SHARED], ids=["apart", "shared ranks"])
def test_ranks_slice_one_micro_batch_that_they_fetched_into_the_parts_of_each_module(eight_ranks, layout):
    is_shared = layout is SHARED

    def run(rank, config, meta):
        grids = make_grids(layout)
        dp_rank, dp_size, needs_data, _ = get_megatron_mimo_dp_info(None, grids)
        if not needs_data:
            return None
        with connect(config, bootstrap=False) as client:
            batch = micro_batch(read_columns(client, meta))
        shared = get_megatron_mimo_shared_dp_info(grids)
        mine = slice_batch_for_megatron_mimo(batch, *([shared] if is_shared else [dp_rank, dp_size]))
        inputs = mine["modality_inputs"]["vision"]
        return mine["input_ids"], mine["position_ids"], inputs["grid_thw"], inputs["hidden_states"]

    config = {"backend": "redis_store", "options": {"namespace": f"mimo-{os.getpid()}"}, "op_timeout_s": 60}
    with connect(config) as client:
        client.register_partition("train", ["input_ids", "input_lengths"], len(IDS), ["train"])
        meta = kv_first_write(rollout(), sample_ids=IDS, dp_client=client, partition_id="train")
        outcomes = eight_ranks(run, config, meta)
    whole = micro_batch(rollout())
    first = 0 if is_shared else 4  # of the ranks of the language model
    for twins in ((0, 2), (1, 3)):  # its data-parallel ranks, by tensor-parallel rank
        ids, positions = ([outcomes[first + rank][column] for rank in twins] for column in (0, 1))
        assert torch.equal(torch.cat(ids), whole["input_ids"])
        assert torch.equal(torch.cat(positions, dim=1), whole["position_ids"])
    vision = whole["modality_inputs"]["vision"]
    for column, name in ((2, "grid_thw"), (3, "hidden_states")):
        assert torch.equal(torch.cat([outcomes[rank][column] for rank in range(4)]), vision[name])
    if is_shared:
        assert outcomes[4:] == [None] * 4, "ranks outside the grids load nothing"
