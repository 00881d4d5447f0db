"""Proven bounds, against the true optimum of tiny problems found by brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane_core.sharding import PACKERS, packing_metrics

# bins <= factor * optimum + constant, as the docstring of the module cites them
BOUNDS = {
    "concatenative": (2, 0),
    "first_fit_shuffle": (1.7, 0),
    "first_fit_decreasing": (11 / 9, 6 / 9),
    "modified_first_fit_decreasing": (71 / 60, 1),
}


def optimum(lengths, capacity):
    """The least number of bins: tries every bin for every sequence, the longest first."""
    falling = sorted(lengths, reverse=True)
    best = len(falling)

    def place(index, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(falling):
            best = len(rooms)
            return
        for number, room in enumerate(rooms):
            if falling[index] <= room and room not in rooms[:number]:
                place(index + 1, [*rooms[:number], room - falling[index], *rooms[number + 1 :]])
        place(index + 1, [*rooms, capacity - falling[index]])

    place(0, [])
    return best


def test_every_packer_has_a_bound():
    assert set(BOUNDS) == set(PACKERS)


@pytest.mark.parametrize("name", PACKERS)
@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_bins_stay_within_the_proven_bound(name, lengths):
    least = optimum(lengths, 30)
    factor, constant = BOUNDS[name]
    bins = PACKERS[name](lengths, 30)
    assert least <= len(bins) <= math.floor(factor * least + constant + 1e-9)
    metrics = packing_metrics(bins, lengths, 30)
    assert metrics.lower_bound <= least


def test_packers_that_sort_are_within_two_percent_of_the_lower_bound_on_many_short_sequences():
    lengths = np.random.RandomState(0).randint(1, 2048, 4096).tolist()
    for name in ("first_fit_decreasing", "modified_first_fit_decreasing"):
        assert packing_metrics(PACKERS[name](lengths, 8192), lengths, 8192).excess < 0.02


def test_modified_first_fit_decreasing_beats_first_fit_decreasing_where_it_was_made_to():
    # Nine bins would do: six of 51 + 26 + 23, three of 27 + 27 + 23 + 23
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert len(PACKERS["first_fit_decreasing"](lengths, 100)) == 11
    assert len(PACKERS["modified_first_fit_decreasing"](lengths, 100)) == 10
