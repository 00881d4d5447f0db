"""What was read, as numpy arrays and as an Arrow table; both can be put again."""

from __future__ import annotations

import doctest
import sys

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from token_rows import jagged

from dataplane_core.batch import BatchedDataDict, columns, read_columns
from dataplane_core.batch.columns import to_arrow, to_numpy
from dataplane_core.codec import ALL_DTYPES, jagged_parts
from dataplane_core.errors import InvalidTypeError

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


@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES - set(REAL), key=str), ids=str)
def test_complex_numbers_are_numpys_and_not_arrows(dtype):
    column = torch.tensor([1 + 2j, -3j]).to(dtype)
    assert to_numpy({"x": column})["x"].tolist() == [1 + 2j, -3j]
    with pytest.raises(InvalidTypeError, match=r"field 'x' is of dtype torch\.complex.*view_as_real"):
        to_arrow({"x": column})
    parts = {"x": torch.view_as_real(column.to(torch.complex64))}
    assert to_arrow(parts)["x"].to_pylist() == [[1.0, 2.0], [0.0, -3.0]]


def test_numbers_are_not_copied_and_a_table_keeps_their_memory_alive():
    ragged, dense = jagged([2, 1], 2), torch.rand(2, 3)
    arrays, table = to_numpy({"ragged": ragged, "dense": dense}), to_arrow({"ragged": ragged, "dense": dense})
    values = jagged_parts(ragged)[0]
    assert arrays["dense"].ctypes.data == dense.data_ptr()
    assert [row.ctypes.data for row in arrays["ragged"]] == [values.data_ptr(), values[2:].data_ptr()]
    assert table["dense"].chunk(0).flatten().to_numpy().ctypes.data == dense.data_ptr()
    assert table["ragged"].chunk(0).flatten().flatten().to_numpy().ctypes.data == values.data_ptr()
    table = to_arrow({"x": torch.arange(100_000)})
    assert sum(table["x"].to_numpy()) == sum(range(100_000))


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


@pytest.mark.parametrize("item", ["a \ud83d", ["\ud83d"]])
def test_half_of_a_surrogate_pair_is_refused_by_the_name_of_the_field(item):
    with pytest.raises(InvalidTypeError, match=r"field 'x' holds objects that Arrow has no .*surrogates"):
        to_arrow({"x": [item]})


@pytest.mark.parametrize("items", [["a", 1], [{"a": 1}, "a"], [{"a": torch.zeros(1)}, None]], ids=repr)
def test_objects_that_arrow_has_no_type_for_are_refused(items):
    with pytest.raises(
        InvalidTypeError, match=r"field 'x' holds objects that Arrow has no common type for.*json\.dumps"
    ):
        to_arrow({"x": NonTensorStack(*items)})


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
    assert doctest.testmod(columns) == (0, 5)
