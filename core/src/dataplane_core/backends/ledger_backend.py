"""`LedgerBackend`: every operation of a backend, on top of a `Ledger` and a payload store.

Payload is stored before the ledger makes it visible, and deleted after the ledger freed it. Write ids are never used
again. So a reader never gets half a row or another put's row, even after crashes.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeVar

import numpy as np
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from dataplane_core.backends.base import Backend
from dataplane_core.backends.content import Probes, ReadCells, without_known
from dataplane_core.config import SizeBytes
from dataplane_core.errors import (
    AlreadyDoneError,
    BackendError,
    CapacityExceededError,
    ContentGoneError,
    FrameError,
    InvalidRequestError,
    LostSamplesError,
    OperationTimeoutError,
    RoomTimeoutError,
    StalePartitionError,
    UnknownPartitionError,
    UnsupportedOperationError,
    preview,
)
from dataplane_core.hosting.extents import RefsGoneError
from dataplane_core.ledger import Command, Located, Ref, Reply, backoff_s, commands
from dataplane_core.ledger.queues import LEAST_ROOM_PAUSE_S
from dataplane_core.spec import (
    Capability,
    Claim,
    ClaimRequest,
    ClearRequest,
    FieldSpec,
    GetRequest,
    PartitionInfo,
    PutRequest,
    RegisterRequest,
    SharedRows,
    WireBatch,
    WireColumn,
    new_id,
)
from dataplane_core.spec.capabilities import GUARANTEES
from dataplane_core.spec.requests import OnceRequest, Request
from dataplane_core.spec.waking import CANCELLATION, Bell, Cancellation

_Request = TypeVar("_Request", bound=Request)

#: The capabilities of every backend on a ledger. A ledger on one host, which serves all clients, also has ``clients``;
#: one whose payload is in processes that come and go, ``units``.
LEDGER_CAPABILITIES: Final[frozenset[Capability]] = (
    frozenset(Capability) - GUARANTEES - {Capability.CLIENTS, Capability.UNITS}
) | {
    Capability.FENCED,
    Capability.ATOMIC_OVERWRITE,
    Capability.REPEATABLE,
}

#: Seconds beyond its deadline after which a put that was not committed counts as abandoned.
_ABANDON_GRACE_S: Final = 30.0
#: Seconds, of those left until its deadline, that a failed put may spend to undo itself. The next call then continues.
_UNDO_S: Final = 5.0
#: Seconds that a later call may spend to undo failed puts, and that a put which gives up may spend to leave the queue.
_LATE_UNDO_S: Final = 1.0
#: Seconds after which a waiting put says again that it waits.
_STILL_WAITS_S: Final = 15.0
#: Errors of a put that reserved nothing, whoever raises them: the ledger, or a host that gives up what it had begun.
NOT_BEGUN: Final = (
    AlreadyDoneError,
    CapacityExceededError,
    InvalidRequestError,
    UnknownPartitionError,
    UnsupportedOperationError,
)
#: Errors of `BeginPut` after which nothing is reserved. After any other error, bytes may be.
_REFUSALS: Final = (*NOT_BEGUN, StalePartitionError)

#: So often a put asks which of its cells the store has, if what it was told does not hold any more.
_MOST_QUESTIONS: Final = 3

#: How much the rows of columns that are apart may cost, as a share of the put.
_APART_SHARE: Final = 0.04
#: Columns whose cells have fewer bytes on average are never apart.
_LEAST_APART_BYTES: Final = 1024


class CapacityOptions(BaseModel):
    """Options of every backend that limits the payload that it holds.

    Attributes:
        capacity_bytes: Limit for the payload bytes held, such as ``8GB``, or None.
        on_full: What a put does that does not fit: wait until its deadline (``block``), or raise at once (``raise``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    capacity_bytes: SizeBytes | None = Field(default=None, gt=0)
    on_full: Literal["block", "raise"] = "block"


@dataclass(slots=True)
class _Ticket:
    """A put's place in the queue for room."""

    refusal: CapacityExceededError | None  # of the store, until the put begins to commit: before that it wrote nothing
    id: str = field(default_factory=new_id)
    queued_at: float | None = None  # when the put last said that it waits; None: it is not in the queue


class LedgerBackend(Backend, ABC):
    """All operations, from a ledger and a payload store. ``Config`` derives from `CapacityOptions`. Deadlines are on
    `time.monotonic`'s clock, in seconds."""

    capabilities = LEDGER_CAPABILITIES
    #: See `writes_of`. None: a read moves only the cells that it asks for, so no column needs to be apart.
    row_cost_bytes: ClassVar[int | None] = None
    # annotated, so that a subclass may have options without a default
    Config: ClassVar[type[CapacityOptions]] = CapacityOptions

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._not_undone: deque[int] = deque()  # write ids of failed puts
        self._cells_read = ReadCells()
        self._probes = Probes(self.kept_digests)

    # --- what a storage author supplies -------------------------------------------------------------------------------

    @abstractmethod
    def call_ledger(self, deadline: float, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """Sends a command to `LedgerService.call` on the ledger's host, by ``deadline``.

        Only a backend that declares ``wakes`` is given ``wake``, for a claim or a put that waits: it gives one to
        `LedgerService.call` on the host, and when that is called, calls this one in the client's process. Its
        `stop_waiting` calls that of the `LedgerService`.
        """

    def store_write(self, write_id: int, columns: Mapping[str, WireColumn], num_samples: int, deadline: float) -> None:
        """Stores the payload of a write. Returns when every client can fetch it. Must copy what it keeps.

        An engine that overrides `store_writes` needs none, so it is not abstract.

        Args:
            write_id: The write. A put may have several.
            columns: Its columns, in the ledger's order of slots.
            num_samples: How many rows they have.


        Raises:
            CapacityExceededError: The engine itself is full. What was stored of the write is deleted again.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither store_write nor store_writes")

    @abstractmethod
    def fetch_fields(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn]:
        """Fetches columns in the order of the request, in new memory.

        Raises:
            RefsGoneError: A ref is no longer there.
        """

    @abstractmethod
    def delete_refs(self, refs: Sequence[Ref], deadline: float) -> Collection[Ref] | None:
        """Deletes payload. Ignores refs that do not exist. Returns those that cannot be reached now: a later clear
        deletes them. None: all are deleted."""

    # --- operations ---------------------------------------------------------------------------------------------------

    def register_partition(self, request: RegisterRequest) -> PartitionInfo:
        """Opens a partition."""
        info, freed = self.call_ledger(request.deadline, _timed(request))
        self._collect_if_possible(freed, request.deadline)
        return info

    def _pass_on(self, request: Any) -> Any:
        """An operation whose request is a command, and whose reply is that of the ledger."""
        return self.call_ledger(request.deadline, _timed(request))

    describe_partition = ack = nack = renew = check_consumption = _pass_on
    list_samples = list_partitions = inspect_partition = list_fields = announce = list_clients = _pass_on
    export_partition = set_cursor = _pass_on

    def put_samples(self, request: PutRequest) -> int:
        """Reserves, stores and commits. If there is no room, tries again, unless ``on_full`` is ``raise``."""
        num_samples = len(request.sample_ids)
        if request.columns.keys() != request.specs.keys():
            raise BackendError(
                f"put_samples('{request.partition_id}', {num_samples} samples) refused: the request holds columns "
                f"{preview(request.columns)} and specs of {preview(request.specs)}. Expected a spec for every column. "
                "Nothing was written.",
                hint="Middleware that adds or drops a column does the same with its spec.",
            )
        with suppress(AlreadyDoneError):
            if not request.columns:
                tags = request.tags or [{}] * num_samples
                put = commands.PutTags(
                    *(request.partition_id, request.sample_ids, tags),
                    request_id=request.request_id,
                    left_s=_left_s(request.deadline),
                    opens=request.opens,
                )
                self.call_ledger(request.deadline, put)
                return num_samples
            if self._not_undone:
                self._finish_undoing(request.deadline)
            writes = writes_of(request.columns, num_samples, self.row_cost_bytes)
            try:
                freed = self._put_lacking(request, writes, None)
            except CapacityExceededError as error:
                if self.config.on_full != "block" or not error.retryable:
                    raise
                freed = self._put_when_there_is_room(request, writes, error)
            if freed:
                self._collect_if_possible(freed, request.deadline)
        return num_samples

    def get_samples(self, request: GetRequest) -> WireBatch:
        """Locates the cells and fetches them. Repeats both if the cells were overwritten in between."""
        gone: set[Ref] = set()
        before: Located | None = None
        locate = commands.Locate(request.partition_id, request.sample_ids, request.fields)
        while True:
            located = self.call_ledger(request.deadline, locate)
            try:
                columns = self._fetch_once(located, len(request.sample_ids), request.deadline)
            except RefsGoneError as error:
                # the ledger frees a ref before its payload is deleted: a ref that it still returns after that is lost
                lost: Iterable[Ref] = gone.intersection(error.refs)
                if not error.refs and located == before:
                    lost = self.find_gone(located.refs, request.deadline)
                if lost:
                    with suppress(Exception):  # else a put could rely on it
                        self.call_ledger(request.deadline, commands.ForgetContent(list(lost)))
                    raise _lost_samples(request, located, lost) from error
                gone.update(error.refs)
                before = located
                if time.monotonic() >= request.deadline:
                    raise OperationTimeoutError(
                        f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples) timed out: the rows "
                        "were overwritten faster than they could be read."
                    ) from error
                continue
            return WireBatch(columns=columns, specs=located.specs)

    def claim(self, request: ClaimRequest) -> Claim:
        """Hands out ready samples."""
        claim = replace(request, left_s=_left_s(request.deadline), wake=None)
        if request.wake is None:
            return self.call_ledger(request.deadline, claim)
        return self.call_ledger(request.deadline, claim, request.wake)

    def clear_samples(self, request: ClearRequest) -> int:
        """Drops rows, then deletes their payload and what crashed writers left."""
        self._finish_undoing(request.deadline)
        count, garbage = self.call_ledger(request.deadline, _timed(request))
        self._collect(garbage, request.deadline)
        return count

    # --- what a storage author may override ---------------------------------------------------------------------------

    def begin_put(
        self, begin: commands.BeginPut, columns: Mapping[str, WireColumn | SharedRows], deadline: float
    ) -> int:
        """Begins a put. An engine that gives out memory together with the write id overrides it."""
        return self.call_ledger(deadline, begin)

    def store_writes(
        self,
        writes: Mapping[int, commands.Write],
        columns: Mapping[str, WireColumn | SharedRows],
        deadline: float,
    ) -> None:
        """Stores all writes of a put. An engine that can store them together overrides it.

        Args:
            writes: The writes by their ids, which follow one another.
            columns: The columns of the put. `columns_of` gives those of a write.
        """
        for write_id, write in writes.items():
            self.store_write(write_id, columns_of(write, columns), len(write.row_bytes), deadline)

    def kept_digests(self, parts: Sequence[commands.Part], spec: FieldSpec, deadline: float) -> list[bytes]:
        """The digests (`column_digests`) of rows of the store, part by part, all of one field with this spec, made of
        the rows in place. Raises `RefsGoneError`. Only a backend with `WireFormat.by_probe` needs it."""
        raise NotImplementedError(f"{type(self).__name__} declares by_probe, and does not override kept_digests")

    def find_gone(self, refs: Sequence[Ref], deadline: float) -> Sequence[Ref]:
        """Which refs of a failed read are gone, if the engine did not say. Default: all."""
        return refs

    def new_write_id(self, num_ids: int) -> int | None:
        """A random id, followed by as many unused ones as a put needs. None: the ledger numbers the writes (if its
        state and the payload die together)."""
        return secrets.randbits(128)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _fetch_once(self, located: Located, num_samples: int, deadline: float) -> dict[str, WireColumn | SharedRows]:
        names = _fields_apart(located, by_content=self.cache_bytes > 0)
        columns = {name: self._fetch_field(located, name, num_samples, deadline) for name in names}
        rest = [name for name in located.specs if name not in columns]
        if rest:
            some = located if not columns else _only(located, rest)
            columns.update(self.fetch_fields(some, num_samples, deadline))
        return columns

    def _fetch_field(self, located: Located, field: str, num_samples: int, deadline: float) -> WireColumn | SharedRows:
        """Fetches a column: rows that samples share once, and those kept by content only if this client lacks them."""
        spec, is_kept = located.specs[field], self.cache_bytes > 0
        slots: dict[int, int] = {}
        refs: list[Ref] = [(0, 0)] * num_samples
        for part in located.parts:
            if field in part.fields:
                slots[part.write_id] = part.slots[part.fields.index(field)]
                is_kept &= part.by_content
                for row, position in zip(part.rows, part.positions, strict=True):
                    refs[row] = part.write_id, position

        def fetch(wanted: Sequence[Ref]) -> WireColumn:
            parts: dict[int, commands.Part] = {}
            for row, (write_id, position) in enumerate(wanted):
                if write_id not in parts:
                    parts[write_id] = commands.Part(write_id, (field,), (slots[write_id],), [], [])
                parts[write_id].rows.append(row)
                parts[write_id].positions.append(position)
            try:
                return self.fetch_fields(Located([*parts.values()], {field: spec}), len(wanted), deadline)[field]
            except FrameError as error:
                error.row = None if error.row is None else refs.index(wanted[error.row])
                raise

        places = {ref: place for place, ref in enumerate(dict.fromkeys(refs))}
        different = list(places)
        column = self._cells_read.fetch(different, spec, self.cache_bytes, fetch) if is_kept else fetch(different)
        return column if len(different) == num_samples else SharedRows(column, [places[ref] for ref in refs])

    def _put_lacking(
        self, request: PutRequest, writes: Sequence[commands.Write], ticket: _Ticket | None
    ) -> Sequence[Ref]:
        """Tries a put, without the cells that the store has. Returns the refs that it freed."""
        for _ in range(_MOST_QUESTIONS):
            with suppress(ContentGoneError):
                return self.put_once(*self._without_known(request, writes), ticket)
        # others bring and clear its cells all the time
        return self.put_once(request, [replace(write, digests=()) for write in writes], ticket)

    def _without_known(
        self, request: PutRequest, writes: Sequence[commands.Write]
    ) -> tuple[PutRequest, Sequence[commands.Write]]:
        """A put without the cells that the store has."""
        digests = [digest for write in writes for digest in write.digests]
        if not digests:
            return request, writes
        known = self.call_ledger(request.deadline, commands.FindContent(digests))
        if self.wire.by_probe and (known or len(set(digests)) < len(digests)):
            try:
                writes = self._probes.told_apart(request, writes, known)
            except RefsGoneError as error:
                lost = error.refs or list(known.values())
                self.call_ledger(request.deadline, commands.ForgetContent(lost))
                return self._without_known(request, writes)
            whole = {digest for write in writes for digest in write.digests}.difference(digests)
            if whole:
                known |= self.call_ledger(request.deadline, commands.FindContent(list(whole)))
        return without_known(request, writes, known) if known else (request, writes)

    def _put_when_there_is_room(
        self, request: PutRequest, writes: Sequence[commands.Write], refusal: CapacityExceededError
    ) -> Sequence[Ref]:
        """Queues for room, for a put that was refused, and tries it again. Returns the refs that it freed."""
        ticket, bell, start = _Ticket(refusal), Bell(), time.monotonic()
        cancellation = CANCELLATION.get() or Cancellation()
        cancellation.listen(bell.ring)
        wakes = (bell.ring,) if Capability.WAKES in self.capabilities else ()
        try:
            while True:
                now = time.monotonic()
                left_s = request.deadline - now
                if left_s <= LEAST_ROOM_PAUSE_S or cancellation.is_set:
                    ticket.refusal = None
                    raise RoomTimeoutError.after(refusal) from refusal
                ticket.refusal = refusal
                if ticket.queued_at is None or now - ticket.queued_at >= _STILL_WAITS_S:
                    ticket.queued_at = now
                    size_bytes = _size_bytes(self._without_known(request, writes)[1])
                    wait = commands.WaitForRoom(ticket.id, size_bytes, wait_s=left_s)
                    self.call_ledger(request.deadline, wait, *wakes)
                # 0 if the engine itself is full: it does not say when to ask again
                pause_s = refusal.ask_again_s or max(backoff_s(now - start), LEAST_ROOM_PAUSE_S)
                bell.wait(min(pause_s, left_s - LEAST_ROOM_PAUSE_S / 2))
                try:
                    return self._put_lacking(request, writes, ticket)
                except CapacityExceededError as error:
                    if not error.retryable:
                        raise
                    refusal = error
        except OperationTimeoutError as late:
            if ticket.refusal is None:
                raise
            raise RoomTimeoutError.after(ticket.refusal, asked_in_vain=True) from late
        finally:
            self.stop_waiting(ticket.id)
            if ticket.queued_at is not None:  # the put ends while it is still in the queue
                until = min(request.deadline, time.monotonic() + _LATE_UNDO_S)
                with suppress(Exception):  # the ledger drops it later anyway
                    self.call_ledger(until, commands.WaitForRoom(ticket.id, 0, wait_s=0.0))

    def put_once(self, request: PutRequest, writes: Sequence[commands.Write], ticket: _Ticket | None) -> Sequence[Ref]:
        """Tries a put once. Returns the refs that it freed. An engine whose parts come and go may override it."""
        begin = self.begin_of(request, writes, ticket)
        try:
            write_id = self.begin_put(begin, request.columns, request.deadline)
        except _REFUSALS:
            raise
        except BaseException:  # the reply may be lost while the bytes are reserved
            if begin.write_id is not None:
                self.undo(begin.write_id, request.deadline)
            raise
        if ticket is not None:
            ticket.queued_at = None  # it left the queue; it enters it again if the engine itself is full
        try:
            brought = {one: write for one, write in begin.by_id(write_id).items() if write.row_bytes}
            if brought:
                self.store_writes(brought, request.columns, request.deadline)
            if ticket is not None:
                ticket.refusal = None
            return self.call_ledger(request.deadline, commands.CommitPut(write_id))
        except BaseException:
            self.undo(write_id, request.deadline)
            raise

    def begin_of(
        self, request: PutRequest, writes: Sequence[commands.Write], ticket: _Ticket | None
    ) -> commands.BeginPut:
        """The command that begins a put, with a new write id."""
        return commands.BeginPut(
            *(request.partition_id, request.sample_ids, request.specs, writes, request.tags),
            write_id=self.new_write_id(sum(write.num_ids for write in writes)),
            ticket=None if ticket is None else ticket.id,
            ttl_s=_left_s(request.deadline) + _ABANDON_GRACE_S,
            request_id=request.request_id,
            strings=request.strings,
            strict=request.strict,
            opens=request.opens,
        )

    def undo(self, write_id: int, deadline: float) -> None:
        """Tries to undo a failed put, unless it was committed, in the time that is left, else with the next call. If no
        client does, the ledger ends it later, and a clear collects its payload."""
        deadline = min(deadline, time.monotonic() + _UNDO_S)
        if time.monotonic() < deadline:
            with suppress(Exception):  # the caller gets the error of the put, not of this
                self._collect(self.call_ledger(deadline, commands.AbortPut(write_id)), deadline)
                return
        self._not_undone.append(write_id)

    def _finish_undoing(self, deadline: float) -> None:
        now = time.monotonic()
        deadline = min(now + _LATE_UNDO_S, now + (deadline - now) / 4)
        while self._not_undone and time.monotonic() < deadline:
            with suppress(Exception):  # it must not fail this call
                write_id = self._not_undone.popleft()
                self._collect(self.call_ledger(deadline, commands.AbortPut(write_id)), deadline)

    def _collect(self, refs: Sequence[Ref], deadline: float) -> None:
        if refs:
            left = self.delete_refs(refs, deadline)
            gone = [ref for ref in refs if ref not in left] if left else refs
            if gone:
                self.call_ledger(deadline, commands.Collected(gone))

    def _collect_if_possible(self, refs: Sequence[Ref], deadline: float) -> None:
        """Deletes payload after what is done, and so must not fail now. A later clear deletes what is left."""
        with suppress(Exception):
            self._collect(refs, deadline)


def _timed(request: _Request) -> _Request:
    """As the ledger gets it."""
    if isinstance(request, OnceRequest):
        return replace(request, left_s=_left_s(request.deadline))
    return request


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _size_bytes(writes: Sequence[commands.Write]) -> int:
    return sum(sum(write.row_bytes) for write in writes)


def _only(located: Located, fields: Sequence[str]) -> Located:
    """What was located of some fields."""
    parts = []
    for part in located.parts:
        kept = [(name, slot) for name, slot in zip(part.fields, part.slots, strict=True) if name in fields]
        if kept:
            names, slots = zip(*kept, strict=True)
            parts.append(replace(part, fields=names, slots=slots))
    return replace(located, parts=parts, specs={name: located.specs[name] for name in fields})


def _fields_apart(located: Located, *, by_content: bool) -> set[str]:
    """The fields to fetch one by one: those of rows that samples share, and, with ``by_content``, those of rows that
    this client may have kept."""
    positions: dict[int, list[int]] = {}
    for part in located.parts:
        positions.setdefault(part.write_id, []).extend(part.positions)
    writes = {write_id for write_id, rows in positions.items() if len(set(rows)) < len(rows)}
    writes.update(part.write_id for part in located.parts if by_content and part.by_content)
    return {name for part in located.parts if part.write_id in writes for name in part.fields}


def _lost_samples(request: GetRequest, located: Located, lost: Iterable[Ref]) -> LostSamplesError:
    """Names the samples and fields that the ledger still refers to and whose payload the store no longer has."""
    gone = set(lost)
    fields: dict[int, set[str]] = {}
    for part in located.parts:
        for row, position in zip(part.rows, part.positions, strict=True):
            if (part.write_id, position) in gone:
                fields.setdefault(row, set()).update(part.fields)
    return LostSamplesError.for_payload(
        f"get_samples('{request.partition_id}', {len(request.sample_ids)} samples)",
        request.partition_id,
        (
            (request.sample_ids[row], [name for name in request.fields if name in names])
            for row, names in sorted(fields.items())
        ),
    )


# --- which columns of a put are stored together -----------------------------------------------------------------------
#
# In engines that store rows, each stored row has a cost, so small columns are stored together. But a read of one field
# moves the whole row. So the largest columns are stored apart, as far as the cost of their rows stays a small share of
# the put: a put of large cells has room for many such columns, a put of small ones for none.


def writes_of(
    columns: Mapping[str, WireColumn | SharedRows], num_samples: int, row_cost_bytes: int | None
) -> list[commands.Write]:
    """The writes of a put: first the columns that are stored together, if there are any, then each one that is apart.

    `SharedRows` are always apart; others only where a stored row has a cost beside its bytes, as the bytes that are
    moved in the same time (``python -m benchmarks row-cost``).
    """
    from dataplane_core.codec.rows import cell_nbytes, row_nbytes  # it imports torch

    plain = {name: column for name, column in columns.items() if not isinstance(column, SharedRows)}
    if len(plain) == len(columns) and (row_cost_bytes is None or len(plain) < 2):  # the usual case of few columns
        return [commands.Write(tuple(plain), row_nbytes(plain, num_samples))] if plain else []
    shared: list[commands.Write] = []
    for name, column in columns.items():
        if isinstance(column, SharedRows):
            num_shared = len(column.rows)
            _check_index(name, column, num_shared, num_samples)
            row_sizes = row_nbytes({name: column.rows}, num_shared)
            shared.append(commands.Write((name,), row_sizes, column.index, column.digests or ()))
    sizes = {name: np.broadcast_to(cell_nbytes(column, num_samples), num_samples) for name, column in plain.items()}
    apart = _columns_apart(sizes, num_samples, row_cost_bytes, shared)
    together = tuple(name for name in plain if name not in apart)
    row_bytes = sum((sizes[name] for name in together), np.zeros(num_samples, dtype=np.int64))
    writes = [commands.Write(together, row_bytes.tolist())] if together else []
    writes += [commands.Write((name,), sizes[name].tolist()) for name in apart]
    return writes + shared


def columns_of(write: commands.Write, columns: Mapping[str, WireColumn | SharedRows]) -> dict[str, WireColumn]:
    """The columns of a write among those of its put, each with the rows of the write."""
    of_write = {name: columns[name] for name in write.fields}
    return {name: column.rows if isinstance(column, SharedRows) else column for name, column in of_write.items()}


def _check_index(name: str, column: SharedRows, num_rows: int, num_samples: int) -> None:
    if len(column.index) != num_samples or set(column.index) != set(range(num_rows)):
        raise BackendError(
            f"put_samples refused: column '{name}' has {num_rows} shared rows and an index of {len(column.index)}. "
            f"Expected a row for each of {num_samples} samples, and no other rows. Nothing was written.",
            hint="Middleware that adds or changes a column encodes it to the wire format that it was given.",
        )


def _columns_apart(
    sizes: Mapping[str, Any], num_samples: int, row_cost_bytes: int | None, shared: Sequence[commands.Write]
) -> list[str]:
    """The largest columns, as many as the budget allows, of which ``shared`` have a part. ``sizes``: the bytes of each
    column's cells."""
    if row_cost_bytes is None or len(sizes) < 2:
        return []
    totals = {name: int(cells.sum()) for name, cells in sizes.items()}
    most = int(_APART_SHARE * (sum(totals.values()) + _size_bytes(shared)) / (row_cost_bytes * num_samples))
    most = max(0, min(most - len(shared), len(totals) - 1))
    largest = sorted(totals, key=lambda name: -totals[name])[:most]
    return [name for name in largest if totals[name] >= _LEAST_APART_BYTES * num_samples]
