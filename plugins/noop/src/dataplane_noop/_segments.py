"""Payload of one put, kept as whole columns: a put copies them in, a read copies its rows out.

Shape legend: ``N`` rows of the put, ``n`` rows of a read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataplane_core.codec import Piece, merge_pieces
from dataplane_core.spec import WireColumn


class Segment:
    """The columns of one put, and which of its rows exist. Never changed in place: readers need no lock."""

    def __init__(self, columns: Mapping[str, WireColumn], num_rows: int) -> None:
        self._columns = dict(columns)
        self._at: list[int] = list(range(num_rows))  # row of the put -> row of the columns; -1: deleted
        self._num_kept = num_rows  # rows of the columns
        self.num_live = num_rows

    @classmethod
    def copy_of(cls, columns: Mapping[str, WireColumn], num_rows: int) -> Segment:
        """A segment with copies of encoded columns."""
        return cls({name: _copy(column, range(num_rows)) for name, column in columns.items()}, num_rows)

    def gone(self, rows: Sequence[int]) -> list[int]:
        """Those of ``rows`` that are deleted."""
        return [row for row in rows if self._at[row] < 0]

    def piece(self, name: str, rows: Sequence[int], positions: Sequence[int]) -> Piece:
        """Rows of a column, which stand at ``positions`` of a read; none may be deleted. A view."""
        return Piece(self._columns[name], [self._at[row] for row in rows], positions)

    def without(self, rows: Sequence[int]) -> Segment:
        """The segment without some rows. Frees memory once half of the rows are deleted."""
        rest = Segment(self._columns, self._num_kept)
        rest._at = list(self._at)
        for row in rows:
            rest._at[row] = -1
        live = [row for row, at in enumerate(rest._at) if at >= 0]
        rest.num_live = len(live)
        if 0 < 2 * rest.num_live <= rest._num_kept:
            old = [rest._at[row] for row in live]
            rest._columns = {name: _copy(column, old) for name, column in self._columns.items()}
            rest._num_kept = len(live)
            for new, row in enumerate(live):
                rest._at[row] = new
        return rest


def _copy(column: WireColumn, rows: Sequence[int]) -> WireColumn:
    """Rows of a column in new memory."""
    return merge_pieces([Piece(column, rows, range(len(rows)))])
