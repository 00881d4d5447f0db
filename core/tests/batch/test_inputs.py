"""What people have goes into every call that writes as it is, and what is refused says what to write instead."""

from __future__ import annotations

import warnings

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import tqdm
from tensordict import NonTensorStack, TensorDict, lazy_stack

from dataplane_core.batch import kv_first_write, write_columns
from dataplane_core.codec import as_column, as_columns, jagged_parts, shared, wire
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, SchemaMismatchError
from dataplane_core.meta import KVBatchMeta

IDS = ["a_g0", "a_g1", "b_g0"]
META = KVBatchMeta("train", "policy", IDS)
TOKENS = [[5, 6, 7], [5], [8, 9]]
REWARDS = [0.5, 1.0, -2.0]
TEXTS = ["eos", None, "length"]
TURNS = [[{"role": "user", "content": "2+2"}], [], [{"role": "user", "content": "hi"}]]


@pytest.fixture(autouse=True)
def _no_thread_of_progress_bars(monkeypatch):
    """Formats of datasets make some, which start a thread that stays."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


def put(client, fields):
    client.put_samples(IDS, "train", fields)


def write(client, fields):
    write_columns(client, META, fields)


def first_write(client, fields):
    kv_first_write(fields, sample_ids=IDS, dp_client=client, partition_id="train")


WRITERS = [put, write, first_write]


@pytest.fixture(
    params=[put, *(pytest.param(each, marks=pytest.mark.long) for each in WRITERS[1:])],
    ids=lambda writer: writer.__name__,
)
def writer(request):
    """A call that writes. All of them take their columns by one function."""
    return request.param


def values(column):
    """A column's rows as Python values."""
    return [row.tolist() for row in column.unbind()] if isinstance(column, torch.Tensor) else column.tolist()


@pytest.mark.parametrize("writer", WRITERS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("as_numpy", [False, True], ids=["tensors", "arrays"])
def test_rows_of_a_list_that_are_the_same_large_tensor_are_stored_once_without_a_look_at_their_bytes(
    client, writer, as_numpy, monkeypatch
):
    monkeypatch.setattr(shared, "equal_rows", lambda column: None)
    monkeypatch.setattr(wire, "equal_rows", lambda column: None)
    one, other = torch.arange(100_000.0), torch.arange(120_000.0)
    rows = [one.numpy(), other.numpy(), one.numpy()] if as_numpy else [one, other, one]
    writer(client, {"image": rows, "input_lengths": [1, 2, 3]})
    assert client.describe("train").held_bytes < one.nbytes + other.nbytes + 10_000
    found = client.get_samples(IDS, "train", ["image"], share_rows=True)["image"].tolist()
    assert torch.equal(found[0], one)
    assert torch.equal(found[1], other)
    assert found[2] is found[0]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda each: each.__name__)
def test_lists_of_large_tensors_that_do_not_fit_are_refused_as_small_ones_are(client, writer):
    large = torch.zeros(200_000)
    with pytest.raises(SchemaMismatchError, match="field 'x' has rows that do not fit one column: row 0") as caught:
        writer(client, {"x": [large, large, large.view(2, -1)]})
    assert caught.value.hint == "Write NonTensorStack(*items) for one object per sample."
    with pytest.raises(InvalidRequestError, match="field 'x' has 2 rows"):
        writer(client, {"x": [large, large]})
    assert client.list_samples("train").size == 0


@pytest.mark.parametrize("writer", [write, first_write])
def test_a_list_of_large_rows_that_is_named_as_token_aligned_is_cut(client, writer):
    rows = [torch.ones(3, 20_000), torch.ones(3, 20_000), torch.ones(3, 20_000)]
    if writer is write:
        meta = KVBatchMeta("train", "policy", IDS, sequence_lengths=[1, 2, 3])
        write_columns(client, meta, {"x": rows}, token_aligned_fields=["x"])
    else:
        columns = {"x": rows, "input_lengths": [1, 2, 3]}
        kv_first_write(columns, sample_ids=IDS, dp_client=client, partition_id="train", token_aligned_fields=["x"])
    assert [len(row) for row in client.get_samples(IDS, "train", ["x"])["x"].unbind()] == [1, 2, 3]


# --- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = {"tokens": TOKENS, "reward": REWARDS, "text": TEXTS, "turns": TURNS}


def table():
    return pa.table(COLUMNS)


def data_set():
    return datasets.Dataset.from_dict(COLUMNS)


def longer_set():
    """A longer one; its rows 1, 2 and 3 are those of the others."""
    return datasets.concatenate_datasets([data_set().select([0]), data_set()])


TABLES = {
    "dict": lambda: COLUMNS,
    "rows": lambda: [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)],
    "rows of numpy": lambda: [
        {"tokens": np.array(TOKENS[row]), "reward": np.float64(REWARDS[row]), "text": TEXTS[row], "turns": TURNS[row]}
        for row in range(3)
    ],
    "Table": table,
    "Table of chunks": lambda: pa.concat_tables([table().slice(0, 2), table().slice(2)]),
    "slice of a Table": lambda: pa.concat_tables([table(), table()]).combine_chunks().slice(3),
    "RecordBatch": lambda: table().to_batches()[0],
    "large lists": lambda: table().set_column(0, "tokens", pa.array(TOKENS, pa.large_list(pa.int64()))),
    "Dataset": data_set,
    "Dataset of chosen rows": lambda: longer_set().select([1, 2, 3]),
    "Dataset in another order": lambda: data_set().select([2, 0, 1]).select([1, 2, 0]),
    "slice of a Dataset": lambda: longer_set()[1:4],
    "slice of a Dataset of numpy": lambda: longer_set().with_format("numpy")[1:4],
    "slice of a Dataset of torch": lambda: longer_set().with_format("torch")[1:4],
    "Dataset of torch": lambda: data_set().with_format("torch"),
    "columns of a Dataset": lambda: {name: data_set()[name] for name in COLUMNS},
    "DataFrame": lambda: pd.DataFrame(COLUMNS),
    "columns of a Table": lambda: {name: table()[name] for name in COLUMNS},
    "columns of a RecordBatch": lambda: dict(zip(COLUMNS, table().to_batches()[0].columns, strict=True)),
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_kind_of_table_gives_the_same_columns(client, writer, kind):
    writer(client, TABLES[kind]())
    columns = client.get_samples(IDS, "train", list(COLUMNS))
    assert columns["tokens"].layout is torch.jagged
    assert columns["tokens"].dtype == torch.int64
    assert columns["reward"].is_floating_point()
    assert {name: values(columns.get(name)) for name in COLUMNS} == COLUMNS
    assert isinstance(columns.get("turns"), NonTensorStack)


FEATURES = {
    "json": (datasets.Json(), [{"a": 1}, None, [1, "b"]]),
    "tool calls": (
        [{"name": datasets.Value("string"), "arguments": datasets.Json()}],
        3 * [[{"name": "f", "arguments": {"x": [1]}}]],
    ),
    "json as text": (datasets.Json(decode=False), ["{}", "[1]", "2"]),
    "numbers": (datasets.Value("int32"), [1, 2, 3]),
    "labels": (datasets.ClassLabel(names=["no", "yes"]), [0, 1, 1]),
    "lists": (datasets.List(datasets.Value("float32")), [[0.5], [], [1.5, 2.0]]),
    "translations": (datasets.Translation(["en", "fr"]), 3 * [{"en": "yes", "fr": "oui"}]),
    "matrices": (datasets.Array2D((1, 2), "float32"), 3 * [[[0.5, 1.5]]]),
    "matrices of any length": (datasets.Array2D((None, 2), "int32"), [[[1, 2]], [[1, 2], [3, 4]], [[5, 6]]]),
    "stored images": (datasets.Image(decode=False), 3 * [{"bytes": b"image", "path": None}]),
}
#: What a slice of this format gives is another value: tensors in JSON, nested lists, text for JSON.
OWN_VALUES = {
    *(
        ("torch", "json"),
        ("torch", "tool calls"),
        ("numpy", "json"),
        ("numpy", "tool calls"),
        ("arrow", "json as text"),
    ),
    *((None, "matrices"), (None, "matrices of any length")),
}


@pytest.mark.parametrize("kind", FEATURES)
def test_a_dataset_its_slices_and_its_formats_give_one_value(kind):
    feature, expected = FEATURES[kind]
    data = datasets.Dataset.from_dict({"x": expected}, features=datasets.Features({"x": feature}))
    forms = {"dataset": data, "chosen": data.select([2, 1, 0]).select([2, 1, 0])}
    for name in (None, "torch", "numpy", "arrow", "pandas"):
        if (name, kind) != ("arrow", "json as text"):
            forms[f"dataset, {name}"] = data.with_format(name)
        if (name, kind) not in OWN_VALUES:
            forms[f"slice, {name}"] = data.with_format(name)[:]
            if name not in ("arrow", "pandas"):  # whose rows are tables
                forms[f"rows, {name}"] = list(data.with_format(name))
    for form, fields in forms.items():
        assert values(as_columns("put", fields, 3)["x"]) == expected, form


def test_categories_of_pandas_keep_their_dtype():
    numbers = pd.Series(np.array([5, 7, 5], np.int32)).astype("category")
    assert torch.equal(as_column("test", numbers), torch.tensor([5, 7, 5], dtype=torch.int32))
    assert as_column("test", pd.Series(TEXTS).astype("category")).tolist() == TEXTS


def test_required_columns_are_found_in_a_table(client):
    with pytest.raises(InvalidRequestError, match="has no 'values'"):
        kv_first_write(
            table(), sample_ids=IDS, dp_client=client, partition_id="train", required_fields=["tokens", "values"]
        )


@pytest.mark.parametrize("empty", [[], {"x": []}, pa.table({"x": pa.array([], pa.int64())})], ids=repr)
def test_no_rows_for_no_ids_write_nothing(client, empty):
    assert client.put_samples([], "train", empty).sample_ids == []
    assert kv_first_write(empty, sample_ids=[], dp_client=client, partition_id="train").sample_ids == []
    assert client.list_samples("train").size == 0


# --- columns ----------------------------------------------------------------------------------------------------------

NUMBERS = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_an_array_keeps_its_dtype_and_shape(client, writer, dtype):
    array = (np.arange(6) % 4).reshape(3, 2).astype(dtype)
    writer(client, {"scalars": array[:, 0], "wide": array, "deep": array.reshape(3, 1, 2)})
    for name, expected in (("scalars", array[:, 0]), ("wide", array), ("deep", array.reshape(3, 1, 2))):
        column = client.get_samples(IDS, "train", [name])[name]
        assert column.dtype == getattr(torch, dtype)
        assert np.array_equal(column.numpy(), expected)


@pytest.mark.parametrize(
    "form", ["transposed", "reversed", "one row reversed", "every second", "of the other byte order", "read-only"]
)
def test_an_array_may_lie_in_memory_as_it_likes(client, writer, form):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    array = {
        "transposed": array.reshape(4, 3).T,
        "reversed": array[::-1],
        "one row reversed": [row[::-1] for row in (array[:1], array[1:2], array[2:])],
        "every second": array[:, ::2],
        "of the other byte order": array.astype(">i4"),
        "read-only": np.frombuffer(array.tobytes(), np.int32).reshape(3, 4),
    }[form]
    writer(client, {"x": array})
    column = client.get_samples(IDS, "train", ["x"])["x"]
    assert column.dtype == torch.int32
    assert column.tolist() == np.asarray(array).tolist()


def rows_of(lengths, make):
    return [make(np.full((length, 2), number, dtype=np.int16)) for number, length in enumerate(lengths)]


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["arrays", "tensors"])
@pytest.mark.parametrize("lengths", [(2, 0, 3), (2, 2, 2)], ids=["ragged", "equal"])
def test_a_list_of_arrays_or_tensors_is_a_tensor_column(client, writer, make, lengths):
    rows = rows_of(lengths, make)
    writer(client, {"x": rows, "scalars": [row.sum() for row in rows]})
    columns = client.get_samples(IDS, "train", ["x", "scalars"])
    assert columns["x"].dtype == torch.int16
    assert columns["x"].is_nested == (len(set(lengths)) > 1)
    assert values(columns["x"]) == [row.tolist() for row in rows]
    assert columns["scalars"].tolist() == [0, 2 * lengths[1], 4 * lengths[2]]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([np.float64(0.5), 1.0, np.float32(2.0)], torch.tensor([0.5, 1.0, 2.0])),
        ([np.int32(1), 2, np.int64(3)], torch.tensor([1, 2, 3])),
        ([np.True_, False, np.False_], torch.tensor([True, False, False])),
        ([[np.int64(1), 2], [3, 4], [np.uint8(5), 6]], torch.tensor([[1, 2], [3, 4], [5, 6]])),
    ],
    ids=["floats", "ints", "bools", "lists"],
)
def test_numbers_of_numpy_in_lists_are_as_pythons(client, writer, items, expected):
    writer(client, {"x": items})
    column = client.get_samples(IDS, "train", ["x"])["x"]
    assert column.dtype == expected.dtype
    assert torch.equal(column, expected)


# --- Arrow ------------------------------------------------------------------------------------------------------------


def address(array):
    """Where the values of an Arrow array lie."""
    while hasattr(array, "flatten") and not pa.types.is_primitive(array.type):
        array = array.flatten()
    return array.to_numpy().ctypes.data


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, 2, 3, 4], pa.int32()).slice(1),
        pa.array([[9], *TOKENS]).slice(1),
        pa.array([[9], *TOKENS], pa.large_list(pa.float32())).slice(1),
        pa.array([[1, 2]] * 4, pa.list_(pa.int64(), 2)).slice(1),
        pa.array([[[1, 2]], [], [[3, 4], [5, 6]], []], pa.list_(pa.list_(pa.int8(), 2))).slice(1),
    ],
    ids=lambda array: str(array.type),
)
def test_arrows_numbers_are_not_copied_on_the_way_to_the_backend(array):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of read-only memory
        column = as_columns("test", pa.table({"x": array}), 3)["x"]
    found = jagged_parts(column)[0] if column.is_nested else column
    assert found.data_ptr() == address(array)
    assert values(column) == array.to_pylist()
    assert str(found.dtype).removeprefix("torch.") in str(array.type).replace("float", "float32")


def test_a_tensor_keeps_arrows_memory_alive():
    column = as_column("test", pa.array(np.arange(100_000)))
    assert column.sum() == sum(range(100_000))


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([True, False, True]), torch.tensor([True, False, True])),
        (pa.array([[True], [False, True], []]), None),
        (pa.array([1.5, 2.5, 3.5], pa.float16()), torch.tensor([1.5, 2.5, 3.5], dtype=torch.float16)),
        (pa.array([1, 2, 1]).dictionary_encode(), torch.tensor([1, 2, 1])),
        (
            pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(3, 4)),
            torch.arange(12).reshape(3, 4),
        ),
        (
            pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([1, 2], pa.int32())),
            torch.tensor([1, 1, 2], dtype=torch.int32),
        ),
        (
            pa.array([[0], [1, 2], [3, 4]], pa.list_view(pa.int32()))[1:],
            torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        ),
    ],
    ids=["bools", "lists of bools", "float16", "dictionary", "extension", "run-end encoded", "list view"],
)
def test_other_numbers_of_arrow_are_tensors_too(array, expected):
    column = as_column("test", array)
    if expected is None:
        assert column.dtype == torch.bool
        assert values(column) == array.to_pylist()
    else:
        assert column.dtype == expected.dtype
        assert torch.equal(column, expected)


@pytest.mark.parametrize(
    "array",
    [
        pa.array(TEXTS),
        pa.array(TEXTS).dictionary_encode(),
        pa.array([b"a", None, b""]),
        pa.array([{"a": 1}, {"a": 2}, None]),
        pa.array([["a"], None, ["b", "c"]]),
        pa.nulls(3),
    ],
    ids=lambda array: str(array.type),
)
def test_other_columns_of_arrow_are_objects(array):
    assert as_column("test", array).tolist() == array.to_pylist()


# --- refusals ---------------------------------------------------------------------------------------------------------

ROW = {"x": 1, "y": 2}
REFUSED = {
    "a missing key": ([ROW, ROW, {"x": 1}], InvalidRequestError, "row 2 lacks 'y', which row 0 has"),
    "an extra key": ([ROW, {**ROW, "z": 3}, ROW], InvalidRequestError, "row 1 has 'z', which row 0 lacks"),
    "a row too few": ([ROW, ROW], InvalidRequestError, r"a list of 2 rows\. Expected 3, one per sample id"),
    "no rows": ([], InvalidRequestError, r"a list of 0 rows\. Expected 3"),
    "a list of numbers": ([1, 2, 3], InvalidTypeError, r"row 0 is a int\. Expected a dict.*Write \{'name': values\}"),
    "masked values": (
        {"x": np.ma.array([1, 2, 3], mask=[0, 1, 0])},
        InvalidTypeError,
        r"field 'x' is an array with 1 of 3 values masked.*array\.filled\(value\)",
    ),
    "masked rows": (
        {"x": [np.ma.array([1, 2], mask=[0, 1])] * 3},
        InvalidTypeError,
        r"field 'x', row 0, is an array with 1 of 2 values masked",
    ),
    "a tensor": (torch.zeros(3), InvalidTypeError, r"fields are a Tensor\. Expected a dict of columns.*Write \{'name'"),
    "a stream": (data_set().to_iterable_dataset(), InvalidTypeError, r"IterableDataset.*list\(data\.take\(n\)\)"),
    "splits": (datasets.DatasetDict(train=data_set()), InvalidTypeError, r"'train' is a datasets\.Dataset.*one split"),
    "columns of one name": (
        pa.Table.from_arrays([pa.array([1, 2, 3])] * 2, ["x", "x"]),
        InvalidRequestError,
        "several columns named 'x'",
    ),
    "rows of a table": (pa.table({"x": [1, 2]}), InvalidRequestError, r"2 rows.*(Expected 3|in field 'x')"),
    "rows of an array": ({"x": np.zeros(2)}, InvalidRequestError, r"2 rows.*(Expected 3|in field 'x')"),
    "times of numpy": (
        {"x": np.zeros(3, "M8[s]")},
        InvalidTypeError,
        r"'x' is a non-tensor column: an ndarray of dtype datetime64\[s\].*x\.astype",
    ),
    "a table of numpy": ({"x": np.zeros(3, [("a", int)])}, InvalidTypeError, "'x' is a non-tensor column: an ndarray"),
    "an array of times in a row": (
        {"x": [np.zeros(1), np.zeros(1), np.zeros(1, "M8[s]")]},
        InvalidTypeError,
        "'x', row 2, is a non-tensor column",
    ),
    "a matrix of objects": ({"x": np.empty((3, 2), dtype=object)}, InvalidTypeError, "'x' is a non-tensor"),
    "None among arrays": (
        {"x": [np.zeros(1), None, np.zeros(2)]},
        InvalidTypeError,
        r"'x' holds a NoneType among tensors or arrays \(row 1\).*NonTensorStack",
    ),
    "a list among tensors": (
        {"x": [torch.zeros(1), torch.zeros(1), [0.0]]},
        InvalidTypeError,
        r"'x' holds a list among tensors or arrays \(row 2\)",
    ),
    "dtypes of rows": (
        {"x": [np.zeros(1), np.zeros(2), np.zeros(1, int)]},
        SchemaMismatchError,
        r"'x' has rows.*row 0 is float64 \(1,\), row 2 is int64.*NonTensorStack",
    ),
    "dims of rows": (
        [{"x": torch.zeros(2)}, {"x": torch.zeros(1, 2)}, {"x": torch.zeros(2)}],
        SchemaMismatchError,
        r"'x' has rows.*row 1 is float32 \(1, 2\)",
    ),
    "lists in Arrow's lists": (pa.table({"x": [[[1]], [[2, 3]], []]}), InvalidTypeError, "nested more than one deep"),
    "numbers of pandas that are missing": (
        pd.DataFrame({"x": pd.array([1, None, 3], "Int64")}),
        InvalidTypeError,
        r"'x' holds None among numbers \(row 1",
    ),
    "nulls among Arrow's numbers": (
        pa.table({"x": [1, None, None]}),
        InvalidTypeError,
        r"'x' is an Arrow column of numbers with nulls: 2 of 3 values, the first at 1\..*fill_null.*drop_null",
    ),
    "nulls among Arrow's lists": (pa.table({"x": [[1], [2], None]}), InvalidTypeError, "1 of 3 lists, the first at 2"),
    "nulls in Arrow's lists": (
        pa.table({"x": [[1, 2], [None], [3]]}),
        InvalidTypeError,
        "1 of 4 values, the first at 2",
    ),
    "times of Arrow": (
        pa.table({"x": pa.array([0, 1, 2], pa.timestamp("s"))}),
        InvalidTypeError,
        r"'x' is an Arrow column of timestamp\[s\].*column\.cast",
    ),
    "numpy's values in objects": (
        {"x": [{"a": np.zeros(1)}, {}, {}]},
        InvalidTypeError,
        r"'x', row 0 at \['a'\].*numpy\.ndarray.*Python numbers and lists",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_says_what_to_write_instead(client, writer, kind):
    fields, error, words = REFUSED[kind]
    with pytest.raises(error, match=words):
        writer(client, fields)
    assert client.list_samples("train").size == 0


def test_a_lazy_stack_of_rows_is_read_as_a_list_of_rows(client, writer):
    rows = [{"x": torch.arange(length), "y": f"text {length}"} for length in (2, 0, 3)]
    writer(client, lazy_stack([TensorDict(row) for row in rows]))
    read = client.get_samples(IDS, "train", ["x", "y"])
    assert values(read["x"]) == [[0, 1], [], [0, 1, 2]]
    assert read["y"] == ["text 2", "text 0", "text 3"]
    del rows[1]["y"]
    with pytest.raises(InvalidRequestError, match="row 1 lacks 'y', which row 0 has"):
        writer(client, lazy_stack([TensorDict(row) for row in rows]))


def test_tables_are_recognized_without_importing_their_packages(python):
    code = """
import sys
from dataplane_core import connect
with connect({"backend": "noop"}) as client:
    client.register_partition("p", [], None, ["t"])
    client.put_samples(["a", "b"], "p", [{"x": [1], "y": "s"}, {"x": [2, 3], "y": "t"}])
    assert client.get_samples(["b"], "p", ["x"])["x"].tolist() == [[2, 3]]
print(sorted({"pyarrow", "datasets", "pandas"} & set(sys.modules)))
"""
    assert python.run("-c", code).stdout == "[]\n"


def test_arrays_may_be_changed_after_the_put(client):
    client.register_partition("changed", ["x", "y"], None, ["trainer"])
    array, row = np.arange(3.0), np.arange(70_000)  # a large row is stored apart
    client.put_samples(IDS, "changed", {"x": array, "y": [row, row[:1], row]})
    array[:], row[:] = 0, 0
    read = client.get_samples(IDS, "changed", ["x", "y"])
    assert read["x"].tolist() == [0, 1, 2]
    assert [each.sum() for each in read["y"].unbind()] == [sum(range(70_000)), 0, sum(range(70_000))]
