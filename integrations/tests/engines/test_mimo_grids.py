"""Module-local data parallelism over real grids: 8 gloo ranks, several layouts. What they cut: test_mimo_slicing.py."""

import pytest
from layouts import told

from dataplane_integrations.trainer.mimo import (
    _find_rank_module,
    _needs_data_for_module,
    get_megatron_mimo_dp_info,
    get_megatron_mimo_sampling_info,
    get_megatron_mimo_shared_dp_info,
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
