"""What cannot be carried is refused before anything is written, with the field's name and both numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane_core.codec import as_columns, encode_columns
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, SchemaMismatchError
from dataplane_core.spec import WireFormat

JAGGED = torch.nested.nested_tensor_from_jagged(torch.arange(10.0), torch.tensor([0, 4, 5, 10]))


@pytest.mark.parametrize(
    "column",
    [
        torch.zeros(511, 2),
        torch.nested.nested_tensor_from_jagged(torch.zeros(511), torch.arange(512)),
        NonTensorStack(*["x"] * 511),
        np.array(["x"] * 511, dtype=object),
    ],
    ids=["dense", "jagged", "objects", "object array"],
)
def test_a_column_of_another_number_of_rows_names_field_and_both_numbers(column):
    with pytest.raises(InvalidRequestError, match=r"'advantages' has 511 rows\. Expected 512"):
        encode_columns({"good": torch.zeros(512), "advantages": column}, 512, WireFormat())


def test_a_scalar_tensor_has_no_rows():
    with pytest.raises(InvalidRequestError, match=r"'x' is a scalar tensor\. Expected 3 rows"):
        encode_columns({"x": torch.tensor(1.0)}, 3, WireFormat())


@pytest.mark.parametrize(
    "leaf",
    [
        "text",
        3,
        None,
        {"a": 1},
        {1, 2, 3},
        np.zeros(3),
        np.array(["a", "b", "c"]),
        np.empty((3, 1), dtype=object),
        TensorDict({"y": torch.zeros(3)}, batch_size=[3]),
        NonTensorData("one for all", batch_size=[3]),
        NonTensorData(None, batch_size=[3]),
    ],
    ids=repr,
)
def test_a_leaf_that_is_neither_a_tensor_nor_row_aligned_objects_is_called_non_tensor(leaf):
    with pytest.raises(InvalidTypeError, match="'x' is a non-tensor leaf"):
        encode_columns({"x": leaf}, 3, WireFormat())


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors_are_refused(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls csr a beta
        column = torch.eye(3).to_sparse() if layout == "coo" else torch.eye(3).to_sparse_csr()
    with pytest.raises(InvalidTypeError, match="'x' is a sparse tensor"):
        encode_columns({"x": column}, 3, WireFormat())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_among_the_rows_of_a_list_are_refused(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls strided ones a prototype
        nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=layout)
    with pytest.raises(InvalidTypeError, match=r"'x' is a nested tensor\. Expected a plain tensor for each row"):
        as_columns("put_samples", {"x": [torch.zeros(2), nested]}, 2)


def test_quantised_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        column = torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8)
    with pytest.raises(InvalidTypeError, match="'x' is a quantised tensor"):
        encode_columns({"x": column}, 3, WireFormat())


def test_dtypes_outside_the_contract_are_refused():
    column = torch.zeros(3, dtype=torch.uint8).view(torch.bits8)
    with pytest.raises(InvalidTypeError, match=r"'x' is a tensor of dtype torch\.bits8"):
        encode_columns({"x": column}, 3, WireFormat())


def test_wrapper_tensors_are_refused_with_advice():
    from torch.testing._internal.two_tensor import TwoTensor

    column = TwoTensor(torch.zeros(3), torch.zeros(3))
    with pytest.raises(InvalidTypeError, match=r"'x' is a TwoTensor.*full_tensor"):
        encode_columns({"x": column}, 3, WireFormat())


def test_rows_that_differ_in_a_dim_other_than_their_first_are_a_value_error():
    with pytest.raises(
        SchemaMismatchError, match=r"'x' has rows.*row 0 is float32 \(2, 4\), row 1 is float32 \(2, 1\)"
    ):
        encode_columns(
            {"x": torch.nested.nested_tensor_from_jagged(torch.zeros(10, 2), JAGGED.offsets()).transpose(1, 2)},
            3,
            WireFormat(),
        )


def test_offsets_outside_the_values_are_refused():
    column = torch.nested.nested_tensor_from_jagged(torch.arange(4.0), torch.tensor([0, 2, 9]))
    with pytest.raises(InvalidTypeError, match="offsets do not lie within its 4 values"):
        encode_columns({"x": column}, 2, WireFormat())


@pytest.mark.parametrize(
    "wire", [WireFormat(), WireFormat(objects="native"), WireFormat(bytes=True)], ids=WireFormat.describe
)
def test_an_object_outside_the_closed_set_names_field_row_and_type(wire):
    fields = {"x": NonTensorStack("fine", {"deep": [1, (2, 3)]})}
    with pytest.raises(InvalidTypeError, match=r"'x', row 1 at \['deep'\]\[1\].*of type tuple"):
        encode_columns(fields, 2, wire)
    encode_columns(fields, 2, wire, allow_pickle=True)
