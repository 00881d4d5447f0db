"""`RowStoreBackend`: a backend over an engine that stores rows of bytes by integer handle.

In many engines each stored value has a cost, so the frames that one put writes of one sample are joined in one row.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane_core.backends.ledger_backend import LedgerBackend, RefsGoneError
from dataplane_core.backends.writes import columns_of
from dataplane_core.codec import join_rows, split_rows
from dataplane_core.errors import BackendError, FrameError
from dataplane_core.ledger import Located, Ref, commands
from dataplane_core.spec import SharedRows, WireColumn, WireFormat


class RowStoreBackend(LedgerBackend):
    """All operations, on a ledger and rows of bytes. A row's handle is an integer that is never used again."""

    wire = WireFormat(bytes=True, shared_rows=True)
    row_cost_bytes = 6144

    @abstractmethod
    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        """Stores rows. Returns when every client can read them.

        Args:
            handles: N consecutive integers, ascending.
            buffer: The rows end to end. If the engine keeps a part of it, it keeps all of it.
            offsets: (N + 1,) int64: row i is ``buffer[offsets[i]:offsets[i + 1]]``.
            deadline: On `time.monotonic`'s clock, in seconds.
        """

    @abstractmethod
    def get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[bytes | bytearray | memoryview]:
        """Reads rows, in the order of ``handles``, which has no repeats.

        Raises:
            RefsGoneError: A row does not exist. Its ``handles`` are the missing ones, if the engine says which.
        """

    @abstractmethod
    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        """Deletes rows. Ignores handles that do not exist."""

    def store_write(self, write_id: int, columns: Mapping[str, WireColumn], num_samples: int, deadline: float) -> None:
        self.store_writes({write_id: commands.Write(tuple(columns), [0] * num_samples)}, columns, deadline)

    def store_writes(
        self,
        writes: Mapping[int, commands.Write],
        columns: Mapping[str, WireColumn | SharedRows],
        deadline: float,
    ) -> None:
        buffer, offsets = join_rows([framed_columns(columns_of(write, columns)) for write in writes.values()])
        first = min(writes)
        self.put_rows(range(first, first + len(offsets) - 1), buffer, offsets, deadline)

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        refs = located.refs
        try:
            found = self.get_rows([write_id + position for write_id, position in refs], deadline)
        except RefsGoneError as error:
            gone = set(error.handles)
            raise RefsGoneError(error.message, refs=[ref for ref in refs if sum(ref) in gone]) from error
        try:
            rows = split_rows(found)
        except FrameError as error:
            _add_place(error, located)
            raise
        columns: dict[str, list[Any]] = {name: [None] * num_samples for name in located.specs}
        start = 0
        for part in located.parts:
            mine = rows[start : start + len(part.rows)]
            start += len(part.rows)
            for name, slot in zip(part.fields, part.slots, strict=True):
                column = columns[name]
                for position, frames in zip(part.rows, mine, strict=True):
                    if slot >= len(frames):
                        short = FrameError(f"its row holds {len(frames)} cells. Expected more than {slot}.")
                        short.add_place([name], position)
                        raise short
                    column[position] = frames[slot]
        return dict(columns)

    def find_gone(self, refs: Sequence[Ref], deadline: float) -> Sequence[Ref]:
        """Reads halves of the refs, recursively. Refs that there is no time to read count as gone."""
        refs = list(dict.fromkeys(refs))
        if time.monotonic() >= deadline:
            return refs
        try:
            self.get_rows([write_id + position for write_id, position in refs], deadline)
        except RefsGoneError:
            middle = len(refs) // 2
            if not middle:
                return refs
            return [*self.find_gone(refs[:middle], deadline), *self.find_gone(refs[middle:], deadline)]
        return []

    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> None:
        self.delete_rows([write_id + position for write_id, position in refs], deadline)


def _add_place(error: FrameError, located: Located) -> None:
    """Adds the fields, and the row of the request, to the error for one of the rows that were located."""
    places = [(part.fields, row) for part in located.parts for row in part.rows]
    error.add_place(*places[error.row or 0])


def framed_columns(columns: Mapping[str, WireColumn]) -> list[list[Any]]:
    """Checks that the columns of a put are lists of frames. Returns them in order.

    Raises:
        BackendError: A column is not a list.
    """
    framed: list[list[Any]] = []
    for name, column in columns.items():
        if not isinstance(column, list):
            raise BackendError(
                f"put_samples refused: column '{name}' is a {type(column).__name__}. Expected a list of framed cells, "
                "as the backend's wire format says. Nothing was written.",
                hint="Middleware that adds or changes a column encodes it to the wire format that it was given.",
            )
        framed.append(column)
    return framed
