"""The length that all ranks pad to."""

import itertools

import numpy as np
from hypothesis import example, given, strategies as st

from dataplane_core.schema import padded_length

MULTIPLES = st.lists(st.integers(1, 12), max_size=4)


@given(st.integers(0, 200), MULTIPLES)
@example(5, [4, 6])  # which do not divide each other
def test_it_is_the_least_that_every_party_can_divide(length, multiples):
    least = next(each for each in itertools.count(length) if not any(each % multiple for multiple in multiples))
    assert padded_length(length, *multiples) == least
    assert padded_length(np.asarray([length, 0, 7]), *multiples).tolist() == [
        padded_length(each, *multiples) for each in (length, 0, 7)
    ]
