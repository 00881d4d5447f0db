"""A backend's reply is checked: rows, dtype, rank and trailing shape; another container of the same cells is fine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from framing import FRAMES, frame_column
from tensordict import NonTensorStack

from dataplane_core.codec import decode_columns, encode_columns
from dataplane_core.errors import BackendError, FrameError
from dataplane_core.spec import FieldSpec, WireFormat

JAGGED, ROWS = WireFormat(), WireFormat(ragged="rows")
FLOATS = FieldSpec.of_cells(torch.float32, (0,))
DEEP = FieldSpec.of_cells(torch.float32, (0, 2))
SCALARS = FieldSpec.of_cells(torch.float32, ())
OBJECTS = FieldSpec.of_objects()


def jagged(lengths, *trailing):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1]), *trailing), offsets)


def raised(column, spec, wire=JAGGED, num_samples=3, **kwargs):
    return decode_columns({"x": column}, {"x": spec}, num_samples, wire, **kwargs)["x"]


@pytest.mark.parametrize(
    ("column", "spec", "wire"),
    [
        (torch.zeros(2), SCALARS, JAGGED),
        (torch.zeros(4, 2), FLOATS, JAGGED),
        (jagged([1, 2]), FLOATS, JAGGED),
        ([torch.zeros(1)] * 2, FLOATS, ROWS),
        ([], FLOATS, ROWS),
        (["a"], OBJECTS, WireFormat(objects="native")),
        (torch.zeros(2, 5, dtype=torch.uint8), OBJECTS, JAGGED),
        (frame_column(torch.zeros(2)), SCALARS, FRAMES),
        (frame_column(["a"]), OBJECTS, FRAMES),
    ],
)
def test_fewer_or_more_rows_are_a_backend_error_with_both_numbers(column, spec, wire):
    with pytest.raises(BackendError, match=r"'x' has \d rows\. Expected 3"):
        raised(column, spec, wire)


@pytest.mark.parametrize(
    ("column", "spec", "wire"),
    [
        (torch.zeros(3, dtype=torch.float64), SCALARS, JAGGED),
        (torch.zeros(3, 1), SCALARS, JAGGED),
        (torch.zeros(3), SCALARS, WireFormat(promote_1d=True)),
        (torch.zeros(3), FLOATS, JAGGED),
        (torch.zeros(3, 2, 3), DEEP, JAGGED),
        (jagged([1, 2, 3], 3), DEEP, JAGGED),
        (jagged([1, 2, 3]), SCALARS, JAGGED),
        (jagged([1, 2, 3]), DEEP, JAGGED),
        (torch.zeros(3, 2, 2), FLOATS, WireFormat(dtypes=frozenset({torch.uint8}))),
        (torch.zeros(3, 2, 3, dtype=torch.uint8), FLOATS, WireFormat(dtypes=frozenset({torch.uint8}))),
        ([torch.zeros(2), torch.zeros(2), torch.zeros(2, 1)], FLOATS, ROWS),
        ([torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int32)], FLOATS, ROWS),
        ([b"a", b"b", b"c"], FLOATS, ROWS),
        (torch.tensor(1.0), FLOATS, JAGGED),
        (None, FLOATS, JAGGED),
        (torch.zeros(3, 2), OBJECTS, JAGGED),
        (torch.zeros(3, 2, device="meta"), FLOATS, JAGGED),
        (frame_column(torch.zeros(3)), FLOATS, FRAMES),
        ([None] * 3, FLOATS, FRAMES),
        (torch.zeros(3, 2), FLOATS, FRAMES),
        (["a", "b", "c"], OBJECTS, FRAMES),
        (None, OBJECTS, FRAMES),
        (None, OBJECTS, WireFormat(objects="native")),
        ("abc", OBJECTS, WireFormat(objects="native")),
        (frame_column(torch.zeros(3, 2)), DEEP, FRAMES),
        (frame_column(torch.zeros(3)), OBJECTS, FRAMES),
        (frame_column(["a", "b", "c"]), SCALARS, FRAMES),
        (torch.zeros(3, 0), FLOATS, WireFormat(zero_length_rows=False)),
        (jagged([1, 0, 2]), FLOATS, WireFormat(zero_length_rows=False)),
    ],
)
def test_cells_that_are_not_what_the_spec_says_are_a_backend_error(column, spec, wire):
    with pytest.raises(BackendError, match="'x'"):
        raised(column, spec, wire)


def test_the_error_says_what_came_and_what_was_expected():
    with pytest.raises(
        BackendError, match=r"'x' has float64 cells of shape \(L, 3\)\. Expected float32 cells of shape \(L, 2\)"
    ):
        raised(jagged([1, 2, 3], 3).double(), DEEP)


def test_a_reply_without_a_spec_or_of_an_unknown_dtype_is_a_backend_error():
    with pytest.raises(BackendError, match="no spec for field 'x'"):
        decode_columns({"x": torch.zeros(3)}, {}, 3, JAGGED)
    with pytest.raises(BackendError, match="unknown dtype 'float99'"):
        raised(torch.zeros(3), FieldSpec("tensor", "float99"))


def test_malformed_frames_name_the_field():
    with pytest.raises(FrameError, match="field 'x': row 1: frame of 3 bytes is truncated"):
        raised([*frame_column(torch.zeros(2))[:1], b"abc", b"abc"], SCALARS, FRAMES)


def test_malformed_objects_name_the_field():
    column = torch.full((3, 2), 0xC1, dtype=torch.uint8)  # a byte that msgpack never uses
    with pytest.raises(FrameError, match="field 'x': object in row 0"):
        raised(column, OBJECTS)


def test_a_uniform_column_may_come_back_as_jagged_or_as_rows():
    assert raised(jagged([2, 2, 2]), FLOATS).shape == (3, 2)
    assert raised([torch.zeros(2)] * 3, FLOATS).shape == (3, 2)
    assert raised(torch.zeros(3, 2), FLOATS, ROWS).shape == (3, 2)
    assert raised(list(torch.zeros(3)), SCALARS, ROWS).shape == (3,)


def test_promoted_scalars_may_come_back_as_jagged_rows_of_one():
    assert raised(jagged([1, 1, 1]), SCALARS, WireFormat(promote_1d=True)).shape == (3,)


def test_native_objects_may_come_back_in_any_sequence():
    wire = WireFormat(objects="native")
    items = ["a", [1], None]
    array = np.empty(3, dtype=object)
    array[:] = items
    for column in (items, tuple(items), array, NonTensorStack(*items)):
        assert raised(column, OBJECTS, wire).tolist() == items


def test_a_reply_is_made_contiguous_and_detached():
    column = raised(torch.zeros(2, 3, requires_grad=True).t(), FLOATS)
    assert column.is_contiguous()
    assert not column.requires_grad


def test_bytes_at_an_odd_address_are_read_all_the_same():
    wire = WireFormat(dtypes=frozenset({torch.uint8}))
    column = torch.arange(1, 26, dtype=torch.uint8)[1:].view(3, 2, 4)
    assert raised(column, FLOATS, wire).view(torch.uint8).flatten().tolist() == list(range(2, 26))


def test_pickled_objects_are_refused_unless_allowed():
    columns, specs = encode_columns({"x": NonTensorStack((1, 2))}, 1, JAGGED, allow_pickle=True)
    with pytest.raises(FrameError, match="pickled"):
        decode_columns(columns, specs, 1, JAGGED)
    assert decode_columns(columns, specs, 1, JAGGED, allow_pickle=True)["x"].tolist() == [(1, 2)]
