"""`ExtentHost`: serves extents to the processes of its host, which share its memory, and to others over the wire.

A write is put in three steps: `Allocate` an extent; get the bytes there, by a copy into shared memory (then `Written`)
or over the wire (`Fill`); then the ledger makes it visible. A host that has the ledger too gets its commands together
with these requests. A client that is gone before the second step is done leaves nothing. A read pins extents and copies
out of them (`Find`), or gets rows over the wire (`Fetch`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from dataplane_core.errors import BackendError, CapacityExceededError, InvalidRequestError, StalePartitionError
from dataplane_core.host_memory.arena import Extent
from dataplane_core.hosting.extents import ExtentService, ExtentStatistics, Place, RefsGoneError, Wanted, arrays_of_rows
from dataplane_core.hosting.messages import Bytes, Messages, Release, Request
from dataplane_core.hosting.server import Client, Host, Transfer
from dataplane_core.ledger import Ref

#: Seconds after which a put that found no room in the arena asks again.
_ASK_AGAIN_S: Final = 0.02
#: Of so many writes it is remembered that they were dropped before they came.
_MOST_LATE: Final = 100_000


class AboutExtents(msgspec.Struct, array_like=True):
    """What a host of extents says about itself to a client that connects. Another host may say more after it."""

    touched_bytes: int  # how much of the arena is ready
    syncs: bool  # bytes must be on the disk when a put is written; a client that shares the memory sees to it


class Allocate(Request[list[int]], frozen=True):
    """Allocates an extent for each write of a put. Reply: where they begin in the arena.

    They are dropped if the session ends, or somebody drops them, before `Written` or `Fill`. With the bytes themselves,
    for few of them, the put is written at once.
    """

    writes: list[Wanted]
    pin: int = 0  # of the session, which keeps the extents where they are while it writes to them; 0: it has none
    data: list[bytes] | None = None

    @property
    def put(self) -> int:
        """What the put is called: the id of its first write."""
        return self.writes[0].write_id

    def check(self) -> None:
        if not self.writes or len({write.write_id for write in self.writes}) != len(self.writes):
            raise InvalidRequestError("a put has no writes, or two of one id.")
        if not all(write.layout.fits(write.num_rows) for write in self.writes):
            raise InvalidRequestError("a write has columns that do not lie in its extent.")
        sizes = [write.layout.size_bytes for write in self.writes]
        if self.data is not None and [len(data) for data in self.data] != sizes:
            raise InvalidRequestError("a put has other bytes than those of its layouts.")


class Written(Request[None], frozen=True):
    """The bytes of a put are in shared memory. ``digests`` as for `ExtentService.keep`."""

    put: int
    digests: list[bytes] | None = None


class Fill(Request[None], frozen=True):
    """The bytes of a put follow this request: those of the extents of its writes."""

    followed = True
    put: int


class Find(Request[list[Place]], frozen=True):
    """Finds rows, by write ids and positions, and pins their extents under a number that the session draws, until it
    releases it. Raises `RefsGoneError`, and pins nothing, if some do not exist.
    """

    wanted: list[tuple[int, list[int]]]
    pin: int


class Fetch(Request[list[Place]], frozen=True):
    """As `Find`, but the bytes of columns follow the reply, by their slots: of each its table, if it has one, and its
    values. Nothing is pinned.
    """

    reads: list[tuple[int, list[int], list[int]]]  # write id, slots, positions


class Drop(Request[None], frozen=True):
    """Drops rows. Ignores those that do not exist. A put of any session that is not written yet ends."""

    refs: list[Ref]


class Retain(Request[None], frozen=True):
    """Of the writes that an earlier process left, keeps these positions, by write id. See `KeptExtents.retain`."""

    live: dict[int, list[int]]


class Memory(Request[ExtentStatistics], frozen=True):
    """Asks how much memory is used."""


# --- the host ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Put:
    """A put that is not written yet: whose it is, its writes, their extents, and its `Fill`, if that is under way."""

    client: Client
    writes: list[Wanted]
    extents: list[Extent]
    fill: Transfer | None = None


class ExtentHost(Host):
    """Serves an `ExtentService`. Clients over a Unix socket get its arena.

    If the extents outlive this process, ``settle`` is the ``commit_or_end`` of their notes.
    """

    messages = Messages(Allocate, Written, Fill, Find, Fetch, Drop, Retain, Memory, errors=[RefsGoneError])

    def __init__(self, extents: ExtentService, settle: Callable[[], object] | None = None) -> None:
        Host.__init__(self, settle)
        self._extents = extents
        self.descriptors = (extents.arena.fd,)
        self._puts: dict[int, _Put] = {}  # write id -> its put that is not written yet
        self._pins: dict[Client, dict[int, list[Extent]]] = {}  # client -> number of a pin -> what it reads or views
        self._late: OrderedDict[int, None] = OrderedDict()  # ids of writes that were dropped before they came
        extents.touch_ahead()

    def about(self) -> AboutExtents:
        return AboutExtents(self._extents.touch_until, self._extents.syncs)

    def end_session(self, client: Client) -> None:
        """Also ends the client's pins, and drops what it has not written whole."""
        super().end_session(client)
        for extents in self._pins.pop(client, {}).values():
            self._extents.unpin(extents)
        for put in {put for put in self._puts.values() if put.client is client}:
            self._end_put(put)

    def work_aside(self) -> bool:
        return self._extents.work_aside()

    def _begin(self, put: int) -> None:
        """A put has its memory. A host that has the ledger too begins it there."""

    def _allocate(self, request: Allocate, client: Client) -> list[int]:
        write_ids = [write.write_id for write in request.writes]
        if any(write_id in self._late for write_id in write_ids):
            raise BackendError("a put was dropped before it came.")
        if any(write_id in self._puts or self._extents.holds(write_id) for write_id in write_ids):
            raise InvalidRequestError("a put was begun that had been begun before.")
        extents = self._extents.allocate(request.writes)
        if extents is None:
            size_bytes, most_bytes = sum(write.layout.size_bytes for write in request.writes), self._extents.most_bytes
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
        put = _Put(client, request.writes, extents)
        self._puts.update(dict.fromkeys(write_ids, put))
        if request.pin > 0:
            self._pin(client, request.pin, write_ids)
        try:
            self._begin(request.put)
        except BaseException:
            self._end_put(put)
            raise
        self._extents.touch_ahead()
        if request.data is not None:
            if self.settle is not None:
                self.settle()  # what lay there before is given up for good, as it is when a client writes
            for extent, data in zip(extents, request.data, strict=True):
                self._extents.bytes_of(extent)[: len(data)] = memoryview(data)
            self._seal(put)
        return [extent.offset for extent in extents]

    def _written(self, request: Written, client: Client) -> None:
        self._seal(self._put_of(client, request.put), request.digests)

    def _put_of(self, client: Client, write_id: int) -> _Put:
        put = self._puts.get(write_id)
        if put is None or put.client is not client or put.fill is not None:
            raise StalePartitionError("put_samples refused: the put was given up before it was written.")
        return put

    def _fill(self, request: Fill, client: Client) -> Transfer:
        put = self._put_of(client, request.put)
        targets = [
            self._extents.bytes_of(extent)[: write.layout.size_bytes]
            for write, extent in zip(put.writes, put.extents, strict=True)
        ]

        def end(is_whole: bool) -> None:
            if is_whole:
                self._seal(put)
            elif put in self._puts.values():
                self._end_put(put)

        put.fill = Transfer(targets, end, comes=True)
        return put.fill

    def _seal(self, put: _Put, digests: list[bytes] | None = None) -> None:
        """A put is written whole."""
        self._extents.keep([write.write_id for write in put.writes], digests)
        self._forget(put)
        self._extents.unpin(put.extents)

    def _end_put(self, put: _Put) -> None:
        """Nobody writes a put any more that is not written whole."""
        if put.fill is not None:
            put.fill.cancelled = True
        self._forget(put)
        self._extents.unpin(put.extents)  # first: what is noted of an extent may not be dropped now, as on a full disk
        self._extents.forget(write.write_id for write in put.writes)

    def _forget(self, put: _Put) -> None:
        for write in put.writes:
            del self._puts[write.write_id]

    def _pin(self, client: Client, number: int, write_ids: Iterable[int]) -> None:
        """Pins writes under a number that the client draws. One that is used again holds what it names last."""
        extents = self._extents.pin(write_ids)
        self._unpin(client, number)  # only now: what both pins name must not slide in between
        self._pins.setdefault(client, {})[number] = extents

    def _unpin(self, client: Client, number: int) -> None:
        self._extents.unpin(self._pins.get(client, {}).pop(number, ()))

    def _release(self, request: Release, client: Client) -> None:
        for number in request.pins:
            self._unpin(client, number)

    def _find(self, request: Find, client: Client) -> list[Place]:
        places = self._extents.find(request.wanted)
        self._pin(client, request.pin, {write_id for write_id, _ in request.wanted})
        return places

    def _fetch(self, request: Fetch, client: Client) -> Transfer:
        places = self._extents.find([(write_id, positions) for write_id, _, positions in request.reads])
        sources: list[Bytes] = []
        for place, (_, slots, positions) in zip(places, request.reads, strict=True):
            if not all(0 <= slot < len(place.layout.columns) for slot in slots):
                raise InvalidRequestError("a put has other columns than those that are asked for.")
            extent, rows = self._extents.arena.bytes[slice(*place.bounds)], place.rows_of(positions)
            for slot in slots:
                sources += arrays_of_rows(extent, place.layout.columns[slot], place.num_rows, rows)
        extents = self._extents.pin({write_id for write_id, _, _ in request.reads})
        return Transfer(sources, lambda _: self._extents.unpin(extents), reply=places)

    def _drop(self, request: Drop, client: Client) -> None:
        write_ids = {write_id for write_id, _ in request.refs}
        for put in {self._puts[write_id] for write_id in self._puts.keys() & write_ids}:
            self._end_put(put)
        self._late.update((write_id, None) for write_id in write_ids if not self._extents.holds(write_id))
        while len(self._late) > _MOST_LATE:
            self._late.popitem(last=False)
        self._extents.drop(request.refs)

    def _memory(self, request: Memory, client: Client) -> ExtentStatistics:
        return self._extents.statistics()._replace(num_sessions=len(self._clients))


ExtentHost.handlers = {
    Allocate: ExtentHost._allocate,
    Written: ExtentHost._written,
    Fill: ExtentHost._fill,
    Find: ExtentHost._find,
    Fetch: ExtentHost._fetch,
    Release: ExtentHost._release,
    Drop: ExtentHost._drop,
    Retain: lambda host, request, client: host._extents.retain(request.live),
    Memory: ExtentHost._memory,
}
