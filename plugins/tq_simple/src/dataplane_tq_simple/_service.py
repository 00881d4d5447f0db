"""The ledger of ``tq_simple``: its write ids say which storage units have the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

from dataplane_core.ledger import Command, LedgerService, Reply, commands
from dataplane_tq_simple._book import UnitBook
from dataplane_tq_simple._errors import UnitsGoneError


class Placing(ABC):
    """Places puts on storage units, and refuses to commit one of whose units has ended."""

    _book: UnitBook

    def use_book(self, book: UnitBook) -> None:
        """Places puts by this book. Called before the first command."""
        self._book = book

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """As `LedgerService.call`.

        Raises:
            UnitsGoneError: A put begins and no unit takes rows, or a unit ended while the put ran.
        """
        if isinstance(command, commands.BeginPut) and command.write_id is None:
            return cast("Reply", self.begin_put(command, None))
        if isinstance(command, commands.CommitPut):
            try:
                self._book.check(command.write_id)
            except UnitsGoneError:
                with self._aside():
                    self._pass_on(commands.AbortPut(command.write_id))
                raise
        reply = self._pass_on(command, wake)
        if isinstance(command, commands.Collected):
            self._book.collected(command.refs)
        return reply

    def begin_put(self, begin: commands.BeginPut, node: str | None) -> int:
        """Begins a put, and places its rows: on units of ``node``, if one is given and has units. Raises as `call`."""
        write_id = self._book.place(begin.num_ids, begin.size_bytes, node)
        self._before_put()
        self._pass_on(replace(begin, write_id=write_id))
        self._book.add(begin.by_id(write_id))
        return write_id

    @abstractmethod
    def _pass_on(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """Sends a command to the ledger."""

    def _before_put(self) -> None:  # noqa: B027  (most have nothing to do)
        """Called when a put was placed and is not begun yet."""

    def _aside(self) -> AbstractContextManager[None]:
        """What is done in this context is not the work of the call under way."""
        return nullcontext()


class PlacingLedgerService(Placing, LedgerService):
    """A `LedgerService` that places puts."""

    def _pass_on(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        return LedgerService.call(self, command, wake)
