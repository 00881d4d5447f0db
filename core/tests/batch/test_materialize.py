"""What was read becomes the batch that trainers compute on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core.batch import BatchedDataDict, materialize
from dataplane_core.batch.jagged import to_nested_by_length
from dataplane_core.codec import ALL_DTYPES

LENGTHS = [3, 0, 5, 1]


def jagged(*trailing, dtype=torch.float32):
    padded = torch.arange(1, 1 + 20 * torch.Size(trailing).numel()).view(4, 5, *trailing).to(dtype)
    return to_nested_by_length(padded, LENGTHS)


@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES, key=str), ids=str)
@pytest.mark.parametrize("trailing", [(), (2, 3)], ids=["flat", "deep"])
@pytest.mark.parametrize("width", [0, 3, 8])
def test_jagged_columns_are_padded_on_the_right(dtype, trailing, width, random_cell, bits):
    padded = random_cell((4, 5, *trailing), dtype)
    batch = materialize({"x": to_nested_by_length(padded, LENGTHS)}, pad_to_seqlen=width)
    assert isinstance(batch, BatchedDataDict)
    column = batch["x"]
    assert column.shape == (4, max(width, 5), *trailing)
    assert column.dtype == dtype
    assert column.is_contiguous()
    for row, length in enumerate(LENGTHS):
        assert bits(column[row, :length]) == bits(padded[row, :length])
        assert set(bits(column[row, length:])) <= {0}


@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES, key=str), ids=str)
def test_every_dtype_is_padded_with_its_own_value(dtype, random_cell, bits):
    value = 1 if dtype == torch.bool else 2
    two = bits(torch.full((), value, dtype=dtype))
    dense = random_cell((4, 5), dtype)
    batch = materialize({"x": dense}, pad_value_dict={"x": value}, pad_to_seqlen=7)
    assert bits(batch["x"][:, :5]) == bits(dense)
    assert bits(batch["x"][:, 5:]) == two * 8
    batch = materialize({"x": to_nested_by_length(dense, LENGTHS)}, pad_value_dict={"x": value})
    assert bits(batch["x"][0]) == bits(dense[0, :3]) + two * 2
    assert bits(batch["x"][1]) == two * 5


def test_pad_values_go_by_field_and_default_to_zero():
    batch = materialize({"ids": jagged(dtype=torch.int64), "logprobs": jagged()}, pad_value_dict={"ids": -100})
    assert batch["ids"][1].tolist() == [-100] * 5
    assert batch["logprobs"][1].tolist() == [0] * 5


def test_every_column_of_two_dims_or_more_is_padded_to_a_larger_length():
    batch = materialize(
        {"jagged": jagged(), "dense": torch.ones(4, 6, 2), "scalar": torch.ones(4), "wide": torch.ones(4, 12)},
        pad_to_seqlen=8,
    )
    shapes = {name: tuple(column.shape) for name, column in batch.items()}
    assert shapes == {"jagged": (4, 8), "dense": (4, 8, 2), "scalar": (4,), "wide": (4, 12)}
    assert batch["dense"][:, 6:].abs().sum() == 0


def test_where_fields_are_named_only_these_are_padded_to_the_length():
    fields = {"jagged": jagged(), "other": jagged(), "features": torch.ones(4, 6)}
    batch = materialize(fields, pad_to_seqlen=8, token_aligned_fields=["jagged"])
    shapes = {name: tuple(column.shape) for name, column in batch.items()}
    assert shapes == {"jagged": (4, 8), "other": (4, 5), "features": (4, 6)}


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("items", [["a", {"k": 1}, None], [[1, 2], [3, 4], [5, 6]], [[], [], []]], ids=str)
def test_objects_become_object_arrays_of_one_dim(layout, items):
    td = TensorDict({"x": NonTensorStack(*items)}, batch_size=[3])
    column = materialize(td, layout)["x"]
    assert isinstance(column, np.ndarray)
    assert column.dtype == object
    assert column.shape == (3,)
    assert list(column) == items


def test_columns_padded_together_own_their_memory_each():
    batch = materialize({"a": jagged(), "b": jagged(3), "c": jagged(dtype=torch.int64)})
    for column in batch.values():
        assert column.untyped_storage().nbytes() == column.nbytes
    batch["a"].fill_(7)
    assert batch["b"][1].abs().sum() == 0
    assert batch["c"][1].abs().sum() == 0


def test_packing_and_padding_are_inverse():
    padded = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    lengths = torch.randint(0, 34, (64,), generator=torch.Generator().manual_seed(1))
    lengths[0] = 33
    mask = torch.arange(33) < lengths[:, None]
    batch = materialize({"x": to_nested_by_length(padded, lengths)})
    assert torch.equal(batch["x"], torch.where(mask, padded, torch.zeros(())))
