"""`RecordedLedger`: the ledger of a process that may be killed and started again.

The process records each command that changes something in a journal in a folder, before it answers. The process that is
started in its place replays the journal: every put, claim and ack is as it was, and each lease has what was left of it.

The answer may be lost with the process, so clients repeat a call until they have one. Each call has an id. A call that
was recorded is not done again: it gets its first answer.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar, cast

from dataplane_core.errors import DataPlaneError, OperationTimeoutError
from dataplane_core.hosting import CallId
from dataplane_core.journal.file import Entry, JournalFile, TakenError
from dataplane_core.journal.journal import Journal, LedgerFailedError
from dataplane_core.journal.records import Begin, Plan, Record, Snapshot
from dataplane_core.journal.shortening import Shortener
from dataplane_core.ledger import Command, Ref, Reply, commands

__all__ = ["RecordedLedger", "TakenError"]

_Result = TypeVar("_Result")

#: Write ids that the ledger is to number have this bit, since those of puts without payload are small numbers.
_NUMBERED: Final = 1 << 40
#: Seconds that a command may wait for the thread that packs a snapshot, and that a snapshot may take.
_PACKING_S: Final = 600.0
#: The fewest bytes of records that are worth a snapshot. They are replayed once, when the process is started again.
_TAIL_BYTES: Final = 1 << 20
#: Commands that no client asked for.
_OWN: Final = (commands.Expire, Begin, Plan, Snapshot)
#: Commands that make room, which a full disk must not keep from it.
_FREES: Final = (commands.ClearRequest, commands.Collected, commands.Expire)
#: The outcomes that no client may ask for any more are dropped whenever so many were added.
_SWEEP: Final = 4096


class RecordedLedger:
    """A ledger that records what it does in a folder. Thread-safe, but `once` only in one thread.

    Args:
        folder: The folder. One process at a time may have it open.
        capacity_bytes: Limit for the payload bytes held and reserved, or None.
        sync: Whether what was answered also survives the end of the machine, not only that of the process.
        must_exist: Whether there must be a journal in the folder.
        lazy_begins: Whether `file.commit` need not wait until the disk has that a put was begun: puts end with this
            machine, and their write ids are not numbered here.

    Attributes:
        file: The journal, with what is noted beside the ledger. Answer only after its `commit`.

    Raises:
        BackendUnavailableError: There is no journal, or the folder cannot be used.
        CorruptDataError: The journal is damaged.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int | None = None,
        *,
        sync: bool = True,
        must_exist: bool = False,
        lazy_begins: bool = False,
    ) -> None:
        self.file = JournalFile(folder, sync=sync, must_exist=must_exist)
        self._journal = _HostJournal(self.file, capacity_bytes, lazy_begins)
        self._shortener = Shortener(self._journal, self.file, lambda _: nullcontext(), _TAIL_BYTES)
        # The thread that writes snapshots is there from the start: a call that starts one may be cut off while it does.
        self._aside: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_all, args=(self._aside,), name="dataplane-snapshot", daemon=True)
        with self._journal.held(_soon(), "open"):
            self._journal.catch_up(_soon())
        self._thread.start()
        self._end = weakref.finalize(self, self._aside.put, None)

    # --- calls --------------------------------------------------------------------------------------------------------

    def once(self, call: CallId, work: Callable[[], _Result]) -> _Result:
        """Does the work of a call, unless that was recorded: then gives or raises what came of it."""
        done = self._journal.outcomes.get((call.client, call.lane))
        if done is not None and done[0].serial >= call.serial:
            if done[0].serial > call.serial:
                raise OperationTimeoutError("the client has made another call since, and does not wait for this one.")
            return cast("_Result", _outcome(done[2]))
        self._journal.calling = call
        try:
            return work()
        finally:
            self._journal.calling = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done in this context is not the work of the call that `once` was given."""
        calling, self._journal.calling = self._journal.calling, None
        try:
            yield
        finally:
            self._journal.calling = calling

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """As `LedgerService.call`, but recorded. Answer only after `file.commit`."""
        if isinstance(command, commands.BeginPut) and command.write_id is None:
            raise ValueError("a put has no write id; see `take_ids`")
        reply = self._journal.call(_soon(), command, wake)
        if self._shortener.is_due() and self._aside.empty():
            self._aside.put(partial(self._shortener.run, _soon()))
        return reply

    def stop_waiting(self, token: str) -> None:
        """As `LedgerService.stop_waiting`."""
        with self._journal.held(_soon(), "stop_waiting"):
            self._journal.service.stop_waiting(token)

    def take_ids(self, num_ids: int) -> int:
        """The first of some write ids that are not used yet, for a ledger whose writes are numbered."""
        number = self._journal.next_number
        self._journal.next_number += num_ids
        return _NUMBERED + number

    # --- state --------------------------------------------------------------------------------------------------------

    def garbage(self) -> list[Ref]:
        """As `LedgerService.garbage`."""
        with self._journal.held(_soon(), "garbage"):
            return self._journal.service.garbage()

    def end_holds(self) -> None:
        """Ends all leases and all puts under way: the clients of the process before are gone."""
        with self._journal.held(_soon(), "open"):
            self._journal.end_holds()

    def payload(self) -> dict[int, tuple[list[int] | None, list[int]]]:
        """As `Ledger.payload`."""
        with self._journal.held(_soon(), "payload"):
            return self._journal.service.ledger.payload()

    @property
    def next_number(self) -> int:
        """No write id whose lower 40 bits are this number or a greater one was used."""
        return self._journal.next_number

    def note_outcome(self, name: str, value: bytes | None, outcome: object) -> None:
        """Notes a value, as the work of the call that `once` was given, with what came of it."""
        self.file.note(name, value, self._journal.calling, _packed(outcome))

    def close(self) -> None:
        """Closes the journal, which stays in its folder."""
        with self._journal.held(_soon(), "close"):  # given back, should an interrupt have kept this thread from it
            pass
        self._end()
        self._thread.join()
        self.file.close()


class _HostJournal(Journal):
    """A `Journal` of one process, which keeps the outcomes of the newest calls.

    Attributes:
        calling: The call whose command is run.
        outcomes: Client and lane -> the newest call that was recorded, when it may be forgotten, and its outcome: as it
            is, or packed.
        next_number: See `RecordedLedger`.
    """

    def __init__(self, file: JournalFile, capacity_bytes: int | None, lazy_begins: bool) -> None:
        self._file = file
        self._lazy_begins = lazy_begins
        self.calling: CallId | None = None
        self._at: float | None = None  # the time at which a command runs, if it was recorded earlier
        super().__init__(file, capacity_bytes)
        self.clock = self._now
        file.make_head, file.keep = self._head, self.keep

    def _now(self) -> float:
        return self._file.now() if self._at is None else self._at

    def _forget(self) -> None:
        super()._forget()
        head = self._file.head
        self.outcomes: dict[tuple[str, int], tuple[CallId, float, object]] = {}
        self._num_kept = 0
        self.next_number: int = head.get("next_number", 1)
        for client, lane, serial, kept_s, until, outcome in head.get("outcomes", ()):
            self.outcomes[client, lane] = (CallId(client, lane, serial, kept_s), until, outcome)
        for entry, outcome in self._file.outcomes():
            self.keep(entry, outcome)

    def _head(self) -> dict[str, Any]:
        now, kept = self._now(), list(self.outcomes.values())  # in the thread that shortens the journal
        outcomes = [[*call, until, _packed(outcome)] for call, until, outcome in kept if until >= now]
        return {"outcomes": outcomes, "next_number": self.next_number}

    def keep(self, entry: Entry, outcome: object) -> None:
        """Keeps the outcome of a call that was recorded."""
        call = entry.call
        if call is None:
            return
        done = self.outcomes.get((call.client, call.lane))
        if done is None or done[0].serial <= call.serial:
            self.outcomes[call.client, call.lane] = (call, entry.at + call.kept_s, outcome)
        self._num_kept += 1
        if self._num_kept % _SWEEP == 0:
            now = self._now()
            for lane in [lane for lane, (_, until, _) in self.outcomes.items() if until < now]:
                del self.outcomes[lane]

    def end_holds(self) -> None:
        """Ends all leases and all puts under way. Call it when `held`."""
        self._at = math.inf
        try:
            due = self._ask(commands.Due())
        finally:
            self._at = None
        if due is not None:
            self.append(commands.Expire(due.leases, due.writes))

    def catch_up(self, deadline: float) -> None:
        """As `Journal.catch_up`. Only this process adds records."""
        if self._next_seq != self._file.next_seq:
            super().catch_up(deadline)

    def _try_append(self, command: Command[Any]) -> bytes | None:
        self._file.next_call = None if isinstance(command, _OWN) else self.calling
        self._file.next_is_lazy = self._lazy_begins and isinstance(command, commands.BeginPut)
        self._file.next_frees = isinstance(command, _FREES)
        return super()._try_append(command)

    def _apply(self, command: Command[Reply], data: bytes) -> Reply:
        return self._run(command, data)  # as it came: no other process replays it beside this one

    def _load(self, record: Record, data: bytes, deadline: float) -> None:
        self._at = self._file.entry.at  # not before anything that the snapshot holds
        try:
            super()._load(record, data, deadline)
        finally:
            self._at = None

    def _run(self, command: Command[Reply], data: bytes) -> Reply:
        entry, before = self._file.entry, self._at
        if isinstance(command, _OWN):
            entry = entry._replace(call=None)
        if isinstance(command, commands.BeginPut) and command.write_id is not None:
            number = command.write_id & (_NUMBERED - 1)
            self.next_number = max(self.next_number, number + command.num_ids)
        self._at = entry.at
        try:
            reply = super()._run(command, data)
        except LedgerFailedError:
            raise
        except DataPlaneError as error:
            self.keep(entry, _packed(error))
            raise
        finally:
            self._at = before
        self.keep(entry, reply)
        return reply


def _run_all(aside: SimpleQueue[Callable[[], None] | None]) -> None:
    for run in iter(aside.get, None):
        run()


def _packed(outcome: object) -> bytes:
    """An outcome as bytes. No outcome is bytes itself."""
    return outcome if isinstance(outcome, bytes) else pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)


def _outcome(kept: object) -> object:
    found: object = pickle.loads(kept) if isinstance(kept, bytes) else kept
    if isinstance(found, DataPlaneError):
        raise found
    return found


def _soon() -> float:
    return time.monotonic() + _PACKING_S
