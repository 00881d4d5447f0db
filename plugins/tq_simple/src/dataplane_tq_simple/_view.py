"""What a client knows about the storage units: which lives there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_tq_simple._book import Life, View
from dataplane_tq_simple._errors import UnitsGoneError

#: Seconds between two questions to the controller about a unit that does not answer.
PATIENCE_S: Final = 0.2
#: Seconds that the controller may take to answer that question, while a reply of the unit may come.
_QUESTION_S: Final = 0.5


class KnownUnits:
    """The newest `View` that this client has of the book of storage units. Thread-safe.

    Args:
        ask: Asks the controller for a newer view than that of a version, by a deadline.
        forget: Called with the numbers of lives that have ended, or are elsewhere now.
    """

    def __init__(self, ask: Callable[[int, float], View | None], forget: Callable[[list[int]], None]) -> None:
        self._ask = ask
        self._forget = forget
        self._lock = threading.Lock()
        self._view = View(-1, {})

    def refresh(self, deadline: float) -> None:
        """Gets the newest view. Raises as `QueueEngine.call`."""
        view = self._ask(self._view.version, deadline)
        with self._lock:
            if view is None or view.version <= self._view.version:
                return
            ended = [number for number, life in self._view.lives.items() if life != view.lives.get(number)]
            self._view = view
        self._forget(ended)

    def look_up(self, numbers: Iterable[int], deadline: float) -> None:
        """Asks the book if it does not know one of these lives. One that it still does not know then has ended."""
        if any(number not in self._view.lives for number in numbers):
            self.refresh(deadline)

    def life(self, number: int) -> Life | None:
        """A life that has not ended, as far as this client knows; else None."""
        return self._view.lives.get(number)

    def living(self) -> dict[str, int]:
        """The units that run, as far as this client knows: name -> number of the life."""
        return {life.unit: number for number, life in self._view.lives.items() if life.served}


class UnitWatch:
    """Asks the book whether a storage unit has ended, while a call waits for it.

    Args:
        known: Gets the answers.
        number, life: The life of the unit, as it was when the call began.
        is_cancelled: Whether the call is to end: another one of the same operation failed, or was interrupted.
    """

    def __init__(self, known: KnownUnits, number: int, life: Life, is_cancelled: Callable[[], bool]) -> None:
        self._known = known
        self._number = number
        self._life = life
        self._is_cancelled = is_cancelled
        self._ask_at = 0.0

    def check(self) -> None:
        """Raises `UnitsGoneError` if it has ended; `BackendUnavailableError` if the controller has, or if cancelled."""
        if self._is_cancelled():
            raise BackendUnavailableError("the call was given up with another one of its operation.")
        now = time.monotonic()
        if now >= self._ask_at and self._known.life(self._number) == self._life:
            try:
                self._known.refresh(now + _QUESTION_S)
            except (OperationTimeoutError, BackendUnavailableError) as error:
                if isinstance(error, BackendUnavailableError) and not error.retryable:
                    raise  # else it is busy, or is started again
            self._ask_at = time.monotonic() + PATIENCE_S
        if self._known.life(self._number) != self._life:
            raise UnitsGoneError("a storage unit ended.")

    def describe(self) -> str:
        """What is known, as a sentence."""
        return "It has not ended: it is stopped, overloaded, or not reachable from this process."
