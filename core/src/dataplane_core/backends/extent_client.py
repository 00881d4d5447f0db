"""`ExtentClient`: a client's connection to an `ExtentHost`: puts and reads of columns, in shared memory or over the
wire.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from dataplane_core.backends.extent_columns import ExtentPlan, StoredRows, stored_columns
from dataplane_core.backends.ledger_backend import RefsGoneError
from dataplane_core.errors import BackendError, CorruptDataError
from dataplane_core.host_memory import Arena, copy_arrays, recycled_bytes
from dataplane_core.host_memory.arena import Uses, extent_bytes
from dataplane_core.hosting.extent_host import (
    AboutExtents,
    Allocate,
    CheckRoom,
    Drop,
    Fetch,
    Fetched,
    Fill,
    Find,
    Found,
    PutWhole,
    Written,
)
from dataplane_core.hosting.extents import Column, Layout, Wanted
from dataplane_core.hosting.kept_extents import digest_of
from dataplane_core.hosting.messages import decode_about
from dataplane_core.hosting.session import Bytes, Pin, Session
from dataplane_core.ledger import Ref, commands
from dataplane_core.spec import FieldSpec, WireColumn

#: A put of at most this many bytes is one request: the copy into it costs less than further requests.
_FEW_BYTES: Final = 16 << 10


class ExtentRead(NamedTuple):
    """Rows of a write that a read asks for.

    Attributes:
        write_id: The write.
        slots: Field -> its place among the columns of the write.
        positions: Positions in the write.
        rows: Where these rows stand in the read, one for each.
    """

    write_id: int
    slots: Mapping[str, int]
    positions: Sequence[int]
    rows: Sequence[int]


def reads_of(parts: Sequence[commands.Part]) -> list[ExtentRead]:
    """What a read asks for, of what the ledger located."""
    return [
        ExtentRead(part.write_id, dict(zip(part.fields, part.slots, strict=True)), part.positions, part.rows)
        for part in parts
    ]


class ExtentClient:
    """A connection to an `ExtentHost`. Thread-safe.

    Args:
        session: The session with it. Over a Unix socket it has brought the descriptor of the host's memory, which this
            object takes over: the process then shares the memory. Over TCP, bytes go over the wire.
        views: Whether reads return views of shared memory. Such memory is mapped read-only.

    Attributes:
        session: The session.
        syncs: Whether this client has the bytes of its puts on the host's disk before they are written.
        arena: The memory of the host, for puts. None: bytes go over the wire.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, session: Session, *, views: bool = False) -> None:
        self.session = session
        self.syncs = False
        self.arena: Arena | None = None
        self._uses: Uses | None = None
        self._views = views
        if not session.descriptors:
            return
        about = decode_about(session.welcome, AboutExtents)
        self.syncs = about.syncs
        descriptor = session.descriptors[0]
        os.set_inheritable(descriptor, False)  # a program that inherits it would keep the memory
        self.arena = self._seen = Arena(descriptor)
        if os.fstat(descriptor).st_nlink:  # a file, which another process may open when this one's host has ended
            self._uses = Uses(descriptor)
        if views:
            self._seen = Arena(os.dup(descriptor), read_only=True)
        with suppress(RuntimeError):  # no more threads are allowed: memory is ready when it is used
            for arena in {self.arena, self._seen}:
                arena.touch_in_background(0, about.touched_bytes)

    @property
    def path(self) -> Literal["memory", "wire"]:
        """How bytes get to the host and back: in memory that this process shares with it, or over the wire."""
        return "wire" if self.arena is None else "memory"

    def put(
        self,
        plans: Mapping[int, ExtentPlan],
        deadline: float,
        threads: int | None = 1,
        *,
        begin: commands.BeginPut | None = None,
        commits: Callable[[], object] = lambda: None,
    ) -> None:
        """Stores writes. Returns when every client can read them.

        If it raises, some may be stored: drop them.

        Args:
            plans: By their write ids.
            deadline: On `time.monotonic`'s clock, in seconds.
            threads: How many threads copy into shared memory; as for `copy_arrays`.
            begin: The put, if the host has the ledger too. Then it is begun before, and committed after that.
            commits: Called before the message that asks for the commit. After it, the put may be done without a reply.

        Raises:
            CapacityExceededError: The host has no room for them.
            DataPlaneError: As `Session.call`.
        """
        what = "put_samples"
        writes = [Wanted(write_id, plan.layout, plan.num_rows) for write_id, plan in plans.items()]
        put, size_bytes = writes[0].write_id, sum(plan.layout.size_bytes for plan in plans.values())
        first: list[Any] = [] if begin is None else [CheckRoom(size_bytes), begin]
        last: list[Any] = [] if begin is None else [commands.CommitPut(put)]
        if size_bytes <= _FEW_BYTES and not self.syncs:
            data = [b"".join(array.data for array in _whole(plan)) for plan in plans.values()]
            commits()
            self.session.call_all(what, deadline, [*first, PutWhole(put, writes, data), *last])
            return
        if self.arena is None:
            self.session.call_all(what, deadline, [*first, Allocate(put, writes)])
            sources = [array for plan in plans.values() for array in _whole(plan)]
            self.session.call(what, deadline, Fill(put), sources=sources)
            if last:
                commits()
                self.session.call_all(what, deadline, last)
            return
        arena = self.arena
        held = self.session.new_pin()  # nobody gets the memory while it is written, even if the put is given up
        try:
            *_, offsets = self.session.call_all(what, deadline, [*first, Allocate(put, writes, held.number)])
            placed = list(zip(offsets, plans.values(), strict=True))
            bounds = [(offset, offset + extent_bytes(plan.layout.size_bytes)) for offset, plan in placed]
            # no later owner of the memory gives it to others meanwhile
            with self._uses.during(bounds, lambda: self.check(what)) if self._uses is not None else nullcontext():
                copies = [copy for offset, plan in placed for copy in plan.copies_into(arena.bytes[offset:])]
                # the disk works while this process copies the rest and makes the digests
                copy_arrays(copies, threads, copied=arena.begin_sync if self.syncs else None)
                digests = [digest_of(arena.bytes[start:stop]) for start, stop in bounds] if self.syncs else None
                for start, stop in bounds if self.syncs else ():
                    arena.sync(start, stop)
                commits()
                self.session.call_all(what, deadline, [Written(put, digests), *last])
        finally:
            held.release()

    def get(self, reads: Sequence[ExtentRead], specs: Mapping[str, FieldSpec], deadline: float) -> list[StoredRows]:
        """Where rows are: in shared memory, pinned as long as the columns live, or in memory of this process. Call
        `check` when they are copied.

        Args:
            reads: The rows.
            specs: The specs of their fields.
            deadline: On `time.monotonic`'s clock, in seconds.

        Raises:
            RefsGoneError: Some do not exist. Its refs name them.
            DataPlaneError: As `Session.call`.
        """
        if self.arena is None:
            return self._fetch(reads, specs, deadline)
        pin = self.session.new_pin()
        try:
            wanted = [(read.write_id, list(read.positions)) for read in reads]
            found = self.session.call("get_samples", deadline, Find(wanted, pin.number))
            _refuse_gone(found.gone)
        except BaseException:
            pin.release()  # the traceback refers to it
            raise
        return self._rows(reads, found, specs, pin)

    def _rows(
        self, reads: Sequence[ExtentRead], found: Found, specs: Mapping[str, FieldSpec], pin: Pin
    ) -> list[StoredRows]:
        if self._views and self._uses is not None:
            bounds = [place.bounds for place in found.places.values()]
            self._uses.as_long_as(pin, bounds, lambda: self.check("get_samples"))
        memory = self._seen.window(owner=pin)
        parts = []
        for read, rows in zip(reads, found.rows, strict=True):
            place = found.places[read.write_id]
            extent = memory[slice(*place.bounds)]
            columns = stored_columns(extent, place.layout, place.num_rows, read.slots, specs)
            parts.append(StoredRows(columns, read.positions if rows is None else rows, read.rows, self._views))
        return parts

    def check(self, what: str) -> None:
        """After a copy out of what `get` gave: that the host has kept it in its place until now.

        Raises:
            DataPlaneError: The host has ended, and another process may have its memory.
        """
        if self._uses is not None:
            self.session.check(what)

    def drop(self, refs: Sequence[Ref], deadline: float) -> None:
        """Drops rows. Ignores those that do not exist."""
        self.session.call("clear_samples", deadline, Drop(list(refs)))

    def _fetch(self, reads: Sequence[ExtentRead], specs: Mapping[str, FieldSpec], deadline: float) -> list[StoredRows]:
        """Gets rows over the wire."""
        parts: list[StoredRows] = []

        def receive(fetched: Fetched, fill: Callable[[Bytes], None]) -> None:
            _refuse_gone(fetched.gone)
            if [len(columns) for columns in fetched.columns] != [len(read.slots) for read in reads]:
                raise BackendError("a storage unit sent other columns than were asked for.")
            for read, columns in zip(reads, fetched.columns, strict=True):
                count = len(read.positions)
                stored: dict[str, WireColumn] = {}
                for name, column in zip(read.slots, columns, strict=True):
                    data, layout = _received(column, count, fill)
                    stored |= stored_columns(data, layout, count, {name: 0}, specs)
                parts.append(StoredRows(stored, range(count), read.rows, in_place=True))

        wanted = [(read.write_id, list(read.slots.values()), list(read.positions)) for read in reads]
        self.session.call("get_samples", deadline, Fetch(wanted), receive=receive)
        return parts


def _refuse_gone(gone: Sequence[Ref]) -> None:
    if gone:
        raise RefsGoneError(f"{len(gone)} rows are gone", refs=gone)


def _whole(plan: ExtentPlan) -> list[Bytes]:
    """The bytes of an extent, in arrays that follow one another."""
    arrays: list[Bytes] = []
    end = 0
    for start, data in plan.chunks():
        if start > end:
            arrays.append(np.zeros(start - end, dtype=np.uint8))
        arrays.append(data)
        end = start + len(data)
    return arrays


def _received(column: Column, num_rows: int, fill: Callable[[Bytes], None]) -> tuple[Bytes, Layout]:
    """Receives a column into memory of its own."""
    layout = Layout([])
    if column.table < 0:
        layout.add_dense(num_rows, column.step, column.length, column.dtype)
        data = recycled_bytes(layout.size_bytes)
        fill(data)
        return data, layout
    table = np.empty(num_rows + 1, dtype=np.int64)
    fill(table.view(np.uint8))
    if table[0] != 0 or (np.diff(table) < 0).any():
        raise CorruptDataError("a storage unit sent a column whose rows overlap.")
    at = layout.add_ragged(num_rows, int(table[-1]), column.step, column.dtype)
    data = recycled_bytes(layout.size_bytes)
    data[at.table : at.table + table.nbytes] = table.view(np.uint8)
    fill(data[at.start :])
    return data, layout
