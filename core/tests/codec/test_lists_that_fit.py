"""A list becomes the type that its field is known to hold, if that changes no int and keeps floats finite."""

import pytest
import torch

from dataplane_core.codec import join_parts, list_as, object_column
from dataplane_core.spec import FieldSpec


def spec(dtype, *cell):
    return FieldSpec.of_cells(dtype, cell)


FITS = {
    "ints as floats": ([1, 2], spec(torch.float32), torch.tensor([1.0, 2.0])),
    "floats as doubles": ([0.1, 2], spec(torch.float64), torch.tensor([0.1, 2.0], dtype=torch.float64)),
    "floats as bfloat16": ([0.1], spec(torch.bfloat16), torch.tensor([0.1], dtype=torch.bfloat16)),
    "infinities": ([float("inf"), 1], spec(torch.float16), torch.tensor([float("inf"), 1], dtype=torch.float16)),
    "floats as complex numbers": ([0.5, 1], spec(torch.complex64), torch.tensor([0.5, 1], dtype=torch.complex64)),
    "ints as small ints": ([[1, 255]], spec(torch.uint8, 0), torch.tensor([[1, 255]], dtype=torch.uint8)),
    "bools": ([True], spec(torch.bool), torch.tensor([True])),
    "lists of ints": ([[1], [2]], spec(torch.float64, 0), torch.tensor([[1.0], [2.0]], dtype=torch.float64)),
}


@pytest.mark.parametrize("case", FITS)
def test_numbers_that_fit(case):
    items, known, expected = FITS[case]
    found = list_as(items, known)
    assert found.dtype == expected.dtype
    assert found.equal(expected)


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
