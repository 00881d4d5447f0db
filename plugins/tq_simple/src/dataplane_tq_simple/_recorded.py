"""The ledger of a controller that keeps a journal, and that finds its ledger there when Ray starts it again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import cast

from dataplane_core.backends import RecordedLedger
from dataplane_core.errors import BackendUnavailableError
from dataplane_core.ledger import Command, Ref, Reply, commands
from dataplane_tq_simple._book import UNITS_NOTE, UnitBook
from dataplane_tq_simple._service import Placing


class RecordedService:
    """As a `LedgerService`, but recorded in a folder.

    Args:
        folder: The folder of this instance's journal. The folder that it is in must exist.
        capacity_bytes: As for `LedgerService`.
        sync: See `RecordedLedger`.
        must_exist: Whether there must be a journal: the controller was started again.

    Attributes:
        journal: The ledger, for what the controller keeps beside it.

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
        self.journal = RecordedLedger(folder, capacity_bytes, sync=sync, must_exist=must_exist)

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """As `LedgerService.call`."""
        if isinstance(command, commands.BeginPut) and command.write_id is None:
            begin = replace(command, write_id=self.journal.take_ids(command.num_ids))
            return cast("Reply", self.journal.call(begin, wake))
        return self.journal.call(command, wake)

    def stop_waiting(self, token: str) -> None:
        """As `LedgerService.stop_waiting`."""
        self.journal.stop_waiting(token)

    def save_book(self) -> None:
        """Keeps what has changed in the book of storage units, if there is one."""

    def garbage(self) -> list[Ref]:
        """As `LedgerService.garbage`."""
        return self.journal.garbage()


class PlacingRecordedService(Placing, RecordedService):
    """As a `PlacingLedgerService`, but recorded in a folder, with the book of storage units."""

    def use_book(self, book: UnitBook) -> None:
        """As `PlacingLedgerService.use_book`. Fills the book with what was recorded."""
        super().use_book(book)
        if UNITS_NOTE in self.journal.notes:
            book.restore(self.journal.notes, self.journal.payload(), self.journal.next_number)

    def save_book(self) -> None:
        """Notes what has changed in the book."""
        mark, notes = self._book.unsaved()
        for name, value in notes.items():
            self.journal.note(name, value)
        self._book.saved(mark, notes)

    def _before_put(self) -> None:
        self.save_book()  # the journal knows the spread before it knows a put that uses it

    def _aside(self) -> AbstractContextManager[None]:
        return self.journal.aside()

    def _pass_on(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        return RecordedService.call(self, command, wake)
