"""The journal of a `BlobStore`: every process replays it through its own ledger, so all reach the same state.

A call first reads the new records. If it changes something, its command is appended as a record under the next number.
If another process took that number, the call reads again, checks its command again and tries the next number. Options
of one process, such as its limit of bytes, are checked before a record is made; a replay does not use them.

**History.** The records are a chain (`dataplane_core.journal.records`), which every replay checks. Each call
also checks that the last record that this process knows is still there. If it is not, the journal was cut or replaced
by an older copy. The call then raises `StalePartitionError` before it writes anything, and the next call starts from
what the store holds now.

**Time.** Records hold no times, and no clock is compared with another. Each process measures, on its own monotonic
clock, how long ago it *read* the record that granted a lease. When the lease's time is over, the next call that could
depend on it appends an ``expire`` record, which ends the lease in every process. So a lease never ends early, however
the clocks of hosts are set. It may end late: by the time until a process has read its grant, and until a call
checks it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, Protocol, cast

from dataplane_core.errors import (
    BackendError,
    CorruptDataError,
    DataPlaneError,
    OperationTimeoutError,
    StalePartitionError,
)
from dataplane_core.journal.records import DIGEST_BYTES, VERSION, Begin, Plan, Record, Snapshot
from dataplane_core.journal.snapshot import ChunkGoneError, SnapshotReader, head
from dataplane_core.ledger import Command, Ledger, LedgerService, Reply, StateReader, commands, to_state
from dataplane_core.spec import fits, new_id

_ANOTHER_HISTORY: Final = (
    "The store was cut or set back to an older copy. What this client wrote, claimed or acked since then may be lost: "
    "claim and read again, and write again what is missing."
)
_MISSED: Final = (
    "`read` must return every record that was appended before and is not trimmed. If it finds that another process "
    "trimmed one meanwhile, it must read again."
)
_BROKEN: Final = "Restore a whole copy of the store, or begin a new one."
#: How often to try to append a plan that keeps others from writing a snapshot. It may fail.
_HOLD_TRIES: Final = 8
#: The deadline is checked after this many replayed records.
_CHECK_EVERY: Final = 256


class LedgerFailedError(CorruptDataError):
    """The ledger raised an exception that is no answer: the journal holds what no client of this package writes."""


class JournalStore(Protocol):
    """The methods of a store that a journal needs; see `BlobStore`."""

    def append(self, seq: int, record: bytes) -> bool: ...
    def read(self, from_seq: int) -> Iterable[bytes]: ...
    def get(self, key: str) -> bytes | None: ...


@dataclass(slots=True)
class Snapshots:
    """The snapshots of a journal, as its records name them.

    Attributes:
        current: The newest snapshot and its number of chunks.
        seq: The number of its record.
        nbytes: Its size.
        garbage: Earlier snapshots whose blobs may still exist: (snapshot, its number of chunks or None if unknown).
        plan: The snapshot that some process is writing.
        planned_nbytes: ``tail_nbytes`` when this process began.
        given_up: Earlier plans that were never finished.
        tail_nbytes: Size of the records since the newest snapshot.
    """

    current: tuple[str, int] | None = None
    seq: int = 0
    nbytes: int = 0
    garbage: list[tuple[str, int | None]] = field(default_factory=list)
    plan: str | None = None
    planned_nbytes: int = 0
    given_up: list[str] = field(default_factory=list)
    tail_nbytes: int = 0


@dataclass(slots=True)
class _Loading:
    """A snapshot that is being loaded.

    Attributes:
        record: The bytes of the record that names it.
        chunks: Reads its chunks.
        state: The state restored so far.
        head: Its first section, once it was read.
        tail: The records in its chunks.
    """

    record: bytes
    chunks: SnapshotReader
    state: StateReader
    head: dict[str, Any] | None = None
    tail: list[bytes] = field(default_factory=list)

    def take(self, section: dict[str, Any], now: float) -> None:
        """Takes the next section."""
        if not isinstance(section, dict):
            raise ValueError("a section is no map")
        if self.head is None:
            self.head = section
        elif section["part"] == "records":
            self.tail.extend(section["records"])
        else:
            self.state.take(section, now)


class Journal:
    """Replays a store's journal through a ledger, and appends to it.

    Args:
        store: The store.
        capacity_bytes: The limit for the puts of this process, or None.

    Attributes:
        clock: This process's clock for leases, in seconds. Only differences count.
        service: The ledger after all records read. Call it only while `held`.
        store_id: The id of this store.
        snapshots: The snapshots, as the records name them.
        tail: The records read or made since the shortener set this to a list. None if it is not collecting them.
    """

    def __init__(self, store: JournalStore, capacity_bytes: int | None) -> None:
        self._store = store
        self._capacity_bytes = capacity_bytes
        self._lock = threading.RLock()  # says who has it; nobody takes it twice
        self._wake: Callable[[], bool] | None = None  # of the call under way
        self.clock = time.monotonic
        self._loading: _Loading | None = None  # kept for the next call if a call runs out of time
        self._was_overtaken = False  # a newer snapshot replaced the one that was being loaded
        self._forget()

    def _forget(self) -> None:
        """Drops the replayed state: the next call replays the journal from its beginning."""
        self._is_cut = True  # whether a change of the state was begun and not completed
        self.service = LedgerService(clock=self._read_clock, ledger=Ledger(self_expiring=False))
        self.store_id = ""
        self._next_seq = 0
        self._last = b""  # the bytes of record `_next_seq - 1`
        self.snapshots = Snapshots()
        self.tail: list[bytes] | None = None
        self._is_cut = False

    def _read_clock(self) -> float:
        return self.clock()

    # --- calls --------------------------------------------------------------------------------------------------------

    @contextmanager
    def held(self, deadline: float, what: str) -> Iterator[None]:
        """Keeps other threads off the journal.

        Raises:
            OperationTimeoutError: Other threads held it until the deadline.
        """
        try:
            if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise OperationTimeoutError(
                    f"{what}: other threads of this client waited for the store until the deadline. Nothing was "
                    "written."
                )
            if self._is_cut:
                self._forget()
            yield
        finally:
            # An interrupt may come before any call: before it is known whether the lock was taken, and in an earlier
            # call that was to give it back. So the release is the first call here, and comes as often as it was taken.
            try:
                while True:
                    self._lock.release()
            except RuntimeError:  # this thread does not have it, now or from the start
                pass

    def call(self, deadline: float, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """Runs a command after all records of the journal, and records it if it changes anything.

        Args:
            deadline: On `time.monotonic`'s clock, in seconds.
            command: The command.
            wake: See `LedgerService.call`. For a journal of one process: others' commands wake nobody here.

        Raises:
            StalePartitionError: The journal was cut or replaced.
            CorruptDataError: A record is damaged or missing.
            OperationTimeoutError: The deadline passed. Nothing was written.
        """
        with self.held(deadline, command.op):
            self._wake = wake
            refused = -1  # the number of the append that returned False last
            while True:
                self.catch_up(deadline)
                seq, is_stuck = self._next_seq, refused == self._next_seq
                # of what only reads, a description tells of leases, and those may have ended
                due = (
                    None
                    if command.reads and not isinstance(command, commands.InspectRequest)
                    else self._ask(commands.Due())
                )
                if not seq:  # also before a read: `append` returns False if `read` missed the records that are there
                    appended = self.append(Begin(new_id()))
                elif due is not None:
                    appended = self.append(due)
                elif command.reads or not self._may_change(command):
                    return self._ask(command)
                else:
                    record = self._try_append(command)
                    if record is not None:
                        return self._apply(command, record)
                    appended = False
                refused = refused if appended else seq
                if time.monotonic() >= deadline:
                    self._refuse_late(command.op, seq, is_stuck)

    def _refuse_late(self, op: str, seq: int, is_stuck: bool) -> NoReturn:
        if is_stuck:
            raise OperationTimeoutError(
                f"{op}: append({seq}) returned False, so record {seq} is there, but read({max(0, seq - 1)}) did not "
                "return it until the deadline. Nothing was written.",
                hint=_MISSED,
            )
        raise OperationTimeoutError(
            f"{op}: other processes took every place in the journal until the deadline. Nothing was written."
        )

    def append(self, command: Command[Any]) -> bool:
        """Appends a record and runs its command. False if another process took the number. Call it when `held`."""
        record = self._try_append(command)
        if record is None:
            return False
        self._apply(command, record)
        return True

    def _try_append(self, command: Command[Any]) -> bytes | None:
        """Appends a record. Returns its bytes, or None if another process took the number."""
        record = Record(self._next_seq, self._last[:DIGEST_BYTES], command).to_bytes()
        return record if self._store.append(self._next_seq, record) else None

    def _may_change(self, command: Command[Any]) -> bool:
        """Whether a command may change anything. Raises if it is a put that is refused."""
        if isinstance(command, commands.BeginPut):
            self._ask(commands.CheckPut(command, self._capacity_bytes))
        return not isinstance(command, commands.ClaimRequest) or self._ask(commands.MayClaim(command))

    def _ask(self, command: Command[Reply]) -> Reply:
        with self._or_forget():
            return self.service.call(command, self._wake)

    @contextmanager
    def _or_forget(self) -> Iterator[None]:
        """If a call of the ledger fails or is interrupted, the next call drops the state and replays the journal."""
        try:
            self._is_cut = True
            yield
            self._is_cut = False
        except DataPlaneError:  # a regular answer, the same in every process
            self._is_cut = False
            raise
        except Exception as error:
            raise LedgerFailedError(
                f"the ledger failed on what the journal holds: {type(error).__name__}: {error}.",
                hint=_BROKEN,
            ) from error

    # --- state --------------------------------------------------------------------------------------------------------

    def sections(self) -> Iterator[dict[str, Any]]:
        """The sections of a snapshot of the state after all records read. Take them all while `held`."""
        yield head(self.store_id, self._next_seq, self._last[:DIGEST_BYTES])
        yield from to_state(self.service.ledger, self.clock())

    # --- replay -------------------------------------------------------------------------------------------------------

    def catch_up(self, deadline: float) -> None:
        """Replays the new records. If there are none, this reads only the last known record.

        Raises:
            OperationTimeoutError: Not all could be replayed by ``deadline``. The next call continues from there.
        """
        while (snapshot := self._follow(deadline)) is not None:
            loaded = False
            while not loaded:
                record, data = snapshot
                self._forget()
                try:
                    self._load(record, data, deadline)
                    loaded = True
                except ChunkGoneError:
                    newer = self._snapshot_after(record.seq)
                    if newer is None:
                        raise
                    snapshot, self._was_overtaken = newer, True
        self._was_overtaken = False

    def _snapshot_after(self, seq: int) -> tuple[Record, bytes] | None:
        """The first record of a snapshot after record ``seq``, or None."""
        for offset, data in enumerate(self._store.read(seq + 1), 1):
            record = Record.from_bytes(data, seq + offset)
            if isinstance(record.command, Snapshot):
                return record, data
        return None

    def _follow(self, deadline: float) -> tuple[Record, bytes] | None:
        """Replays new records up to the record of a snapshot that must be loaded first. Returns this one, or None."""
        records = iter(self._store.read(max(0, self._next_seq - 1)))
        if self._next_seq:
            data = next(records, None)
            if data is None:
                self._refuse_gone(self._next_seq - 1)
            if data != self._last:
                record = Record.from_bytes(data, self._next_seq - 1)
                self._check_first(record)
                if record.seq > self._next_seq:
                    return record, data
                self._take(record, data)
        for data in records:
            record = Record.from_bytes(data, self._next_seq)
            if isinstance(record.command, Snapshot) and record.seq > self._next_seq:
                return record, data  # the records in between were trimmed: the snapshot holds their state
            self._check_next(record)
            self._take(record, data)
            if not self._next_seq % _CHECK_EVERY and time.monotonic() >= deadline:
                if self._was_overtaken:
                    self._hold_back(record.seq)
                raise OperationTimeoutError(
                    f"the journal was replayed up to record {self._next_seq - 1} by the deadline, and goes on. Nothing "
                    "was written.",
                    hint="Call again: the replay goes on from there.",
                )
        return None

    def _check_first(self, record: Record) -> None:
        """Checks the first record read, if it is not the last one that this process knows."""
        last = self._next_seq - 1
        if record.seq <= last:
            self._refuse_history(f"another record stands in the place of journal record {last}.")
        if not isinstance(record.command, Snapshot):
            self._refuse_gap(record, last)
        if record.command.store != self.store_id:
            self._refuse_history(f"its journal is that of store {record.command.store}, not {self.store_id}.")
        if record.seq == self._next_seq and record.prev != self._last[:DIGEST_BYTES]:
            self._refuse_history(f"another record stood in the place of journal record {last}.")

    def _check_next(self, record: Record) -> None:
        if record.seq != self._next_seq or (not record.seq and not isinstance(record.command, Begin)):
            self._refuse_gap(record, self._next_seq)
        if record.prev != self._last[:DIGEST_BYTES]:
            self._forget()
            raise CorruptDataError(
                f"journal record {record.seq} does not follow record {record.seq - 1}: another stood there when it was "
                "written.",
                hint=_BROKEN,
            )

    def _take(self, record: Record, data: bytes) -> None:
        """Replays a record of another process."""
        try:
            self._run(record.command, data)
        except LedgerFailedError:
            raise
        except DataPlaneError:  # the command was refused, in every process alike
            pass

    def _apply(self, command: Command[Reply], data: bytes) -> Reply:
        """Runs a command of this process in its recorded form, as the other processes will."""
        recorded: Any = Record.from_bytes(data, self._next_seq).command  # a dataclass
        others = {name: getattr(command, name) for name in command.not_recorded}
        whole: Command[Reply] = replace(recorded, **others)
        return self._run(whole, data)

    def _run(self, command: Command[Reply], data: bytes) -> Reply:
        with self._or_forget():
            self._next_seq += 1
            self._last = data
            self.snapshots.tail_nbytes += len(data)
            tail = self.tail  # the shortener sets it to None without the lock
            if tail is not None:
                tail.append(data)
            match command:
                case Begin():
                    self.store_id = command.store
                case Plan():
                    self._note_plan(command.snapshot)
                case Snapshot():
                    self._note_snapshot(command)
                case _:
                    return self.service.call(command, self._wake)
            return cast("Reply", None)

    def _note_plan(self, snapshot: str) -> None:
        known = self.snapshots
        if known.plan is not None:
            known.given_up.append(known.plan)
        known.plan = snapshot
        known.planned_nbytes = known.tail_nbytes

    def _note_snapshot(self, command: Snapshot) -> None:
        self.snapshots = Snapshots(
            current=(command.snapshot, command.chunks),
            seq=self._next_seq - 1,
            nbytes=command.nbytes,
            garbage=[(snapshot, chunks) for snapshot, chunks in command.garbage],
        )

    def _load(self, record: Record, data: bytes, deadline: float) -> None:
        """Loads the state of a snapshot, and replays the records that it holds."""
        named = record.command
        assert isinstance(named, Snapshot)
        loading = self._loading
        if loading is None or loading.record != data:
            self._was_overtaken |= loading is not None
            chunks = SnapshotReader(named.snapshot, named.chunks, named.digest)
            loading = _Loading(data, chunks, StateReader(self_expiring=False))
        if self._was_overtaken:
            self._hold_back(record.seq)
        try:
            while loading.chunks.num_read < named.chunks:
                self._loading = loading  # if this chunk cannot be read in time, the next call continues with it
                sections = loading.chunks.next_chunk(self._store.get)
                self._loading = None  # a chunk that was taken in part cannot be continued
                for section in sections:
                    loading.take(section, self.clock())
                if time.monotonic() >= deadline and loading.chunks.num_read < named.chunks:
                    self._loading = loading
                    raise OperationTimeoutError(
                        f"{loading.chunks.num_read} of the {named.chunks} blobs of the journal's snapshot were "
                        "loaded by the deadline. Nothing was written.",
                        hint="Call again: the next call goes on from there.",
                    )
            first = loading.head
            if first is None or first["v"] != VERSION or first["store"] != named.store:
                raise ValueError("its head is of another store or version")
            if not (fits(first["seq"], int) and fits(first["prev"], bytes) and fits(loading.tail, Sequence[bytes])):
                raise ValueError("its head or its records hold what they cannot hold")
            loading.state.end()
            self.service = LedgerService(clock=self._read_clock, ledger=loading.state.ledger)
            self.store_id = named.store
            self._next_seq = first["seq"]
            self._last = first["prev"]
            for each in [*loading.tail, *named.records]:
                kept = Record.from_bytes(each, self._next_seq)
                if (kept.seq, kept.prev) != (self._next_seq, self._last[:DIGEST_BYTES]):
                    raise ValueError(f"record {kept.seq} beside it does not follow")
                self._take(kept, each)
            if (record.seq, record.prev) != (self._next_seq, self._last[:DIGEST_BYTES]):
                raise ValueError("its records end elsewhere")
            self._take(record, data)
        except BaseException as error:
            self._forget()
            if isinstance(error, CorruptDataError):
                self._loading = None
            if isinstance(error, (ValueError, TypeError, KeyError, IndexError)) and not isinstance(
                error, DataPlaneError
            ):
                raise CorruptDataError(
                    f"snapshot {named.snapshot}, which journal record {record.seq} names, cannot be read: {error}."
                ) from error
            raise

    def _hold_back(self, seq: int) -> None:
        """Appends a plan after record ``seq``, so that no other snapshot is written while this process catches up.

        Others respect a plan that is never finished until records worth two snapshots have followed it. Each call of
        this process that does not finish appends another plan. So a slow client starves only if that much is written
        between two of its calls. Without the plan, it would starve if records worth one snapshot were written before it
        caught up.
        """
        prev = b""
        for _ in range(_HOLD_TRIES):
            for data in self._store.read(seq):
                seq, prev = seq + 1, data[:DIGEST_BYTES]
            if prev and self._store.append(seq, Record(seq, prev, Plan(new_id())).to_bytes()):
                return

    def _refuse_gone(self, seq: int) -> NoReturn:
        """Refuses that ``read`` returned nothing from a record on that was there."""
        if next(iter(self._store.read(seq)), None) is not None:
            raise BackendError(
                f"read({seq}) returned no records, and those that are there when it was called again.", hint=_MISSED
            )
        self._refuse_history(f"journal record {seq} is gone.")

    def _refuse_history(self, what: str) -> NoReturn:
        self._forget()
        raise StalePartitionError(
            f"the store's history is another than this client knew: {what}", hint=_ANOTHER_HISTORY
        )

    def _refuse_gap(self, record: Record, expected: int) -> NoReturn:
        self._forget()
        raise CorruptDataError(
            f"journal record {record.seq} ({record.command.op}) stands where record {expected} was expected: records "
            "are missing, or in another order.",
            hint=_BROKEN,
        )
