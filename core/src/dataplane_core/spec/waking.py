"""What ends a wait: a bell, the cancellation of a call, and what wakes a claim."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Final


class Bell:
    """Lets a thread wait until it is woken.

    Any thread, and any signal handler or ``__del__`` in the middle of another call, may ring it: it takes no lock that
    these could find taken, as `threading.Event` does.
    """

    __slots__ = ("_rung",)

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Ends the wait, or the next one."""
        self._rung.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s``. Returns whether it was rung. What rang so far does not end a further wait."""
        with suppress(Empty):
            self._rung.get(timeout=max(0.0, timeout_s))
            while not self._rung.empty():
                self._rung.get_nowait()
            return True
        return False


class Cancellation:
    """Ends the wait of a put for room when nobody wants the put any longer. `CANCELLATION` has that of this call.

    Attributes:
        is_set: Whether it is cancelled.
    """

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


class Wake:
    """Wakes a claim that waits. The client makes it; a backend that declares ``wakes`` keeps it and calls it.

    Args:
        notify: Tells the client to ask again. Does not block.

    Attributes:
        at_end: Called once when the claim no longer waits, unless it is None. The backend sets it; it must not block.
    """

    __slots__ = ("_ended", "_notify", "at_end")

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._ended = False
        self.at_end: Callable[[], None] | None = None

    def __call__(self) -> bool:
        """Tells the client to ask again. Any thread may call it. False: the claim no longer waits."""
        if self._ended:
            return False
        self._notify()
        return True

    def end(self) -> None:
        """The claim no longer waits."""
        self._ended = True
        at_end, self.at_end = self.at_end, None
        if at_end is not None:
            at_end()
