"""`NoopBackend`: the ledger and the payload are in the client's own process.

Payload is kept as the columns of each put: a put copies them in, a read copies its rows out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from dataplane_core.backends import LEDGER_CAPABILITIES, CapacityOptions, LedgerBackend, RefsGoneError
from dataplane_core.codec import Piece, column_digests, copy_column, merge_pieces
from dataplane_core.host_memory import check_capacity
from dataplane_core.ledger import Command, LedgerThread, Located, Ref, Reply, commands
from dataplane_core.spec import Capability, FieldSpec, Scope, WireColumn, WireFormat


class Segment:
    """The columns of one put, in this memory, and which rows exist. Never changed in place: readers need no lock."""

    def __init__(self, columns: dict[str, WireColumn], num_rows: int) -> None:
        self._columns = columns
        self._at: list[int] = list(range(num_rows))  # row of the put -> row of the columns; -1: deleted
        self._num_kept = num_rows  # rows of the columns
        self.num_live = num_rows

    def gone(self, rows: Sequence[int]) -> list[int]:
        """Those of ``rows`` that are deleted."""
        return [row for row in rows if self._at[row] < 0]

    def piece(self, slot: int, rows: Sequence[int], positions: Sequence[int]) -> Piece:
        """Rows of a column, which stand at ``positions`` of a read; none may be deleted. A view."""
        return Piece(list(self._columns.values())[slot], [self._at[row] for row in rows], positions)

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
            places = range(len(live))
            rest._columns = {name: merge_pieces([Piece(column, old, places)]) for name, column in self._columns.items()}
            rest._num_kept = len(live)
            for new, row in enumerate(live):
                rest._at[row] = new
        return rest


class NoopBackend(LedgerBackend):
    """The reference backend: every operation of the contract, scope process. It waits for nothing but its ledger."""

    wire = WireFormat(ragged="jagged", objects="native", shared_rows=True, by_content=True, by_probe=True, narrow=True)
    capabilities = LEDGER_CAPABILITIES | {Capability.CLIENTS, Capability.NO_PICKLE, Capability.WAKES}
    scope = Scope.PROCESS
    why_not_declared: ClassVar[Mapping[str, str]] = {
        Capability.UNITS: "the client's own process holds the payload",
        "scope": "a store is memory of one process, which no other process can reach",
        Capability.DURABLE: "a store ends with its process",
    }
    Config = CapacityOptions

    def __init__(self, config: CapacityOptions) -> None:
        super().__init__(config)
        self._service = LedgerThread(config.capacity_bytes)
        self._segments: dict[int, Segment] = {}
        self._lock = threading.Lock()

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        """Refuses a capacity that this host does not have. Starts the ledger."""
        self.cache_bytes = 0
        check_capacity(self.config.capacity_bytes)
        self._service.start()

    def stop(self) -> None:
        """Frees the payload, and ends the ledger."""
        self._service.stop()
        self._segments.clear()

    def call_ledger(self, deadline: float, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        return self._service.call(command, wake)

    def stop_waiting(self, token: str) -> None:
        self._service.stop_waiting(token)

    def store_write(self, write_id: int, columns: Mapping[str, WireColumn], num_samples: int, deadline: float) -> None:
        copied = {name: copy_column(column) for name, column in columns.items()}
        self._segments[write_id] = Segment(copied, num_samples)

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        pieces: dict[str, list[Piece]] = {name: [] for name in located.specs}
        for part in located.parts:
            for name, piece in zip(part.fields, self._pieces_of(part), strict=True):
                pieces[name].append(piece)
        tensors = [name for name, spec in located.specs.items() if spec.kind == "tensor" and self.wire.narrow]
        dtypes = {name: located.specs[name].stored.torch_dtype for name in tensors}
        return {name: merge_pieces(parts, dtypes.get(name)) for name, parts in pieces.items()}

    def kept_digests(self, parts: Sequence[commands.Part], spec: FieldSpec, deadline: float) -> list[bytes]:
        pieces = [piece for part in parts for piece in self._pieces_of(part)]
        return [digest for piece in pieces for digest in column_digests(piece.column, spec, piece.rows)]

    def _pieces_of(self, part: commands.Part) -> list[Piece]:
        """Where the rows of each field of a part lie."""
        segment = self._segments.get(part.write_id)
        gone = part.positions if segment is None else segment.gone(part.positions)
        if segment is None or gone:
            refs = [(part.write_id, position) for position in gone]
            raise RefsGoneError(f"{len(gone)} rows of write {part.write_id} are gone", refs=refs)
        return [segment.piece(slot, part.positions, part.rows) for slot in part.slots]

    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> None:
        by_write: dict[int, list[int]] = {}
        for write_id, pos in refs:
            by_write.setdefault(write_id, []).append(pos)
        with self._lock:
            for write_id, rows in by_write.items():
                segment = self._segments.get(write_id)
                if segment is None:
                    continue
                rest = segment.without(rows)
                if rest.num_live:
                    self._segments[write_id] = rest
                else:
                    del self._segments[write_id]
