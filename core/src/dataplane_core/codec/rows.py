"""Rows of columns in any container: their number and size, selections of them, and their join."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection

from dataplane_core.codec.cells import copy_item
from dataplane_core.codec.tensors import (
    as_ragged,
    bounds_of,
    byte_array,
    carrier,
    dense_or_jagged,
    empty_tensor,
    is_jagged,
    jagged_parts,
    offsets_of,
    plain_rows,
    ragged_of_rows,
    take_dense,
    take_ragged,
    to_nested,
)
from dataplane_core.errors import SchemaMismatchError
from dataplane_core.host_memory import copy_arrays
from dataplane_core.host_memory.copying import Copy
from dataplane_core.spec import FieldSpec, Ragged, SharedRows, WireColumn

#: The spec of a column of `EmptyLists`.
EMPTY_LISTS: Final = FieldSpec.of_empty_lists()
#: Rows that lie side by side are copied at once. If such a run has fewer bytes on average, an index is faster.
_LEAST_RUN_BYTES: Final = 512
#: Columns of fewer bytes are copied by one operator if possible: the rest would take longer than the copy.
_SMALL_BYTES: Final = 1 << 16
#: float32 holds integers up to this exactly.
EXACT_IN_FLOAT32: Final = 2**24
#: What a frame may be. A memoryview is one of bytes.
_BYTES: Final = frozenset({bytes, bytearray, memoryview})


# --- columns of a put or a read ---------------------------------------------------------------------------------------


class EmptyLists(list[list[Any]]):
    """A column of empty lists, which say nothing about their type: it leaves its field open."""


class TensorRows(list[torch.Tensor]):
    """A tensor column as its rows. Rows may be the same memory: large ones are then stored once."""

    def joined(self, what: str) -> Ragged | torch.Tensor:
        """The rows end to end. Raises as `ragged_of_rows`."""
        try:
            return ragged_of_rows(self, what)
        except SchemaMismatchError as error:
            error.hint = "Write NonTensorStack(*items) for one object per sample."
            raise


class Columns(dict[str, Any]):
    """Columns that the codec takes: tensors, `Ragged`, `TensorRows`, `EmptyLists`, and object columns.

    ``lists``: those that were lists, as they were: a field may be known to hold another type than they became.
    ``ints``: those whose ints leave their field open: floats may follow. See `FieldSpec.of_ints`.
    """

    def __init__(
        self, columns: Mapping[str, Any], lists: Mapping[str, Sequence[Any]] | None = None, ints: Iterable[str] = ()
    ) -> None:
        super().__init__(columns)
        self.lists = dict(lists or {})
        self.ints = frozenset(ints)


def tensor_columns(columns: Mapping[str, Any] | TensorDictBase) -> dict[str, Any]:
    """The columns, with a tensor in the place of each `Ragged`: dense if all rows have the same shape, else jagged.

    Jagged columns of equal lengths share their offsets, so that torch can combine them.
    """
    tensors: dict[str, Any] = {}
    forms: dict[bytes, tuple[torch.Tensor, tuple[int, int]]] = {}
    for name in columns.keys():
        column: Any = columns.get(name)
        if isinstance(column, Ragged):
            key = column.offsets.numpy().tobytes()
            if key not in forms:
                forms[key] = column.offsets, bounds_of(column.lengths)
            offsets, bounds = forms[key]
            if bounds[0] == bounds[1]:
                column = column.values.view(len(column), bounds[0], *column.values.shape[1:])
            else:
                column = to_nested(Ragged(column.values, offsets), bounds)
        tensors[name] = column
    return tensors


def num_rows(column: Any) -> int:
    """Rows of a column in any container. A tensor without dims has none."""
    if isinstance(column, torch.Tensor):
        if is_jagged(column):
            return len(jagged_parts(column)[1]) - 1
        return column.size(0) if column.dim() else 0
    return len(column)


def object_column(items: Sequence[Any]) -> NonTensorStack:
    """Items, one per row, as an object column for a TensorDict. Keeps references to them."""
    return NonTensorStack(*[NonTensorData(data=item) if is_tensor_collection(item) else item for item in items])


def empty_columns(specs: Mapping[str, FieldSpec], names: Iterable[str]) -> TensorDict:
    """Columns of no rows, of the dtypes that fields have."""
    columns = TensorDict(batch_size=[0])
    for name in names:
        spec = specs[name]
        column = empty_rows(spec, 0) if spec.rank or spec.kind == "object" else empty_tensor((0,), spec.torch_dtype)
        # not `set`: before 0.15, tensordict asks an empty stack for the names of its first item
        columns._set_str(name, column, validated=True, inplace=False, non_blocking=False)
    return columns


def empty_rows(spec: FieldSpec, count: int) -> Any:
    """Rows of length 0 of a field. Empty lists, if it holds objects or only empty lists are known of it."""
    if spec.kind == "object" or spec == EMPTY_LISTS:
        return object_column([[] for _ in range(count)])
    return empty_tensor((count, 0, *spec.trailing), spec.torch_dtype)


# --- sizes ------------------------------------------------------------------------------------------------------------


def row_nbytes(columns: Mapping[str, WireColumn | SharedRows], num_samples: int) -> list[int]:
    """Payload bytes per row, summed over all encoded columns of ``num_samples`` rows, as capacity and metrics count
    them. Exact for tensors and frames; for native objects, the size of their values without Python's overhead."""
    total = np.zeros(num_samples, dtype=np.int64)
    for column in columns.values():
        total += cell_nbytes(column, num_samples)
    sizes: list[int] = total.tolist()
    return sizes


def cell_nbytes(column: WireColumn | SharedRows, num_samples: int) -> Any:
    """Payload bytes of each cell of one column: an int64 array (N,), or one number if all are equal. A shared cell
    counts for the first of its rows only."""
    if isinstance(column, SharedRows):
        sizes = np.zeros(num_samples, dtype=np.int64)
        _, firsts = np.unique(column.index, return_index=True)
        sizes[firsts] = cell_nbytes(column.rows, max(column.index, default=-1) + 1)
        return sizes
    if isinstance(column, Ragged):
        return column.lengths * column.itemsize
    if isinstance(column, torch.Tensor):
        return column.nbytes // max(num_samples, 1)
    size_of: Any = len if set(map(type, column)) <= _BYTES else _item_nbytes  # frames: 5 times as fast
    return np.fromiter(map(size_of, column), dtype=np.int64, count=len(column))


def _item_nbytes(item: Any) -> int:
    if isinstance(item, (memoryview, torch.Tensor, np.ndarray)):
        return item.nbytes
    if isinstance(item, (bytes, bytearray, str)):
        return len(item)
    if isinstance(item, dict):
        return sum(_item_nbytes(key) + _item_nbytes(value) for key, value in item.items())
    return sum(map(_item_nbytes, item)) if isinstance(item, list) else 8


# --- selections -------------------------------------------------------------------------------------------------------


def take_rows(column: Any, positions: Sequence[int]) -> Any:
    """The rows of a column of a read at ``positions``, in that order, repeats included: tensors in new memory, dense if
    all rows taken have the same shape, else jagged. A repeated item is copied, so that rows stay independent."""
    taken = take_plain(column, positions)
    return dense_or_jagged(taken) if isinstance(taken, Ragged) else taken


def take_plain(column: Any, positions: Sequence[int]) -> Any:
    """As `take_rows`, but ragged rows are not made one tensor."""
    if isinstance(column, list):
        return type(column)(column[position] for position in positions)
    if isinstance(column, torch.Tensor):
        column = plain_rows(column, "a column")
    if isinstance(column, Ragged):
        return take_ragged(column, positions)
    if isinstance(column, torch.Tensor):
        return take_dense(column, positions)
    items, seen, taken = column.tolist(), set[int](), []
    for position in positions:
        taken.append(copy_item(items[position]) if position in seen else items[position])
        seen.add(position)
    return object_column(taken)


def spread(column: Any, index: Sequence[int], *, share: bool) -> Any:
    """The rows of a column of different ones, by their places among these. With ``share``, a ``NonTensorStack`` where
    equal rows are one object. Else every row has memory of its own."""
    if not share:
        return take_plain(column, index)
    if isinstance(column, Ragged):
        rows: Sequence[Any] = column.values.split_with_sizes(column.lengths.tolist())
    else:
        rows = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
    wrapped = [NonTensorData(data=row) for row in rows]  # once each: it takes as long as copying some KB
    return NonTensorStack(*[wrapped[at] for at in index])


def repeat_rows(columns: Mapping[str, Any], positions: Sequence[int], *, share: bool) -> dict[str, Any]:
    """The rows of a read at ``positions``, in that order. With ``share``, rows of object columns, and of those of which
    rows are shared, are one object where they repeat."""
    rows = {
        name: spread(column, positions, share=share and isinstance(column, NonTensorStack))
        for name, column in columns.items()
    }
    return tensor_columns(rows)


def join_parts(parts: Sequence[Any], order: Sequence[int]) -> Any:
    """Rows of one field that were read apart, in an order of places among the rows of all parts: tensors in the wider
    of their dtypes; or one object per row, if a part has these."""
    if not all(isinstance(part, torch.Tensor) for part in parts):
        items = [row for part in parts for row in (part.unbind() if isinstance(part, torch.Tensor) else part.tolist())]
        return object_column([items[row] for row in order])
    if all(part.dim() == 1 for part in parts):
        return take_dense(torch.cat(list(parts)), order)
    rows = [as_ragged(plain_rows(part, "a column")) for part in parts]
    joined = torch.cat([part.values for part in rows])
    lengths = torch.cat([part.offsets.diff() for part in rows])
    return dense_or_jagged(take_ragged(Ragged(joined, offsets_of(lengths)), order))


# --- joining rows of stored columns with one copy ---------------------------------------------------------------------


class Piece(NamedTuple):
    """Some rows of one stored column."""

    column: WireColumn
    rows: Sequence[int]
    positions: Sequence[int]  # of these rows in the read


def rows_in_order(rows: Sequence[int], start: int, count: int) -> bool:
    """Whether ``rows`` are ``start``, ``start + 1``, ..., ``count`` of them."""
    if isinstance(rows, range):
        return rows == range(start, start + count)
    return len(rows) == count and (not count or (rows[0] == start and list(rows) == list(range(start, start + count))))


def copy_column(column: WireColumn) -> WireColumn:
    """A column in new memory."""
    if isinstance(column, list):
        return list(map(copy_item, column))
    values = column.values if isinstance(column, Ragged) else column
    copied = empty_tensor(values.shape, values.dtype)
    byte_array(copied)[:] = byte_array(values)
    return Ragged(copied, column.offsets.clone()) if isinstance(column, Ragged) else copied


def merge_pieces(
    pieces: Sequence[Piece], dtype: torch.dtype | None = None, copies: list[Copy] | None = None
) -> WireColumn:
    """The column of a read, in new memory: dense if all rows have one shape and were stored so.

    Of one piece or more, whose positions together are 0 to n - 1. ``dtype``: that of the field, where integer columns
    may be narrower. ``copies`` gets the copies that are left to the caller, who can then make those of all columns at
    once. The column has undefined values until then.
    """
    first, rows, positions = pieces[0]
    count = len(rows)
    is_run = len(pieces) == 1 and count > 0 and rows_in_order(positions, 0, count)
    is_run = is_run and rows_in_order(rows, rows[0], count)
    if is_run and isinstance(first, torch.Tensor) and first.nbytes < _SMALL_BYTES:
        run = first[rows[0] : rows[0] + count]
        if dtype not in (None, run.dtype):
            return run.to(dtype)
        return run.view(torch.uint8).clone().view(torch.bool) if run.dtype == torch.bool else run.clone()
    if isinstance(first, list):
        return _merge_items(pieces)
    left: list[Copy] = [] if copies is None else copies
    merged: WireColumn
    if isinstance(first, torch.Tensor) and all(
        isinstance(piece.column, torch.Tensor) and piece.column.shape[1:] == first.shape[1:] for piece in pieces
    ):
        merged = _merge_dense(first, pieces, dtype or first.dtype, left)
    else:
        merged = _merge_ragged(pieces, is_run, dtype, left)
    if copies is None:
        copy_arrays(left, threads=1)
    return merged


def _merge_items(pieces: Sequence[Piece]) -> list[object]:
    items: list[object] = [None] * sum(len(piece.rows) for piece in pieces)
    for column, rows, positions in pieces:
        assert isinstance(column, list)
        for row, position in zip(rows, positions, strict=True):
            items[position] = copy_item(column[row])
    return items


def _merge_dense(like: torch.Tensor, pieces: Sequence[Piece], dtype: torch.dtype, copies: list[Copy]) -> torch.Tensor:
    shape, step = like.shape[1:], math.prod(like.shape[1:])
    merged = empty_tensor((sum(len(piece.rows) for piece in pieces), *shape), dtype)
    for column, rows, positions in pieces:
        assert isinstance(column, torch.Tensor)
        runs = _runs(rows, positions)
        if dtype.itemsize * step * len(rows) < _LEAST_RUN_BYTES * len(runs) and len(runs) > 1:
            picked = carrier(column).index_select(0, torch.as_tensor(rows, device="cpu"))
            if column.dtype != dtype:
                picked = picked.view(column.dtype).to(dtype)
            carrier(merged).index_copy_(0, torch.as_tensor(positions, device="cpu"), picked)
            continue
        target, source = _arrays(merged, column)
        for row, position, count in runs:
            begin, end = position * step, (position + count) * step
            copies.append((target[begin:end], source[row * step : (row + count) * step]))
    return merged


def _merge_ragged(pieces: Sequence[Piece], is_run: bool, dtype: torch.dtype | None, copies: list[Copy]) -> Ragged:
    ragged = [(as_ragged(cast("Ragged | torch.Tensor", column)), rows, positions) for column, rows, positions in pieces]
    first, rows, positions = ragged[0]
    if is_run:  # the usual case, without work for each row
        cuts = first.offsets.numpy()[rows[0] : rows[0] + len(rows) + 1]
        values = first.values[cuts[0] : cuts[-1]]
        merged = empty_tensor(values.shape, dtype or values.dtype)
        copies.append(_arrays(merged, values))
        return Ragged(merged, torch.from_numpy(cuts - cuts[0]))
    lengths = torch.empty(sum(len(rows) for _, rows, _ in ragged), dtype=torch.int64, device="cpu")
    for column, rows, positions in ragged:
        lengths.numpy()[np.asarray(positions)] = column.lengths[np.asarray(rows)]
    offsets = offsets_of(lengths)
    like = first.values
    merged = empty_tensor((int(offsets[-1]), *like.shape[1:]), dtype or like.dtype)
    step = math.prod(like.shape[1:])
    ends = (offsets * step).tolist()
    for column, rows, positions in ragged:
        target, source = _arrays(merged, column.values)
        for row, position, count in _runs(rows, positions):
            begin, end = column.offsets[row].item() * step, column.offsets[row + count].item() * step
            copies.append((target[ends[position] : ends[position + count]], source[begin:end]))
    return Ragged(merged, offsets)


def _arrays(target: torch.Tensor, source: torch.Tensor) -> Copy:
    """Both as flat arrays of an item for each element, between which numpy copies."""
    if source.dtype == target.dtype:
        target, source = carrier(target), carrier(source)  # numpy lacks some dtypes
    return target.reshape(-1).numpy(), source.reshape(-1).numpy()


def _runs(rows: Sequence[int], positions: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of rows that stand side by side in both: the first row, its position, and how many."""
    count = len(rows)
    if not count:
        return []
    if rows_in_order(rows, rows[0], count) and rows_in_order(positions, positions[0], count):
        return [(rows[0], positions[0], count)]
    row, position = np.asarray(rows), np.asarray(positions)
    starts = np.concatenate(([0], np.flatnonzero((np.diff(row) != 1) | (np.diff(position) != 1)) + 1))
    counts = np.diff(np.append(starts, count))
    return list(zip(row[starts].tolist(), position[starts].tolist(), counts.tolist(), strict=True))
