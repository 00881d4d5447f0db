"""Whatever a trainer has at hand is taken: strides, gradients, views, all nested tensors, every way to objects."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core.codec import decode_columns, encode_columns
from dataplane_core.spec import WireFormat

WIRES = [
    WireFormat(),
    WireFormat(bytes=True),
    WireFormat(ragged="rows", promote_1d=True, zero_length_rows=False, dtypes=frozenset({torch.uint8})),
]


@pytest.fixture(params=WIRES, ids=WireFormat.describe)
def there_and_back(request):
    def run(column):
        fields = column if isinstance(column, TensorDict) else {"x": column}
        columns, specs = encode_columns(fields, 3, request.param)
        return decode_columns(columns, specs, 3, request.param)["x"]

    return run


INPUTS = {
    "transposed": torch.arange(24.0).view(8, 3).t(),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(1, 2, 0),
    "strided": torch.arange(48.0).view(3, 16)[:, ::2],
    "flipped": torch.arange(24.0).view(3, 8).flip(1),
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 5),
    "expanded rows": torch.arange(5.0).expand(3, 5),
    "expanded scalar": torch.tensor(2.0).expand(3),
    "with gradient": torch.ones(3, 2, requires_grad=True),
    "with graph": torch.ones(3, 2, requires_grad=True) * 2,
    "a parameter": torch.nn.Parameter(torch.ones(3, 2)),
    "channels last": torch.arange(24.0).view(3, 2, 2, 2).to(memory_format=torch.channels_last),
    "offset": torch.arange(25, dtype=torch.uint8)[1:].view(3, 8),
    "odd strides of a size 1": torch.arange(6.0).view(3, 2)[:, :1],
    "odd strides of one row": torch.as_strided(torch.arange(30.0), (3, 1, 1), (1, 7, 7)),
}


@pytest.mark.parametrize("column", INPUTS.values(), ids=INPUTS.keys())
def test_dense_tensors_of_any_strides_are_taken(column, there_and_back, assert_rows):
    assert_rows(there_and_back(column), list(column.detach().contiguous()))


def test_conjugate_and_negative_views_are_taken(there_and_back):
    column = torch.tensor([1 + 2j, 3 - 4j, -5j])
    assert there_and_back(column.conj()).tolist() == [1 - 2j, 3 + 4j, 5j]
    assert there_and_back(column.conj().imag).tolist() == [-2, 4, 5]


def test_a_tensor_written_in_inference_mode_is_taken(there_and_back):
    with torch.inference_mode():
        column = torch.ones(3, 2)
    assert there_and_back(column).tolist() == [[1, 1]] * 3


VALUES = torch.arange(20.0).view(10, 2)
OFFSETS = torch.tensor([0, 4, 5, 10])


def nested(**kwargs):
    return torch.nested.nested_tensor_from_jagged(VALUES, OFFSETS, **kwargs)


def strided(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a prototype
        return torch.nested.nested_tensor(rows, layout=torch.strided)


NESTED = {
    "jagged": nested(),
    "jagged with int32 offsets": torch.nested.nested_tensor_from_jagged(VALUES, OFFSETS.to(torch.int32)),
    "jagged with holes": nested(lengths=torch.tensor([2, 0, 5])),
    "jagged, equal but for holes": nested(lengths=torch.tensor([1, 1, 1])),
    "jagged, narrowed": torch.nested.narrow(
        torch.arange(24.0).view(3, 8), 1, torch.tensor([0, 1, 2]), torch.tensor([3, 2, 4]), layout=torch.jagged
    ),
    "jagged, values not contiguous": torch.nested.nested_tensor_from_jagged(
        torch.arange(20.0).view(2, 10).t(), OFFSETS
    ),
    "jagged, trailing dims transposed": torch.nested.nested_tensor_from_jagged(
        torch.arange(60.0).view(10, 2, 3), OFFSETS
    ).transpose(2, 3),
    "jagged with gradient": torch.nested.nested_tensor_from_jagged(VALUES.clone().requires_grad_(), OFFSETS),
    "jagged on dim 2, equal rows": torch.nested.nested_tensor_from_jagged(
        torch.arange(18.0).view(9, 2), torch.tensor([0, 3, 6, 9])
    ).transpose(1, 2),
    "strided": strided([torch.ones(2, 3), torch.ones(0, 3), torch.ones(4, 3)]),
    "strided, equal rows": strided([torch.ones(2, 3)] * 3),
    "strided scalars": strided([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)]),
    "strided, transposed": strided([torch.arange(6.0).view(2, 3)] * 3).transpose(1, 2),
}


@pytest.mark.parametrize("column", NESTED.values(), ids=NESTED.keys())
def test_nested_tensors_of_any_kind_are_taken(column, there_and_back, assert_rows):
    assert_rows(there_and_back(column), [row.detach().contiguous() for row in column.unbind()])


def test_a_jagged_tensor_over_a_part_of_its_values_is_taken(there_and_back, assert_rows):
    column = torch.nested.nested_tensor_from_jagged(VALUES, torch.tensor([1, 4, 5, 9]))
    assert_rows(there_and_back(column), [VALUES[1:4], VALUES[4:5], VALUES[5:9]])


ITEMS = ["a", {"k": [1, None]}, [2.5]]


def object_array(items):
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


OBJECTS = {
    "NonTensorStack": NonTensorStack(*ITEMS),
    "object array": object_array(ITEMS),
    "TensorDict of NonTensorStack": TensorDict({"x": NonTensorStack(*ITEMS)}, batch_size=[3]),
    "TensorDict of object array": TensorDict({"x": object_array(ITEMS)}, batch_size=[3]),
    "TensorDict of list": TensorDict({"x": ITEMS}, batch_size=[3]),
}


@pytest.mark.parametrize("column", OBJECTS.values(), ids=OBJECTS.keys())
def test_objects_are_taken_in_every_form_that_tensordict_makes_of_them(column, there_and_back):
    decoded = there_and_back(column)
    assert type(decoded) is NonTensorStack
    assert decoded.batch_size == (3,)
    assert decoded.tolist() == ITEMS
    assert TensorDict({"x": decoded}, batch_size=[3])["x"] == ITEMS


@pytest.mark.parametrize("items", [["x"] * 3, [[1, 2]] * 3, [[]] * 3, [{}] * 3, [None] * 3, [[["a"], ["b"]]] * 3])
def test_equal_items_stay_one_item_per_row(items, there_and_back):
    assert there_and_back(NonTensorStack(*items)).tolist() == items


def test_strings_of_a_list_stay_strings(there_and_back):
    assert there_and_back(TensorDict({"x": ["a", "b", "c"]}, batch_size=[3])).tolist() == ["a", "b", "c"]


def test_numbers_of_a_list_become_a_tensor_as_tensordict_has_it(there_and_back):
    assert there_and_back(TensorDict({"x": [1, 2, 3]}, batch_size=[3])).tolist() == [1, 2, 3]
