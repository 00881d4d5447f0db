"""What a put changes in the rows of a partition, worked out once for all rows that are alike. Pure, like the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dataplane_core.ledger import commands
from dataplane_core.ledger.rows import Cells, Row, packed_positions
from dataplane_core.ledger.views import ReadyView


class Change(NamedTuple):
    """What a put changes in all rows that have the same cells before.

    Attributes:
        cells: Their cells after it.
        sources, dropped: See `Join`.
        gained: The fields that they did not have before.
        ready: Tasks and their views whose fields the rows have since this put.
        satisfied: All views whose fields the rows have.
    """

    cells: Cells
    sources: tuple[int, ...]
    dropped: tuple[int, ...]
    gained: tuple[str, ...]
    ready: list[tuple[str, ReadyView]]
    satisfied: list[ReadyView]


class PutWrites:
    """The writes of a put that commits, and what it changes in the rows of one partition.

    Args:
        writes: Its writes by their ids.
        num_rows: Its rows.

    Attributes:
        writes: The id and the fields of each.
        changes: The cells that rows had -> what the put changes in these rows. None: in new rows.
    """

    __slots__ = ("_num_rows", "_positions", "_simple", "changes", "writes")

    def __init__(self, writes: Mapping[int, commands.Write], num_rows: int) -> None:
        self.writes = [(write_id, tuple(write.fields)) for write_id, write in writes.items()]
        self.changes: dict[Cells | None, Change] = {}
        self._num_rows = num_rows
        self._positions = [write.positions for write in writes.values()]
        self._simple = all(each is None for each in self._positions)

    def positions(self, row: Row, index: int, sources: Sequence[int]) -> int | tuple[int, ...]:
        """The positions of a row of the put, as `Row.positions`, before the row gets its new cells."""
        before, num_before = row.positions, len(row.cells.write_ids)
        if self._simple and (not num_before or before == index):
            return index
        all_before = [before] * num_before if isinstance(before, int) else list(before)
        found = [*all_before, *(index if each is None else each[index] for each in self._positions)]
        return packed_positions([found[number] for number in sources])

    def new_positions(self, sources: Sequence[int]) -> Sequence[int | tuple[int, ...]]:
        """The positions of all rows of the put, if these have no other cells."""
        if self._simple:
            return range(self._num_rows)
        columns = [range(self._num_rows) if each is None else each for each in self._positions]
        if len(sources) == 1:
            return columns[sources[0]]
        return [packed_positions(each) for each in zip(*(columns[number] for number in sources), strict=True)]
