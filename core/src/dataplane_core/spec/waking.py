"""What ends a wait: a bell, and the cancellation of a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Final


class Bell(SimpleQueue[None]):
    """Lets a thread wait until it is woken.

    Any thread, and any signal handler or ``__del__`` in the middle of another call, may ring it: it takes no lock that
    these could find taken, as `threading.Event` does.
    """

    __slots__ = ()

    def ring(self) -> bool:
        """Ends the wait, or the next one. True, as what wakes a waiter says if that is there."""
        self.put(None)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s``. Returns whether it was rung. What rang so far does not end a further wait."""
        with suppress(Empty):
            self.get(timeout=max(0.0, timeout_s))
            while not self.empty():
                self.get_nowait()
            return True
        return False


class Cancellation:
    """Ends the wait of a put for room when nobody wants the put any longer. `CANCELLATION` has that of this call."""

    def __init__(self) -> None:
        self.is_set = False
        self._listening: list[Callable[[], object]] = []

    def listen(self, ring: Callable[[], object]) -> None:
        """``ring`` is called from another thread when it is cancelled."""
        self._listening.append(ring)
        if self.is_set:
            ring()

    def cancel(self) -> None:
        """Nobody wants it any longer."""
        self.is_set = True
        for ring in self._listening:
            ring()


#: That of the call that this thread makes for an `AsyncDataPlaneClient`.
CANCELLATION: Final[ContextVar[Cancellation | None]] = ContextVar("CANCELLATION", default=None)
