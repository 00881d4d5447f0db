"""The ledger of a controller that keeps a journal, and that finds its ledger there when Ray starts it again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from dataplane_core.backends import CallId, RecordedLedger
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.ledger import Command, Ref, Reply, commands
from dataplane_tq_simple._book import UNITS_NOTE, UnitBook
from dataplane_tq_simple._service import Placing

__all__ = ["PlacingRecordedService", "RecordedService", "Recorder"]

_logger = logging.getLogger(__name__)

#: The exit status of a controller that may answer nobody any more.
_EXIT_STATUS: Final = 70


class Recorder:
    """What the controller needs of its journal beside the ledger. For one thread at a time.

    Args:
        ledger: The ledger.

    Attributes:
        book: The book of storage units that is kept too, or None.
    """

    def __init__(self, ledger: RecordedLedger) -> None:
        self._ledger = ledger
        self.book: UnitBook | None = None

    def once(self, call: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """As `RecordedLedger.once`; ``call`` is a `CallId` as a tuple."""
        return self._ledger.once(CallId(*call), work)

    def note(self, name: str, value: bytes) -> None:
        """As `RecordedLedger.note`."""
        self._ledger.note(name, value)

    def noted(self, name: str) -> bytes | None:
        """What was noted last."""
        return self._ledger.notes.get(name)

    def save(self) -> None:
        """Notes what has changed in the book."""
        if self.book is None:
            return
        mark, notes = self.book.unsaved()
        for name, value in notes.items():
            self._ledger.note(name, value)
        self.book.saved(mark, notes)

    def save_change(self, outcome: object) -> None:
        """Notes that the call under way changed the units, with what came of it."""
        if self.book is not None:
            self._ledger.note_outcome(UNITS_NOTE, self.book.pack(), outcome)

    def commit(self) -> None:
        """Returns when everything that was done is kept. If it cannot be, ends the process: nobody gets an answer.

        Ray then starts the controller again, unless another process is the controller already.
        """
        try:
            self._ledger.commit()
        except (OSError, BackendUnavailableError) as error:
            _end(error)


class RecordedService:
    """As a `LedgerService`, but recorded in a folder.

    Args:
        folder: The folder of this instance's journal. The folder that it is in must exist.
        capacity_bytes: As for `LedgerService`.
        sync: See `RecordedLedger`.
        must_exist: Whether there must be a journal: the controller was started again.

    Attributes:
        recorder: See `Recorder`.

    Raises:
        BackendUnavailableError: The folder cannot be used.
        CorruptDataError: The journal is damaged.
    """

    def __init__(self, folder: Path, capacity_bytes: int | None, sync: bool, *, must_exist: bool = False) -> None:
        if not must_exist and not folder.parent.is_dir():
            raise BackendUnavailableError(
                f"there is no folder {folder.parent} on the node of the controller, {os.uname().nodename}.",
                retryable=False,
                hint="Set `journal` to a folder that all nodes of the Ray cluster share, and make it first.",
            )
        self._ledger = RecordedLedger(folder, capacity_bytes, sync=sync, must_exist=must_exist)
        self.recorder = Recorder(self._ledger)

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """As `LedgerService.call`."""
        if isinstance(command, commands.BeginPut) and command.write_id is None:
            begin = replace(command, write_id=self._ledger.take_ids(command.num_ids))
            return cast("Reply", self._ledger.call(begin, wake))
        return self._ledger.call(command, wake)

    def garbage(self) -> list[Ref]:
        """As `LedgerService.garbage`."""
        return self._ledger.garbage()


class PlacingRecordedService(Placing, RecordedService):
    """As a `PlacingLedgerService`, but recorded in a folder, with the book of storage units."""

    def use_book(self, book: UnitBook) -> None:
        """As `PlacingLedgerService.use_book`. Fills the book with what was recorded."""
        super().use_book(book)
        self.recorder.book = book
        if UNITS_NOTE in self._ledger.notes:
            book.restore(self._ledger.notes, self._ledger.payload(), self._ledger.next_number)

    def _before_put(self) -> None:
        self.recorder.save()  # the journal knows the layout before it knows a put that uses it

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with self._ledger.aside():
            yield

    def _pass_on(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        return RecordedService.call(self, command, wake)


def _end(error: Exception) -> NoReturn:
    _logger.critical("this controller may answer nobody any more, and ends: %s", error)
    os._exit(_EXIT_STATUS)
