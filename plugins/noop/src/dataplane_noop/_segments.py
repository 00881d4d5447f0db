"""Payload of one put, kept as whole columns: a put copies them in, a read copies its rows out.

Shape legend: ``N`` rows of the put, ``n`` rows of a read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from dataplane_core.codec import Ragged, carrier, copy_item, gather_rows, jagged_parts, offsets_of, to_nested
from dataplane_core.spec import WireColumn

__all__ = ["Segment", "StoredColumn", "merge", "to_wire"]


#: A dense tensor (N, ...), N rows of differing length, or a list of N items.
StoredColumn: TypeAlias = torch.Tensor | Ragged | list[object]


class Segment:
    """The columns of one put, and which of its rows exist. Never changed in place: readers need no lock."""

    def __init__(self, columns: Mapping[str, StoredColumn], num_rows: int) -> None:
        self._columns = dict(columns)
        self._at: list[int] = list(range(num_rows))  # row of the put -> row of the columns; -1: deleted
        self.num_live = num_rows

    @classmethod
    def copy_of(cls, columns: Mapping[str, WireColumn], num_rows: int) -> Segment:
        """A segment with copies of encoded columns."""
        return cls({name: _own(column) for name, column in columns.items()}, num_rows)

    def gone(self, rows: Sequence[int]) -> list[int]:
        """Those of ``rows`` that are deleted."""
        return [row for row in rows if self._at[row] < 0]

    def take(self, name: str, rows: Sequence[int]) -> StoredColumn:
        """Copies rows of a column; none may be deleted."""
        return _take(self._columns[name], [self._at[row] for row in rows])

    def without(self, rows: Sequence[int]) -> Segment:
        """The segment without some rows. Frees memory once half of the rows are deleted."""
        rest = Segment(self._columns, 0)
        rest._at = list(self._at)
        for row in rows:
            rest._at[row] = -1
        live = [row for row, at in enumerate(rest._at) if at >= 0]
        rest.num_live = len(live)
        kept = 1 + max((at for at in rest._at), default=-1)
        if 0 < 2 * rest.num_live <= kept:
            old = [rest._at[row] for row in live]
            rest._columns = {name: _take(column, old) for name, column in self._columns.items()}
            for new, row in enumerate(live):
                rest._at[row] = new
        return rest


def merge(parts: Sequence[tuple[StoredColumn, Sequence[int]]]) -> StoredColumn:
    """Joins parts of one column, and puts the rows in the order of the request.

    Args:
        parts: Each part, and the position in the request of each of its rows. The positions are 0 to n - 1.
    """
    if len(parts) == 1:
        column, rows = parts[0]
        return column if list(rows) == list(range(len(rows))) else _take(column, _inverse(rows))
    order = _inverse([row for _, rows in parts for row in rows])
    columns = [column for column, _ in parts]
    if isinstance(columns[0], list):
        joined: StoredColumn = [item for column in columns if isinstance(column, list) for item in column]
    elif len({column.shape[1:] for column in columns if isinstance(column, torch.Tensor)}) == 1 and not any(
        isinstance(column, Ragged) for column in columns
    ):
        joined = torch.cat([column for column in columns if isinstance(column, torch.Tensor)])
    else:
        ragged = [_as_ragged(column) for column in columns]
        lengths = torch.cat([each.offsets.diff() for each in ragged])
        joined = Ragged(torch.cat([each.values for each in ragged]), offsets_of(lengths))
    return _take(joined, order)


def to_wire(column: StoredColumn) -> WireColumn:
    """The column in the backend's wire format; aliases ``column``."""
    return to_nested(column) if isinstance(column, Ragged) else column


def _own(column: WireColumn) -> StoredColumn:
    if isinstance(column, list):
        return [copy_item(item) for item in column]
    if column.is_nested:
        values, offsets, _, _ = jagged_parts(column)
        return Ragged(values.clone(), offsets.to(torch.int64).clone())
    return column.clone(memory_format=torch.contiguous_format)


def _take(column: StoredColumn, rows: Sequence[int]) -> StoredColumn:
    start = rows[0] if rows else 0
    adjacent = list(rows) == list(range(start, start + len(rows)))
    stop = start + len(rows)
    if isinstance(column, list):
        return [copy_item(column[row]) for row in rows]
    if isinstance(column, torch.Tensor):
        if adjacent:
            return column[start:stop].clone()
        return carrier(column).index_select(0, torch.tensor(rows)).view(column.dtype)  # carrier: for every dtype
    offsets = column.offsets
    if adjacent:
        first, last = int(offsets[start]), int(offsets[stop])
        return Ragged(column.values[first:last].clone(), offsets[start : stop + 1] - first)
    picks = torch.tensor(rows, dtype=torch.int64)
    lengths = offsets.diff().index_select(0, picks)
    return gather_rows(column.values, offsets.index_select(0, picks), offsets_of(lengths))


def _as_ragged(column: StoredColumn) -> Ragged:
    if isinstance(column, Ragged):
        return column
    assert isinstance(column, torch.Tensor)
    lengths = torch.full((column.shape[0],), column.shape[1], dtype=torch.int64)
    return Ragged(column.flatten(0, 1), offsets_of(lengths))


def _inverse(rows: Sequence[int]) -> list[int]:
    inverse = [0] * len(rows)
    for position, row in enumerate(rows):
        inverse[row] = position
    return inverse
