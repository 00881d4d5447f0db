"""`Store`: the ledger, and which parts of the arena hold what. One thread of the ledger's process uses it.

An extent is pinned while a client writes, reads or views it. What is pinned keeps its place and its bytes, whatever the
ledger says of it meanwhile. A session is a client; when it ends, however it ends, its pins end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from dataplane_core.errors import CapacityExceededError, StalePartitionError
from dataplane_core.host_memory import Arena, Extent, Extents
from dataplane_core.ledger import Command, LedgerService, Ref, commands
from dataplane_core.spec import Claim, new_id
from dataplane_shm._layout import Layout, squeeze
from dataplane_shm._messages import (
    Begin,
    Begun,
    ClaimOrWait,
    Drop,
    Find,
    Place,
    Placed,
    PutWhole,
    Release,
    Statistics,
    Status,
    StopWaiting,
)

__all__ = ["Session", "Store"]

#: Bytes of an extent without rows that the store squeezes at least. Less is not worth the work.
_LEAST_DEAD: Final = 64
#: Puts that were given up, and not begun, of which a session remembers the ids. A request is read soon or never.
_MOST_ABORTED: Final = 1000
#: Seconds after which a put that found no room in the arena asks again.
_ASK_AGAIN_S: Final = 0.02


@dataclass(slots=True, eq=False)
class _Payload:
    """The payload of one put.

    Attributes:
        extent: Where it lies.
        layout: Where its columns lie in it.
        num_rows: How many rows lie there.
        num_live: How many of them exist.
        rows: Position in the put -> row of the extent, -1 if it is gone. None: all, in order.
        num_positions: How many rows the put had.
    """

    extent: Extent
    layout: Layout
    num_rows: int
    num_live: int
    num_positions: int
    rows: list[int] | None = None

    def drop(self, position: int) -> None:
        """Marks a row as gone. Ignores a position that does not exist."""
        if self.rows is None:
            self.rows = list(range(self.num_positions))
        if 0 <= position < self.num_positions and self.rows[position] >= 0:
            self.rows[position] = -1
            self.num_live -= 1

    @property
    def dead_bytes(self) -> int:
        """About how many bytes squeezing it would free."""
        return self.layout.size_bytes * (self.num_rows - self.num_live) // max(self.num_rows, 1)


@dataclass(slots=True, eq=False)
class Session:
    """A client.

    Attributes:
        number: Its number, never used again in this store.
        key: Identifies it among the sessions of all stores.
        writing: Write id of a put -> the extents that it writes.
        pins: Number of a pin -> the extents that it reads or views.
        aborted: Write ids of puts that it gave up last and that were not begun: their requests may be read later.
        claims: Tokens of its claims that wait.
        tickets: Those of its puts that wait for room.
        ended: Whether the client is gone.
        wake: Tells the client that a claim or a put, named by its token or ticket, is to ask again. False if the client
            is gone.
    """

    number: int
    key: str = field(default_factory=new_id)
    writing: dict[int, list[Extent]] = field(default_factory=dict)
    pins: dict[int, list[Extent]] = field(default_factory=dict)
    aborted: dict[int, None] = field(default_factory=dict)
    claims: set[str] = field(default_factory=set)
    tickets: set[str] = field(default_factory=set)
    ended: bool = False
    wake: Callable[[str], bool] = lambda token: False


class Store:
    """The state of one store.

    Args:
        arena: The memory.
        service: The ledger.
    """

    def __init__(self, arena: Arena, service: LedgerService) -> None:
        self._arena = arena
        self._service = service
        self._extents = Extents(arena.size_bytes)
        self._payloads: dict[int, _Payload] = {}
        self._sessions: dict[str, Session] = {}  # by key
        self._numbers = itertools.count(1)
        self._doomed: dict[Extent, None] = {}  # free as soon as nobody pins them
        #: The least size for which no room could be made since rows were dropped or pins ended. Not searched again.
        self._least_refused: int | None = None

    # --- sessions -----------------------------------------------------------------------------------------------------

    def begin_session(self) -> Session:
        """A client connects."""
        session = Session(next(self._numbers))
        self._sessions[session.key] = session
        return session

    def session(self, key: str) -> Session | None:
        """The session with that key, or None if it has ended, or is one of another store."""
        return self._sessions.get(key)

    def end_session(self, session: Session) -> None:
        """A client is gone: ends its pins, aborts the puts that it had begun, and gives up what it waited for."""
        session.ended = True
        del self._sessions[session.key]
        for pin in list(session.pins):
            self._release(session, pin)
        for write_id in list(session.writing):
            self._stop_writing(session, write_id)
            self._service.call(commands.AbortPut(write_id))
        for token in session.claims:
            self._service.stop_waiting(token)
        for ticket in list(session.tickets):
            self._wait_for_room(commands.WaitForRoom(ticket, 0, wait_s=0.0), session)
        self._sweep()

    # --- requests -----------------------------------------------------------------------------------------------------

    def handle(self, request: Any, session: Session) -> Any:
        """Answers a request or a command of a session.

        Raises:
            DataPlaneError: As the request says.
        """
        handler = _HANDLERS.get(type(request))
        return self._service.call(request) if handler is None else handler(self, request, session)

    def take_back(self, request: Any, session: Session) -> None:
        """A client that did not wait for the reply gets none.

        Its release, or that it waits no longer, may have been read before the request, and then ended nothing.
        """
        if isinstance(request, Find):
            self._release(session, request.pin)
        elif isinstance(request, ClaimOrWait):
            self._stop_waiting(StopWaiting(request.claim.token), session)

    def _begin(self, request: Begin, session: Session) -> Begun:
        put = request.put
        if put.write_id in session.aborted:
            raise StalePartitionError("put_samples refused: its client gave it up before it was begun.")
        write_id = self._service.call(put)
        self._sweep()  # the ledger gave up puts of before
        extents = self._allocate_all([layout.size_bytes for layout in request.layouts])
        if extents is None:
            refs = self._service.call(commands.AbortPut(write_id))
            self._service.call(commands.Collected(refs))
            raise self._no_room(put, sum(layout.size_bytes for layout in request.layouts))
        if put.ticket is not None:
            session.tickets.discard(put.ticket)
        session.writing[write_id] = extents
        writes = commands.writes_of(write_id, put.specs, put.row_bytes, put.splits)
        for write, extent, layout in zip(writes, extents, request.layouts, strict=True):
            num_rows = len(write.row_bytes)
            self._payloads[write.write_id] = _Payload(extent, layout, num_rows, num_rows, num_rows)
        return Begun(write_id, [extent.offset for extent in extents])

    def _commit(self, command: commands.CommitPut, session: Session) -> Any:
        if command.write_id not in session.writing:
            raise StalePartitionError("put_samples refused at commit: the put is not begun, or was aborted.")
        self._stop_writing(session, command.write_id)
        try:
            self._service.call(command)
        finally:
            self._sweep()
        return []

    def _put_whole(self, request: PutWhole, session: Session) -> None:
        begun = self._begin(Begin(request.put, [request.layout]), session)
        data = np.frombuffer(request.data, dtype=np.uint8)
        offset = begun.offsets[0]
        self._arena.bytes[offset : offset + len(data)] = data
        self._commit(commands.CommitPut(begun.write_id), session)

    def _abort(self, command: commands.AbortPut, session: Session) -> Any:
        if command.write_id not in session.writing:
            session.aborted[command.write_id] = None
            if len(session.aborted) > _MOST_ABORTED:
                del session.aborted[next(iter(session.aborted))]
        self._stop_writing(session, command.write_id)
        self._service.call(command)
        self._sweep()
        return []

    def _register_or_clear(self, command: Command[tuple[Any, list[Ref]]], session: Session) -> Any:
        found, _ = self._service.call(command)
        self._sweep()
        return found, []

    def _find(self, request: Find, session: Session) -> Placed:
        located = self._service.call(request.locate)
        places: dict[int, Place] = {}
        extents: list[Extent] = []
        gone: list[Ref] = []
        parts: list[commands.Part] = []
        for part in located.parts:
            payload = self._payloads.get(part.write_id)
            positions = part.positions
            if payload is None:
                gone += [(part.write_id, position) for position in positions]
                continue
            if payload.rows is not None:
                rows = [payload.rows[position] for position in positions]
                gone += [(part.write_id, at) for at, row in zip(positions, rows, strict=True) if row < 0]
                positions = rows
            if part.write_id not in places:
                places[part.write_id] = Place(payload.extent.offset, payload.layout, payload.num_rows)
                extents.append(payload.extent)
            parts.append(commands.Part(part.write_id, part.fields, part.slots, part.rows, positions))
        if gone:
            return Placed(located, {}, gone)
        for extent in extents:
            extent.pins += 1
        self._release(session, request.pin)  # a number that is used again holds what it names last
        session.pins[request.pin] = extents
        return Placed(type(located)(parts, located.specs), places, [])

    def _release_pins(self, request: Release, session: Session) -> None:
        for pin in request.pins:
            self._release(session, pin)

    def _claim_or_wait(self, request: ClaimOrWait, session: Session) -> Claim:
        claim, token = request.claim, request.claim.token
        session.claims.discard(token)
        found = self._service.call(claim, partial(session.wake, token))
        if not (found.answered or claim.explain):
            session.claims.add(token)
        return found

    def _wait_for_room(self, command: commands.WaitForRoom, session: Session) -> Any:
        (session.tickets.add if command.wait_s > 0 else session.tickets.discard)(command.ticket)
        return self._service.call(command, partial(session.wake, command.ticket))

    def _stop_waiting(self, request: StopWaiting, session: Session) -> None:
        session.claims.discard(request.token)
        self._service.stop_waiting(request.token)

    def _drop(self, request: Drop, session: Session) -> None:
        self._drop_rows(request.refs)

    def _status(self, request: Status, session: Session) -> Statistics:
        pinned = {each for one in self._sessions.values() for pins in one.pins.values() for each in pins}
        pinned.update(each for one in self._sessions.values() for some in one.writing.values() for each in some)
        return Statistics(
            arena_bytes=self._extents.size_bytes,
            held_bytes=self._extents.used_bytes
            - sum(each.dead_bytes for each in self._payloads.values())
            - sum(each.size_bytes for each in self._doomed),
            pinned_bytes=sum(each.size_bytes for each in pinned),
            touched_bytes=self._arena.touched_bytes,
            num_extents=len(self._payloads) + len(self._doomed),
            num_sessions=len(self._sessions),
        )

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def high_water(self) -> int:
        """Where the highest extent so far ended."""
        return self._extents.high_water

    def _allocate_all(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Pinned extents of these sizes, or None if there is no room for all of them."""
        extents: list[Extent] = []
        refused_before = self._least_refused
        for size_bytes in sizes:
            extent = self._allocate(size_bytes)
            if extent is None:
                for each in extents:
                    self._extents.free(each)
                if extents:  # the size was refused for want of the room that these had
                    self._least_refused = refused_before
                return None
            extents.append(extent)
        for each in extents:  # not before: an extent slides to make room for the others
            each.pins += 1
        return extents

    def _allocate(self, size_bytes: int) -> Extent | None:
        extent = self._extents.allocate(size_bytes)
        if extent is None and (self._least_refused is None or size_bytes < self._least_refused):
            if self._make_room(size_bytes):
                return self._extents.allocate(size_bytes)
            self._least_refused = size_bytes
        return extent

    def _make_room(self, size_bytes: int) -> bool:
        """Squeezes extents with dropped rows, those with most first, then slides extents together."""
        dead = [each for each in self._payloads.values() if not each.extent.pins and each.dead_bytes >= _LEAST_DEAD]
        waiting = deque(sorted(dead, key=lambda each: -each.dead_bytes))
        free = self._extents.size_bytes - self._extents.used_bytes
        while waiting and free < size_bytes:
            free += self._squeeze(waiting.popleft())
        while not self._extents.make_room(size_bytes, self._move):
            if not waiting:
                return False
            self._squeeze(waiting.popleft())
        return True

    def _squeeze(self, payload: _Payload) -> int:
        """Frees the bytes of dropped rows. Returns how many."""
        extent = payload.extent
        before = extent.size_bytes
        assert payload.rows is not None
        kept = sorted(row for row in payload.rows if row >= 0)
        data = self._arena.bytes[extent.offset : extent.offset + before]
        payload.layout = squeeze(data, payload.layout, payload.num_rows, kept)
        now = {row: index for index, row in enumerate(kept)}
        payload.rows = [now.get(row, -1) for row in payload.rows]
        payload.num_rows = len(kept)
        self._extents.shrink(extent, payload.layout.size_bytes)
        return before - extent.size_bytes

    def _move(self, source: int, target: int, size_bytes: int) -> None:
        data = self._arena.bytes
        data[target : target + size_bytes] = data[source : source + size_bytes]

    def _no_room(self, put: commands.BeginPut, size_bytes: int) -> CapacityExceededError:
        extents = self._extents
        never = size_bytes > extents.size_bytes
        if not never and put.ticket is not None:
            # it left the queue when the ledger had room: it takes the next place
            self._service.call(commands.WaitForRoom(put.ticket, put.size_bytes, wait_s=put.ttl_s))
        return CapacityExceededError(
            f"put_samples('{put.partition_id}', {len(put.sample_ids)} samples) refused: its {size_bytes} bytes with "
            f"tables do not fit into the arena, of whose {extents.size_bytes} bytes {extents.used_bytes} are used, "
            "also by cleared samples that are still read or viewed.",
            retryable=not never,
            ask_again_s=0.0 if never else _ASK_AGAIN_S,
            hint="Write smaller batches or raise capacity_bytes." if never else "Drop views that are not needed.",
        )

    # --- what is no longer needed -------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Frees the payload of all refs that the ledger no longer needs."""
        garbage = self._service.garbage()
        if garbage:
            self._drop_rows(garbage)
            self._service.call(commands.Collected(garbage))

    def _drop_rows(self, refs: Sequence[Ref]) -> None:
        self._least_refused = None
        for write_id, position in refs:
            payload = self._payloads.get(write_id)
            if payload is None:
                continue
            payload.drop(position)
            if not payload.num_live:
                del self._payloads[write_id]
                self._free(payload.extent)

    def _stop_writing(self, session: Session, write_id: int) -> None:
        for extent in session.writing.pop(write_id, ()):
            self._unpin(extent)

    def _release(self, session: Session, pin: int) -> None:
        for extent in session.pins.pop(pin, ()):
            self._unpin(extent)

    def _unpin(self, extent: Extent) -> None:
        extent.pins -= 1
        self._least_refused = None
        if not extent.pins and extent in self._doomed:
            del self._doomed[extent]
            self._extents.free(extent)

    def _free(self, extent: Extent) -> None:
        if extent.pins:
            self._doomed[extent] = None
        else:
            self._extents.free(extent)


#: Type of a request -> its handler. All other commands go to the ledger as they are.
_HANDLERS: Final[Mapping[type[Any], Callable[[Store, Any, Session], Any]]] = {
    Begin: Store._begin,
    PutWhole: Store._put_whole,
    Find: Store._find,
    Release: Store._release_pins,
    ClaimOrWait: Store._claim_or_wait,
    StopWaiting: Store._stop_waiting,
    Drop: Store._drop,
    Status: Store._status,
    commands.CommitPut: Store._commit,
    commands.AbortPut: Store._abort,
    commands.Register: Store._register_or_clear,
    commands.Clear: Store._register_or_clear,
    commands.WaitForRoom: Store._wait_for_room,
}
