"""`NoopBackend`: the ledger and the payload are in the client's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from dataplane_core.backends import LEDGER_CAPABILITIES, CapacityOptions, LedgerBackend, RefsGoneError
from dataplane_core.codec import Piece, merge_pieces
from dataplane_core.host_memory import check_capacity
from dataplane_core.ledger import Command, LedgerThread, Located, Ref, Reply
from dataplane_core.spec import Capability, Scope, WireColumn, WireFormat
from dataplane_noop._segments import Segment


class NoopBackend(LedgerBackend):
    """The reference backend: every operation of the contract, scope process. It waits for nothing but its ledger."""

    wire = WireFormat(ragged="jagged", objects="native", shared_rows=True, narrow=True)
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
        check_capacity(self.config.capacity_bytes)
        self._service.start()

    def stop(self) -> None:
        """Frees the payload, and ends the ledger."""
        self._service.stop()
        self._segments.clear()

    def call_ledger(self, deadline: float, command: Command[Reply]) -> Reply:
        return self._service.call(command)

    def call_ledger_waking(self, deadline: float, command: Command[Reply], wake: Callable[[], bool]) -> Reply:
        return self._service.call(command, wake)

    def stop_waiting(self, token: str) -> None:
        self._service.stop_waiting(token)

    def store_write(self, write_id: int, columns: Mapping[str, WireColumn], num_samples: int, deadline: float) -> None:
        self._segments[write_id] = Segment.copy_of(columns, num_samples)

    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        pieces: dict[str, list[Piece]] = {name: [] for name in located.specs}
        for part in located.parts:
            segment = self._segments.get(part.write_id)
            gone = part.positions if segment is None else segment.gone(part.positions)
            if segment is None or gone:
                refs = [(part.write_id, position) for position in gone]
                raise RefsGoneError(f"{len(gone)} rows of write {part.write_id} are gone", refs=refs)
            for name in part.fields:
                pieces[name].append(segment.piece(name, part.positions, part.rows))
        tensors = [name for name, spec in located.specs.items() if spec.kind == "tensor" and self.wire.narrow]
        dtypes = {name: located.specs[name].stored.torch_dtype for name in tensors}
        return {name: merge_pieces(parts, dtypes.get(name)) for name, parts in pieces.items()}

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
