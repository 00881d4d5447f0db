"""`ExtentService`: which parts of an arena hold what. It knows no ledger, so any process can host it.

A put has an extent for each of its writes. An extent is pinned while a client writes, reads or views it. What is pinned
keeps its place and its bytes, even when its rows are dropped. Rows that were dropped are room for others: extents with
such rows are squeezed, and extents slide together.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from dataplane_core.host_memory import Arena, Extent, Extents
from dataplane_core.hosting.layout import Bytes, Layout, squeeze
from dataplane_core.ledger import Ref

#: Bytes of an extent without rows that are squeezed at least. Less is not worth the work.
_LEAST_DEAD: Final = 64


class Place(msgspec.Struct, array_like=True):
    """Where a write lies.

    Attributes:
        offset: Where its extent begins in the arena.
        layout: Where its columns lie in the extent.
        num_rows: How many rows the extent holds.
    """

    offset: int
    layout: Layout
    num_rows: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Where its extent begins and ends in the arena."""
        return self.offset, self.offset + self.layout.size_bytes


class Wanted(NamedTuple):
    """An extent to be allocated: the write that it is for, its layout, and its rows."""

    write_id: int
    layout: Layout
    num_rows: int


class ExtentStatistics(NamedTuple):
    """How much memory is used, and for what.

    Attributes:
        size_bytes: Size of the arena.
        held_bytes: Bytes of the rows that exist, with their tables. A put can get the rest, but for what is pinned.
        pinned_bytes: Bytes of those that are read, viewed or written now.
        touched_bytes: Memory of the system that the arena uses.
        num_extents: Number of extents.
        num_sessions: Number of connected clients, as their host says.
    """

    size_bytes: int
    held_bytes: int
    pinned_bytes: int
    touched_bytes: int
    num_extents: int
    num_sessions: int = 0


@dataclass(slots=True, eq=False)
class Holds:
    """What one client holds.

    Attributes:
        writing: A put -> the extents that it writes.
        pins: Number of a pin -> the extents that it reads or views.
    """

    writing: dict[int, list[Extent]] = field(default_factory=dict)
    pins: dict[int, list[Extent]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Payload:
    """The payload of one write, as the service knows it.

    Attributes:
        extent: Where it lies.
        layout: Where its columns lie in it.
        num_rows: How many rows lie there.
        num_live: How many of them exist.
        rows: Position in the write -> row of the extent, -1 if it is gone. None: all, in order.
        num_positions: How many rows the write had.
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

    def squeeze(self, data: Bytes) -> None:
        """Moves the rows that exist together, at the start of its bytes."""
        assert self.rows is not None
        # in order, so that each row moves to a lower offset, over bytes that were read already
        kept = sorted(row for row in self.rows if row >= 0)
        self.layout = squeeze(data, self.layout, self.num_rows, kept)
        now = {row: index for index, row in enumerate(kept)}
        self.rows = [now.get(row, -1) for row in self.rows]
        self.num_rows = len(kept)

    @property
    def dead_bytes(self) -> int:
        """About how many bytes squeezing it would free."""
        return self.layout.size_bytes * (self.num_rows - self.num_live) // max(self.num_rows, 1)


class ExtentService:
    """The extents of an arena. One thread uses it.

    Args:
        arena: The memory.
        touch_ahead_bytes: How much of it is made ready before it is used.

    Attributes:
        syncs: Whether the bytes of a put must be on a disk before it is kept.
    """

    syncs = False

    def __init__(self, arena: Arena, touch_ahead_bytes: int = 0) -> None:
        self._arena = arena
        self._extents = Extents(arena.size_bytes)
        self._payloads: dict[int, Payload] = {}
        self._doomed: dict[Extent, None] = {}  # free as soon as nobody pins them
        #: The least size for which no room could be made since rows were dropped or pins ended. Not searched again.
        self._least_refused: int | None = None
        self._touch_ahead_bytes = touch_ahead_bytes
        self.touch_until = 0  # how much of the arena is ready, or will be soon
        self._toucher: threading.Thread | None = None

    @property
    def most_bytes(self) -> int:
        """The most bytes that all extents may take."""
        return self._extents.size_bytes

    # --- writing and reading ------------------------------------------------------------------------------------------

    def allocate(self, holds: Holds, put: int, wanted: Sequence[Wanted]) -> list[int] | None:
        """Extents for the writes of a put, pinned until `stop_writing`.

        Returns:
            Where they begin, or None if there is no room for all of them.
        """
        extents = self._allocate_all([each.layout.size_bytes for each in wanted])
        if extents is None:
            return None
        holds.writing[put] = extents
        for each, extent in zip(wanted, extents, strict=True):
            self._payloads[each.write_id] = Payload(extent, each.layout, *(each.num_rows,) * 3)
        return [extent.offset for extent in extents]

    def check_room(self, size_bytes: int) -> None:
        """Raises `CapacityExceededError` if it is known that a put of so many bytes can get no room now."""

    def keep(self, put: int, digests: Sequence[bytes] | None = None) -> None:
        """The bytes of a put are there, which is still pinned. What outlives its process notes where they lie.

        Args:
            put: The put.
            digests: `digest_of` the extent of each write, from who wrote the bytes and then had them synced. None: they
                were not synced.
        """

    def retain(self, live: Mapping[int, Sequence[int]]) -> None:
        """Of what an earlier process left, only these positions exist. Here nothing is."""

    def stop_writing(self, holds: Holds, put: int) -> None:
        """A put no longer writes."""
        self._unpin_all(holds.writing.pop(put, ()))

    def find(self, write_id: int, positions: list[int]) -> tuple[Place | None, list[int], list[int]]:
        """Where rows of a write are.

        Returns:
            The place of the write, None if it is gone; the rows of its extent; and which positions are gone.
        """
        payload = self._payloads.get(write_id)
        if payload is None:
            return None, [], positions
        place = Place(payload.extent.offset, payload.layout, payload.num_rows)
        if positions and not (min(positions) >= 0 and max(positions) < payload.num_positions):
            return place, [], [each for each in positions if not 0 <= each < payload.num_positions]
        if payload.rows is None:
            return place, positions, []
        rows = [payload.rows[position] for position in positions]
        return place, rows, [position for position, row in zip(positions, rows, strict=True) if row < 0]

    def holds(self, write_id: int) -> bool:
        """Whether it has rows of a write."""
        return write_id in self._payloads

    def forget(self, write_ids: Iterable[int]) -> None:
        """Drops writes whole. Ignores those that do not exist."""
        self._least_refused = None
        for write_id in write_ids:
            if write_id in self._payloads:
                self._remove(write_id)

    def pin(self, holds: Holds, number: int, write_ids: Iterable[int]) -> None:
        """Pins writes under a number that the client draws. One that is used again holds what it names last."""
        extents = [self._payloads[write_id].extent for write_id in write_ids]
        # before the release: what both the old and the new pin name must not slide in between
        for extent in extents:
            extent.pins += 1
        self.release(holds, number)
        holds.pins[number] = extents

    def release(self, holds: Holds, number: int) -> None:
        """Ends a pin. Ignores a number that holds nothing."""
        self._unpin_all(holds.pins.pop(number, ()))

    def release_all(self, holds: Holds) -> None:
        """A client is gone, and holds nothing any more."""
        for pin in list(holds.pins):
            self.release(holds, pin)
        for put in list(holds.writing):
            self.stop_writing(holds, put)

    def drop(self, refs: Iterable[Ref]) -> None:
        """Rows are no longer needed. Ignores those that do not exist."""
        self._least_refused = None
        for write_id, position in refs:
            payload = self._payloads.get(write_id)
            if payload is None:
                continue
            payload.drop(position)
            if not payload.num_live:
                self._remove(write_id)

    def _remove(self, write_id: int) -> None:
        extent = self._payloads.pop(write_id).extent
        # a client still reads it: its bytes must not be given to another put before the pin ends
        if extent.pins:
            self._doomed[extent] = None
        else:
            self._free(extent)

    def _free(self, extent: Extent) -> None:
        self._extents.free(extent)

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """The memory."""
        return self._arena

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents."""
        return self._extents.used_bytes

    def statistics(self) -> ExtentStatistics:
        """How much memory is used now."""
        extents = [*self._doomed, *(each.extent for each in self._payloads.values())]
        dead_bytes = sum(each.dead_bytes for each in self._payloads.values())
        return ExtentStatistics(
            size_bytes=self.most_bytes,
            held_bytes=self._extents.used_bytes - dead_bytes - sum(each.size_bytes for each in self._doomed),
            pinned_bytes=sum(each.size_bytes for each in extents if each.pins),
            touched_bytes=self._arena.touched_bytes,
            num_extents=len(extents),
        )

    def touch_ahead(self) -> None:
        """Makes more memory ready, in the background, if less than half of what lies ahead is left."""
        ahead, high_water, size_bytes = self._touch_ahead_bytes, self._extents.high_water, self.most_bytes
        if self._toucher is not None and self._toucher.is_alive():
            return
        if ahead and self.touch_until < min(high_water + ahead // 2 + 1, size_bytes):
            start, self.touch_until = self.touch_until, min(high_water + ahead, size_bytes)
            with contextlib.suppress(RuntimeError):  # no more threads are allowed: memory is ready when it is used
                self._toucher = self._arena.touch_in_background(start, self.touch_until)

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
        waiting = deque(self._squeezable())
        free = self._extents.size_bytes - self._extents.used_bytes
        while waiting and free < size_bytes:
            free += self._squeeze(waiting.popleft())
        while not self._extents.make_room(size_bytes, self._move):
            if not waiting:
                return False
            self._squeeze(waiting.popleft())
        return True

    def _squeezable(self) -> list[int]:
        """The writes with dropped rows, those with most first."""
        # pinned ones are left alone: a client reads them by the offsets of the layout that it was told
        dead = {
            write_id: -each.dead_bytes
            for write_id, each in self._payloads.items()
            if not each.extent.pins and each.dead_bytes >= _LEAST_DEAD
        }
        return sorted(dead, key=dead.__getitem__)

    def _squeeze(self, write_id: int) -> int:
        """Frees the bytes of dropped rows. Returns how many."""
        payload = self._payloads[write_id]
        before = payload.extent.size_bytes
        payload.squeeze(self._bytes_of(payload.extent))
        self._extents.shrink(payload.extent, payload.layout.size_bytes)
        return before - payload.extent.size_bytes

    def _bytes_of(self, extent: Extent) -> Bytes:
        return self._arena.bytes[extent.offset : extent.offset + extent.size_bytes]

    def _move(self, source: int, target: int, size_bytes: int) -> None:
        data = self._arena.bytes
        data[target : target + size_bytes] = data[source : source + size_bytes]

    def _unpin_all(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            extent.pins -= 1
            self._least_refused = None
            if not extent.pins and extent in self._doomed:
                del self._doomed[extent]
                self._free(extent)
