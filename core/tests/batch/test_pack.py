"""Padded columns to jagged ones: lengths and widths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core.batch import pack_jagged_fields, response_from_nested, stack_or_nest
from dataplane_core.batch.jagged import pack_per_token_field, to_nested_by_length
from dataplane_core.codec import ALL_DTYPES
from dataplane_core.errors import InvalidRequestError, InvalidTypeError

LENGTHS = [3, 0, 5, 1]


def rows_of(column):
    return [row.tolist() for row in column.unbind()]


# --- to_nested_by_length ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES, key=str), ids=str)
@pytest.mark.parametrize("trailing", [(), (2, 3)], ids=["flat", "deep"])
def test_padding_is_cut_bit_for_bit(dtype, trailing, random_cell, assert_rows):
    padded = random_cell((4, 5, *trailing), dtype)
    expected = [padded[row, :length] for row, length in enumerate(LENGTHS)]
    assert_rows(to_nested_by_length(padded, torch.tensor(LENGTHS)), expected)


@pytest.mark.parametrize(
    "lengths",
    [
        LENGTHS,
        tuple(LENGTHS),
        np.array(LENGTHS),
        torch.tensor(LENGTHS, dtype=torch.int32),
        torch.tensor(LENGTHS)[:, None],
    ],
    ids=["list", "tuple", "ndarray", "int32", "a column of one"],
)
def test_lengths_may_come_in_any_form(lengths):
    assert [len(row) for row in rows_of(to_nested_by_length(torch.zeros(4, 5), lengths))] == LENGTHS


def test_views_and_gradients_are_taken_and_the_result_is_a_detached_copy():
    padded = torch.arange(20.0, requires_grad=True).view(5, 4).t()
    column = to_nested_by_length(padded, LENGTHS)
    assert not column.requires_grad
    assert rows_of(column)[0] == [0, 4, 8]
    source = torch.zeros(2, 3)
    column = to_nested_by_length(source, [3, 3])
    source += 1
    assert rows_of(column) == [[0, 0, 0]] * 2


# --- pack_per_token_field ---------------------------------------------------------------------------------------------


def test_a_column_that_is_jagged_already_passes_if_its_lengths_are_these():
    column = to_nested_by_length(torch.ones(4, 5), LENGTHS)
    assert rows_of(pack_per_token_field(column, LENGTHS)) == rows_of(column)
    with pytest.raises(InvalidRequestError, match="jagged already, but not of the given lengths"):
        pack_per_token_field(column, [3, 1, 5, 1])


# --- pack_jagged_fields -----------------------------------------------------------------------------------------------


def test_only_declared_fields_are_packed():
    fields = {
        "tokens": torch.ones(4, 5),
        "embedding": torch.ones(4, 4096),
        "scalar": torch.ones(4),
        "texts": ["a", "b", "c", "d"],
        "array": np.array([1, "x", None, 2.0], dtype=object),
        "stack": NonTensorStack("a", "b", "c", "d"),
    }
    packed = pack_jagged_fields(fields, lengths=LENGTHS, token_aligned_fields=["tokens", "not there"])
    assert isinstance(packed, TensorDict)
    assert packed.batch_size == (4,)
    assert [len(row) for row in rows_of(packed["tokens"])] == LENGTHS
    assert packed["embedding"].shape == (4, 4096)
    assert packed["scalar"].shape == (4,)
    assert packed["texts"] == packed["stack"] == ["a", "b", "c", "d"]
    assert packed["array"] == [1, "x", None, 2.0]


def test_without_lengths_every_column_stays_as_it_is():
    packed = pack_jagged_fields({"tokens": torch.ones(4, 5)}, lengths=None, token_aligned_fields=["tokens"])
    assert packed.batch_size == (4,)
    assert packed["tokens"].shape == (4, 5)


def test_fields_packed_together_own_their_memory_each(random_cell, bits):
    fields = {name: random_cell((4, 5), torch.float32, seed) for seed, name in enumerate("abc")}
    fields["d"] = random_cell((4, 7, 3), torch.float8_e5m2)
    packed = pack_jagged_fields(fields, lengths=LENGTHS, token_aligned_fields=list(fields))
    for name, padded in fields.items():
        values = packed.get(name).values()
        assert bits(values) == b"".join(bits(padded[row, :length]) for row, length in enumerate(LENGTHS))
        # what pickles a column must not carry its siblings along
        assert values.untyped_storage().nbytes() == values.nbytes
    packed.get("a").values().zero_()
    assert bits(packed.get("b").values()[:3]) == bits(fields["b"][0, :3])


# --- stack_or_nest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [[()] * 3, [(2,)] * 3, [(2, 3), (0, 3), (4, 3)], [(2,), (1,)], [(5,)]], ids=str)
def test_rows_become_the_container_that_they_fit(shapes, random_cell, assert_rows):
    rows = [random_cell(shape, torch.bfloat16, seed) for seed, shape in enumerate(shapes)]
    assert_rows(stack_or_nest(rows), rows)


def test_rows_of_any_kind_of_tensor_are_taken_or_refused_one_by_one():
    plain = torch.ones(2, 2)
    parameter = torch.nn.Parameter(torch.ones(1, 2))
    column = stack_or_nest([plain, parameter])
    assert not column.requires_grad
    assert column.offsets().tolist() == [0, 2, 3]
    for odd, reason in ((torch.ones(2, 2, device="meta"), "meta-device"), (torch.eye(2).to_sparse(), "sparse")):
        with pytest.raises(InvalidTypeError, match=reason):
            stack_or_nest([plain, odd])


# --- response_from_nested ---------------------------------------------------------------------------------------------


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=torch.float32) for row in rows], layout=torch.jagged)


def test_the_response_is_taken_one_token_to_the_left():
    # prompt of 2, response of 3: the outputs at tokens 1, 2, 3 are about tokens 2, 3, 4
    full, mask = nested([0, 1, 2, 3, 4], [5, 6], [7, 8, 9]), nested([1, 1, 1], [1], [0, 0])
    assert rows_of(response_from_nested(full, mask)) == [[1, 2, 3], [5], [7, 8]]


def test_dense_columns_are_rows_of_equal_length():
    full = torch.arange(10.0).view(2, 5)
    assert rows_of(response_from_nested(full, torch.ones(2, 2))) == [[2, 3], [7, 8]]
    assert response_from_nested(full, torch.ones(2, 2)).layout == torch.jagged
