"""Converts columns to a backend's wire format and back.

`encode_columns` converts what a caller puts into what the backend's hooks take. `decode_columns` checks a backend's
reply and converts it into what the caller gets. Both are pure: no I/O, no state. The form of a field's cells on the
wire depends on its `FieldSpec` and the `WireFormat`, so any process can read what another wrote. Of the data, only the
width of integers depends on it, and cells carry it with them:

0. Integers go in the narrowest dtype that holds those of the put (`narrow`), if cells are frames, which name their
   dtype, or the wire has `WireFormat.narrow`. What follows is then said of that dtype.
1. A dtype that the wire does not carry is bit-cast: cells ``(L, *t)`` to uint8 ``(L, prod(t) * itemsize)``, scalars to
   ``(itemsize,)``. Cells without elements (a trailing dim of 0) become uint8 ``(L,)`` if the wire cannot carry empty
   rows.
2. If the wire cannot carry empty rows, cells of rank 1 and more get an extra zero element in front, on their first dim.
3. If the wire cannot carry ``(N,)``, scalars are sent as ``(N, 1)``.

Shape legend: ``N`` rows, ``T`` elements of all rows together on the ragged dim, ``L`` a row's own length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from msgspec.structs import replace
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_tensorclass,
)

from dataplane_core.codec.frames import frame_ragged, ragged_of_items, unframe_ragged
from dataplane_core.codec.header import KIND_OBJECT, KIND_TENSOR
from dataplane_core.codec.lists import EXACT_IN_FLOAT32
from dataplane_core.codec.narrow import is_narrow, narrowed, widened
from dataplane_core.codec.objects import check_items, decode_items
from dataplane_core.codec.rows import (
    EMPTY_LISTS,
    Columns,
    EmptyLists,
    TensorRows,
    empty_rows,
    num_rows,
    object_column,
    take_dense,
    take_ragged,
)
from dataplane_core.codec.shared import LARGE_CELL_BYTES, Repeats, equal_rows, same_memory, spread
from dataplane_core.codec.sizes import cell_nbytes
from dataplane_core.codec.tensors import (
    DTYPE_CODES,
    JaggedColumns,
    Ragged,
    byte_view,
    dense_or_jagged,
    from_byte_tensor,
    gather_rows,
    host_tensor,
    is_jagged,
    jagged_parts,
    offsets_of,
    pad_front,
    ragged_of_dense,
    ragged_of_nested,
    ragged_of_rows,
)
from dataplane_core.errors import (
    BackendError,
    DataPlaneError,
    FrameError,
    InvalidRequestError,
    InvalidTypeError,
)
from dataplane_core.packed import BytesLike
from dataplane_core.spec import FieldSpec, SharedRows, WireColumn, WireFormat

_OBJECTS: Final = FieldSpec.of_objects()


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode_columns(
    fields: TensorDictBase | Mapping[str, Any],
    num_samples: int,
    wire: WireFormat,
    *,
    allow_pickle: bool = False,
    narrow: bool | Mapping[str, bool] = True,
) -> tuple[dict[str, WireColumn | SharedRows], dict[str, FieldSpec]]:
    """Converts a batch to the form that a backend's hooks take.

    Args:
        fields: Columns of ``num_samples`` rows: tensors of any device but meta, dense or nested, contiguous or not;
            object columns as ``NonTensorStack`` or ``np.ndarray(dtype=object)``; in a mapping also `TensorRows` and
            `EmptyLists`. `codec.inputs.as_columns` makes these of what callers have.
        num_samples: N.
        wire: The backend's wire format.
        allow_pickle: Accept object items outside the closed set.
        narrow: Whether integers are sent narrower, on wires that take them so. Per field, or for all; a field that is
            not named is.

    Returns:
        Field -> column, contiguous and detached; and field -> spec of the cells before the conversion. The rows of a
        column may be views of one buffer. Large equal rows of a column are `SharedRows`, if the wire has them. Tensors
        that need no conversion alias the caller's memory, and native object items are the caller's objects: a backend
        that keeps them must copy them (`objects.copy_item`). Frames and encoded objects are new memory.

    Raises:
        InvalidRequestError: A column does not have one row per sample.
        SchemaMismatchError: The rows of a column differ in dtype, rank, or a dim other than their first.
        InvalidTypeError: A leaf is no tensor; a tensor is a meta-device, sparse or quantised one, or of a dtype that is
            not carried; an object item is outside the closed set.
    """
    columns: dict[str, WireColumn | SharedRows] = {}
    specs: dict[str, FieldSpec] = {}
    for name in fields.keys():
        leaf: Any = fields.get(name)
        if isinstance(leaf, (torch.Tensor, TensorRows)):
            column, repeats = _ingest(name, leaf, num_samples, wire)
            is_open = isinstance(fields, Columns) and name in fields.ints and _are_ints_for_floats(column)
            specs[name] = FieldSpec.of_ints(_spec_of(column).rank) if is_open else _spec_of(column)
            if (wire.bytes or wire.narrow) and (narrow if isinstance(narrow, bool) else narrow.get(name, True)):
                column = _narrowed(column)
            encoded = _encode_tensor(column, _spec_of(column), wire)
        elif isinstance(leaf, EmptyLists):
            _check_rows(name, len(leaf), num_samples)
            empty = torch.empty((num_samples, 0), dtype=torch.uint8, device="cpu")
            specs[name], encoded, repeats = EMPTY_LISTS, _encode_tensor(empty, _spec_of(empty), wire), None
        else:
            items = _object_items(name, leaf, num_samples)
            specs[name] = _OBJECTS
            encoded, repeats = _encode_objects(items, name, wire, allow_pickle)
        columns[name] = encoded if repeats is None else SharedRows(encoded, repeats.index)
    return columns, specs


def _ingest(
    name: str, leaf: torch.Tensor | TensorRows, num_samples: int, wire: WireFormat
) -> tuple[Ragged | torch.Tensor, Repeats | None]:
    """The plain rows of a leaf. If the wire has shared rows, without large equal ones, and which rows these are."""
    what = f"put_samples refused: field '{name}'"
    if isinstance(leaf, TensorRows):
        found = len(leaf)
    elif leaf.dim() == 0:
        raise InvalidRequestError(f"{what} is a scalar tensor. Expected {num_samples} rows, one per sample id.")
    elif is_jagged(leaf):
        found = len(jagged_parts(leaf)[1]) - 1
    else:
        found = leaf.size(0)
    _check_rows(name, found, num_samples)
    same = None
    if isinstance(leaf, TensorRows):  # large rows
        same = same_memory(leaf) if wire.shared_rows else None
        try:
            column = ragged_of_rows(leaf if same is None else [leaf[row] for row in same.firsts], what)
        except DataPlaneError:
            column = leaf.joined(what)  # raises the error with the numbers of all rows
    elif leaf.is_nested:
        column = ragged_of_nested(leaf, what)
    else:
        expanded = num_samples > 1 and leaf.layout == torch.strided and leaf.stride(0) == 0
        if wire.shared_rows and expanded and leaf[0].nbytes >= LARGE_CELL_BYTES:
            same, leaf = Repeats([0], [0] * num_samples), leaf[:1]
        column = host_tensor(leaf, what)
    equal = equal_rows(column) if wire.shared_rows else None
    if equal is None:
        return column, same
    some = take_ragged(column, equal.firsts) if isinstance(column, Ragged) else take_dense(column, equal.firsts)
    return some, equal.after(same)


def _spec_of(column: Ragged | torch.Tensor) -> FieldSpec:
    if isinstance(column, Ragged):
        return FieldSpec.of_cells(column.values.dtype, tuple(column.values.shape))
    return FieldSpec.of_cells(column.dtype, tuple(column.shape[1:]))


def _narrowed(column: Ragged | torch.Tensor) -> Ragged | torch.Tensor:
    return Ragged(narrowed(column.values), column.offsets) if isinstance(column, Ragged) else narrowed(column)


def _are_ints_for_floats(column: Ragged | torch.Tensor) -> bool:
    """Whether these are int64 numbers, each of them the same as a float."""
    values = _plain(column)
    if values.dtype != torch.int64 or values.numel() == 0:
        return False
    least, most = values.aminmax()
    return int(least) >= -EXACT_IN_FLOAT32 and int(most) <= EXACT_IN_FLOAT32


def _object_items(name: str, leaf: Any, num_samples: int) -> list[Any]:
    what = f"put_samples refused: field '{name}'"
    # TensorDict wraps an object array in NonTensorData
    data = leaf.data if isinstance(leaf, NonTensorData) else leaf
    if isinstance(data, NonTensorStack) or (
        isinstance(data, np.ndarray) and data.dtype == np.dtype(object) and data.ndim == 1
    ):
        items: list[Any] = data.tolist()
    else:
        if isinstance(data, TensorDictBase) or is_tensorclass(data):
            found = f"a nested {type(data).__name__}"
        elif isinstance(data, np.ndarray):
            found = f"an ndarray of dtype {data.dtype} and shape {data.shape}"
        else:
            found = f"a {type(data).__name__}{' for all rows' if data is not leaf else ''}"
        raise InvalidTypeError(
            f"{what} is a non-tensor leaf: {found}. Expected a tensor, or a list, a NonTensorStack or a 1-D "
            f"np.ndarray(dtype=object) of {num_samples} items.",
            hint="Write a list of one item per sample, torch.as_tensor(x) for numbers.",
        )
    _check_rows(name, len(items), num_samples)
    return items


def _check_rows(name: str, found: int, num_samples: int) -> None:
    if found != num_samples:
        raise InvalidRequestError(
            f"put_samples refused: field '{name}' has {found} rows. Expected {num_samples}, one row per sample id."
        )


def _encode_objects(
    items: list[Any], name: str, wire: WireFormat, allow_pickle: bool
) -> tuple[WireColumn, Repeats | None]:
    """Encodes items. If the wire has shared rows, without large equal ones, and which rows these are."""
    same = same_memory(items) if wire.shared_rows else None
    some = items if same is None else [items[row] for row in same.firsts]
    if wire.objects == "native" and not wire.bytes:
        check_items(items, name, allow_pickle=allow_pickle)
        if same is not None and cell_nbytes(some, len(some)).sum() < LARGE_CELL_BYTES * len(some):
            some, same = items, None
        return some, same
    try:
        column = ragged_of_items(some, name, allow_pickle=allow_pickle)
    except DataPlaneError:
        column = ragged_of_items(items, name, allow_pickle=allow_pickle)  # raises the error with the number of the row
    if same is not None and column.values.nbytes < LARGE_CELL_BYTES * len(some):
        column, same = take_ragged(column, same.index), None
    equal = equal_rows(column) if wire.shared_rows else None
    if equal is not None:
        column, same = take_ragged(column, equal.firsts), equal.after(same)
    return (list(frame_ragged(column, KIND_OBJECT)) if wire.bytes else _container(column, wire)), same


def _encode_tensor(column: Ragged | torch.Tensor, spec: FieldSpec, wire: WireFormat) -> WireColumn:
    """Encodes plain rows."""
    if wire.bytes:
        return list(frame_ragged(column))
    dtype, trailing = _on_wire(spec, wire)
    if spec.rank == 0:
        assert isinstance(column, torch.Tensor)
        if dtype != column.dtype:
            return column.unsqueeze(-1).view(torch.uint8)
        return column.unsqueeze(-1) if wire.promote_1d else column
    values = column.values if isinstance(column, Ragged) else column.flatten(0, 1)
    if values.dtype != dtype or tuple(values.shape[1:]) != trailing:
        width = math.prod(spec.trailing)
        if width == 0:
            values = torch.zeros((len(values), *trailing), dtype=dtype, device="cpu")
        else:
            values = values.view(len(values), width).view(torch.uint8)
    if isinstance(column, Ragged):
        encoded: Ragged | torch.Tensor = Ragged(values, column.offsets)
    else:
        encoded = values.view(column.shape[0], column.shape[1], *trailing)
    return _container(encoded if wire.zero_length_rows else _pad(encoded), wire)


def _on_wire(spec: FieldSpec, wire: WireFormat) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and trailing shape of a field's cells on the wire. For scalars, the shape of the whole cell."""
    dtype = spec.torch_dtype
    if spec.rank == 0:
        if not wire.carries(dtype):
            return torch.uint8, (dtype.itemsize,)
        return dtype, (1,) if wire.promote_1d else ()
    width = math.prod(spec.trailing)
    if width == 0 and not wire.zero_length_rows:
        return torch.uint8, ()
    if not wire.carries(dtype):
        return torch.uint8, (width * dtype.itemsize,)
    return dtype, spec.trailing


def _pad(rows: Ragged | torch.Tensor) -> Ragged | torch.Tensor:
    """Adds one zero element in front of every row. New memory."""
    if isinstance(rows, torch.Tensor):
        return torch.cat([rows.new_zeros((rows.shape[0], 1, *rows.shape[2:])), rows], dim=1)
    return pad_front(rows)


def _container(column: Ragged | torch.Tensor, wire: WireFormat) -> WireColumn:
    """Rows of rank 1 and more in the wire's container: a dense or jagged tensor, or a list of rows."""
    if wire.ragged == "rows":
        if isinstance(column, Ragged):
            return list(column.values.split_with_sizes(column.lengths.tolist()))
        return list(column.unbind())
    if isinstance(column, torch.Tensor):
        return column
    return dense_or_jagged(column)


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode_columns(
    columns: Mapping[str, WireColumn | SharedRows],
    specs: Mapping[str, FieldSpec],
    num_samples: int,
    wire: WireFormat,
    *,
    allow_pickle: bool = False,
    share_rows: bool = False,
) -> dict[str, Any]:
    """Checks what a backend returned and converts it to what the caller gets.

    Args:
        columns: Field -> encoded column of ``num_samples`` rows. This function takes ownership: what needs no
            conversion is returned as it is. The container may differ from the one that `encode_columns` made (a dense
            column may come back as jagged or as rows); the cells may not.
        specs: Field -> the spec of its cells, as in `WireBatch`. Must have every key of ``columns``.
        num_samples: N, at least 1.
        wire: The backend's wire format.
        allow_pickle: Unpickle object items that were pickled.
        share_rows: Return the rows of `SharedRows` as one object each. If False, each row gets memory of its own.

    Returns:
        Field -> a dense tensor if all rows have the same shape, else one ``torch.jagged`` nested tensor with cached min
        and max length; objects as ``NonTensorStack``. Contiguous and detached. Jagged columns of equal lengths share
        their offsets, so that torch can combine them. With ``share_rows``, `SharedRows` become a ``NonTensorStack`` of
        row tensors or items.

    Raises:
        BackendError: A column does not have one row per sample, or its dtype, rank or trailing shape differs from the
            spec.
        FrameError: The bytes are malformed.
    """
    decoded: dict[str, Any] = {}
    jagged = JaggedColumns()
    for name, column in columns.items():
        spec = specs.get(name)
        if spec is None:
            raise BackendError(f"get_samples: the backend's reply has no spec for field '{name}'.")
        index = _index_of(name, column, num_samples)
        rows, count = (column.rows, num_rows(column.rows)) if isinstance(column, SharedRows) else (column, num_samples)
        try:
            if spec.lists == "empty":
                found: Any = empty_rows(spec, count)
            elif spec.kind == "object":
                found = _decode_objects(name, rows, count, wire, allow_pickle)
            else:
                found = _decode_tensor(name, rows, spec.stored, count, wire, jagged)
                found = found if found.dtype == spec.torch_dtype else found.to(spec.torch_dtype)
            decoded[name] = found if index is None else spread(found, index, jagged, share=share_rows)
        except FrameError as error:
            row = error.row
            error.add_place([name], row if row is None or index is None else list(index).index(row))
            raise
    return decoded


def _index_of(name: str, column: WireColumn | SharedRows, num_samples: int) -> Sequence[int] | None:
    """The checked index of shared rows; None for any other column."""
    if not isinstance(column, SharedRows):
        return None
    _check_count(name, len(column.index), num_samples)
    found = num_rows(column.rows)
    if min(column.index) < 0 or max(column.index) >= found:
        raise _mismatch(name, f"an index that does not lie within its {found} rows", "a row for each sample")
    return column.index


def _mismatch(name: str, found: str, expected: str) -> BackendError:
    return BackendError(f"get_samples: the backend's reply for field '{name}' has {found}. Expected {expected}.")


def _check_count(name: str, found: int, num_samples: int) -> None:
    if found != num_samples:
        raise _mismatch(name, f"{found} rows", f"{num_samples}, one per sample id")


def _check_frames(name: str, column: Any, num_samples: int) -> Sequence[BytesLike]:
    strange = [column] if not isinstance(column, Sequence) else column
    for kind in set(map(type, strange)):
        if not issubclass(kind, (bytes, bytearray, memoryview)):
            raise _mismatch(name, f"a {kind.__name__}", "frames: bytes, bytearray or memoryview")
    _check_count(name, len(column), num_samples)
    return column  # type: ignore[no-any-return] # a backend's column is of any type; it was looked at above


def _decode_objects(name: str, column: Any, num_samples: int, wire: WireFormat, allow_pickle: bool) -> NonTensorStack:
    if wire.bytes:
        kind, rows = unframe_ragged(_check_frames(name, column, num_samples))
        if kind != KIND_OBJECT:
            raise _mismatch(name, "framed tensors", "framed objects")
        items = _items_of(rows, allow_pickle)
    elif wire.objects == "native":
        if not isinstance(column, (Sequence, NonTensorStack, np.ndarray)) or isinstance(column, str):
            raise _mismatch(name, f"a {type(column).__name__}", f"a list of {num_samples} items")
        items = column.tolist() if isinstance(column, (NonTensorStack, np.ndarray)) else list(column)
        _check_count(name, len(items), num_samples)
    else:
        found = _check_cells(name, _gather(name, column, num_samples), torch.uint8, ())
        items = _items_of(found, allow_pickle)
    return object_column(items)


def _items_of(encoded: Ragged | torch.Tensor, allow_pickle: bool) -> list[Any]:
    rows = encoded if isinstance(encoded, Ragged) else ragged_of_dense(encoded)
    data, cuts = byte_view(rows.values), rows.offsets.tolist()
    return decode_items([data[start:stop] for start, stop in pairwise(cuts)], allow_pickle=allow_pickle)


def _decode_tensor(
    name: str, column: Any, spec: FieldSpec, num_samples: int, wire: WireFormat, jagged: JaggedColumns
) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if dtype not in DTYPE_CODES:
        raise BackendError(f"get_samples: the backend's spec for field '{name}' has an unknown dtype '{spec.dtype}'.")
    if wire.bytes:
        kind, rows = unframe_ragged(_check_frames(name, column, num_samples), dtype)
        sent = _as_sent(spec, _plain(rows).dtype)
        if kind != KIND_TENSOR or _spec_of(rows) != sent:
            found = "framed objects" if kind != KIND_TENSOR else _spec_of(rows).describe()
            raise _mismatch(name, found, spec.describe())
    else:
        if wire.narrow:
            column = _of_one_width(column, dtype)
            spec = _as_sent(spec, _dtype_of(column))
        sent_dtype = spec.torch_dtype
        wire_dtype, trailing = _on_wire(spec, wire)
        as_it_is = spec.rank and wire_dtype == dtype and wire.zero_length_rows
        kept = jagged.keep(column, num_samples) if as_it_is else None
        if kept is not None:
            values = jagged_parts(kept)[0]
            if values.dtype == dtype and tuple(values.shape[1:]) == trailing:
                return kept
        rows = _gather(name, column, num_samples)
        if spec.rank == 0:
            rows = _check_scalars(name, rows, wire_dtype, trailing)
            same = wire_dtype == sent_dtype
            rows = rows.view(num_samples) if same else from_byte_tensor(rows, sent_dtype, (num_samples,))
        else:
            rows = _restore(name, _check_cells(name, rows, wire_dtype, trailing), spec, wire)
    if isinstance(rows, torch.Tensor):
        return widened(rows, dtype)
    return dense_or_jagged(Ragged(widened(rows.values, dtype), rows.offsets), jagged)


def _as_sent(spec: FieldSpec, dtype: torch.dtype | None) -> FieldSpec:
    """The spec of cells that came back in this dtype: that of the field, or a narrower one."""
    return replace(spec, dtype=_name(dtype)) if dtype is not None and is_narrow(dtype, spec.torch_dtype) else spec


def _dtype_of(column: Any) -> torch.dtype | None:
    first = column[0] if isinstance(column, Sequence) and column else column
    return first.dtype if isinstance(first, torch.Tensor) else None


def _of_one_width(column: Any, dtype: torch.dtype) -> Any:
    """A column of rows, some of which may be narrower than the others, in one dtype."""
    if not isinstance(column, list) or len({_dtype_of(row) for row in column}) < 2:
        return column
    return [widened(row, dtype) if isinstance(row, torch.Tensor) else row for row in column]


def _plain(rows: Ragged | torch.Tensor) -> torch.Tensor:
    return rows.values if isinstance(rows, Ragged) else rows


def _gather(name: str, column: Any, num_samples: int) -> Ragged | torch.Tensor:
    """A reply's rows, one per sample: dense (N, *cell), or joined end to end."""
    what = f"the column '{name}' of the backend's reply"
    if not isinstance(column, torch.Tensor):
        if not isinstance(column, Sequence) or not all(isinstance(row, torch.Tensor) for row in column):
            raise _mismatch(name, f"a {type(column).__name__} of other things than tensors", "tensors")
    elif column.dim() == 0:
        raise _mismatch(name, "a scalar tensor", f"{num_samples} rows")
    _check_count(name, num_rows(column), num_samples)
    try:
        if not isinstance(column, torch.Tensor):
            return ragged_of_rows(column, what)
        return ragged_of_nested(column, what) if column.is_nested else host_tensor(column, what)
    except DataPlaneError as error:
        raise BackendError(f"get_samples: {error.message}") from error


def _check_scalars(name: str, rows: Ragged | torch.Tensor, dtype: torch.dtype, cell: tuple[int, ...]) -> torch.Tensor:
    """Checks cells that are scalars before they are encoded; returns them as (N, *cell)."""
    dense = rows.dense() if isinstance(rows, Ragged) else rows
    if dense is None or dense.dtype != dtype or tuple(dense.shape[1:]) != cell:
        raise _mismatch(name, _cells(rows), f"{_name(dtype)} cells of shape {cell} on the wire")
    return dense


def _check_cells(
    name: str, rows: Ragged | torch.Tensor, dtype: torch.dtype, trailing: tuple[int, ...]
) -> Ragged | torch.Tensor:
    """Checks cells of shape (L, *trailing); returns them."""
    plain, skip = _plain(rows), 1 if isinstance(rows, Ragged) else 2
    if plain.dtype != dtype or plain.dim() != skip + len(trailing) or tuple(plain.shape[skip:]) != trailing:
        expected = FieldSpec.of_cells(dtype, (0, *trailing)).describe()
        raise _mismatch(name, _cells(rows), f"{expected} on the wire")
    return rows


def _cells(rows: Ragged | torch.Tensor) -> str:
    shape = ["L", *map(str, rows.values.shape[1:])] if isinstance(rows, Ragged) else list(map(str, rows.shape[1:]))
    return f"{_name(_plain(rows).dtype)} cells of shape ({', '.join(shape)})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _restore(name: str, rows: Ragged | torch.Tensor, spec: FieldSpec, wire: WireFormat) -> Ragged | torch.Tensor:
    """Reverts padding and bit-cast of cells of rank 1 and more."""
    if not wire.zero_length_rows:
        if isinstance(rows, Ragged):
            lengths = rows.offsets.diff()
            if bool((lengths < 1).any()):
                raise _mismatch(name, "a row of length 0", "at least 1 element per row, which this wire adds")
            rows = gather_rows(rows.values, rows.offsets[:-1] + 1, offsets_of(lengths - 1))
        elif rows.shape[1] < 1:
            raise _mismatch(name, "rows of length 0", "at least 1 element per row, which this wire adds")
        else:
            rows = rows[:, 1:].contiguous()
    dtype, trailing = spec.torch_dtype, spec.trailing
    plain = _plain(rows)
    if plain.dtype == dtype and tuple(plain.shape[1 if isinstance(rows, Ragged) else 2 :]) == trailing:
        return rows
    if isinstance(rows, Ragged):
        return Ragged(from_byte_tensor(rows.values, dtype, (len(rows.values), *trailing)), rows.offsets)
    return from_byte_tensor(rows, dtype, (*rows.shape[:2], *trailing))
