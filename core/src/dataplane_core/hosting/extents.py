"""`ExtentService`: which parts of an arena hold what, and where the columns of a put lie there. It knows no ledger.

A put has an extent for each of its writes. An extent is pinned while a client writes, reads or views it: it keeps its
place and its bytes, even when its rows are dropped. Rows that were dropped are room for others: extents with such rows
are squeezed, and extents slide together.

Numpy only: processes that host extents have no torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from dataplane_core.errors import DataPlaneError
from dataplane_core.host_memory import Arena
from dataplane_core.host_memory.arena import Extent, Extents
from dataplane_core.hosting.messages import Bytes
from dataplane_core.ledger import Ref

#: The most rows of a write.
_MOST_ROWS: Final = 1 << 24
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
#: Bytes of an extent without rows that are squeezed at least. Less is not worth the work.
_LEAST_DEAD: Final = 64


# --- where the columns of a put lie in its extent ---------------------------------------------------------------------


class Column(msgspec.Struct, array_like=True, frozen=True):
    """One column of a put. Dense: its rows, one after the other. Ragged: a table of N + 1 offsets (int64, in elements),
    then its rows end to end.
    """

    start: _Count  # where its values begin in the extent
    step: _Count  # bytes of one row (dense), or of one element of the ragged dim
    table: int = -1  # where its offsets begin in the extent; -1 for a dense column
    length: _Count = 0  # size of the first dim of each cell of a dense column of rank 1 or more
    dtype: int = 0  # what the writer says of the dtype of its cells, for the reader; 0: it is that of the field


def _aligned(offset: int, size_bytes: int) -> int:
    """Where ``size_bytes`` may begin at or after ``offset``. A lower offset or size never gives a higher result."""
    alignment = 64 if size_bytes >= 1024 else 16
    return -(-offset // alignment) * alignment


class Layout(msgspec.Struct, array_like=True):
    """The columns of a put, in the order of its slots, and the bytes that they take with their tables."""

    columns: list[Column] = []
    size_bytes: _Count = 0

    def add_dense(self, num_rows: int, step: int, length: int = 0, dtype: int = 0) -> Column:
        size_bytes = num_rows * step
        start = _aligned(self.size_bytes, size_bytes)
        return self._add(Column(start, step, length=length, dtype=dtype), size_bytes)

    def add_ragged(self, num_rows: int, num_elements: int, step: int, dtype: int = 0) -> Column:
        table_bytes, size_bytes = 8 * (num_rows + 1), num_elements * step
        table = _aligned(self.size_bytes, table_bytes)
        start = _aligned(table + table_bytes, size_bytes)
        return self._add(Column(start, step, table, dtype=dtype), size_bytes)

    def _add(self, column: Column, size_bytes: int) -> Column:
        self.columns.append(column)
        self.size_bytes = column.start + size_bytes
        return column

    def fits(self, num_rows: int) -> bool:
        """Whether all columns lie in its bytes."""
        return all(
            column.start + num_rows * column.step <= self.size_bytes
            if column.table < 0
            else max(column.start, column.table + 8 * (num_rows + 1)) <= self.size_bytes
            for column in self.columns
        )


def offsets_at(extent: Bytes, column: Column, num_rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where the rows of a column begin and end, in steps. Of a ragged column it is the table; a view."""
    if column.table < 0:
        return np.arange(num_rows + 1)
    return extent[column.table : column.table + 8 * (num_rows + 1)].view(np.int64)


def arrays_of_rows(extent: Bytes, column: Column, num_rows: int, rows: Sequence[int]) -> list[Bytes]:
    """The bytes of some rows of a column, in any order: the table of their offsets, if it has one, and then the rows,
    in runs."""
    wanted = np.asarray(rows, dtype=np.int64)
    offsets = offsets_at(extent, column, num_rows)
    begins, ends = offsets[wanted], offsets[wanted + 1]
    arrays: list[Bytes] = []
    if column.table >= 0:
        table = np.zeros(len(wanted) + 1, dtype=np.int64)
        np.cumsum(ends - begins, out=table[1:])
        arrays.append(table.view(np.uint8))
    for begin, end in runs(begins * column.step, ends * column.step):
        arrays.append(extent[column.start + begin : column.start + end])
    return arrays


def squeeze(extent: Bytes, layout: Layout, num_rows: int, rows: Sequence[int]) -> Layout:
    """Moves the rows that are kept, ascending, together at the start of an extent, which nobody uses meanwhile. Returns
    their layout, whose offsets are never higher than before."""
    kept = np.asarray(rows, dtype=np.int64)
    squeezed = Layout([])
    for column in layout.columns:
        offsets = offsets_at(extent, column, num_rows)
        begins, ends = offsets[kept], offsets[kept + 1]  # copies: the table is overwritten
        if column.table < 0:
            new = squeezed.add_dense(len(kept), column.step, column.length, column.dtype)
        else:
            new = squeezed.add_ragged(len(kept), int((ends - begins).sum()), column.step, column.dtype)
            table = offsets_at(extent, new, len(kept))
            table[0] = 0
            np.cumsum(ends - begins, out=table[1:])
        target = new.start
        # ascending, to lower offsets; numpy copies overlaps right
        for begin, end in runs(begins * column.step, ends * column.step):
            extent[target : target + end - begin] = extent[column.start + begin : column.start + end]
            target += end - begin
    return squeezed


def runs(begins: Any, ends: Any) -> list[tuple[int, int]]:
    """Joins ranges that lie side by side: where each run of them begins and ends. The ranges ascend."""
    if not len(begins):
        return []
    breaks = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks - 1, [len(begins) - 1]))
    return list(zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True))


# --- the extents of an arena ------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """An extent to be allocated: the write that it is for, its layout, and its rows."""

    write_id: int
    layout: Layout
    num_rows: Annotated[int, msgspec.Meta(ge=1, le=_MOST_ROWS)]


class Place(msgspec.Struct, array_like=True):
    """Where rows of a write lie: its extent, the columns there, and the rows that were asked for."""

    offset: int  # of the extent in the arena
    layout: Layout
    num_rows: int  # in the extent
    rows: list[int] | None = None  # None: they have the same numbers as the positions

    @property
    def bounds(self) -> tuple[int, int]:
        """Where its extent begins and ends in the arena."""
        return self.offset, self.offset + self.layout.size_bytes

    def rows_of(self, positions: list[int]) -> list[int]:
        """The rows, given the positions that were asked for."""
        return positions if self.rows is None else self.rows


class RefsGoneError(DataPlaneError):
    """Located payload is gone: it was cleared or overwritten since then, or lost. `LedgerBackend` locates it again.

    It has the refs of what is gone, or for a `RowStoreBackend` the handles of the rows, if known.
    """

    def __init__(self, message: str, *, refs: Iterable[Ref] = (), handles: Iterable[int] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.refs = tuple(refs)
        self.handles = tuple(handles)


class ExtentStatistics(NamedTuple):
    """How much memory is used, and for what."""

    size_bytes: int  # of the arena
    held_bytes: int  # of the rows that exist, with their tables; a put can get the rest, but for what is pinned
    pinned_bytes: int  # of those that are read, viewed or written now
    touched_bytes: int  # memory of the system that the arena uses
    num_extents: int
    num_sessions: int = 0  # connected clients, as their host says


@dataclass(slots=True, eq=False)
class Payload:
    """The payload of one write."""

    extent: Extent
    layout: Layout
    num_rows: int  # in the extent
    num_live: int  # of them, those that exist
    num_positions: int  # rows that the write had
    rows: list[int] | None = None  # position in the write -> row of the extent, -1 if it is gone; None: all, in order

    def rows_at(self, positions: list[int]) -> list[int] | None:
        """The rows of the extent at these positions, -1 for what is gone. None: they have the same numbers."""
        if self.rows is None and (not positions or (min(positions) >= 0 and max(positions) < self.num_positions)):
            return None
        rows = range(self.num_positions) if self.rows is None else self.rows
        return [rows[position] if 0 <= position < self.num_positions else -1 for position in positions]

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
    """Which parts of an arena hold what. It makes some bytes ready before they are used. One thread uses it."""

    syncs = False  # whether the bytes of a put must be on a disk before it is kept

    def __init__(self, arena: Arena, touch_ahead_bytes: int = 0) -> None:
        self.arena = arena
        self._extents = Extents(arena.size_bytes)
        self.most_bytes = self._extents.size_bytes  # that all extents may take
        self._payloads: dict[int, Payload] = {}  # by write id
        self._doomed: dict[Extent, None] = {}  # free as soon as nobody pins them
        #: The least size for which no room could be made since rows were dropped or pins ended. Not searched again.
        self._least_refused: int | None = None
        self._touch_ahead_bytes = touch_ahead_bytes
        self.touch_until = 0  # so much of the arena is ready, or will be soon
        self._toucher: threading.Thread | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents."""
        return self._extents.used_bytes

    def allocate(self, wanted: Sequence[Wanted]) -> list[Extent] | None:
        """Extents for the writes of a put, pinned. None: there is no room for all of them."""
        extents: list[Extent] = []
        refused_before = self._least_refused
        for write in wanted:
            extent = self._allocate(write.layout.size_bytes)
            if extent is None:
                for extent in extents:
                    self._extents.free(extent)
                if extents:  # the size was refused for want of the room that these had
                    self._least_refused = refused_before
                return None
            extents.append(extent)
        for write, extent in zip(wanted, extents, strict=True):  # not before: an extent slides to make room for others
            extent.pins += 1
            self._payloads[write.write_id] = Payload(extent, write.layout, *(write.num_rows,) * 3)
        return extents

    def keep(self, write_ids: Sequence[int], digests: Sequence[bytes] | None = None) -> None:
        """The bytes of writes are there, whose extents are still pinned. What outlives its process notes where, with
        `digest_of` each extent, from who wrote the bytes and had them synced. None: they were not synced."""

    def work_aside(self) -> bool:
        """As `Host.work_aside`."""
        return False

    def retain(self, live: Mapping[int, Sequence[int]]) -> None:
        """Of what an earlier process left, only these positions exist. Here nothing is."""

    def find(self, wanted: Sequence[tuple[int, list[int]]]) -> list[Place]:
        """Where rows are, by write ids and positions. Raises `RefsGoneError`, which names all that do not exist."""
        places: list[Place] = []
        gone: list[Ref] = []
        for write_id, positions in wanted:
            payload = self._payloads.get(write_id)
            if payload is None:
                gone += [(write_id, position) for position in positions]
                continue
            rows = payload.rows_at(positions)
            if rows is not None:
                gone += [(write_id, position) for position, row in zip(positions, rows, strict=True) if row < 0]
            places.append(Place(payload.extent.offset, payload.layout, payload.num_rows, rows))
        if gone:
            raise RefsGoneError(f"{len(gone)} rows are gone.", refs=gone)
        return places

    def holds(self, write_id: int) -> bool:
        """Whether it has rows of a write."""
        return write_id in self._payloads

    def pin(self, write_ids: Iterable[int]) -> list[Extent]:
        """Pins the extents of writes until `unpin`."""
        extents = [self._payloads[write_id].extent for write_id in write_ids]
        for extent in extents:
            extent.pins += 1
        return extents

    def unpin(self, extents: Iterable[Extent]) -> None:
        """Ends a pin."""
        for extent in extents:
            extent.pins -= 1
            self._least_refused = None
            if not extent.pins and extent in self._doomed:
                del self._doomed[extent]
                self._free(extent)

    def drop(self, refs: Iterable[Ref]) -> None:
        """Rows are no longer needed. Ignores those that do not exist."""
        self._least_refused = None
        for write_id, position in refs:
            payload = self._payloads.get(write_id)
            if payload is not None:
                payload.drop(position)
                if not payload.num_live:
                    self._remove(write_id)

    def forget(self, write_ids: Iterable[int]) -> None:
        """Drops writes whole. Ignores those that do not exist."""
        self._least_refused = None
        for write_id in write_ids:
            if write_id in self._payloads:
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

    def statistics(self) -> ExtentStatistics:
        """How much memory is used now."""
        extents = [*self._doomed, *(payload.extent for payload in self._payloads.values())]
        dead_bytes = sum(payload.dead_bytes for payload in self._payloads.values())
        return ExtentStatistics(
            size_bytes=self.most_bytes,
            held_bytes=self.used_bytes - dead_bytes - sum(extent.size_bytes for extent in self._doomed),
            pinned_bytes=sum(extent.size_bytes for extent in extents if extent.pins),
            touched_bytes=self.arena.touched_bytes,
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
                self._toucher = self.arena.touch_in_background(start, self.touch_until)

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
            write_id: -payload.dead_bytes
            for write_id, payload in self._payloads.items()
            if not payload.extent.pins and payload.dead_bytes >= _LEAST_DEAD
        }
        return sorted(dead, key=dead.__getitem__)

    def _squeeze(self, write_id: int) -> int:
        """Frees the bytes of dropped rows. Returns how many."""
        payload = self._payloads[write_id]
        before = payload.extent.size_bytes
        payload.squeeze(self.bytes_of(payload.extent))
        self._extents.shrink(payload.extent, payload.layout.size_bytes)
        return before - payload.extent.size_bytes

    def bytes_of(self, extent: Extent) -> Bytes:
        """The bytes of an extent; a view."""
        return self.arena.bytes[extent.offset : extent.offset + extent.size_bytes]

    def _move(self, source: int, target: int, size_bytes: int) -> None:
        data = self.arena.bytes
        data[target : target + size_bytes] = data[source : source + size_bytes]
