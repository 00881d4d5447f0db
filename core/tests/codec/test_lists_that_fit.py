"""A list becomes the type that its field is known to hold, if that changes no int and keeps floats finite."""

import pytest
import torch

from dataplane_core.codec import join_parts, list_as, object_column
from dataplane_core.spec import FieldSpec


def spec(dtype, *cell):
    return FieldSpec.of_cells(dtype, cell)


#: Items, the dtype of the field, and the dims of its cells after the first.
FITS = [
    ([1, 2], torch.float32),
    ([0.1, 2], torch.float64),
    ([0.1], torch.bfloat16),
    ([float("inf"), 1], torch.float16),
    ([0.5, 1], torch.complex64),
    ([[1, 255]], torch.uint8, 0),
    ([True], torch.bool),
    ([[1], [2]], torch.float64, 0),
]


@pytest.mark.parametrize("case", FITS, ids=str)
def test_numbers_that_fit(case):
    items, dtype, *cell = case
    found = list_as(items, spec(dtype, *cell))
    assert found.dtype == dtype
    assert found.equal(torch.tensor(items, dtype=dtype))


#: A field, and lists that it cannot hold without a change of an int, an infinite float, or another shape.
MISFITS = [
    (spec(torch.int64), [[1, 0.5], [1.0], [True, 1], [True], [[1]], ["a"]]),
    (spec(torch.float32), [[2**24 + 1], [1e300]]),
    (spec(torch.float64), [[1 << 64], [2**53 + 1, 0.5]]),
    (spec(torch.uint8), [[256], [-1]]),
    (spec(torch.bool), [[1]]),
    (spec(torch.int64, 0), [[1]]),
    (spec(torch.int64, 0, 2), [[[1]]]),
    (FieldSpec.of_objects(), [[torch.ones(1)]]),
]


@pytest.mark.parametrize(("known", "items"), [(known, items) for known, lists in MISFITS for items in lists], ids=str)
def test_numbers_that_do_not_fit(known, items):
    assert list_as(items, known) is None


def test_rows_that_were_read_apart_go_among_rows_of_one_object_each():
    large = torch.ones(2, 3)
    found = join_parts([object_column([large, large]), torch.empty(1, 0, 3)], [0, 2, 1])
    assert [tuple(row.shape) for row in found.tolist()] == [(2, 3), (0, 3), (2, 3)]
