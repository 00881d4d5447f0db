"""What packers refuse, and what they say."""

import numpy as np
import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_core.sharding import PACKERS, PackingMetrics, concatenative, first_fit_shuffle, packing_metrics


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_length_over_the_capacity_is_refused_with_both_numbers(pack):
    with pytest.raises(ValueError, match=r"sequence 1 has 12 tokens\. Expected at most the capacity of a bin, 10"):
        pack([3, 12, 4], 10)


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_negative_length_is_refused(pack):
    with pytest.raises(InvalidRequestError, match=r"sequence 1 has -2 tokens"):
        pack([3, -2], 10)


@pytest.mark.parametrize("lengths", [[1.5, 2.0], [[1], [2]], [True]], ids=["fractions", "nested", "booleans"])
def test_lengths_that_are_no_integers_are_refused(lengths):
    with pytest.raises(InvalidRequestError, match=r"Expected one integer per sequence"):
        concatenative(lengths, 10)


@pytest.mark.parametrize(
    "options", [{"capacity": 0}, {"capacity": 9, "min_bin_count": -1}, {"capacity": 9, "bin_count_multiple": 0}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InvalidRequestError, match=r"Expected at least 1, 0 and 1"):
        concatenative([1], **options)


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(InvalidRequestError, match=rf"seed is {seed}"):
        first_fit_shuffle([1], 10, seed=seed)


def test_metrics_compare_with_the_lower_bound():
    assert packing_metrics([[0, 1], [2], [3]], [6, 4, 3, 2], 10) == PackingMetrics(
        bins=3, lower_bound=2, tokens=15, capacity=10, utilisation=0.5, waste=15
    )
    assert packing_metrics([[0, 1], [2], [3]], np.asarray([6, 4, 3, 2]), 10).excess == 0.5


def test_metrics_of_nothing():
    metrics = packing_metrics([], [], 10)
    assert (metrics.bins, metrics.utilisation, metrics.waste, metrics.excess) == (0, 1.0, 0, 0.0)


@pytest.mark.parametrize(
    "bins", [[[0]], [[0, 1], [1]], [[0], [2]], [[0, 1]]], ids=["missing", "twice", "other", "over"]
)
def test_metrics_refuse_what_is_no_packing(bins):
    with pytest.raises(InvalidRequestError, match=r"packing_metrics refused"):
        packing_metrics(bins, [6, 6], 10)
