"""What a backend is handed: containers, dtypes, padding, and who owns the memory."""

from __future__ import annotations

import torch
from tensordict import NonTensorStack

from dataplane_core.codec import cell_nbytes, decode_columns, encode_columns, encode_item, num_rows
from dataplane_core.spec import WireFormat


def jagged(lengths, *trailing, dtype=torch.float32):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.arange(int(offsets[-1]) * torch.Size(trailing).numel()).to(dtype)
    return torch.nested.nested_tensor_from_jagged(values.view(-1, *trailing), offsets)


def encoded(column, wire, **kwargs):
    columns, _ = encode_columns({"x": column}, num_rows(column), wire, **kwargs)
    return columns["x"]


def test_equal_rows_of_a_jagged_column_travel_dense():
    column = encoded(jagged([3, 3]), WireFormat())
    assert not column.is_nested
    assert column.shape == (2, 3)


def test_unequal_rows_travel_as_one_jagged_tensor_with_known_lengths():
    column = encoded(jagged([3, 0, 2]), WireFormat())
    assert column.layout == torch.jagged
    assert (column._maybe_min_seqlen, column._maybe_max_seqlen) == (0, 3)


def test_rows_are_always_a_list_even_where_they_are_equal():
    wire = WireFormat(ragged="rows")
    assert [row.shape for row in encoded(torch.zeros(2, 3), wire)] == [(3,), (3,)]
    column = encoded(jagged([3, 0, 2], 4), wire)
    assert isinstance(column, list)
    assert [tuple(row.shape) for row in column] == [(3, 4), (0, 4), (2, 4)]
    assert all(row.is_contiguous() for row in column)


def test_scalars_are_promoted_and_wide_cells_are_not():
    wire = WireFormat(promote_1d=True)
    assert encoded(torch.zeros(3), wire).shape == (3, 1)
    assert encoded(torch.zeros(3, 1), wire).shape == (3, 1)


def test_promoted_scalars_come_back_as_scalars_and_wide_cells_as_wide():
    wire = WireFormat(promote_1d=True)
    columns, specs = encode_columns({"scalar": torch.zeros(3), "wide": torch.zeros(3, 1)}, 3, wire)
    decoded = decode_columns(columns, specs, 3, wire)
    assert decoded["scalar"].shape == (3,)
    assert decoded["wide"].shape == (3, 1)


def test_a_dtype_that_is_not_carried_travels_as_bytes():
    wire = WireFormat(dtypes=frozenset({torch.uint8, torch.int64}))
    assert encoded(torch.zeros(2, 3, 4, 5), wire).shape == (2, 3, 80)
    assert encoded(torch.zeros(2, 3), wire).shape == (2, 3, 4)
    assert encoded(torch.zeros(2, dtype=torch.bfloat16), wire).shape == (2, 2)
    assert encoded(jagged([2, 1], 3), wire).values().shape == (3, 12)
    assert encoded(torch.zeros(2, 3), wire).dtype == torch.uint8
    assert encoded(torch.zeros(2, 3, dtype=torch.int64), wire).dtype == torch.int64


def test_where_empty_rows_do_not_survive_every_row_gets_one_element_in_front():
    wire = WireFormat(zero_length_rows=False)
    column = encoded(jagged([2, 0]), wire)
    assert column.offsets().diff().tolist() == [3, 1]
    assert column.values().tolist() == [0, 0, 1, 0]
    # whether or not a row is empty: the reader does not see the data before it decides
    assert encoded(torch.ones(2, 3), wire).tolist() == [[0, 1, 1, 1]] * 2
    assert encoded(torch.ones(2), wire).tolist() == [1, 1]


def test_where_empty_rows_do_not_survive_cells_without_content_have_some():
    column = encoded(torch.zeros(2, 3, 0), WireFormat(zero_length_rows=False))
    assert column.shape == (2, 4)
    assert column.dtype == torch.uint8


def test_bytes_wires_get_one_frame_per_cell_of_any_kind():
    wire = WireFormat(bytes=True)
    fields = {"a": torch.zeros(2), "b": jagged([2, 0]), "c": NonTensorStack("x", None)}
    columns, _ = encode_columns(fields, 2, wire)
    for column in columns.values():
        assert len(column) == 2
        assert all(isinstance(frame, (bytes, bytearray, memoryview)) for frame in column)


def test_objects_travel_as_items_or_as_bytes():
    stack = NonTensorStack("x", [1, 2])
    assert encoded(stack, WireFormat(objects="native")) == ["x", [1, 2]]
    rows = encoded(stack, WireFormat(objects="encoded", ragged="rows"))
    assert [bytes(row.numpy()) for row in rows] == [encode_item("x"), encode_item([1, 2])]
    assert encoded(stack, WireFormat(objects="encoded")).layout == torch.jagged


# --- ownership --------------------------------------------------------------------------------------------------------


def test_a_contiguous_column_is_encoded_and_decoded_in_place():
    dense = torch.ones(3, 2)
    columns, specs = encode_columns({"x": dense}, 3, WireFormat())
    assert columns["x"].data_ptr() == dense.data_ptr()
    assert decode_columns(columns, specs, 3, WireFormat())["x"].data_ptr() == dense.data_ptr()


def test_native_items_are_not_copied():
    item = {"list": [torch.zeros(2)]}
    wire = WireFormat(objects="native")
    columns, specs = encode_columns({"x": NonTensorStack(item)}, 1, wire)
    assert columns["x"][0] is item
    assert decode_columns(columns, specs, 1, wire)["x"].tolist()[0] is item


def test_cell_nbytes_counts_what_travels():
    assert cell_nbytes(torch.zeros(3, 2), 3) == 8
    assert cell_nbytes(jagged([2, 1, 3], 2), 3).tolist() == [16, 8, 24]
    assert cell_nbytes([b"abc", b""], 2).tolist() == [3, 0]
    assert cell_nbytes([torch.zeros(2), torch.zeros(1)], 2).tolist() == [8, 4]
