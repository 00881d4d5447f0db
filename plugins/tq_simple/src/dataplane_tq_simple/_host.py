"""What the thread in the controller serves: the ledger, and the book of storage units.

The ledger's write ids say which unit has the rows. An instance with the option `journal` has a log of both in that
folder, where a controller that Ray starts again finds them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from dataplane_core.durable_files import sync_path
from dataplane_core.errors import BackendUnavailableError, CorruptDataError, InvalidRequestError, preview
from dataplane_core.hosting import Client, LedgerHost
from dataplane_core.ledger import LedgerService, Ref, commands
from dataplane_core.log import FolderLog, LoggedLedger
from dataplane_core.ownership import lock_folder
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple._folders import ENDING_S
from dataplane_tq_simple._messages import (
    LIFE_BITS,
    MESSAGES,
    BeginNear,
    Life,
    Started,
    UnitRecords,
    UnitsGoneError,
    View,
    ViewUnits,
)

_logger = logging.getLogger(__name__)

#: The note of a journal that holds the units.
UNITS_NOTE: Final = "units"

#: How much of its memory a unit is given as payload. The rest is for tables, and for cleared rows that are still read.
_FILLED: Final = 3 / 4

_OF_THE_BOOK: Final = (ViewUnits, UnitRecords)


# --- which unit has which rows ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rows:
    """The rows of a life that are not collected: write id -> position -> bytes."""

    writes: dict[int, dict[int, int]] = field(default_factory=dict)
    size_bytes: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.writes.values()))


class _Noted(NamedTuple):
    """What a controller that is started again must know. See the attributes of the book."""

    lives: dict[int, Life]
    next_life: int
    version: int


class UnitBook:
    """The storage units: which has which rows, and which one takes new ones.

    The server's thread in the controller and the keeper's thread use it. No method blocks.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held by each method
        self._lives: dict[int, Life] = {}  # by number; with those that have ended, while they have a node or rows
        self._rows: dict[int, _Rows] = defaultdict(_Rows)  # by life
        self._next_life = 0
        self.num_ended = 0  # lives that ended since this object was made
        self._version = self._saved_version = 0

    # --- the keeper ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing runs yet: the folders of before are waited for, and no node has them."""
        with self.lock:
            for life in self._lives.values():
                life.node, life.served, life.why = "", False, ""
            self._changed()

    def started(self, started: Started) -> None:
        """The process of a node serves a folder, or memory. Ignores what is known."""
        with self.lock:
            life = next((life for life in self._lives.values() if life.started.token == started.token), None)
            if life is not None and life.served and life.started == started:
                return
            before = self._on(started.node)
            if life is None:
                life = self._begin_life(started, before)
            if before is not None and before is not life:  # its memory ended, or its folder was damaged or is not there
                before.node = ""
                self._end(before)
            # a folder whose rows were given up is welcome too
            life.node, life.started, life.alive, life.served, life.why = started.node, started, True, True, ""
            life.num_starts += 1
            self._changed()

    def ended(self, node: str) -> None:
        """The process of a node has ended, and with it the life of its unit, unless its rows are kept."""
        with self.lock:
            life = self._on(node)
            if life is not None and life.served:
                life.served = False
                if not life.started.kept:
                    self._end(life)
                self._changed()

    def left(self, node: str) -> None:
        """A node is gone. If its unit is a folder, it may come back with another node."""
        with self.lock:
            self.ended(node)
            life = self._on(node)
            if life is not None:
                life.node = life.why = ""
                self._changed()

    def waits(self, node: str, why: str) -> None:
        """A node cannot open the folder of its unit. Whoever waits is told why."""
        with self.lock:
            life = self._on(node)
            if life is not None and not life.served and life.why != why:
                life.why = why
                self._changed()

    def give_up(self, number: int) -> None:
        """Nobody waits any more for a life: its rows are lost."""
        with self.lock:
            self._end(self._lives[number])
            self._changed()

    def awaited(self) -> dict[int, bool]:
        """The lives that nobody serves: number -> whether their node says why."""
        with self.lock:
            return {number: bool(life.why) for number, life in self._lives.items() if life.alive and not life.served}

    def nodes(self) -> list[str]:
        """The nodes that have a unit."""
        with self.lock:
            return [life.node for life in self._lives.values() if life.node]

    def rows_on(self, node: str, garbage: Iterable[Ref]) -> tuple[dict[int, list[int]], list[Ref]]:
        """Of a node's unit, the rows that are not collected: write id -> positions. And which of the refs it has."""
        with self.lock:
            life = self._on(node)
            if life is None:
                return {}, []
            rows = {write_id: sorted(positions) for write_id, positions in self._rows[life.number].writes.items()}
            return rows, [ref for ref in garbage if ref[0] >> LIFE_BITS == life.number]

    # --- the ledger's service -----------------------------------------------------------------------------------------

    def choose(self, number: int, size_bytes: int, node: str, full: Sequence[int] = ()) -> int:
        """A write id with this number. It says which unit gets the rows: that of the node, if it has room; else the one
        with the most room. Lives in ``full`` get none, unless there are no others. From ``number`` on, no number of
        ``LIFE_BITS`` bits may be used already. Raises `UnitsGoneError` if no unit takes rows at the moment."""
        with self.lock:
            serving = [life for life in self._lives.values() if life.served]
            if not serving:
                self._refuse()
            serving = [life for life in serving if life.number not in full] or serving
            near = (life for life in serving if life.node == node and self._room_bytes(life) >= size_bytes)
            return next(near, max(serving, key=self._room_bytes)).number << LIFE_BITS | number

    def _room_bytes(self, life: Life) -> float:
        return life.started.size_bytes * _FILLED - self._rows[life.number].size_bytes

    def _refuse(self) -> None:
        """Says that no unit takes rows: for good if the units say why, else for the moment."""
        units = [life for life in self._lives.values() if life.node]
        if units and all(life.why for life in units):
            why = "; ".join(f"{life.unit}: {life.why}" for life in units)
            raise BackendUnavailableError(f"no storage unit takes rows. {why}", retryable=False)
        names = [life.unit for life in units]
        raise UnitsGoneError(f"no storage unit takes rows: {preview(names) or 'none'} of {len(units)} are starting.")

    def add(self, writes: Mapping[int, commands.Write]) -> None:
        """The rows of a put that was begun: its writes by their ids."""
        with self.lock:
            for write_id, write in writes.items():
                if write.row_bytes:
                    self._hold(write_id, dict(enumerate(write.row_bytes)))

    def _hold(self, write_id: int, rows: dict[int, int]) -> None:
        held = self._rows[write_id >> LIFE_BITS]
        held.writes[write_id] = rows
        held.size_bytes += sum(rows.values())

    def check(self, write_id: int) -> None:
        """Raises `UnitsGoneError` if the unit of a put has ended since it was begun."""
        with self.lock:
            life = self._lives.get(write_id >> LIFE_BITS)
            if life is not None and not life.alive:
                raise UnitsGoneError(f"{life.unit} ended while the put ran. Nothing was written.")

    def lost(self, refs: Iterable[Ref]) -> list[Ref]:
        """Those of units that have ended."""
        with self.lock:
            lives = ((ref, self._lives.get(ref[0] >> LIFE_BITS)) for ref in refs)
            return [ref for ref, life in lives if life is None or not life.alive]

    def collected(self, refs: Iterable[Ref]) -> None:
        """The payload of these rows is deleted. Two clients that clear at the same time may both report a row."""
        with self.lock:
            for write_id, position in refs:
                held = self._rows.get(write_id >> LIFE_BITS)
                if held is not None and write_id in held.writes:
                    rows = held.writes[write_id]
                    held.size_bytes -= rows.pop(position, 0)
                    if not rows:
                        del held.writes[write_id]
            self._forget()

    # --- clients ------------------------------------------------------------------------------------------------------

    def view(self, known: int = -1) -> View | None:
        """What clients need to find rows. None if ``known`` is still its version."""
        with self.lock:
            if known == self._version:
                return None
            return View(self._version, {number: replace(life) for number, life in self._lives.items() if life.alive})

    def records(self) -> list[UnitInfo]:
        """All units."""
        with self.lock:
            units: dict[str, Life] = {}
            num_lost: Counter[str] = Counter()
            for life in self._lives.values():
                units[life.unit] = max(units.get(life.unit, life), life, key=lambda life: (life.node, life.alive))
                num_lost[life.unit] += 0 if life.alive else len(self._rows[life.number])
            return [self._record(life, num_lost[name]) for name, life in units.items()]

    def _record(self, life: Life, num_lost: int) -> UnitInfo:
        rows = self._rows[life.number] if life.alive else _Rows()
        return UnitInfo(
            name=life.unit,
            state="serving" if life.served else "starting" if life.node or life.alive else "removed",
            node=life.node,
            address=f"{life.started.ip}:{life.started.port}" if life.alive else "",
            num_rows=len(rows),
            size_bytes=rows.size_bytes,
            num_lost=num_lost,
            num_starts=life.num_starts,
        )

    # --- a journal ----------------------------------------------------------------------------------------------------

    def save(self, note: Callable[[str, bytes | None], None]) -> None:
        """Has the units noted, if they changed since."""
        with self.lock:
            if self._version != self._saved_version:
                note(UNITS_NOTE, msgspec.msgpack.encode(_Noted(self._lives, self._next_life, self._version)))
                self._saved_version = self._version

    def restore(self, noted: bytes, payload: Mapping[int, tuple[Sequence[int] | None, Sequence[int]]]) -> None:
        """Goes on from what another book noted. ``payload``: write id -> the bytes of all its rows, if known, and
        the rows that the units may still hold."""
        with self.lock:
            try:
                self._lives, self._next_life, self._version = msgspec.msgpack.decode(noted, type=_Noted)
            except msgspec.MsgspecError as error:
                raise CorruptDataError(f"the journal's book of storage units is of another version: {error}") from error
            self._version += 1
            for write_id, (row_bytes, positions) in payload.items():
                if write_id >> LIFE_BITS in self._lives:
                    # of what was freed, the ledger does not know the size
                    self._hold(write_id, {row: row_bytes[row] if row_bytes else 0 for row in positions})

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _on(self, node: str) -> Life | None:
        return next((life for life in self._lives.values() if life.node == node), None)

    def _begin_life(self, started: Started, before: Life | None) -> Life:
        """A new life: of the node's unit, or of a new one."""
        taken = {life.unit for life in self._lives.values()}
        name = next(name for name in map("unit-{}".format, count()) if name not in taken)
        life = Life(name, self._next_life, started)
        if before is not None:
            life.unit, life.num_starts = before.unit, before.num_starts
        self._lives[life.number] = life
        self._next_life += 1
        return life

    def _end(self, life: Life) -> None:
        """Ends a life: its rows are lost."""
        life.alive = life.served = False
        self.num_ended += 1

    def _changed(self) -> None:
        self._version += 1
        self._forget()

    def _forget(self) -> None:
        """Forgets the ended lives that have no node and no rows."""
        for number in [number for number, life in self._lives.items() if not (life.alive or life.node)]:
            if not self._rows[number].writes:
                del self._lives[number], self._rows[number]
                self._version += 1


# --- the controller ---------------------------------------------------------------------------------------------------


def make_ledger(
    journal: Path | None, capacity_bytes: int | None, sync: bool, *, durable: bool = False, must_exist: bool = False
) -> tuple[LedgerService, FolderLog | None]:
    """The ledger of an instance, and its log in the folder ``journal``, if there is one. Unless it is durable, the
    folder that this is in must exist.

    Args:
        durable: Whether the log outlives the instance: who bootstraps it again goes on with it. The folder that it is
            in is made, and is this process's alone.
        must_exist: Whether there must be a log: the controller was started again.
    """
    if journal is None:
        return LedgerService(capacity_bytes), None
    if not (durable or must_exist or journal.parent.is_dir()):
        raise BackendUnavailableError(
            f"there is no folder {journal.parent} on the node of the controller, {os.uname().nodename}.",
            retryable=False,
            hint="Set `journal` to a folder that all nodes of the Ray cluster share, and make it first.",
        )
    try:
        if durable:
            lock_folder(journal.parent, journal.name, ENDING_S)  # until this process ends
        log = FolderLog(journal, sync=sync, must_exist=must_exist)
        if durable:
            sync_path(journal.parent)  # which has the log now
    except BackendUnavailableError:  # it is an OSError too, and says already what is wrong
        raise
    except OSError as error:
        raise BackendUnavailableError(
            f"the folder {journal.parent} cannot be used: {error}.", retryable=False
        ) from error
    # the clients of a durable instance before are gone
    return LoggedLedger(log, capacity_bytes, ends_holds=durable and not must_exist), log


class ControllerHost(LedgerHost):
    """The ledger and the book of storage units of an instance, which the ledger's log keeps too, if it has one.

    With ``has_units``, rows lie on the units of the book, else elsewhere.
    """

    messages = MESSAGES

    def __init__(self, ledger: LedgerService, log: FolderLog | None = None, *, has_units: bool = True) -> None:
        super().__init__(ledger, None if log is None else log.commit_or_end)
        self.book = UnitBook()  # who holds its lock keeps the server's thread from answering
        self._ledger = ledger
        self._has_units = has_units
        self._num_forgotten = -1  # of `UnitBook.num_ended`, when content was last forgotten
        self._log = log
        if log is not None and UNITS_NOTE in log.notes:
            self.book.restore(log.notes[UNITS_NOTE], ledger.ledger.payload())

    def note(self, name: str, value: bytes | None) -> None:
        """Keeps a value, and the book as it is now, for a controller that is started again. None: no value any more."""
        if self._log is not None:
            with self.book.lock:
                self._save_book()
                self._log.note(name, value)
                self._log.commit_or_end()

    def noted(self, name: str) -> bytes | None:
        """What `note` was given last, also by an earlier process."""
        return None if self._log is None else self._log.notes.get(name)

    def garbage(self) -> list[Ref]:
        """The rows that nobody reads, and whose payload may not be deleted yet. It may be, from now on."""
        with self.book.lock:
            self._commit()  # else a controller that is started again may have these rows
            return self._ledger.garbage()

    def collected(self, refs: Sequence[Ref]) -> None:
        """The payload of these rows is deleted."""
        with self.book.lock:
            self._collected(commands.Collected(refs))
            self._save_book()
            self._commit()

    # --- as a host ----------------------------------------------------------------------------------------------------

    def answer(self, request: Any, client: Client) -> Any:
        with self.book.lock:
            result = super().answer(request, client)
            try:
                self._save_book()
            except BackendUnavailableError as error:
                if isinstance(request, _OF_THE_BOOK):
                    raise  # no client may know a view that a controller which is started again does not
                _logger.warning("the book of units is saved with the next call: %s", error)
            return result

    def end_session(self, client: Client) -> None:
        with self.book.lock:
            super().end_session(client)

    def _commit(self) -> None:
        """Ray starts a controller that ended here again, unless another process is one already."""
        if self._log is not None:
            self._log.commit_or_end()

    def _save_book(self) -> None:
        if self._log is not None:
            self.book.save(self._log.note)

    # --- puts ---------------------------------------------------------------------------------------------------------

    def _begin_put(self, put: commands.BeginPut, client: Client) -> int:
        """Begins a put whose rows lie elsewhere: the ledger numbers its writes."""
        if self._has_units:  # the book numbers them too
            raise InvalidRequestError("a put was not begun: it names no node, and this instance places rows on units.")
        return self._ledger.call(put)

    def _begin_near(self, request: BeginNear, client: Client) -> int:
        """Begins a put, and places its rows. Raises `UnitsGoneError` if no unit takes rows."""
        self._forget_lost()
        put = request.put
        write_id = self.book.choose(self._ledger.ledger.next_number, put.size_bytes, request.node, request.full)
        self._save_book()  # the log knows the life before it knows a put that has rows there
        self._ledger.call(msgspec.structs.replace(put, write_id=write_id))
        self.book.add(put.by_id(write_id))
        return write_id

    def _commit_put(self, commit: commands.CommitPut, client: Client) -> Any:
        try:
            self.book.check(commit.write_id)
        except UnitsGoneError:
            self._ledger.call(commands.AbortPut(commit.write_id))
            raise
        self._forget_lost()
        return self._ledger.call(commit)

    def _forget_lost(self) -> None:
        """No put may rely on content of units that have ended."""
        if self._num_forgotten != self.book.num_ended:
            if lost := self.book.lost(self._ledger.ledger.content_refs()):
                self._ledger.call(commands.ForgetContent(lost))
            self._num_forgotten = self.book.num_ended

    def _collected(self, collected: commands.Collected, client: Client | None = None) -> None:
        self._ledger.call(collected)
        self.book.collected(collected.refs)

    # --- units --------------------------------------------------------------------------------------------------------

    def _view(self, request: ViewUnits, client: Client) -> View | None:
        return self.book.view(request.version)

    def _records(self, request: UnitRecords, client: Client) -> Any:
        return self.book.records()


ControllerHost.handlers = {
    **LedgerHost.handlers,
    BeginNear: ControllerHost._begin_near,
    ViewUnits: ControllerHost._view,
    UnitRecords: ControllerHost._records,
    commands.BeginPut: ControllerHost._begin_put,
    commands.CommitPut: ControllerHost._commit_put,
    commands.Collected: ControllerHost._collected,
}
