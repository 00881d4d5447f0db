"""`Store`: what the ledger's process serves: the ledger, and the extents that hold its payload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from dataplane_core.errors import CapacityExceededError, StalePartitionError
from dataplane_core.hosting import Client, ExtentService, Holds, LedgerHost, Place, Release, Wanted
from dataplane_core.ledger import Command, LedgerService, Ref, commands
from dataplane_core.log import LoggedLedger
from dataplane_shm._messages import (
    MESSAGES,
    About,
    Begin,
    Begun,
    CommitSynced,
    Drop,
    Find,
    Placed,
    PutWhole,
    Statistics,
    Status,
)

#: Seconds after which a put that found no room in the arena asks again.
_ASK_AGAIN_S: Final = 0.02


@dataclass(slots=True, eq=False)
class _Client(Client):
    holds: Holds = field(default_factory=Holds)


class Store(LedgerHost):
    """The state of one store.

    Args:
        extents: The payload.
        service: The ledger.
        capacity_bytes: Limit for the payload held, for clients.
        on_full: What clients do if it is reached.
    """

    messages = MESSAGES
    sync = "none"
    folder: str | None = None

    def __init__(
        self,
        extents: ExtentService,
        service: LedgerService | LoggedLedger,
        capacity_bytes: int = 0,
        on_full: str = "block",
    ) -> None:
        super().__init__(service)
        self._ledger = service
        self._extents = extents
        self._limits = capacity_bytes, on_full
        self.descriptors = (extents.arena.fd,)

    def about(self) -> About:
        return About(*self._limits, self._extents.touch_until, self.sync, self.folder)

    def end_session(self, client: Client) -> None:
        """Also ends the client's pins, and aborts the puts that it had begun."""
        assert isinstance(client, _Client)
        puts = list(client.holds.writing)
        self._extents.release_all(client.holds)
        for write_id in puts:
            self._ledger.call(commands.AbortPut(write_id))
        super().end_session(client)
        self._sweep()

    def _new_client(self, number: int) -> Client:
        return _Client(number)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _begin(self, request: Begin, client: _Client) -> Begun:
        put = request.put
        # before anything of the put is recorded, which takes room as well
        self._extents.check_room(sum(layout.size_bytes for layout in request.layouts))
        write_id = self._ledger.call(put)
        self._sweep()  # the ledger gave up puts of before
        wanted = [
            Wanted(each, layout, len(write.row_bytes))
            for (each, write), layout in zip(put.by_id(write_id).items(), request.layouts, strict=True)
        ]
        try:
            offsets = self._extents.allocate(client.holds, write_id, wanted)
        except CapacityExceededError:  # the file system is full
            self._give_up(write_id)
            raise
        if offsets is None:
            self._give_up(write_id)
            raise self._no_room(put, sum(layout.size_bytes for layout in request.layouts))
        if put.ticket is not None:
            client.tickets.discard(put.ticket)
        return Begun(write_id, offsets)

    def _give_up(self, write_id: int) -> None:
        """Ends a put that got no extents."""
        self._ledger.call(commands.Collected(self._ledger.call(commands.AbortPut(write_id))))

    def _commit_synced(self, request: CommitSynced, client: _Client) -> Any:
        return self._commit(request.commit, client, request.digests)

    def _commit(self, command: commands.CommitPut, client: _Client, digests: list[bytes] | None = None) -> Any:
        if command.write_id not in client.holds.writing:
            raise StalePartitionError("put_samples refused at commit: the put is not begun, or was aborted.")
        try:
            self._extents.keep(command.write_id, digests)
            self._ledger.call(command)
        finally:
            self._extents.stop_writing(client.holds, command.write_id)
            self._sweep()
        return []

    def _put_whole(self, request: PutWhole, client: _Client) -> None:
        begun = self._begin(Begin(request.put, [request.layout]), client)
        self.settle()  # what lay in its place before is given up for good, as it is when a client writes
        data = np.frombuffer(request.data, dtype=np.uint8)
        offset = begun.offsets[0]
        self._extents.arena.bytes[offset : offset + len(data)] = data
        self._commit(commands.CommitPut(begun.write_id), client)

    def _abort(self, command: commands.AbortPut, client: _Client) -> Any:
        self._extents.stop_writing(client.holds, command.write_id)
        self._ledger.call(command)
        self._sweep()
        return []

    def _register_or_clear(self, command: Command[tuple[Any, list[Ref]]], client: _Client) -> Any:
        found, _ = self._ledger.call(command)
        self._sweep()
        return found, []

    def _find(self, request: Find, client: _Client) -> Placed:
        located = self._ledger.call(request.locate)
        places: dict[int, Place] = {}
        gone: list[Ref] = []
        parts: list[commands.Part] = []
        for part in located.parts:
            place, rows, gone_rows = self._extents.find(part.write_id, part.positions)
            gone += [(part.write_id, position) for position in gone_rows]
            if place is not None:
                places[part.write_id] = place
                parts.append(commands.Part(part.write_id, part.fields, part.slots, part.rows, rows))
        if gone:
            return Placed(located, {}, gone)
        self._extents.pin(client.holds, request.pin, places)
        return Placed(type(located)(parts, located.specs), places, [])

    def _release(self, request: Release, client: _Client) -> None:
        for pin in request.pins:
            self._extents.release(client.holds, pin)

    def _drop(self, request: Drop, client: _Client) -> None:
        self._extents.drop(request.refs)

    def _status(self, request: Status, client: _Client) -> Statistics:
        return Statistics(*self._extents.statistics(), num_sessions=len(self._clients))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _no_room(self, put: commands.BeginPut, size_bytes: int) -> CapacityExceededError:
        arena_bytes = self._extents.most_bytes
        never = size_bytes > arena_bytes
        if not never and put.ticket is not None:
            # it left the queue when the ledger had room: it takes the next place
            self._ledger.call(commands.WaitForRoom(put.ticket, put.size_bytes, wait_s=put.ttl_s))
        return CapacityExceededError(
            f"put_samples('{put.partition_id}', {len(put.sample_ids)} samples) refused: its {size_bytes} bytes with "
            f"tables do not fit into the arena, of whose {arena_bytes} bytes {self._extents.used_bytes} are used, "
            "also by cleared samples that are still read or viewed.",
            retryable=not never,
            ask_again_s=0.0 if never else _ASK_AGAIN_S,
            hint="Write smaller batches or raise capacity_bytes." if never else "Drop views that are not needed.",
        )

    def _sweep(self) -> None:
        """Frees the payload of all refs that the ledger no longer needs."""
        garbage = self._ledger.garbage()
        if garbage:
            self._extents.drop(garbage)
            self._ledger.call(commands.Collected(garbage))


Store.handlers = {
    **LedgerHost.handlers,
    Begin: Store._begin,
    CommitSynced: Store._commit_synced,
    PutWhole: Store._put_whole,
    Find: Store._find,
    Release: Store._release,
    Drop: Store._drop,
    Status: Store._status,
    commands.CommitPut: Store._commit,
    commands.AbortPut: Store._abort,
    commands.RegisterRequest: Store._register_or_clear,
    commands.ClearRequest: Store._register_or_clear,
}
