"""Each packer against the plainest program for its rule: scan every bin, for every sequence. Metrics, and refusals."""

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from dataplane_core.errors import InvalidRequestError
from dataplane_core.sharding import (
    PACKERS,
    concatenative,
    first_fit_decreasing,
    first_fit_shuffle,
    get_packer,
    modified_first_fit_decreasing,
    packing_metrics,
)
from dataplane_core.sharding.packing import PackingMetrics

EACH_PACKER = pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)


@st.composite
def problems(draw):
    """Lengths and a capacity, with many ties, from all size classes or from one."""
    capacity = draw(st.sampled_from([1, 6, 12, 60, 97]))
    low = draw(st.integers(0, capacity))
    step = draw(st.sampled_from([1, 1, 5]))
    lengths = draw(st.lists(st.integers(low, capacity).map(lambda each: each // step * step), max_size=40))
    return lengths, capacity


def fitted(order, lengths, capacity, tried=list):
    """Puts each sequence into the first bin in which it fits, of those that ``tried`` picks from the bins so far."""
    bins = []
    for position in order:
        for each in tried(bins):
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

    def emptiest(bins):
        return sorted(bins, key=lambda each: sum(left[other] for other in each))[:1]

    plans = [fitted(range(len(left)), left, capacity, tried) for tried in (list, emptiest)]
    return bins + [[left[i] for i in each] for each in min(plans, key=len)]


def raised(bins, target):
    """Each extra bin gets one sequence from the end of the bin that has most sequences."""
    bins = [list(each) for each in bins]
    while len(bins) < target:
        fullest = max(bins, key=len)
        bins.append([fullest.pop()])
    return bins


@given(problems(), st.integers(0, 3))
def test_packers_do_what_they_say(problem, seed):
    lengths, capacity = problem
    falling = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    shuffled = np.random.RandomState(seed).permutation(len(lengths)).tolist()
    assert concatenative(lengths, capacity) == fitted(range(len(lengths)), lengths, capacity, lambda bins: bins[-1:])
    assert first_fit_decreasing(lengths, capacity) == fitted(falling, lengths, capacity)
    assert first_fit_shuffle(lengths, capacity, seed=seed) == fitted(shuffled, lengths, capacity)


@given(problems())
@example(([5, 11, 10, 5, 5, 7], 12))  # long ones in pairs with medium ones
@example(([16, 11, 5, 4, 7], 20))
@example(([28, 36, 92, 124, 120, 12, 68, 128, 44], 331))  # first fit would take three bins
def test_modified_first_fit_decreasing_goes_through_the_five_phases(problem):
    lengths, capacity = problem
    bins = modified_first_fit_decreasing(lengths, capacity)
    assert [[lengths[position] for position in each] for each in bins] == five_phases(lengths, capacity)


@EACH_PACKER
@given(problem=problems(), minimum=st.integers(0, 12), multiple=st.integers(1, 6))
def test_bins_are_complete_within_the_capacity_and_as_many_as_asked_for(pack, problem, minimum, multiple):
    lengths, capacity = problem
    plain = pack(lengths, capacity)
    assert sorted(position for each in plain for position in each) == list(range(len(lengths)))
    assert all(each and sum(lengths[position] for position in each) <= capacity for each in plain)
    assert pack(np.asarray(lengths, dtype=np.int64), capacity) == plain
    target = -(-max(len(plain), minimum) // multiple) * multiple
    more = partial(pack, lengths, capacity, min_bin_count=minimum, bin_count_multiple=multiple)
    if target > len(lengths):
        with pytest.raises(InvalidRequestError, match=f"{len(lengths)} sequences are too few for {target} bins"):
            more()
    else:
        assert more() == raised(plain, target)


def test_a_seed_means_the_same_on_every_machine_and_without_one_the_order_is_new_each_time():
    lengths = list(range(1, 60))
    assert first_fit_shuffle([5, 4, 3, 2, 1], 6, seed=7) == [[0, 4], [3, 2], [1]]
    assert first_fit_shuffle(lengths, 100, seed=1) != first_fit_shuffle(lengths, 100, seed=2)
    assert first_fit_shuffle(lengths, 100, seed=None) != first_fit_shuffle(lengths, 100, seed=None)


@pytest.mark.parametrize("name", ["modified_first_fit_decreasing", "MODIFIED_FIRST_FIT_DECREASING"])
def test_a_packer_by_name_packs_as_its_function(name):
    packer = get_packer(name, 10, collect_metrics=True, min_bin_count=3, bin_count_multiple=2)
    lengths = [9, 4, 4, 2, 7, 3]
    bins = packer.pack(lengths)
    assert bins == PACKERS[name.lower()](lengths, 10, min_bin_count=3, bin_count_multiple=2)
    assert packer.metrics == [packing_metrics(bins, lengths, 10)]
    assert get_packer(name, 10).metrics is None


def test_metrics_compare_with_the_lower_bound():
    expected = PackingMetrics(bins=3, lower_bound=2, tokens=15, capacity=10, utilisation=0.5, waste=15)
    for lengths in ([6, 4, 3, 2], np.asarray([6, 4, 3, 2])):
        assert packing_metrics([[0, 1], [2], [3]], lengths, 10) == expected
    assert expected.excess == 0.5
    nothing = packing_metrics([], [], 10)
    assert (nothing.bins, nothing.utilisation, nothing.waste, nothing.excess) == (0, 1.0, 0, 0.0)


@EACH_PACKER
def test_a_length_out_of_range_is_refused_with_its_place(pack):
    for lengths, said in (
        ([3, 12, 4], r"sequence 1 has 12 tokens\. Expected at most the capacity of a bin, 10"),
        ([3, -2], r"sequence 1 has -2 tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            pack(lengths, 10)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        *((partial(concatenative, lengths, 10), "one integer per sequence") for lengths in ([1.5], [[1], [2]], [True])),
        *(
            (partial(concatenative, [1], **options), "Expected at least 1, 0 and 1")
            for options in (
                {"capacity": 0},
                {"capacity": 9, "min_bin_count": -1},
                {"capacity": 9, "bin_count_multiple": 0},
            )
        ),
        *((partial(first_fit_shuffle, [1], 10, seed=seed), f"seed is {seed}") for seed in (-1, 1 << 32)),
        (partial(get_packer, "best_fit", 10), r"no algorithm 'best_fit'\. Expected one of concatenative"),
        # no packing of two sequences: one is missing, twice, another one, or over the capacity
        *(
            (partial(packing_metrics, bins, [6, 6], 10), "packing_metrics refused")
            for bins in ([[0]], [[0, 1], [1]], [[0], [2]], [[0, 1]])
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(call, said):
    with pytest.raises(InvalidRequestError, match=said):
        call()
