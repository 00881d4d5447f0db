"""`ExtentClient`: a client's connection to an `ExtentHost`: puts and reads of columns, in shared memory or over the
wire.

Shape legend: ``N`` rows of a write, ``n`` rows of a read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from dataplane_core.errors import CorruptDataError
from dataplane_core.host_memory import Arena, copy_arrays, recycled_bytes
from dataplane_core.host_memory.arena import Uses, extent_bytes
from dataplane_core.host_memory.copying import Copy
from dataplane_core.hosting.extent_host import AboutExtents, Allocate, Drop, Fetch, Fill, Find, Written
from dataplane_core.hosting.extents import Column, Layout, Place, Wanted, offsets_at
from dataplane_core.hosting.messages import Bytes, decode_about
from dataplane_core.hosting.session import Pin, Session
from dataplane_core.kept_extents import digest_of
from dataplane_core.ledger import Ref, commands
from dataplane_core.spec import FieldSpec, Ragged, WireColumn

if TYPE_CHECKING:  # a client that only asks does without torch
    import torch

#: A put of at most this many bytes is one request: the copy into it costs less than further requests.
_FEW_BYTES: Final = 16 << 10


class StoredRows(NamedTuple):
    """Some rows of a write, for a read."""

    columns: Mapping[str, WireColumn]
    rows: Sequence[int]  # of these columns
    positions: Sequence[int]  # where these rows stand in the read, one for each
    in_place: bool  # whether the read may return tensors on the memory of the columns; if not, it copies


class ExtentClient:
    """A connection to an `ExtentHost`. Thread-safe.

    Args:
        session: The session with it. Over a Unix socket it has brought the descriptor of the host's memory, which this
            object takes over: the process then shares the memory. Over TCP, bytes go over the wire.
        views: Whether reads return views of shared memory. Such memory is mapped read-only.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, session: Session, *, views: bool = False) -> None:
        self.session = session
        self.syncs = False  # whether it has the bytes of its puts on the host's disk before they are written
        self.arena: Arena | None = None  # the memory of the host, for puts; None: bytes go over the wire
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
        writes: Mapping[int, Iterable[WireColumn]],
        deadline: float,
        threads: int | None = 1,
        *,
        begin: commands.BeginPut | None = None,
        commits: Callable[[], object] = lambda: None,
    ) -> None:
        """Stores writes. Returns when every client can read them. If it raises, some may be stored: drop them.

        Args:
            writes: Write id -> its columns, in the order of its slots: tensors or `Ragged`, with N rows each.
            deadline: On `time.monotonic`'s clock, in seconds.
            threads: How many threads copy into shared memory; as for `copy_arrays`.
            begin: The put, if the host has the ledger too. Then it is begun before, and committed after that.
            commits: Called before the message that asks for the commit. After it, the put may be done without a reply.

        Raises:
            CapacityExceededError: The host has no room for them.
            DataPlaneError: As `Session.call`.
        """
        what = "put_samples"
        assert writes or begin is not None, "a put brings writes, or is begun and committed here"
        plans = [_Plan(write_id, list(columns)) for write_id, columns in writes.items()]
        wanted = [plan.wanted for plan in plans]
        first: list[Any] = []
        last: list[Any] = []
        if begin is not None:
            assert begin.write_id is not None
            first, last = [begin], [commands.CommitPut(begin.write_id)]
        size_bytes = sum(write.layout.size_bytes for write in wanted)
        if not wanted or (size_bytes <= _FEW_BYTES and not self.syncs):
            data = [b"".join(array.data for array in plan.whole()) for plan in plans]
            brought = [Allocate(wanted, data=data)] if wanted else []  # else the store has all of its cells
            commits()
            self.session.call_all(what, deadline, [*first, *brought, *last])
            return
        put = wanted[0].write_id
        if self.arena is None:
            assert begin is None, "who has the ledger too serves this host only"
            # not alone: a message that the host cannot read would end the connection, as if the host had ended
            self.session.call_all(what, deadline, [Allocate(wanted)])
            sources = [array for plan in plans for array in plan.whole()]
            self.session.call(what, deadline, Fill(put), sources=sources)
            return
        arena = self.arena
        held = self.session.new_pin()  # nobody gets the memory while it is written, even if the put is given up
        try:
            *_, offsets = self.session.call_all(what, deadline, [*first, Allocate(wanted, held.number)])
            placed = list(zip(offsets, plans, strict=True))
            bounds = [(offset, offset + extent_bytes(plan.wanted.layout.size_bytes)) for offset, plan in placed]
            # no later owner of the memory gives it to others meanwhile
            with self._uses.during(bounds, lambda: self.check(what)) if self._uses is not None else nullcontext():
                chunks = [(offset + at, chunk) for offset, plan in placed for at, chunk in plan.chunks()]
                copies = [(arena.bytes[start : start + len(chunk)], chunk) for start, chunk in chunks]
                # the disk works while this process copies the rest and makes the digests
                copy_arrays(copies, threads, copied=arena.begin_sync if self.syncs else None)
                digests = [digest_of(arena.bytes[start:stop]) for start, stop in bounds] if self.syncs else None
                for start, stop in bounds if self.syncs else ():
                    arena.sync(start, stop)
                commits()
                self.session.call_all(what, deadline, [Written(put, digests), *last])
        finally:
            held.release()

    def get(self, parts: Sequence[commands.Part], specs: Mapping[str, FieldSpec], deadline: float) -> list[StoredRows]:
        """Where rows are that the ledger located: in shared memory, pinned as long as the columns live, or in memory of
        this process. Call `check` when they are copied. Raises `RefsGoneError`, which names those that do not exist."""
        if self.arena is None:
            return self._fetch(parts, specs, deadline)
        pin = self.session.new_pin()
        try:
            wanted = [(part.write_id, part.positions) for part in parts]
            places = self.session.call("get_samples", deadline, Find(wanted, pin.number))
        except BaseException:
            pin.release()  # the traceback refers to it
            raise
        return self._rows(parts, places, specs, pin)

    def _rows(
        self, parts: Sequence[commands.Part], places: Sequence[Place], specs: Mapping[str, FieldSpec], pin: Pin
    ) -> list[StoredRows]:
        if self._views and self._uses is not None:
            bounds = {place.bounds for place in places}
            self._uses.as_long_as(pin, bounds, lambda: self.check("get_samples"))
        memory = self._seen.window(owner=pin)
        stored = []
        for part, place in zip(parts, places, strict=True):
            extent, layout = memory[slice(*place.bounds)], place.layout.columns
            columns = {
                name: _stored(extent, layout[slot], place.num_rows, specs[name])
                for name, slot in zip(part.fields, part.slots, strict=True)
            }
            stored.append(StoredRows(columns, place.rows_of(part.positions), part.rows, self._views))
        return stored

    def check(self, what: str) -> None:
        """After a copy out of what `get` gave: raises if the host has ended, since another may have its memory."""
        if self._uses is not None:
            self.session.check(what)

    def drop(self, refs: Sequence[Ref], deadline: float) -> None:
        """Drops rows. Ignores those that do not exist."""
        self.session.call("clear_samples", deadline, Drop(list(refs)))

    def _fetch(
        self, parts: Sequence[commands.Part], specs: Mapping[str, FieldSpec], deadline: float
    ) -> list[StoredRows]:
        """Gets rows over the wire."""
        stored: list[StoredRows] = []

        def receive(places: list[Place], fill: Callable[[Bytes], None]) -> None:
            for part, place in zip(parts, places, strict=True):
                count, layout = len(part.positions), place.layout.columns
                received = {
                    name: _stored(*_received(layout[slot], count, fill), count, specs[name])
                    for name, slot in zip(part.fields, part.slots, strict=True)
                }
                stored.append(StoredRows(received, range(count), part.rows, in_place=True))

        wanted = [(part.write_id, list(part.slots), part.positions) for part in parts]
        self.session.call("get_samples", deadline, Fetch(wanted), receive=receive)
        return stored


# --- writing ----------------------------------------------------------------------------------------------------------


class _Plan:
    """Where the columns of a write will lie in its extent, and their bytes."""

    def __init__(self, write_id: int, columns: Sequence[WireColumn]) -> None:
        from dataplane_core.codec.tensors import DTYPE_CODES  # it imports torch

        self._columns = columns
        layout, num_rows = Layout([]), len(columns[0])
        for column in columns:
            if isinstance(column, Ragged):
                layout.add_ragged(num_rows, len(column.values), column.itemsize, DTYPE_CODES[column.values.dtype])
            else:
                assert not isinstance(column, list)
                length = column.shape[1] if column.dim() > 1 else 0
                step = column.dtype.itemsize * math.prod(column.shape[1:])
                layout.add_dense(num_rows, step, length, DTYPE_CODES[column.dtype])
        self.wanted = Wanted(write_id, layout, num_rows)

    def chunks(self) -> list[tuple[int, Bytes]]:
        """The bytes of the tables and columns, ascending: where each chunk begins in the extent, and the chunk."""
        from dataplane_core.codec.tensors import byte_array  # it imports torch

        chunks: list[tuple[int, Bytes]] = []
        for column, at in zip(self._columns, self.wanted.layout.columns, strict=True):
            if isinstance(column, Ragged):
                chunks.append((at.table, column.offsets.numpy().view(np.uint8)))
            values = column.values if isinstance(column, Ragged) else column
            assert not isinstance(values, list)
            chunks.append((at.start, byte_array(values.contiguous())))
        return chunks

    def whole(self) -> list[Bytes]:
        """The bytes of the extent, in arrays that follow one another."""
        arrays: list[Bytes] = []
        end = 0
        for start, chunk in self.chunks():
            if start > end:
                arrays.append(np.zeros(start - end, dtype=np.uint8))
            arrays.append(chunk)
            end = start + len(chunk)
        return arrays


# --- reading ----------------------------------------------------------------------------------------------------------


def _received(column: Column, num_rows: int, fill: Callable[[Bytes], None]) -> tuple[Bytes, Column]:
    """Receives a column into memory of its own. Returns that, and where the column lies there."""
    layout = Layout([])
    if column.table < 0:
        at = layout.add_dense(num_rows, column.step, column.length, column.dtype)
        data = recycled_bytes(layout.size_bytes)
        fill(data)
        return data, at
    table = np.empty(num_rows + 1, dtype=np.int64)
    fill(table.view(np.uint8))
    if table[0] != 0 or (np.diff(table) < 0).any():
        raise CorruptDataError("a storage unit sent a column whose rows overlap.")
    at = layout.add_ragged(num_rows, int(table[-1]), column.step, column.dtype)
    data = recycled_bytes(layout.size_bytes)
    data[at.table : at.table + table.nbytes] = table.view(np.uint8)
    fill(data[at.start :])
    return data, at


def read_stored(
    specs: Mapping[str, FieldSpec], parts: Sequence[StoredRows], num_rows: int, threads: int | None = 1
) -> dict[str, WireColumn]:
    """The columns of a read of n rows, in the order of the request; ``threads`` as for `copy_arrays`.

    Columns that may be given in place are, if their rows lie there in this order. Others are copied into new memory.
    """
    from dataplane_core.codec.rows import Piece, merge_pieces, rows_in_order  # it imports torch

    pieces: dict[str, list[Piece]] = {name: [] for name in specs}
    starts: dict[str, int] = {}  # the first row of each field whose rows lie in the order of the request
    for part in parts:
        for name, column in part.columns.items():
            pieces[name].append(Piece(column, part.rows, part.positions))
        in_order = part.in_place and rows_in_order(part.positions, 0, num_rows)
        if in_order and rows_in_order(part.rows, part.rows[0], num_rows):
            starts.update(dict.fromkeys(part.columns, part.rows[0]))
    copies: list[Copy] = []
    columns: dict[str, WireColumn] = {}
    for name, parts_of_field in pieces.items():
        dtype = specs[name].stored.torch_dtype if specs[name].kind == "tensor" else None
        view = _as_it_lies(parts_of_field[0].column, starts[name], num_rows, dtype) if name in starts else None
        columns[name] = merge_pieces(parts_of_field, dtype, copies) if view is None else view
    copy_arrays(copies, threads)
    return columns


def _as_it_lies(column: WireColumn, start: int, num_rows: int, dtype: torch.dtype | None) -> WireColumn | None:
    """A column on the memory of another one, from the row ``start``. None if that has narrow integers."""
    import torch

    if isinstance(column, Ragged):
        if dtype not in (None, column.values.dtype):
            return None
        cuts = column.offsets.numpy()[start : start + num_rows + 1]
        return Ragged(column.values[cuts[0] : cuts[-1]], torch.from_numpy(cuts - cuts[0]))
    assert isinstance(column, torch.Tensor)
    return None if dtype not in (None, column.dtype) else column[start : start + num_rows]


def _stored(extent: Bytes, column: Column, num_rows: int, field: FieldSpec) -> WireColumn:
    """A column with all rows that lie in an extent; a view of it. Raises `CorruptDataError`."""
    import torch

    from dataplane_core.codec.compact import is_narrow
    from dataplane_core.codec.tensors import DTYPE_OF_CODE

    spec = field.stored
    is_object = spec.kind == "object"
    dtype, rank = (torch.uint8, 1) if is_object else (spec.torch_dtype, spec.rank)
    stored = DTYPE_OF_CODE.get(column.dtype) if column.dtype else dtype
    if stored is None or not (stored == dtype or is_narrow(stored, dtype)):
        raise CorruptDataError(f"a put has cells of {stored} of a field of {dtype}.")
    if column.table < 0:
        shape = (num_rows, *spec.trailing) if rank == 0 else (num_rows, column.length, *spec.trailing)
        return _tensor(extent, column.start, shape, stored)
    offsets = torch.from_numpy(offsets_at(extent, column, num_rows))
    return Ragged(_tensor(extent, column.start, (int(offsets[-1]), *spec.trailing), stored), offsets)


def _tensor(extent: Bytes, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on an extent."""
    import torch

    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(extent[start : start + size_bytes]).view(dtype).view(shape)
