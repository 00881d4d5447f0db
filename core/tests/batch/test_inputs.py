"""What people have goes into every call that writes as it is, and what is refused says what to write instead."""

from dataclasses import replace
from functools import reduce
from itertools import product

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import tqdm
from tensordict import NonTensorStack, TensorDict, lazy_stack

from dataplane_core.batch import kv_first_write, read_columns, rebuild_message_logs, split_message_logs, write_columns
from dataplane_core.batch.columns import object_array
from dataplane_core.codec import as_columns, tensor_columns
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, SchemaMismatchError
from dataplane_core.meta import KVBatchMeta

IDS = ["a_g0", "a_g1", "b_g0"]
META = KVBatchMeta("train", "policy", IDS, sequence_lengths=[2, 1, 3])
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


def write_aligned(client, fields):
    write_columns(client, META, fields, token_aligned_fields=["input_ids"])


def first_write(client, fields):
    kv_first_write(fields, sample_ids=IDS, dp_client=client, partition_id="train")


WRITERS = [put, write, write_aligned, first_write]


def written(client, fields, writer=put, names=None):
    """The columns as they are read back; the next writer finds an empty partition."""
    writer(client, fields)
    columns = client.get_samples(IDS, "train", list(names or fields))
    client.clear_samples(IDS, "train")
    return columns


def values(column):
    """A column's rows as Python values."""
    column = tensor_columns({"x": column})["x"]
    return [row.tolist() for row in column.unbind()] if isinstance(column, torch.Tensor) else column.tolist()


def plain(given):
    """What was given, as Python values."""
    for convert in ("to_pylist", "tolist"):
        if hasattr(given, convert):
            return getattr(given, convert)()
    return [list(row) if isinstance(row, tuple) else plain(row) if hasattr(row, "tolist") else row for row in given]


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
def test_every_kind_of_table_gives_the_same_columns_in_every_call_that_writes(client, kind):
    for writer in WRITERS if kind in ("rows of numpy", "Table", "Dataset", "DataFrame") else [put]:
        client.register_partition("train", [], None, ["policy"])
        columns = written(client, TABLES[kind](), writer, COLUMNS)
        assert (columns["tokens"].layout, columns["tokens"].dtype) == (torch.jagged, torch.int64)
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
    *product(("torch", "numpy", "arrow"), ("json", "tool calls")),
    *((None, "matrices"), (None, "matrices of any length")),
}


@pytest.mark.parametrize("kind", FEATURES)
def test_a_dataset_its_slices_and_its_formats_give_one_value(kind):
    feature, expected = FEATURES[kind]
    data = datasets.Dataset.from_dict({"x": expected}, features=datasets.Features({"x": feature}))
    forms = {"dataset": data, "chosen": data.select([2, 1, 0]).select([2, 1, 0])}
    for name in (None, "torch", "numpy", "arrow", "pandas"):
        forms[f"dataset, {name}"] = data.with_format(name)
        if (name, kind) not in OWN_VALUES:
            forms[f"slice, {name}"] = data.with_format(name)[:]
            if name not in ("arrow", "pandas"):  # whose rows are tables
                forms[f"rows, {name}"] = list(data.with_format(name))
    for form, fields in forms.items():
        assert values(as_columns("put", fields, 3)["x"]) == expected, form


# --- columns ----------------------------------------------------------------------------------------------------------


INT32 = np.arange(12, dtype=np.int32).reshape(3, 4)
RAGGED = [np.full((length, 2), length, dtype=np.int16) for length in (2, 0, 3)]
TENSORS_OF_ARROW = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(3, 4))
EQUAL = [np.full((2, 2), number, dtype=np.int16) for number in range(3)]
#: The dtype that is expected, and what is given.
TENSORS = {
    torch.int64: [
        *([1, 2, 3], [[1, 2], [3, 4], [5, 6]], [[1, 2], [3], [4, 5, 2**62]], [(1, 2), (), (3,)], ([1], [2, 3], [4])),
        # numbers of numpy in lists are as Python's
        *([np.int32(1), 2, np.int64(3)], [[np.int64(1), 2], [3, 4], [np.uint8(5), 6]]),
        [torch.tensor(number) for number in range(3)],
        pa.array([1, 2, 1]).dictionary_encode(),
        *(TENSORS_OF_ARROW, pa.chunked_array([TENSORS_OF_ARROW.slice(0, 1), TENSORS_OF_ARROW.slice(1)])),
    ],
    torch.float32: [
        *([0.5, 1.0, -2.0], [1, 0.5, 0], [[0.5, 2.0], [-1.0], [float("inf"), 3.0]], [[1, 0.5], [3], [4]]),
        *([[], [], [0.5]], [np.float64(0.5), 1.0, np.float32(2.0)]),
    ],
    torch.bool: [
        *([True, False, True], [[True], [False, True], []], [np.True_, False, np.False_]),
        *(pa.array([True, False, True]), pa.array([[True], [False, True], []])),
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, 3], pa.int8())),
    ],
    torch.float16: [pa.array([1.5, 2.5, 3.5], pa.float16()), np.ones((3, 1, 2), "e")],
    **{getattr(torch, str(np.dtype(kind))): [np.ones(3, kind)] for kind in "BHILdFD"},  # numpy's letters
    torch.int16: [rows for arrays in (RAGGED, EQUAL) for rows in (arrays, [torch.from_numpy(row) for row in arrays])],
    # arrays, which may lie in memory as they like
    torch.int32: [
        *(INT32.reshape(4, 3).T, INT32[::-1], [INT32[row : row + 1, ::-1] for row in range(3)], INT32[:, ::2]),
        *(INT32.astype(">i4"), np.frombuffer(INT32.tobytes(), np.int32).reshape(3, 4)),
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([1, 2], pa.int32())),
        pa.array([[0], [1, 2], [3, 4], [5, 6]], pa.list_view(pa.int32()))[1:],
        pd.Series(np.array([5, 7, 5], np.int32)).astype("category"),
    ],
}


@pytest.mark.parametrize(("dtype", "given"), [(dtype, each) for dtype, column in TENSORS.items() for each in column])
def test_numbers_become_a_tensor_which_is_jagged_if_rows_differ_in_length(client, dtype, given):
    expected = plain(given)
    is_ragged = isinstance(expected[0], list) and len(set(map(len, expected))) > 1
    for writer in WRITERS:
        column = written(client, {"x": given, "other": torch.zeros(3)}, writer)["x"]
        assert column.dtype == dtype
        assert column.layout is (torch.jagged if is_ragged else torch.strided)
        assert values(column) == expected


OBJECTS = [
    *(["text", "", "more"], [None, None, "text"], [[], [], []], [["a"], [], ["b", 1]], [{"n": 1}, {"n": [1, 2]}, None]),
    *([b"1", 1, None], [{"a": 1}, [{"b": [1]}], [[1], "a"]]),
    *(NonTensorStack([1, 2], [3], [4, 5, 6]), object_array([[1, 2], [3], [4, 5, 6]])),
    *(
        pa.array(TEXTS),
        pa.array(TEXTS).dictionary_encode(),
        pd.Series(["a", "b", "a"]).astype("category"),
        pa.array([b"a", None, b""]),
        pa.nulls(3),
    ),
    *(pa.array([{"a": 1}, {"a": 2}, None]), pa.array([["a"], None, ["b", "c"]])),
]


@pytest.mark.parametrize("given", OBJECTS, ids=str)
def test_other_columns_are_objects(client, given):
    for writer in WRITERS:
        column = written(client, {"x": given, "other": torch.zeros(3)}, writer).get("x")
        assert isinstance(column, NonTensorStack)
        assert column.tolist() == plain(given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # of its own configuration
def test_tensors_of_ray_are_taken(client):
    from ray.data._internal.tensor_extensions import arrow as ray_arrow

    for name, rows in (("x", INT32.reshape(3, 2, 2)), ("y", object_array(RAGGED))):
        column = written(client, {name: ray_arrow.ArrowTensorArray.from_numpy(rows)})[name]
        assert values(column) == [row.tolist() for row in rows]


def test_turns_of_message_logs_whose_contents_are_numbers_stay_as_they_are(client):
    logs = [[{"role": "user", "content": number, "token_ids": [number, 8]}] for number in range(3)]
    columns = {**split_message_logs(logs), "input_ids": torch.tensor([[0, 8], [1, 8], [2, 8]])}
    meta = replace(META, sequence_lengths=[2, 2, 2])
    write_columns(client, meta, columns)
    rebuilt = rebuild_message_logs(read_columns(client, meta, list(columns)))
    assert [[turn["content"] for turn in log] for log in rebuilt] == [[0], [1], [2]]


# --- refusals ---------------------------------------------------------------------------------------------------------

ROW = {"x": 1, "y": 2}
LARGE = torch.zeros(200_000)
#: What is written, the class of the error, and what it must name.
REFUSED = {
    "a missing key": ([ROW, ROW, {"x": 1}], InvalidRequestError, "row 2 .*'y'"),
    "an extra key": ([ROW, {**ROW, "z": 3}, ROW], InvalidRequestError, "row 1 .*'z'"),
    "a row too few": ([ROW, ROW], InvalidRequestError, "2 rows.*3"),
    "no rows": ([], InvalidRequestError, "0 rows.*3"),
    "a list too short": ({"x": [[1], [2, 3]], "y": torch.zeros(3)}, InvalidRequestError, "2"),
    "large rows too few": ({"x": [LARGE, LARGE]}, InvalidRequestError, "'x' has 2 rows"),
    "rows of a table": (pa.table({"x": [1, 2]}), InvalidRequestError, "2 rows"),
    "rows of an array": ({"x": np.zeros(2)}, InvalidRequestError, "2 rows"),
    "columns of one name": (pa.Table.from_arrays([pa.array([1, 2, 3])] * 2, ["x", "x"]), InvalidRequestError, "'x'"),
    # columns that are none
    "one text for all rows": ({"x": "text"}, InvalidTypeError, "'x'.*non-tensor leaf"),
    "None for all rows": ({"x": None}, InvalidTypeError, "'x'.*non-tensor leaf"),
    "a tuple in an object": ({"x": [("a",), 2, 3]}, InvalidTypeError, "'x', row 0.* of type tuple"),
    # no table at all
    "a list of numbers": ([1, 2, 3], InvalidTypeError, r"row 0 is a int.*\{'name': values\}"),
    "a tensor": (torch.zeros(3), InvalidTypeError, r"Tensor.*\{'name'"),
    "a stream": (data_set().to_iterable_dataset(), InvalidTypeError, r"IterableDataset.*list\(data\.take\(n\)\)"),
    "splits": (datasets.DatasetDict(train=data_set()), InvalidTypeError, "'train'.*one split"),
    # what nearly is numbers is asked for, and not guessed
    "None among numbers": ({"x": [1, None, 3]}, InvalidTypeError, "'x'.*None.*row 1"),
    "None among lists": ({"x": [[1], [2], None]}, InvalidTypeError, "'x'.*None.*row 2"),
    "None in a list": ({"x": [[1], [2, None], [3]]}, InvalidTypeError, "'x'.*None.*row 1"),
    "a number among lists": ({"x": [[1], 2, [3]]}, InvalidTypeError, "'x'.*lists of numbers in others"),
    "lists in lists": ({"x": [[[1, 2]], [[3]], []]}, InvalidTypeError, "'x'.*nested"),
    "lists in many lists": ({"x": [reduce(lambda item, _: [item], range(100), 1)] * 3}, InvalidTypeError, "one deep"),
    "lists and numbers in lists": ({"x": [[1, [2]], [3], []]}, InvalidTypeError, "'x'.*nested"),
    "bools among numbers": ({"x": [True, 1, 0.5]}, InvalidTypeError, "'x'.*bools"),
    "bools among floats in lists": ({"x": [[True], [0.5], []]}, InvalidTypeError, "'x'.*bools"),
    "an int of 65 bits": ({"x": [1, 2, 2**63]}, InvalidRequestError, "'x'.*64 bits"),
    "a float beyond float32": ({"x": [[1.0], [1e300], []]}, InvalidRequestError, r"'x'.*1e\+300.*float32"),
    "an int that float32 rounds": ({"x": [0.5, 1, 2**24 + 1]}, InvalidRequestError, "'x'.*16777217"),
    # numpy's
    "masked values": ({"x": np.ma.array([1, 2, 3], mask=[0, 1, 0])}, InvalidTypeError, r"'x'.*1 of 3.*filled\("),
    "masked rows": ({"x": [np.ma.array([1, 2], mask=[0, 1])] * 3}, InvalidTypeError, "'x', row 0.*1 of 2"),
    "times": ({"x": np.zeros(3, "M8[s]")}, InvalidTypeError, r"'x'.*datetime64\[s\].*x\.astype"),
    "a table of numpy": ({"x": np.zeros(3, [("a", int)])}, InvalidTypeError, "'x'.*ndarray"),
    "times in a row": ({"x": [np.zeros(1), np.zeros(1), np.zeros(1, "M8[s]")]}, InvalidTypeError, "'x', row 2"),
    "a matrix of objects": ({"x": np.empty((3, 2), dtype=object)}, InvalidTypeError, "'x'"),
    "an array in an object": ({"x": [{"a": np.zeros(1)}, {}, {}]}, InvalidTypeError, r"'x', row 0 at \['a'\].*ndarray"),
    # rows that do not fit one column
    "None among arrays": ({"x": [np.zeros(1), None, np.zeros(2)]}, InvalidTypeError, r"'x'.*row 1\).*NonTensorStack"),
    "a list among tensors": ({"x": [torch.zeros(1), torch.zeros(1), [0.0]]}, InvalidTypeError, "'x'.*list.*row 2"),
    "dtypes of rows": (
        {"x": [np.zeros(1), np.zeros(2), np.zeros(1, int)]},
        SchemaMismatchError,
        r"'x'.*row 0 is float64 \(1,\), row 2 is int64.*NonTensorStack",
    ),
    "dims of rows": (
        [{"x": torch.zeros(2)}, {"x": torch.zeros(1, 2)}, {"x": torch.zeros(2)}],
        SchemaMismatchError,
        r"'x'.*row 1 is float32 \(1, 2\)",
    ),
    "dims of large rows": ({"x": [LARGE, LARGE, LARGE.view(2, -1)]}, SchemaMismatchError, "'x'.*row 0.*NonTensorStack"),
    # Arrow's and pandas'
    "lists in Arrow's lists": (pa.table({"x": [[[1]], [[2, 3]], []]}), InvalidTypeError, "nested"),
    "missing numbers of pandas": (pd.DataFrame({"x": pd.array([1, None, 3], "Int64")}), InvalidTypeError, "'x'.*row 1"),
    "nulls among numbers": (pa.table({"x": [1, None, None]}), InvalidTypeError, "'x'.*2 of 3.* at 1.*fill_null"),
    "nulls among lists": (pa.table({"x": [[1], [2], None]}), InvalidTypeError, "1 of 3 lists.* at 2"),
    "nulls in lists": (pa.table({"x": [[1, 2], [None], [3]]}), InvalidTypeError, "1 of 4 values.* at 2"),
    "nulls among tensors": (
        {
            "x": pa.ExtensionArray.from_storage(
                TENSORS_OF_ARROW.type, pa.array([[1] * 4, None, None], pa.list_(pa.int64(), 4))
            )
        },
        InvalidTypeError,
        "'x'.*fixed_shape_tensor.*contains nulls",
    ),
    "an extension type that is not known here": (
        pa.table([[1, 2, 3]], pa.schema([pa.field("x", pa.int64(), metadata={"ARROW:extension:name": "of.nobody"})])),
        InvalidTypeError,
        "'x'.*extension type 'of.nobody', which this process does not know",
    ),
    "Arrow's times": (
        pa.table({"x": pa.array([0, 1, 2], pa.timestamp("s"))}),
        InvalidTypeError,
        r"'x'.*timestamp\[s\].*column\.cast",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_says_what_to_write_instead(client, kind):
    fields, error, named = REFUSED[kind]
    for writer in WRITERS:
        with pytest.raises(error, match=named):
            writer(client, fields)
        assert client.list_samples("train").size == 0


def test_a_lazy_stack_of_rows_is_read_as_a_list_of_rows(client):
    rows = [{"x": torch.arange(length), "y": f"text {length}"} for length in (2, 0, 3)]
    put(client, lazy_stack([TensorDict(row) for row in rows]))
    read = client.get_samples(IDS, "train", ["x", "y"])
    assert values(read["x"]) == [[0, 1], [], [0, 1, 2]]
    assert read["y"] == ["text 2", "text 0", "text 3"]
    del rows[1]["y"]
    with pytest.raises(InvalidRequestError, match="row 1 lacks 'y', which row 0 has"):
        put(client, lazy_stack([TensorDict(row) for row in rows]))
