"""The length that all ranks pad to."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dataplane_core.schema import padded_length

MULTIPLES = st.lists(st.integers(1, 12), max_size=4)


@pytest.mark.parametrize(
    ("length", "multiples", "expected"),
    [(5, (4, 6), 12), (13, (4, 6), 24), (12, (6, 4), 12), (5, (8, 4), 8), (7, (), 7), (0, (4,), 0)],
)
def test_multiples_that_do_not_divide_each_other_are_both_kept(length, multiples, expected):
    assert padded_length(length, *multiples) == expected


@given(st.integers(0, 200), MULTIPLES)
def test_it_is_the_least_that_every_party_can_divide(length, multiples):
    least = next(each for each in itertools.count(length) if not any(each % multiple for multiple in multiples))
    assert padded_length(length, *multiples) == least


@given(st.lists(st.integers(0, 200)), MULTIPLES)
def test_an_array_is_padded_element_by_element(lengths, multiples):
    padded = padded_length(np.asarray(lengths, dtype=np.int64), *multiples)
    assert padded.tolist() == [padded_length(length, *multiples) for length in lengths]
