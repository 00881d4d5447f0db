"""Rows of stored columns, joined to the column of a read, with one copy.

Shape legend: ``N`` rows of a stored column, ``n`` rows of the read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from dataplane_core.codec.objects import copy_item
from dataplane_core.codec.tensors import (
    JaggedColumns,
    Ragged,
    byte_array,
    carrier,
    empty_tensor,
    offsets_of,
    ragged_of_dense,
)
from dataplane_core.host_memory import Copy, copy_arrays
from dataplane_core.spec import WireColumn

#: A dense tensor (N, ...), N rows of differing length, or a list of N items.
StoredColumn: TypeAlias = torch.Tensor | Ragged | list[object]

#: Rows that lie side by side are copied at once. If such a run has fewer bytes on average, an index is faster.
_LEAST_RUN_BYTES: Final = 512
#: Columns of fewer bytes are copied by one operator if possible: the rest would take longer than the copy.
_SMALL_BYTES: Final = 1 << 16


class Piece(NamedTuple):
    """Some rows of one stored column.

    Attributes:
        column: The column.
        rows: Rows of the column.
        positions: Where these rows stand in the read, one for each.
    """

    column: StoredColumn
    rows: Sequence[int]
    positions: Sequence[int]


def rows_in_order(rows: Sequence[int], start: int, count: int) -> bool:
    """Whether ``rows`` are ``start``, ``start + 1``, ..., ``count`` of them."""
    if isinstance(rows, range):
        return rows == range(start, start + count)
    return len(rows) == count and (not count or (rows[0] == start and list(rows) == list(range(start, start + count))))


def merge_pieces(
    pieces: Sequence[Piece],
    jagged: JaggedColumns | None = None,
    dtype: torch.dtype | None = None,
    copies: list[Copy] | None = None,
) -> WireColumn:
    """The column of a read, in new memory.

    Args:
        pieces: At least one. Their positions together are 0 to n - 1.
        jagged: The jagged columns of the same read.
        dtype: The dtype of the result. Integer columns may be narrower (`WireFormat.narrow`). None: that of the first.
        copies: Gets the copies that are left to the caller, who can then make those of all columns at once. The column
            has undefined values until then. None: this function makes them.

    Returns:
        A dense tensor if all rows have one shape and were stored so, else one jagged tensor. A list for items, which
        are copied.
    """
    first, rows, positions = pieces[0]
    if len(pieces) == 1 and isinstance(first, torch.Tensor) and first.nbytes < _SMALL_BYTES:
        count, start = len(rows), rows[0]
        if rows_in_order(rows, start, count) and rows_in_order(positions, 0, count):
            some = first[start : start + count]
            if dtype not in (None, some.dtype):
                return some.to(dtype)
            return some.view(torch.uint8).clone().view(torch.bool) if some.dtype == torch.bool else some.clone()
    if isinstance(first, list):
        return _merge_items(pieces)
    left: list[Copy] = [] if copies is None else copies
    if isinstance(first, torch.Tensor) and all(
        isinstance(each.column, torch.Tensor) and each.column.shape[1:] == first.shape[1:] for each in pieces
    ):
        merged = _merge_dense(first, pieces, dtype or first.dtype, left)
    else:
        merged = _merge_ragged(pieces, JaggedColumns() if jagged is None else jagged, dtype, left)
    if copies is None:
        copy_arrays(left, threads=1)
    return merged


def _merge_items(pieces: Sequence[Piece]) -> list[object]:
    items: list[object] = [None] * sum(len(each.rows) for each in pieces)
    for column, rows, positions in pieces:
        assert isinstance(column, list)
        for row, position in zip(rows, positions, strict=True):
            items[position] = copy_item(column[row])
    return items


def _merge_dense(like: torch.Tensor, pieces: Sequence[Piece], dtype: torch.dtype, copies: list[Copy]) -> torch.Tensor:
    shape = like.shape[1:]
    merged = empty_tensor((sum(len(each.rows) for each in pieces), *shape), dtype)
    for column, rows, positions in pieces:
        assert isinstance(column, torch.Tensor)
        runs = _runs(rows, positions)
        if dtype.itemsize * math.prod(shape) * len(rows) < _LEAST_RUN_BYTES * len(runs) and len(runs) > 1:
            picked = carrier(column).index_select(0, torch.as_tensor(rows, device="cpu"))
            if column.dtype != dtype:
                picked = picked.view(column.dtype).to(dtype)
            carrier(merged).index_copy_(0, torch.as_tensor(positions, device="cpu"), picked)
            continue
        source, target, unit = _arrays(column, merged)
        step = unit * math.prod(shape)
        for row, position, count in runs:
            begin, end = position * step, (position + count) * step
            copies.append((target[begin:end], source[row * step : (row + count) * step]))
    return merged


def _merge_ragged(
    pieces: Sequence[Piece], jagged: JaggedColumns, dtype: torch.dtype | None, copies: list[Copy]
) -> torch.Tensor:
    ragged = [(_as_ragged(column), rows, positions) for column, rows, positions in pieces]
    first, rows, positions = ragged[0]
    count = len(rows)
    if len(ragged) == 1 and count and rows_in_order(rows, rows[0], count) and rows_in_order(positions, 0, count):
        cuts = first.offsets.numpy()[rows[0] : rows[0] + count + 1]  # the usual case, without work for each row
        values = first.values[cuts[0] : cuts[-1]]
        merged = empty_tensor(tuple(values.shape), dtype or values.dtype)
        source, target, _ = _arrays(values, merged)
        copies.append((target, source))
        return jagged.add(merged, torch.from_numpy(cuts - cuts[0]))
    lengths = torch.empty(sum(len(rows) for _, rows, _ in ragged), dtype=torch.int64, device="cpu")
    for column, rows, positions in ragged:
        lengths.numpy()[np.asarray(positions)] = column.lengths[np.asarray(rows)]
    offsets = offsets_of(lengths)
    like = ragged[0][0].values
    merged = empty_tensor((int(offsets[-1]), *like.shape[1:]), dtype or like.dtype)
    for column, rows, positions in ragged:
        source, target, unit = _arrays(column.values, merged)
        step = unit * math.prod(like.shape[1:])
        ends = (offsets * step).tolist()
        for row, position, count in _runs(rows, positions):
            begin, end = column.offsets[row].item() * step, column.offsets[row + count].item() * step
            copies.append((target[ends[position] : ends[position + count]], source[begin:end]))
    return jagged.add(merged, offsets)


def _arrays(source: torch.Tensor, target: torch.Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Both as flat arrays, between which numpy copies: as bytes, or as integers of different dtypes. And how many items
    of the arrays an element is."""
    if source.dtype == target.dtype:
        return byte_array(source), byte_array(target), source.dtype.itemsize
    return source.reshape(-1).numpy(), target.reshape(-1).numpy(), 1


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


def _as_ragged(column: StoredColumn) -> Ragged:
    if isinstance(column, Ragged):
        return column
    assert isinstance(column, torch.Tensor)
    return ragged_of_dense(column)
