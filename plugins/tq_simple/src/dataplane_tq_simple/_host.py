"""What the thread in the controller serves: the ledger, and the book of storage units.

The ledger's write ids say which unit has the rows. An instance with the option `journal` has a log of both in that
folder, where a controller that Ray starts again finds them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from dataplane_core.durable_files import sync_path
from dataplane_core.errors import BackendUnavailableError, InvalidRequestError
from dataplane_core.hosting import Client, LedgerHost
from dataplane_core.ledger import LedgerService, Ref, commands
from dataplane_core.log import FolderLog, LoggedLedger
from dataplane_core.ownership import lock_folder
from dataplane_tq_simple._book import UNITS_NOTE, UnitBook
from dataplane_tq_simple._folders import ENDING_S
from dataplane_tq_simple._messages import MESSAGES, BeginNear, UnitRecords, UnitsGoneError, View, ViewUnits

_logger = logging.getLogger(__name__)

_OF_THE_BOOK: Final = (ViewUnits, UnitRecords)


def make_ledger(
    journal: Path | None, capacity_bytes: int | None, sync: bool, *, durable: bool = False, must_exist: bool = False
) -> tuple[LedgerService | LoggedLedger, FolderLog | None]:
    """The ledger of an instance, and its log.

    Args:
        journal: The folder of the log; the folder that this is in must exist. None: there is no log.
        capacity_bytes: As for `LedgerService`.
        sync: See `FolderLog`.
        durable: Whether the log outlives the instance: who bootstraps it again goes on with it. The folder that it is
            in is made, and is this process's alone.
        must_exist: Whether there must be a log: the controller was started again.

    Raises:
        AlreadyRunningError: Another process has the folder.
        BackendUnavailableError: The folder cannot be used.
        CorruptDataError: The log is damaged.
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
    """The ledger and the book of storage units of an instance.

    Args:
        ledger: The ledger.
        log: That of the ledger, which also keeps the book. None: they are not kept.
        has_units: Whether rows lie on the units of the book. If not, they lie elsewhere.

    Attributes:
        book: The book of storage units. Who holds its lock keeps the server's thread from answering.
    """

    messages = MESSAGES

    def __init__(
        self, ledger: LedgerService | LoggedLedger, log: FolderLog | None = None, *, has_units: bool = True
    ) -> None:
        super().__init__(ledger, None if log is None else log.commit_or_end)
        self.book = UnitBook()
        self._ledger = ledger
        self._has_units = has_units
        self._log = log
        if log is not None and UNITS_NOTE in log.notes:
            self.book.restore(log.notes[UNITS_NOTE], ledger.ledger.payload())

    def note(self, name: str, value: bytes | None) -> None:
        """Keeps a value, and the book as it is now, for a controller that is started again. None: no value any more.

        Nothing happens without a log.
        """
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
        """As `LedgerHost.answer`."""
        answer = super().answer
        with self.book.lock:
            result = answer(request, client)
            try:
                self._save_book()
            except BackendUnavailableError as error:
                if isinstance(request, _OF_THE_BOOK):
                    raise  # no client may know a view that a controller which is started again does not
                _logger.warning("the book of units is saved with the next call: %s", error)
            return result

    def end_session(self, client: Client) -> None:
        """As `LedgerHost.end_session`."""
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
        put = request.put
        write_id = self.book.choose(self._ledger.ledger.next_number, put.size_bytes, request.node, request.full)
        self._save_book()  # the log knows the life before it knows a put that has rows there
        self._ledger.call(replace(put, write_id=write_id))
        self.book.add(put.by_id(write_id))
        return write_id

    def _commit_put(self, commit: commands.CommitPut, client: Client) -> Any:
        try:
            self.book.check(commit.write_id)
        except UnitsGoneError:
            self._ledger.call(commands.AbortPut(commit.write_id))
            raise
        return self._ledger.call(commit)

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
