"""A list becomes the type that its field is known to hold, if that changes no int and keeps floats finite."""

import pytest
import torch

from dataplane_core.codec import join_parts, list_as, object_column
from dataplane_core.spec import FieldSpec


def spec(dtype, *cell):
    return FieldSpec.of_cells(dtype, cell)


#: Items, the dtype of the field, and the dims of its cells after the first.
FITS = {
    "ints as floats": ([1, 2], torch.float32),
    "floats as doubles": ([0.1, 2], torch.float64),
    "floats as bfloat16": ([0.1], torch.bfloat16),
    "infinities": ([float("inf"), 1], torch.float16),
    "floats as complex numbers": ([0.5, 1], torch.complex64),
    "ints as small ints": ([[1, 255]], torch.uint8, 0),
    "bools": ([True], torch.bool),
    "lists of ints": ([[1], [2]], torch.float64, 0),
}


@pytest.mark.parametrize("case", FITS)
def test_numbers_that_fit(case):
    items, dtype, *cell = FITS[case]
    found = list_as(items, spec(dtype, *cell))
    assert found.dtype == dtype
    assert found.equal(torch.tensor(items, dtype=dtype))


MISFITS = {
    "a float among ints": ([1, 0.5], spec(torch.int64)),
    "a whole float among ints": ([1.0], spec(torch.int64)),
    "an int that loses digits": ([2**24 + 1], spec(torch.float32)),
    "a large int": ([256], spec(torch.uint8)),
    "a negative int": ([-1], spec(torch.uint8)),
    "an int of 65 bits": ([1 << 64], spec(torch.float64)),
    "an int that loses digits among floats": ([2**53 + 1, 0.5], spec(torch.float64)),
    "a float that becomes infinite": ([1e300], spec(torch.float32)),
    "bools among numbers": ([True, 1], spec(torch.int64)),
    "bools as ints": ([True], spec(torch.int64)),
    "ints as bools": ([1], spec(torch.bool)),
    "lists as scalars": ([[1]], spec(torch.int64)),
    "scalars as lists": ([1], spec(torch.int64, 0)),
    "lists as matrices": ([[1]], spec(torch.int64, 0, 2)),
    "text": (["a"], spec(torch.int64)),
    "tensors as objects": ([torch.ones(1)], FieldSpec.of_objects()),
}


@pytest.mark.parametrize("case", MISFITS)
def test_numbers_that_do_not_fit(case):
    assert list_as(*MISFITS[case]) is None


def test_rows_that_were_read_apart_go_among_rows_of_one_object_each():
    large = torch.ones(2, 3)
    found = join_parts([object_column([large, large]), torch.empty(1, 0, 3)], [0, 2, 1])
    assert [tuple(row.shape) for row in found.tolist()] == [(2, 3), (0, 3), (2, 3)]
