"""A list becomes the type that its field is known to hold, if that changes no int and keeps floats finite."""

import pytest
import torch

from dataplane_core.codec.lists import list_as
from dataplane_core.spec import FieldSpec

#: A dtype, the dims of a cell, lists that fit a field of it, and lists that do not: an int would change, or a float
#: become infinite. What the kit does not put.
FORMS = [
    (torch.float64, (), [[0.1, 2]], [[1 << 64], [2**53 + 1, 0.5]]),
    (torch.float32, (), [[1, 2]], [[1e300], [[1]]]),
    (torch.float16, (), [[float("inf"), 1]], []),
    (torch.complex64, (), [[0.5, 1]], []),
    (torch.bool, (), [[True]], [[1]]),
    (torch.uint8, (0,), [[[1, 255]]], [[[256]], [[-1]], [1]]),
    (torch.int64, (), [[1]], [[1, 0.5], [True, 1], ["a"]]),
]


@pytest.mark.parametrize(("dtype", "cell", "fitting", "others"), FORMS, ids=str)
def test_numbers_fit_or_not(dtype, cell, fitting, others):
    known = FieldSpec.of_cells(dtype, cell)
    for items in fitting:
        found = list_as(items, known)
        assert found.dtype == dtype
        assert found.equal(torch.tensor(items, dtype=dtype))
    assert [list_as(items, known) for items in others] == [None] * len(others)
    assert list_as([torch.ones(1)], FieldSpec.of_objects()) is None
