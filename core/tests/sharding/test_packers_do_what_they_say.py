"""Each packer against the plainest program for its rule: scan every bin, for every sequence."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dataplane_core.sharding import (
    PACKERS,
    concatenative,
    first_fit_decreasing,
    first_fit_shuffle,
    modified_first_fit_decreasing,
)


@st.composite
def problems(draw):
    """Lengths and a capacity, with many ties, from all size classes or from one."""
    capacity = draw(st.sampled_from([1, 6, 12, 60, 97]))
    low = draw(st.integers(0, capacity))
    step = draw(st.sampled_from([1, 1, 5]))
    lengths = draw(st.lists(st.integers(low, capacity).map(lambda each: each // step * step), max_size=40))
    return lengths, capacity


def first_fit(order, lengths, capacity):
    bins = []
    for position in order:
        for each in bins:
            if sum(lengths[other] for other in each) + lengths[position] <= capacity:
                each.append(position)
                break
        else:
            bins.append([position])
    return bins


def five_phases(lengths, capacity):
    """Johnson and Garey (1985), word for word; bins of lengths, since equal sequences are interchangeable."""
    falling = sorted(lengths, reverse=True)
    bins = [[size] for size in falling if 2 * size > capacity]
    medium = [size for size in falling if 2 * size <= capacity < 3 * size]
    small = [size for size in falling if 3 * size <= capacity < 6 * size]
    tiny = [size for size in falling if 6 * size <= capacity]

    def take_largest(pool, room):
        for size in pool:
            if size <= room:
                pool.remove(size)
                return [size]
        return []

    without_medium = []
    for each in bins:
        taken = take_largest(medium, capacity - sum(each))
        each += taken
        if not taken:
            without_medium.append(each)
    for each in reversed(without_medium):
        room = capacity - sum(each)
        if len(small) < 2 or small[-1] + small[-2] > room:
            continue
        each.append(small.pop())
        each += take_largest(small, capacity - sum(each))
    left = medium + small + tiny
    for each in bins:
        while taken := take_largest(left, capacity - sum(each)):
            each += taken
    return bins + [[left[i] for i in each] for each in first_fit(range(len(left)), left, capacity)]


@given(problems())
def test_concatenative_opens_a_bin_when_the_next_does_not_fit(problem):
    lengths, capacity = problem
    expected = []
    for position, length in enumerate(lengths):
        if not expected or sum(lengths[other] for other in expected[-1]) + length > capacity:
            expected.append([])
        expected[-1].append(position)
    assert concatenative(lengths, capacity) == expected


@given(problems())
def test_first_fit_decreasing_is_first_fit_in_falling_order(problem):
    lengths, capacity = problem
    order = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    assert first_fit_decreasing(lengths, capacity) == first_fit(order, lengths, capacity)


@given(problems(), st.integers(0, 3))
def test_first_fit_shuffle_is_first_fit_in_some_order(problem, seed):
    lengths, capacity = problem
    bins = first_fit_shuffle(lengths, capacity, seed=seed)
    order = np.random.RandomState(seed).permutation(len(lengths)).tolist()
    assert bins == first_fit(order, lengths, capacity)


@given(problems())
def test_modified_first_fit_decreasing_goes_through_the_five_phases(problem):
    lengths, capacity = problem
    bins = modified_first_fit_decreasing(lengths, capacity)
    assert [[lengths[position] for position in each] for each in bins] == five_phases(lengths, capacity)


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@given(problem=problems())
def test_bins_are_disjoint_complete_and_within_the_capacity(pack, problem):
    lengths, capacity = problem
    bins = pack(lengths, capacity)
    assert sorted(position for each in bins for position in each) == list(range(len(lengths)))
    assert all(each and sum(lengths[position] for position in each) <= capacity for each in bins)
    assert pack(np.asarray(lengths, dtype=np.int64), capacity) == bins


def test_a_seed_gives_the_same_bins_again_and_another_seed_others():
    lengths = list(range(1, 60))
    assert first_fit_shuffle(lengths, 100, seed=1) == first_fit_shuffle(lengths, 100, seed=1)
    assert first_fit_shuffle(lengths, 100, seed=1) != first_fit_shuffle(lengths, 100, seed=2)


def test_without_a_seed_the_order_is_new_each_time():
    lengths = list(range(1, 60))
    assert first_fit_shuffle(lengths, 100, seed=None) != first_fit_shuffle(lengths, 100, seed=None)


def test_seeds_mean_the_same_on_every_machine():
    assert first_fit_shuffle([5, 4, 3, 2, 1], 6, seed=7) == [[0, 4], [3, 2], [1]]
