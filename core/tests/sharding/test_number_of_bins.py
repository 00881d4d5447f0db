"""The least number of bins, and its multiple."""

import pytest
from hypothesis import given, strategies as st

from dataplane_core.errors import InvalidRequestError
from dataplane_core.sharding import PACKERS, concatenative, get_packer, packing_metrics


def raised(bins, target):
    """Each extra bin gets one sequence from the end of the bin that has most sequences."""
    bins = [list(each) for each in bins]
    while len(bins) < target:
        fullest = max(bins, key=len)
        bins.append([fullest.pop()])
    return bins


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@given(lengths=st.lists(st.integers(0, 20), max_size=30), minimum=st.integers(0, 12), multiple=st.integers(1, 6))
def test_extra_bins_take_from_the_fullest(pack, lengths, minimum, multiple):
    plain = pack(lengths, 20)
    target = -(-max(len(plain), minimum) // multiple) * multiple
    if target > len(lengths):
        with pytest.raises(InvalidRequestError):
            pack(lengths, 20, min_bin_count=minimum, bin_count_multiple=multiple)
        return
    bins = pack(lengths, 20, min_bin_count=minimum, bin_count_multiple=multiple)
    assert bins == raised(plain, target)
    assert len(bins) % multiple == 0
    assert all(bins), "no bin is empty"


def test_too_few_sequences_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"3 sequences are too few for 4 bins \(at least 0, a multiple of 4\)"):
        concatenative([1, 1, 1], 10, bin_count_multiple=4)
    with pytest.raises(ValueError, match=r"0 sequences are too few for 1 bins"):
        concatenative([], 10, min_bin_count=1)


@pytest.mark.parametrize("name", ["modified_first_fit_decreasing", "MODIFIED_FIRST_FIT_DECREASING"])
def test_a_packer_by_name_packs_as_its_function(name):
    packer = get_packer(name, 10, collect_metrics=True, min_bin_count=3, bin_count_multiple=2)
    lengths = [9, 4, 4, 2, 7, 3]
    bins = packer.pack(lengths)
    assert bins == PACKERS[name.lower()](lengths, 10, min_bin_count=3, bin_count_multiple=2)
    assert packer.metrics == [packing_metrics(bins, lengths, 10)]
    assert get_packer(name, 10).metrics is None


def test_a_packer_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no algorithm 'best_fit'\. Expected one of concatenative"):
        get_packer("best_fit", 10)
