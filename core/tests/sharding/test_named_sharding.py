"""Rank grids with named axes."""

import pickle

import numpy as np
import pytest

from dataplane_core import NamedSharding
from dataplane_core.errors import InvalidRequestError
from dataplane_core.sharding import REPLICATED_AXES

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


@pytest.fixture
def grid():
    return NamedSharding(np.arange(16).reshape(2, 2, 2, 2), AXES)


def test_coordinates_of_a_rank_and_ranks_at_coordinates(grid):
    assert grid.get_worker_coords(11) == dict(zip(AXES, (1, 0, 1, 1), strict=True))
    assert grid.get_ranks_by_coord(data_parallel=1) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert grid.get_ranks_by_coord(data_parallel=1, tensor_parallel=0) == [4, 6, 12, 14]
    assert grid.get_ranks_by_coord() == list(range(16))
    assert grid.get_ranks_by_coord(data_parallel=2) == grid.get_ranks_by_coord(data_parallel=-1) == []


def test_a_part_of_the_grid_is_a_grid_of_the_other_axes(grid):
    part = grid.get_ranks(data_parallel=1, pipeline_parallel=0)
    assert part == NamedSharding([[4, 5], [6, 7]], ["context_parallel", "tensor_parallel"])
    assert grid.get_ranks(**dict.fromkeys(AXES, 1)) == 15
    assert grid.get_ranks() == grid


def test_leaders_are_zero_on_every_replicated_axis(grid):
    assert set(REPLICATED_AXES) == {"tensor_parallel", "context_parallel", "pipeline_parallel"}
    leaders = [rank for rank in range(16) if grid.is_axis_zero(grid.get_worker_coords(rank), REPLICATED_AXES)]
    assert leaders == [0, 4], "one for each data-parallel rank"
    # an axis that is not there counts as zero
    assert NamedSharding.is_axis_zero({"data_parallel": 3}, REPLICATED_AXES)
    assert not NamedSharding.is_axis_zero({"tensor_parallel": 1}, REPLICATED_AXES)


def test_grids_are_values(grid):
    same = NamedSharding(np.arange(16).reshape(2, 2, 2, 2).tolist(), AXES)
    assert same == grid == pickle.loads(pickle.dumps(grid))
    assert hash(same) == hash(grid)
    assert grid != NamedSharding(np.arange(16).reshape(2, 2, 2, 2), AXES[::-1])
    assert grid != "grid"
    grid.layout[0] = 7
    grid.names.append("more")
    assert same == grid, "what it hands out are copies"
    assert "data_parallel=2" in repr(grid)


@pytest.mark.parametrize(
    ("layout", "names", "said"),
    [
        ([[0, 1], [2]], ["a", "b"], "the layout is ragged"),
        ([], ["a"], "the layout has 0 ranks"),
        ([0.0, 1.5], ["a"], "2 ranks of type float64"),
        ([[0, 1]], ["a"], "Expected 2 different names"),
        ([[0, 1]], ["a", "a"], "Expected 2 different names"),
        ([[0, 1], [2, 1]], ["a", "b"], "rank 1 is repeated"),
        ([0, -1], ["a"], "rank -1 is negative"),
    ],
)
def test_layouts_that_are_no_grid_are_refused(layout, names, said):
    with pytest.raises(ValueError, match=said):
        NamedSharding(layout, names)


def test_questions_about_what_is_not_there_are_refused(grid):
    for ask in (
        lambda: grid.get_axis_size("expert"),
        lambda: grid.get_worker_coords(16),
        lambda: grid.get_ranks(expert=0),
        lambda: grid.get_ranks(data_parallel=2),
        lambda: grid.get_ranks_by_coord(expert=0),
        lambda: grid.get_axis_index("expert"),
    ):
        with pytest.raises(InvalidRequestError, match=r"refused: .*Expected"):
            ask()
