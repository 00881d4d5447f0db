"""`ExtentClient`: a client's connection to an `ExtentHost`: puts and reads of columns, in shared memory or over the
wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from dataplane_core.backends.extent_columns import ExtentPlan, StoredRows, stored_columns
from dataplane_core.backends.ledger_backend import RefsGoneError
from dataplane_core.backends.shared_memory import ExtentRead, SharedMemory
from dataplane_core.codec import StoredColumn
from dataplane_core.errors import BackendError, CorruptDataError
from dataplane_core.host_memory import copy_arrays, extent_bytes, recycled_bytes
from dataplane_core.hosting import (
    AboutExtents,
    Allocate,
    Bytes,
    CheckRoom,
    Column,
    Drop,
    Fetch,
    Fetched,
    Fill,
    Find,
    Layout,
    PutWhole,
    Session,
    Wanted,
    Written,
    decode_about,
    digest_of,
)
from dataplane_core.ledger import Ref, commands
from dataplane_core.spec import FieldSpec

#: A put of at most this many bytes is one request: the copy into it costs less than further requests.
_FEW_BYTES: Final = 16 << 10


class ExtentClient:
    """A connection to an `ExtentHost`. Thread-safe.

    Args:
        session: The session with it. Over a Unix socket it has brought the descriptor of the host's memory, which this
            process then shares. Over TCP, bytes go over the wire.
        views: Whether reads return views of shared memory. Such memory is mapped read-only.

    Attributes:
        session: The session.
        syncs: Whether this client has the bytes of its puts on the host's disk before they are written.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, session: Session, *, views: bool = False) -> None:
        self.session = session
        self.syncs = False
        self._memory: SharedMemory | None = None
        if session.descriptors:
            self._memory = SharedMemory(session, views=views)
            about = decode_about(session.welcome, AboutExtents)
            self.syncs = about.syncs
            self._memory.touch_in_background(about.touched_bytes)

    @property
    def path(self) -> Literal["memory", "wire"]:
        """How bytes get to the host and back: in memory that this process shares with it, or over the wire."""
        return "wire" if self._memory is None else "memory"

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
            data = [b"".join(each.data for each in _whole(plan)) for plan in plans.values()]
            commits()
            self.session.call_all(what, deadline, [*first, PutWhole(put, writes, data), *last])
            return
        if self._memory is None:
            self.session.call_all(what, deadline, [*first, Allocate(put, writes)])
            sources = [array for plan in plans.values() for array in _whole(plan)]
            self.session.call(what, deadline, Fill(put), sources=sources)
            if last:
                commits()
                self.session.call_all(what, deadline, last)
            return
        arena = self._memory.arena
        held = self.session.new_pin()  # nobody gets the memory while it is written, even if the put is given up
        try:
            *_, offsets = self.session.call_all(what, deadline, [*first, Allocate(put, writes, held.number)])
            placed = list(zip(offsets, plans.values(), strict=True))
            bounds = [(offset, offset + extent_bytes(plan.layout.size_bytes)) for offset, plan in placed]
            with self._memory.writing(bounds):
                copies = [copy for offset, plan in placed for copy in plan.copies_into(arena.bytes[offset:])]
                # the disk works while this process copies the rest and makes the digests
                copy_arrays(copies, threads, copied=arena.begin_sync if self.syncs else None)
                digests = [digest_of(arena.bytes[slice(*each)]) for each in bounds] if self.syncs else None
                for each in bounds if self.syncs else ():
                    arena.sync(*each)
                commits()
                self.session.call_all(what, deadline, [Written(put, digests), *last])
        finally:
            held.release()

    def get(self, reads: Sequence[ExtentRead], specs: Mapping[str, FieldSpec], deadline: float) -> list[StoredRows]:
        """Where rows are: in shared memory, pinned as long as the columns live, or in memory of this process.

        Args:
            reads: The rows.
            specs: The specs of their fields.
            deadline: On `time.monotonic`'s clock, in seconds.

        Raises:
            RefsGoneError: Some do not exist. Its refs name them.
            DataPlaneError: As `Session.call`.
        """
        if self._memory is None:
            return self._fetch(reads, specs, deadline)
        pin = self.session.new_pin()
        try:
            wanted = [(each.write_id, list(each.positions)) for each in reads]
            found = self.session.call("get_samples", deadline, Find(wanted, pin.number))
            _refuse_gone(found.gone)
        except BaseException:
            pin.release()  # the traceback refers to it
            raise
        there = [
            read if moved is None else ExtentRead(read.write_id, read.slots, moved, read.rows)
            for read, moved in zip(reads, found.rows, strict=True)
        ]
        return self._memory.rows(there, found.places, specs, pin)

    def check(self, what: str) -> None:
        """After a copy out of what `get` gave: as `SharedMemory.check`."""
        if self._memory is not None:
            self._memory.check(what)

    def drop(self, refs: Sequence[Ref], deadline: float) -> None:
        """Drops rows. Ignores those that do not exist."""
        self.session.call("clear_samples", deadline, Drop(list(refs)))

    def _fetch(self, reads: Sequence[ExtentRead], specs: Mapping[str, FieldSpec], deadline: float) -> list[StoredRows]:
        """Gets rows over the wire."""
        parts: list[StoredRows] = []

        def receive(fetched: Fetched, fill: Callable[[Bytes], None]) -> None:
            _refuse_gone(fetched.gone)
            if [len(each) for each in fetched.columns] != [len(read.slots) for read in reads]:
                raise BackendError("a storage unit sent other columns than were asked for.")
            for read, columns in zip(reads, fetched.columns, strict=True):
                count = len(read.positions)
                found: dict[str, StoredColumn] = {}
                for name, column in zip(read.slots, columns, strict=True):
                    data, layout = _received(column, count, fill)
                    found |= stored_columns(data, layout, count, {name: 0}, specs)
                parts.append(StoredRows(found, range(count), read.rows, in_place=True))

        asked = [(each.write_id, list(each.slots.values()), list(each.positions)) for each in reads]
        self.session.call("get_samples", deadline, Fetch(asked), receive=receive)
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
