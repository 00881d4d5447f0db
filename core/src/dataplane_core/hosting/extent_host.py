"""`ExtentHost`: serves extents to the processes of its host, which share its memory, and to others over the wire.

A write is put in three steps: `Allocate` an extent; get the bytes there, by a copy into shared memory (then `Written`)
or over the wire (`Fill`); then the ledger makes it visible. A host that has the ledger too gets its commands together
with these requests. A client that is gone before the second step is done leaves nothing. A read pins extents and copies
out of them (`Find`), or gets rows over the wire (`Fetch`).
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dataplane_core.errors import BackendError, CapacityExceededError, InvalidRequestError, StalePartitionError
from dataplane_core.hosting.extents import ExtentService, ExtentStatistics, Holds, Place, Wanted
from dataplane_core.hosting.host import Client, Host, Receiving, Sending
from dataplane_core.hosting.layout import Bytes, Column, arrays_of_rows
from dataplane_core.hosting.messages import Messages, Release, Request
from dataplane_core.ledger import Ref

#: The most rows of a write.
_MOST_ROWS: Final = 1 << 24
#: Seconds after which a put that found no room in the arena asks again.
_ASK_AGAIN_S: Final = 0.02
#: For how many seconds it is remembered that a write was dropped before it came, and for about how many at most.
_LATE_S: Final = 60.0
_MOST_LATE: Final = 100_000


class AboutExtents(msgspec.Struct, array_like=True):
    """What a host of extents says about itself to a client that connects. Another host may say more after it.

    Attributes:
        touched_bytes: How much of the arena is ready.
        syncs: Whether bytes must be on the disk when a put is written. A client that shares the memory sees to it.
    """

    touched_bytes: int
    syncs: bool


class CheckRoom(Request[None], frozen=True):
    """Raises `CapacityExceededError` if it is known that so many bytes get no room now."""

    size_bytes: int


class Allocate(Request[list[int]], frozen=True):
    """Allocates an extent for each write of a put. Reply: where they begin in the arena.

    They are dropped if the session ends, or somebody drops them, before `Written` or `Fill`.

    Attributes:
        put: The number of the put: the id of its first write.
        writes: Its writes.
        pin: A pin of the session, which keeps the extents where they are while it writes to them. 0: it has none.

    Raises:
        CapacityExceededError: There is no room for all of them.
    """

    put: int
    writes: list[Wanted]
    pin: int = 0

    def check(self) -> None:
        if len({each.write_id for each in self.writes}) != len(self.writes):
            raise InvalidRequestError("a put has two writes of one id.")
        for each in self.writes:
            if not 1 <= each.num_rows <= _MOST_ROWS:
                raise InvalidRequestError(f"a write has {each.num_rows} rows. Expected 1 to {_MOST_ROWS}.")
            if not each.layout.fits(len(each.layout.columns), each.num_rows):
                raise InvalidRequestError("a write has columns that do not lie in its extent.")


class PutWhole(Request[None], frozen=True):
    """`Allocate`, the bytes of the extents, and `Written`, in one request, for few bytes. Raises as `Allocate`."""

    put: int
    writes: list[Wanted]
    data: list[bytes]

    def check(self) -> None:
        Allocate(self.put, self.writes).check()
        if [len(each) for each in self.data] != [each.layout.size_bytes for each in self.writes]:
            raise InvalidRequestError("a put has other bytes than those of its layouts.")


class Written(Request[None], frozen=True):
    """The bytes of a put are in shared memory.

    Attributes:
        put: The put.
        digests: `digest_of` the extent of each write, from a client that had them synced. None: they were not synced.
    """

    put: int
    digests: list[bytes] | None = None


class Fill(Request[None], frozen=True):
    """The bytes of a put follow this request: those of the extents of its writes."""

    followed = True
    put: int


@dataclass(frozen=True, slots=True)
class Found:
    """Where writes lie.

    Attributes:
        places: By write id. They are pinned until this session releases the pin.
        rows: The rows of the extent for the positions that were asked for. None: they are the same numbers.
        gone: What does not exist. If there is any, nothing is pinned.
    """

    places: dict[int, Place]
    rows: list[list[int] | None]
    gone: list[Ref]


class Find(Request[Found], frozen=True):
    """Finds rows of writes, and pins their extents under a number that the session draws.

    Attributes:
        wanted: Write ids, and positions in the write.
        pin: The number.
    """

    wanted: list[tuple[int, list[int]]]
    pin: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The columns of a `Fetch`. Their bytes follow one another: of each its table, if it has one, and its values.

    Attributes:
        columns: For each read, its columns as in their extent, so where they begin says nothing.
        gone: What does not exist. If there is any, no bytes follow.
    """

    columns: list[list[Column]]
    gone: list[Ref]


class Fetch(Request[Fetched], frozen=True):
    """Fetches rows over the wire.

    Attributes:
        reads: Write id, columns by their slots, and positions in the write.
    """

    reads: list[tuple[int, list[int], list[int]]]


class Drop(Request[None], frozen=True):
    """Drops rows. Ignores those that do not exist. A put of any session that is not written yet ends."""

    refs: list[Ref]


class Retain(Request[None], frozen=True):
    """Of the writes that an earlier process left, keeps these rows. See `KeptExtents.retain`.

    Attributes:
        live: Write id -> positions in the write.
    """

    live: dict[int, list[int]]


class Memory(Request[ExtentStatistics], frozen=True):
    """Asks how much memory is used."""


@dataclass(slots=True, eq=False)
class _Client(Client):
    """Also the puts that are not written yet: their writes, and their `Fill`, if that is under way."""

    holds: Holds = field(default_factory=Holds)
    puts: dict[int, list[Wanted]] = field(default_factory=dict)
    fills: dict[int, Receiving] = field(default_factory=dict)


class ExtentHost(Host):
    """Serves an `ExtentService`. Clients over a Unix socket get its arena.

    Args:
        extents: The extents.
    """

    messages = Messages(CheckRoom, Allocate, PutWhole, Written, Fill, Find, Fetch, Drop, Retain, Memory)

    def __init__(self, extents: ExtentService) -> None:
        Host.__init__(self)
        self._extents = extents
        self.descriptors = (extents.arena.fd,)
        self._writers: dict[int, tuple[_Client, int]] = {}  # write id -> whose put is not written yet
        self._pins = itertools.count(-1, -1)  # of reads over the wire; clients draw numbers above 0
        self._late: tuple[set[int], set[int]] = (set(), set())  # write ids: the newer ones, and those before
        self._forget_at = time.monotonic() + _LATE_S

    def about(self) -> AboutExtents:
        """How much of the arena is ready, and who syncs."""
        return AboutExtents(self._extents.touch_until, self._extents.syncs)

    def end_session(self, client: Client) -> None:
        """Also ends the client's pins, and drops what it has not written whole."""
        super().end_session(client)
        assert isinstance(client, _Client)
        for put in list(client.puts):
            self._end_put(client, put)
        self._extents.release_all(client.holds)

    def _new_client(self, number: int) -> Client:
        return _Client(number)

    # --- puts ---------------------------------------------------------------------------------------------------------

    def _check_room(self, request: CheckRoom, client: _Client) -> None:
        self._extents.check_room(request.size_bytes)

    def _allocate(self, request: Allocate | PutWhole, client: _Client) -> list[int]:
        if any(each.write_id in late for late in self._late for each in request.writes):
            raise BackendError("a put was dropped before it came.")
        if request.put in client.puts or any(self._extents.holds(each.write_id) for each in request.writes):
            raise InvalidRequestError("a put was begun that had been begun before.")
        offsets = self._extents.allocate(client.holds, request.put, request.writes)
        if offsets is None:
            size_bytes, most_bytes = sum(each.layout.size_bytes for each in request.writes), self._extents.most_bytes
            raise CapacityExceededError(
                f"{size_bytes} bytes with tables do not fit into the arena, of whose "
                f"{most_bytes} bytes {self._extents.used_bytes} are used, also by cleared samples that are still "
                "read or viewed.",
                retryable=size_bytes <= most_bytes,
                ask_again_s=_ASK_AGAIN_S,
                hint="Drop views that are not needed."
                if size_bytes <= most_bytes
                else "Write smaller batches, or raise the limit of the memory.",
            )
        client.puts[request.put] = request.writes
        self._writers.update((each.write_id, (client, request.put)) for each in request.writes)
        if isinstance(request, Allocate) and request.pin > 0:
            self._extents.pin(client.holds, request.pin, [each.write_id for each in request.writes])
        return offsets

    def _put_whole(self, request: PutWhole, client: _Client) -> None:
        offsets = self._allocate(request, client)
        self.settle()  # what lay there before is given up for good, as it is when a client writes
        for offset, data in zip(offsets, request.data, strict=True):
            self._extents.arena.bytes[offset : offset + len(data)] = memoryview(data)
        self._seal(client, request.put)

    def _written(self, request: Written, client: _Client) -> None:
        if request.put not in client.puts or request.put in client.fills:
            raise StalePartitionError("put_samples refused: the put was given up before it was written.")
        self._seal(client, request.put, request.digests)

    def _fill(self, request: Fill, client: _Client) -> Receiving:
        put = request.put
        if put not in client.puts or put in client.fills:
            raise StalePartitionError("put_samples refused: the put was given up before its bytes came.")
        extents = zip(client.puts[put], client.holds.writing[put], strict=True)
        targets = [
            self._extents.arena.bytes[extent.offset : extent.offset + wanted.layout.size_bytes]
            for wanted, extent in extents
        ]

        def lost() -> None:
            if client.fills.get(put) is receiving:
                self._end_put(client, put)

        receiving = client.fills[put] = Receiving(targets, lambda: self._seal(client, put), lost)
        return receiving

    def _seal(self, client: _Client, put: int, digests: list[bytes] | None = None) -> None:
        """A put is written whole."""
        self._extents.keep(put, digests)
        for each in client.puts.pop(put):
            del self._writers[each.write_id]
        client.fills.pop(put, None)
        self._extents.stop_writing(client.holds, put)

    def _end_put(self, client: _Client, put: int) -> None:
        """Nobody writes a put any more that is not written whole."""
        writes = client.puts.pop(put)
        fill = client.fills.pop(put, None)
        if fill is not None:
            fill.cancelled = True
        for each in writes:
            del self._writers[each.write_id]
        self._extents.forget(each.write_id for each in writes)
        self._extents.stop_writing(client.holds, put)

    # --- reads --------------------------------------------------------------------------------------------------------

    def _find(self, request: Find, client: _Client) -> Found:
        places: dict[int, Place] = {}
        rows_found: list[list[int] | None] = []
        gone: list[Ref] = []
        for write_id, positions in request.wanted:
            place, rows, gone_positions = self._extents.find(write_id, positions)
            gone += [(write_id, position) for position in gone_positions]
            if place is not None:
                places[write_id] = place
                rows_found.append(None if rows is positions else rows)
        if gone:
            return Found({}, [], gone)
        self._extents.pin(client.holds, request.pin, places)
        return Found(places, rows_found, [])

    def _fetch(self, request: Fetch, client: _Client) -> Any:
        reads: list[tuple[Place, list[int], list[int]]] = []
        gone: list[Ref] = []
        for write_id, slots, positions in request.reads:
            place, rows, gone_positions = self._extents.find(write_id, positions)
            gone += [(write_id, position) for position in gone_positions]
            if place is not None:
                reads.append((place, slots, rows))
        if gone:
            return Fetched([], gone)
        columns: list[list[Column]] = []
        sources: list[Bytes] = []
        for place, slots, rows in reads:
            if not all(0 <= slot < len(place.layout.columns) for slot in slots):
                raise InvalidRequestError("a put has other columns than those that are asked for.")
            extent = self._extents.arena.bytes[slice(*place.bounds)]
            columns.append([place.layout.columns[slot] for slot in slots])
            for column in columns[-1]:
                sources += arrays_of_rows(extent, column, place.num_rows, rows)
        pin = next(self._pins)
        self._extents.pin(client.holds, pin, {write_id for write_id, _, _ in request.reads})
        return Sending(Fetched(columns, []), sources, lambda: self._extents.release(client.holds, pin))

    def _release(self, request: Release, client: _Client) -> None:
        for pin in request.pins:
            self._extents.release(client.holds, pin)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _drop(self, request: Drop, client: _Client) -> None:
        write_ids = {write_id for write_id, _ in request.refs}
        for write_id in self._writers.keys() & write_ids:
            if write_id in self._writers:  # else it ended with another write of its put
                self._end_put(*self._writers[write_id])
        if len(self._late[0]) >= _MOST_LATE or time.monotonic() >= self._forget_at:
            self._late, self._forget_at = (set(), self._late[0]), time.monotonic() + _LATE_S
        self._late[0].update(each for each in write_ids if not self._extents.holds(each))
        self._extents.drop(request.refs)

    def _retain(self, request: Retain, client: _Client) -> None:
        self._extents.retain(request.live)

    def _memory(self, request: Memory, client: _Client) -> ExtentStatistics:
        return self._extents.statistics()._replace(num_sessions=len(self._clients))


ExtentHost.handlers = {
    CheckRoom: ExtentHost._check_room,
    Allocate: ExtentHost._allocate,
    PutWhole: ExtentHost._put_whole,
    Written: ExtentHost._written,
    Fill: ExtentHost._fill,
    Find: ExtentHost._find,
    Fetch: ExtentHost._fetch,
    Release: ExtentHost._release,
    Drop: ExtentHost._drop,
    Retain: ExtentHost._retain,
    Memory: ExtentHost._memory,
}
