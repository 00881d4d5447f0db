"""What the thread in TransferQueue's controller serves: the ledger, and the book of storage units."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from dataplane_core.errors import BackendUnavailableError
from dataplane_core.hosting import CallId, Client, LedgerHost
from dataplane_core.ledger import Ref
from dataplane_tq_simple._book import UNITS_NOTE, UnitBook
from dataplane_tq_simple._messages import MESSAGES, AddUnits, BeginNear, Ping, RemoveUnit, UnitRecords, ViewUnits

if TYPE_CHECKING:
    from dataplane_core.backends import RecordedLedger

_logger = logging.getLogger(__name__)

#: The exit status of a controller that may answer nobody any more.
_EXIT_STATUS: Final = 70
_OF_THE_BOOK: Final = (ViewUnits, UnitRecords, AddUnits, RemoveUnit)


class ControllerHost(LedgerHost):
    """The ledger and the book of storage units of an instance.

    Args:
        service: The ledger. If it has a method ``use_book``, that is called with the book of storage units; if it has a
            ``journal``, what is done is kept there, and each call with an id is done once.

    Attributes:
        book: The book of storage units.
    """

    messages = MESSAGES

    def __init__(self, service: Any) -> None:
        super().__init__(service)
        self.book = UnitBook()
        self._service: Any = service
        self._journal: RecordedLedger | None = getattr(service, "journal", None)
        self._lock = threading.Lock()  # the server's thread, and those of the actor's methods
        if hasattr(service, "use_book"):
            service.use_book(self.book)

    def note(self, name: str, value: bytes) -> None:
        """Keeps a value for a controller that is started again. Nothing happens without a journal."""
        with self._lock:
            if self._journal is not None:
                self._journal.note(name, value)
                self._commit()

    def noted(self, name: str) -> bytes | None:
        """What `note` was given last, also by an earlier process."""
        return None if self._journal is None else self._journal.notes.get(name)

    def garbage(self) -> list[Ref]:
        """The refs that the ledger holds as free, for the keeper of the units."""
        found: list[Ref] = self._service.garbage()
        return found

    # --- as a host ----------------------------------------------------------------------------------------------------

    def answer(self, request: Any, client: Client, call: CallId | None = None) -> Any:
        """As `LedgerHost.answer`."""
        with self._lock:
            if self._journal is None or call is None:
                result = self._execute(request, client)
            else:
                result = self._journal.once(call, lambda: self._execute(request, client))
            try:
                if self._journal is not None:
                    self._service.save_book()
            except BackendUnavailableError as error:
                if isinstance(request, _OF_THE_BOOK):
                    raise  # no client may know a view that a controller which is started again does not
                _logger.warning("the book of units is saved with the next call: %s", error)
            return result

    def end_session(self, client: Client) -> None:
        """As `LedgerHost.end_session`."""
        with self._lock:
            super().end_session(client)

    def settle(self) -> None:
        """Returns when all that was answered is kept."""
        if self._journal is not None:
            with self._lock:
                self._commit()

    def _execute(self, request: Any, client: Client) -> Any:
        match request:
            case Ping():
                return os.getpid()
            case BeginNear():
                return self._service.begin_put(request.put, request.node)
            case ViewUnits():
                return self.book.view(request.version)
            case UnitRecords():
                return self.book.records()
            case AddUnits():
                return self._noted(self.book.add_units(request.count))
            case RemoveUnit():
                self.book.remove_unit(request.name, request.now)
                return self._noted(None)
        return super().answer(request, client)

    def _noted(self, outcome: Any) -> Any:
        """Keeps what a call has changed in the book, and what came of it."""
        if self._journal is not None:
            self._journal.note_outcome(UNITS_NOTE, self.book.pack(), outcome)
        return outcome

    def _commit(self) -> None:
        """Returns when all that was done is kept. If it cannot be, ends the process: nobody gets an answer.

        Ray then starts the controller again, unless another process is the controller already.
        """
        try:
            if self._journal is not None:
                self._journal.commit()
        except (OSError, BackendUnavailableError) as error:
            _logger.critical("this controller may answer nobody any more, and ends: %s", error)
            os._exit(_EXIT_STATUS)
