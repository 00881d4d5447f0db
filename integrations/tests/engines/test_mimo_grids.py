"""Module-local data parallelism over real grids: 8 gloo ranks, several layouts. What they cut: test_mimo_slicing.py."""

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
#: Module name -> sizes of tp, pp and dp, and its first rank.
LAYOUTS = {
    "apart": {"vision": ((1, 1, 4), 0), "language": ((2, 1, 2), 4)},
    "ranks outside every grid": {"language": ((2, 2, 1), 0), "vision": ((1, 2, 1), 4)},
    "shared ranks": {"language": ((1, 4, 2), 0), "vision": ((1, 1, 8), 0)},
    "inner stages": {"vision": ((1, 2, 2), 0), "language": ((1, 4, 1), 4)},
}


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


def stand(rank):
    """What this rank says of its place, by layout."""
    return {name: stand_in(layout) for name, layout in LAYOUTS.items()}


def stand_in(layout):
    grids = make_grids(layout)
    grid, module = _find_rank_module(grids)
    assert (grid is None) == (module is None)
    assert module is None or grid is grids[module]
    return {
        "module": module,
        "shared": get_megatron_mimo_shared_dp_info(grids),
        "needs": {name: _needs_data_for_module(grids[name], name) for name in grids},
        "one": {name: get_megatron_mimo_dp_info(None, {name: grids[name]}) for name in grids},
        **{
            f"every stage {every}": (
                get_megatron_mimo_dp_info(None, grids, every_language_stage=every),
                get_megatron_mimo_sampling_info(None, grids, every_language_stage=every),
            )
            for every in (False, True)
        },
    }


def expected(rank, layout):
    """The same, by counting: of the ranks of a grid, tp changes first, then pp, then dp."""
    places, needs = {}, {}
    for name, ((tp, pp, dp), first) in layout.items():
        at, stage = rank - first, (rank - first) // tp % pp
        if 0 <= at < tp * pp * dp:
            places[name] = at // (tp * pp), dp
            needs[name] = stage == 0 or (name == "language" and stage == pp - 1)  # token ids, or labels

    def info(names, needs):
        here = [name for name in names if name in places]
        loaders = [name for name in here if needs[name]]
        name = next(iter([*loaders, *here]), None)
        return (0, 1, False, "language") if name is None else (*places[name], bool(loaders), name)

    # the inner stages of the language model need data only if told; every rank samples the same micro-batch
    told_to = {False: needs, True: {name: need or name == "language" for name, need in needs.items()}}
    infos = {every: info(layout, told_to[every]) for every in (False, True)}
    return {
        "module": next(iter(places), None),
        "shared": places,
        "needs": {name: needs.get(name, False) for name in layout},
        "one": {name: info([name], needs) for name in layout},
        **{f"every stage {every}": (infos[every], (0, 1, infos[every][2])) for every in (False, True)},
    }


def test_every_rank_knows_its_place_in_each_module_and_whether_it_needs_data(ranks):
    for rank, found in enumerate(ranks(WORLD, stand, timeout_s=PATIENCE_S)):
        assert found == {name: expected(rank, layout) for name, layout in LAYOUTS.items()}
        assert found["shared ranks"]["every stage False"][0][3] == ("vision" if rank % 4 in (1, 2) else "language")


def test_groups_that_were_not_created_are_named_with_what_to_call_and_no_pipeline_is_one_stage(ranks):
    def run(rank):
        from megatron.core.hyper_comm_grid import HyperCommGrid

        grids = make_grids(LAYOUTS["apart"], groups=["pp"])
        asked = (lambda: get_megatron_mimo_dp_info(None, grids), lambda: get_megatron_mimo_shared_dp_info(grids))
        said = [told(ask) for ask in asked]
        grid = HyperCommGrid([2, 4], ["tp", "dp"], backend="gloo")
        grid.create_pg(["dp"])
        return _find_rank_module(grids)[1], said, get_megatron_mimo_dp_info(None, {"vision": grid})

    for rank, (module, said, info) in enumerate(ranks(WORLD, run, timeout_s=PATIENCE_S)):
        assert info == (rank // 2, 4, True, "vision")
        for kind, _, text in said:
            assert kind == "ConfigError"
            assert f"the grid of module '{module}' has no process group 'dp'" in text
            assert "grid.create_pg(['dp'])" in text
