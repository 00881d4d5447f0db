"""Columns in other forms: padded ones become jagged and back, and what was read goes to numpy and Arrow."""

import doctest
import sys

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from token_rows import jagged, rows_of

from dataplane_core import materialize, pack_jagged_fields
from dataplane_core.batch import BatchedDataDict, columns, read_columns, response_from_nested, stack_or_nest
from dataplane_core.batch.columns import pack_per_token_field, to_arrow, to_nested_by_length, to_numpy
from dataplane_core.codec import ALL_DTYPES, jagged_parts
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_testkit._columns import check_column, random_cells

LENGTHS = [3, 0, 5, 1]


@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, tuple(LENGTHS), np.array(LENGTHS), torch.tensor(LENGTHS, dtype=torch.int32), torch.tensor([LENGTHS]).T],
    ids=["list", "tuple", "ndarray", "int32", "a column of one"],
)
def test_lengths_may_come_in_any_form(lengths):
    assert [len(row) for row in rows_of(to_nested_by_length(torch.zeros(4, 5), lengths))] == LENGTHS


def test_a_column_that_is_jagged_already_passes_if_its_lengths_are_these():
    column = to_nested_by_length(torch.ones(4, 5), LENGTHS)
    assert rows_of(pack_per_token_field(column, LENGTHS)) == rows_of(column)
    with pytest.raises(InvalidRequestError, match="jagged already, but not of the given lengths"):
        pack_per_token_field(column, [3, 1, 5, 1])


def test_only_declared_fields_are_packed_and_none_without_lengths():
    fields = {
        "tokens": torch.ones(4, 5),
        "embedding": torch.ones(4, 4096),
        "scalar": torch.ones(4),
        "texts": ["a", "b", "c", "d"],
        "array": np.array([1, "x", None, 2.0], dtype=object),
        "stack": NonTensorStack("a", "b", "c", "d"),
    }
    for lengths in (LENGTHS, None):
        packed = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=["tokens", "not there"])
        assert isinstance(packed, TensorDict)
        assert packed.batch_size == (4,)
        assert [len(row) for row in rows_of(packed["tokens"])] == (lengths or [5] * 4)
        assert packed["embedding"].shape == (4, 4096)
        assert packed["scalar"].shape == (4,)
        assert packed["texts"] == packed["stack"] == ["a", "b", "c", "d"]
        assert packed["array"] == [1, "x", None, 2.0]


# --- what was read ----------------------------------------------------------------------------------------------------


def test_pad_values_go_by_field_and_default_to_zero():
    batch = materialize({"ids": jagged(LENGTHS).long(), "logprobs": jagged(LENGTHS)}, pad_value_dict={"ids": -100})
    assert isinstance(batch, BatchedDataDict)
    assert batch["ids"][1].tolist() == [-100] * 5
    assert batch["logprobs"][1].tolist() == [0] * 5


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [[()] * 3, [(2,)] * 3, [(2, 3), (0, 3), (4, 3)], [(2,), (1,)], [(5,)]], ids=str)
def test_rows_become_the_container_that_they_fit_and_none_an_empty_row(shapes):
    rows = [random_cells(torch.bfloat16, shape, seed) for seed, shape in enumerate(shapes)]
    check_column(stack_or_nest(rows), rows)
    if rows[0].dim():
        check_column(stack_or_nest([None, *rows]), [rows[0][:0], *rows])


def test_rows_of_any_kind_of_tensor_are_taken_or_refused_one_by_one():
    plain = torch.ones(2, 2)
    column = stack_or_nest([plain, torch.nn.Parameter(torch.ones(1, 2))])
    assert not column.requires_grad
    assert column.offsets().tolist() == [0, 2, 3]
    for odd, reason in ((torch.ones(2, 2, device="meta"), "meta-device"), (torch.eye(2).to_sparse(), "sparse")):
        with pytest.raises(InvalidTypeError, match=reason):
            stack_or_nest([plain, odd])


def test_the_response_is_taken_one_token_to_the_left():
    def nested(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    # prompt of 2, response of 3: the outputs at tokens 1, 2, 3 are about tokens 2, 3, 4
    full, mask = nested([0, 1, 2, 3, 4], [5, 6], [7, 8, 9]), nested([1, 1, 1], [1], [0, 0])
    assert rows_of(response_from_nested(full, mask)) == [[1, 2, 3], [5], [7, 8]]
    dense = response_from_nested(torch.arange(10.0).view(2, 5), torch.ones(2, 2))
    assert dense.layout == torch.jagged
    assert rows_of(dense) == [[2, 3], [7, 8]]


# --- numpy and Arrow --------------------------------------------------------------------------------------------------

IDS = ["a_g0", "a_g1", "b_g0"]
#: What numpy lacks, and what it becomes.
WIDER = {torch.bfloat16: "float32", torch.complex32: "complex64"} | {
    dtype: "float32" for dtype in ALL_DTYPES if "float8" in str(dtype)
}
REAL = sorted((dtype for dtype in ALL_DTYPES if not dtype.is_complex), key=str)


def test_each_kind_of_column_has_its_form_in_numpy(client):
    fields = {"tokens": jagged([3, 0, 2]).long(), "deep": torch.rand(3, 2, 2), "text": ["a", None, "b"]}
    meta = client.put_samples(IDS, "train", fields)
    read = client.get_data(meta)
    arrays = to_numpy(read)
    assert list(arrays) == list(fields)
    assert isinstance(arrays["tokens"], list)
    assert [(row.tolist(), row.dtype) for row in arrays["tokens"]] == [
        ([1, 2, 3], np.int64),
        ([], np.int64),
        ([1, 2], np.int64),
    ]
    assert np.array_equal(arrays["deep"], fields["deep"].numpy())
    assert (arrays["text"].dtype, arrays["text"].tolist()) == (object, fields["text"])
    batch = read_columns(client, meta, layout="jagged")
    assert all(repr(batch.to_numpy()[name]) == repr(arrays[name]) for name in fields)
    assert batch.to_arrow() == to_arrow(read)


@pytest.mark.parametrize("convert", [to_numpy, to_arrow], ids=["numpy", "arrow"])
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_what_comes_out_goes_in_again(client, convert, dtype):
    values = (torch.arange(10) % 2 + (dtype != torch.bool)).float().reshape(5, 2).to(dtype)  # which every dtype holds
    fields = {
        "scalars": values[:3, 0],
        "equal": values[:3],
        "ragged": torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 2, 5])),
        "text": NonTensorStack("a", "b", "c"),
    }
    read = client.get_data(client.put_samples(IDS, "train", TensorDict(fields, batch_size=[3])))
    client.register_partition("again", [], None, ["policy"])
    again = client.get_data(client.put_samples(IDS, "again", convert(read)))
    expected = getattr(torch, WIDER.get(dtype, str(dtype).removeprefix("torch.")))
    for name in ("scalars", "equal"):
        assert again[name].dtype == expected
        assert torch.equal(again[name], read[name].to(expected))
    assert again["ragged"].dtype == expected
    assert torch.equal(jagged_parts(again["ragged"])[0], values.to(expected))
    assert jagged_parts(again["ragged"])[1].tolist() == [0, 2, 2, 5]
    assert again.get("text").tolist() == ["a", "b", "c"]


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch warns of it once per process
@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES - set(REAL), key=str), ids=str)
def test_complex_numbers_are_numpys_and_not_arrows(dtype):
    column = torch.tensor([1 + 2j, -3j]).to(dtype)
    assert to_numpy({"x": column})["x"].tolist() == [1 + 2j, -3j]
    with pytest.raises(InvalidTypeError, match=r"field 'x' is of dtype torch\.complex.*view_as_real"):
        to_arrow({"x": column})
    parts = {"x": torch.view_as_real(column.to(torch.complex64))}
    assert to_arrow(parts)["x"].to_pylist() == [[1.0, 2.0], [0.0, -3.0]]


def test_the_schema_does_not_depend_on_the_rows():
    equal = {"tokens": torch.zeros(2, 3), "images": torch.zeros(2, 1, 4, 5)}
    ragged = {"tokens": jagged([3, 0]), "images": jagged([2, 1], 4, 5)}
    empty = {"tokens": torch.zeros(0, 3), "images": torch.zeros(0, 1, 4, 5)}
    tables = [to_arrow(columns) for columns in (equal, ragged, empty)]
    for table in tables:
        table.validate(full=True)
        assert table.schema == tables[0].schema
    assert [table.num_rows for table in tables] == [2, 2, 0]
    assert str(tables[0].schema.field("tokens").type) == "large_list<item: float>"


def test_a_table_has_ids_and_tags():
    batch = BatchedDataDict({"tokens": [[1, 2], [3]]})
    rows = batch.to_arrow(ids=["a", "b"], tags=[{"split": "train"}, {"version": 7}]).to_pylist()
    assert rows == [
        {"sample_id": "a", "tokens": [1, 2], "split": "train", "version": None},
        {"sample_id": "b", "tokens": [3], "split": None, "version": 7},
    ]
    for more in ({"ids": ["a"]}, {"tags": [{}] * 3}, {"tags": [{"tokens": 1}, {}]}):
        with pytest.raises(ValueError, match=r"one per row|align 1:1|'tokens' would be two columns"):
            batch.to_arrow(**more)


def test_without_pyarrow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert to_numpy({"x": [1]})["x"].tolist() == [1]
    with pytest.raises(ImportError, match=r"to_arrow needs pyarrow: pip install 'dataplane-core\[arrow\]'"):
        to_arrow({"x": [1]})


def test_the_examples_run():
    assert doctest.testmod(columns) == (0, 8)
