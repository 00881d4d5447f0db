"""`RowStoreBackend`: a backend over an engine that keeps rows of bytes under integers.

Many engines' cost is per cell, so the framed cells that one put writes of one sample are joined in one row.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane_core.backends.ledger_backend import LedgerBackend, RefsGoneError
from dataplane_core.codec import join_rows, split_rows
from dataplane_core.errors import BackendError, CorruptDataError
from dataplane_core.ledger import Located, Ref
from dataplane_core.spec import WireColumn, WireFormat

__all__ = ["RowStoreBackend", "framed_columns"]


class RowStoreBackend(LedgerBackend):
    """All operations, from a ledger and rows of bytes. A row's handle is an integer that is never used again."""

    wire = WireFormat(bytes=True)

    @abstractmethod
    def _put_rows(self, handles: Sequence[int], buffer: bytearray, offsets: Any, deadline: float) -> None:
        """Stores rows; returns when every client can read them.

        Args:
            handles: N ascending, adjacent integers.
            buffer: The rows end to end.
            offsets: (N + 1,) int64: row i is ``buffer[offsets[i]:offsets[i + 1]]``.
            deadline: On `time.monotonic`'s clock, in seconds.
        """

    @abstractmethod
    def _get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[bytes | bytearray | memoryview]:
        """Reads rows, in the order of ``handles``; no handle repeats.

        Raises:
            RefsGoneError: A row is not there; ``handles`` are those that are not, where the engine says which.
        """

    @abstractmethod
    def _delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        """Deletes rows; handles that are not there are ignored."""

    def _store(self, write_id: int, columns: Mapping[str, WireColumn], num_samples: int, deadline: float) -> None:
        buffer, offsets = join_rows(framed_columns(columns))
        self._put_rows(range(write_id, write_id + num_samples), buffer, offsets, deadline)

    def _fetch(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        refs = located.refs
        try:
            found = self._get_rows([write_id + position for write_id, position in refs], deadline)
        except RefsGoneError as error:
            gone = set(error.handles)
            raise RefsGoneError(error.message, refs=[ref for ref in refs if sum(ref) in gone]) from error
        rows = split_rows(found)
        columns: dict[str, list[Any]] = {name: [None] * num_samples for name in located.specs}
        start = 0
        for part in located.parts:
            mine = rows[start : start + len(part.rows)]
            start += len(part.rows)
            for name, slot in zip(part.fields, part.slots, strict=True):
                column = columns[name]
                for position, frames in zip(part.rows, mine, strict=True):
                    if slot >= len(frames):
                        raise CorruptDataError(
                            f"a row of write {part.write_id} holds {len(frames)} cells. Expected more than {slot}, "
                            f"with field '{name}' among them."
                        )
                    column[position] = frames[slot]
        return dict(columns)

    def _find_gone(self, refs: Sequence[Ref], deadline: float) -> Sequence[Ref]:
        """Found by reading halves; what there is no time for counts as gone."""
        if time.monotonic() >= deadline:
            return refs
        try:
            self._get_rows([write_id + position for write_id, position in refs], deadline)
        except RefsGoneError:
            middle = len(refs) // 2
            if not middle:
                return refs
            return [*self._find_gone(refs[:middle], deadline), *self._find_gone(refs[middle:], deadline)]
        return []

    def _delete(self, refs: Sequence[Ref], deadline: float) -> None:
        self._delete_rows([write_id + position for write_id, position in refs], deadline)


def framed_columns(columns: Mapping[str, WireColumn]) -> list[list[Any]]:
    """The columns of a put to a backend that takes bytes, in their order.

    Raises:
        BackendError: One is no list of frames.
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
