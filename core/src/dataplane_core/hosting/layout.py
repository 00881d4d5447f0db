"""Where the columns of a put lie in its extent, and how dropped rows are squeezed out.

A dense column is its rows, one after the other. A ragged column is a table of N + 1 offsets (int64, in elements),
then its rows end to end. Every table and every column begins at a multiple of 16 bytes, large ones of 64.

Numpy only: processes that host extents have no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from dataplane_core.errors import InvalidRequestError

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


def _aligned(offset: int, size_bytes: int) -> int:
    """Where ``size_bytes`` may begin at or after ``offset``. A lower offset or size never gives a higher result."""
    alignment = 64 if size_bytes >= 1024 else 16
    return -(-offset // alignment) * alignment


class Column(msgspec.Struct, array_like=True, frozen=True):
    """One column of a put.

    Attributes:
        start: Where its values begin in the extent.
        step: Bytes of one row (dense), or of one element of the ragged dim.
        table: Where its offsets begin in the extent; -1 for a dense column.
        length: Size of the first dim of each cell of a dense column of rank 1 or more; else 0.
        dtype: What the writer says of the dtype of its cells, for the reader; 0: it is that of the field.
    """

    start: int
    step: int
    table: int = -1
    length: int = 0
    dtype: int = 0


class Layout(msgspec.Struct, array_like=True):
    """The columns of a put, in the order of its slots, and the bytes that they take with their tables."""

    columns: list[Column] = []
    size_bytes: int = 0

    def add_dense(self, num_rows: int, step: int, length: int = 0, dtype: int = 0) -> Column:
        """Adds a dense column."""
        size_bytes = num_rows * step
        start = _aligned(self.size_bytes, size_bytes)
        return self._add(Column(start, step, length=length, dtype=dtype), size_bytes)

    def add_ragged(self, num_rows: int, num_elements: int, step: int, dtype: int = 0) -> Column:
        """Adds a ragged column."""
        table_bytes, size_bytes = 8 * (num_rows + 1), num_elements * step
        table = _aligned(self.size_bytes, table_bytes)
        start = _aligned(table + table_bytes, size_bytes)
        return self._add(Column(start, step, table, dtype=dtype), size_bytes)

    def fits(self, num_columns: int, num_rows: int) -> bool:
        """Whether it has so many columns, and all of them lie in its bytes."""
        return len(self.columns) == num_columns and all(
            min(each.start, each.step, each.length) >= 0
            and (
                each.start + num_rows * each.step <= self.size_bytes
                if each.table < 0
                else max(each.start, each.table + 8 * (num_rows + 1)) <= self.size_bytes
            )
            for each in self.columns
        )

    def _add(self, column: Column, size_bytes: int) -> Column:
        self.columns.append(column)
        self.size_bytes = column.start + size_bytes
        return column


def offsets_at(extent: Bytes, column: Column, num_rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The table of a ragged column; a view."""
    return extent[column.table : column.table + 8 * (num_rows + 1)].view(np.int64)


def arrays_of_rows(extent: Bytes, column: Column, num_rows: int, rows: Sequence[int]) -> list[Bytes]:
    """The bytes of some rows of a column: the table of its offsets, if it has one, and then the rows, in runs.

    Args:
        extent: The bytes of the put.
        column: The column.
        num_rows: How many rows the put holds.
        rows: The rows, in any order.

    Raises:
        InvalidRequestError: There is no such row.
    """
    if rows and not (min(rows) >= 0 and max(rows) < num_rows):
        raise InvalidRequestError(f"a put has {num_rows} rows, not all that are asked for.")
    wanted = np.asarray(rows, dtype=np.int64)
    arrays: list[Bytes] = []
    if column.table < 0:
        begins = wanted * column.step
        ends = begins + column.step
    else:
        offsets = offsets_at(extent, column, num_rows)
        begins, ends = offsets[wanted], offsets[wanted + 1]
        table = np.zeros(len(wanted) + 1, dtype=np.int64)
        np.cumsum(ends - begins, out=table[1:])
        arrays.append(table.view(np.uint8))
        begins, ends = begins * column.step, ends * column.step
    for begin, end in runs(begins, ends):
        arrays.append(extent[column.start + begin : column.start + end])
    return arrays


def squeeze(extent: Bytes, layout: Layout, num_rows: int, rows: Sequence[int]) -> Layout:
    """Moves the rows that are kept together, in place, at the extent's start.

    Args:
        extent: The bytes of the put. Nobody may use them meanwhile.
        layout: Where its columns lie.
        num_rows: How many rows it holds.
        rows: Those to keep, ascending.

    Returns:
        The layout of the kept rows. Its offsets are never higher than before.
    """
    kept = np.asarray(rows, dtype=np.int64)
    squeezed = Layout([])
    for column in layout.columns:
        if column.table < 0:
            new = squeezed.add_dense(len(kept), column.step, column.length, column.dtype)
            begins, sizes = kept * column.step, np.full(len(kept), column.step)
        else:
            offsets = offsets_at(extent, column, num_rows).copy()
            lengths = np.diff(offsets)[kept]
            new = squeezed.add_ragged(len(kept), int(lengths.sum()), column.step, column.dtype)
            table = offsets_at(extent, new, len(kept))
            table[0] = 0
            np.cumsum(lengths, out=table[1:])
            begins, sizes = offsets[kept] * column.step, lengths * column.step
        _move_rows(extent, column.start, new.start, begins, sizes)
    return squeezed


def _move_rows(extent: Bytes, source: int, target: int, begins: Any, sizes: Any) -> None:
    """Moves rows to lower offsets, ascending, in runs of rows that lie side by side."""
    for begin, end in runs(begins, begins + sizes):
        extent[target : target + end - begin] = extent[source + begin : source + end]  # numpy copies overlaps right
        target += end - begin


def runs(begins: Any, ends: Any) -> list[tuple[int, int]]:
    """Joins ranges that lie side by side: where each run of them begins and ends. The ranges ascend."""
    if not len(begins):
        return []
    breaks = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks - 1, [len(begins) - 1]))
    return list(zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True))
