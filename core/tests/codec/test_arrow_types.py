"""Arrow's extension types are written as what they stand for, wherever they are; others are refused by name."""

import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from ray.data._internal.tensor_extensions import arrow as ray_arrow

from dataplane_core.codec import as_column, as_columns
from dataplane_core.errors import InvalidTypeError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # of its own configuration

NUMBERS = np.arange(24).reshape(4, 2, 3)
FIXED = pa.FixedShapeTensorArray.from_numpy_ndarray(NUMBERS)
ROWS = NUMBERS.reshape(4, 6).tolist()


def stored(kind, values):
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


def permuted():
    """Stored as (2, 3), and meant as (3, 2)."""
    return stored(pa.fixed_shape_tensor(pa.int64(), [2, 3], dim_names=["a", "b"], permutation=[1, 0]), ROWS)


def named(name, parameters, storage):
    """A table of a type that this process does not know, as another program wrote it."""
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": parameters}
    return pa.table([storage], schema=pa.schema([pa.field("x", storage.type, metadata=metadata)]))


TENSORS = {
    "fixed shape": lambda: FIXED,
    "chunks": lambda: pa.chunked_array([FIXED.slice(0, 1), FIXED.slice(1)]),
    "slice": lambda: pa.concat_arrays([FIXED, FIXED]).slice(4),
    "Ray": lambda: stored(ray_arrow.ArrowTensorType((2, 3), pa.int64()), ROWS),
    "Ray, large": lambda: ray_arrow.ArrowTensorArray.from_numpy(NUMBERS),
    "Ray, of any shape": lambda: ray_arrow.ArrowVariableShapedTensorArray.from_numpy(NUMBERS),
    "pandas": lambda: pd.Series(pd.ArrowDtype(FIXED.type).__from_arrow__(pa.chunked_array([FIXED]))),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_keep_their_shape(kind):
    assert as_column("x", TENSORS[kind]()).equal(torch.from_numpy(NUMBERS))


def test_dims_in_another_order_are_put_in_order_and_tensors_of_their_own_shape_are_rows():
    assert as_column("x", permuted().slice(1)).equal(torch.from_numpy(NUMBERS).transpose(1, 2)[1:])
    rows = [np.ones((2, 3)), np.ones((1, 3))]
    array = ray_arrow.ArrowVariableShapedTensorArray.from_numpy(np.array([*rows, None], dtype=object)[:2])
    assert [row.tolist() for row in as_column("x", array).unbind()] == [row.tolist() for row in rows]


def test_types_that_this_process_does_not_know_are_read_by_name():
    shapes = pa.array([[3, 2], [3, 1]], pa.list_(pa.int32(), 2))
    rows = pa.StructArray.from_arrays([pa.array([[0, 1, 2, 3, 4, 5], [6, 7, 8]]), shapes], ["data", "shape"])
    found = as_columns("x", named("arrow.variable_shape_tensor", '{"permutation": [1, 0]}', rows.slice(0, 1)), 1)["x"]
    assert found.tolist() == [[[0, 2, 4], [1, 3, 5]]]
    found = as_columns("x", named("ray.data.arrow_tensor_v2", "[2, 3]", pa.array(ROWS)), 4)["x"]
    assert found.equal(torch.from_numpy(NUMBERS))


def test_lists_of_tensors_are_rows_with_these_trailing_dims():
    lists = pa.ListArray.from_arrays([0, 2, 2, 3, 4], FIXED).slice(1)
    assert [tuple(row.shape) for row in as_column("x", lists).unbind()] == [(0, 2, 3), (1, 2, 3), (1, 2, 3)]
    flags = pa.ListArray.from_arrays([0, 1, 3], stored(pa.bool8(), [1, 0, 3]))
    assert [row.tolist() for row in as_column("x", flags).unbind()] == [[True], [False, True]]


OBJECTS = {
    "json": (pa.array(['{"a": [1]}', None, "[]"], pa.json_()), [{"a": [1]}, None, []]),
    "json in lists": (pa.ListArray.from_arrays([0, 2, 3], pa.array(["1", "{}", "2"], pa.json_())), [[1, {}], [2]]),
    "uuid": (pa.array([bytes(15) + b"\x01", None], pa.uuid()), ["00000000-0000-0000-0000-000000000001", None]),
    "structs": (
        pa.StructArray.from_arrays([pa.array(["1", "{}"], pa.json_()), stored(pa.bool8(), [0, 1])], ["a", "b"]).slice(
            1
        ),
        [{"a": {}, "b": True}],
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_are_what_their_text_says(kind):
    array, expected = OBJECTS[kind]
    assert as_column("x", array).tolist() == expected


class OfNobody(pa.ExtensionType):
    def __init__(self):
        super().__init__(pa.int64(), "of.nobody")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()


def through_ipc(column):
    """The column, read by a process that does not know its types."""
    sink, table = io.BytesIO(), pa.table({"x": column})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


STRANGE = stored(OfNobody(), [1, 2])
REFUSED = {
    "known here": ({"x": STRANGE}, "extension type 'of.nobody', which is not known.*column.storage"),
    "inside": ({"x": pa.StructArray.from_arrays([STRANGE], ["a"])}, "extension type 'of.nobody'"),
    "unknown here": (through_ipc(STRANGE), "extension type 'of.nobody'"),
    "unknown inside": (through_ipc(pa.ListArray.from_arrays([0, 1, 2], STRANGE)), "'of.nobody'"),
    "nulls": ({"x": stored(FIXED.type, [ROWS[0], None])}, "'x' is an Arrow column of numbers with nulls: 1 of 2 lists"),
    "strings in tensors": (
        {"x": stored(ray_arrow.ArrowTensorTypeV2((1,), pa.binary(1)), [[b"a"], [b"b"]])},
        "'ray.data.arrow_tensor_v2'.*no numbers",
    ),
    "text that is no JSON": ({"x": pa.array(["{", "{"], pa.json_())}, "'arrow.json', and cannot be read"),
    "pickled parameters": (named("ray.data.arrow_tensor", b"\x80\x05.", pa.array(ROWS[:2])), "cannot be read"),
    "another shape": (named("arrow.fixed_shape_tensor", '{"shape": [4]}', pa.array(ROWS[:2])), "cannot be read"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_types_are_refused_by_name(kind):
    fields, words = REFUSED[kind]
    with pytest.raises(InvalidTypeError, match=words):
        as_columns("put_samples", fields, 2)
