"""Waits with time limits. Nothing in the kit sleeps for a fixed time, or hangs if a backend hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

__all__ = ["PROMPT_S", "STARTS_S", "Background", "bounded", "eventually", "in_threads"]

_R = TypeVar("_R")

#: The most seconds that "at once" may take on a loaded machine. The environment variable sets another number.
PROMPT_S: Final = float(os.environ.get("DATAPLANE_CONFORMANCE_PROMPT_S", "10"))
#: The most seconds that a store may take to start there.
STARTS_S: Final = 60.0


class Background:
    """A call in a thread of its own, whose result or error is fetched later.

    The thread is a daemon: one that hangs fails its test and does not keep the process.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self.wall_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self._result = self._call()
        except BaseException as error:  # handed to the thread that asks
            self._error = error
        self.wall_s = time.monotonic() - start

    @property
    def running(self) -> bool:
        """Whether the call has not ended."""
        return self._thread.is_alive()

    def result(self, within_s: float = PROMPT_S, what: str = "the call") -> Any:
        """The call's result, or its error.

        Raises:
            AssertionError: It did not end in time.
        """
        self._thread.join(within_s)
        assert not self.running, f"{what} did not end within {within_s:g} s: it hangs."
        if self._error is not None:
            raise self._error
        return self._result


def bounded(call: Callable[[], _R], within_s: float = PROMPT_S, what: str = "the call") -> _R:
    """Calls, and fails instead of hanging."""
    result: _R = Background(call).result(within_s, what)
    return result


def eventually(condition: Callable[[], _R], within_s: float = PROMPT_S, what: str = "the condition") -> _R:
    """Polls until the condition is true, and returns it.

    Raises:
        AssertionError: It did not become true in time.
    """
    give_up = time.monotonic() + within_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < give_up, f"{what} did not come true within {within_s:g} s."
        time.sleep(0.005)


def in_threads(*calls: Callable[[], Any], within_s: float = 60.0) -> list[Any]:
    """Starts all calls together, each in a thread of its own; their results in order, or the first error."""
    barrier = threading.Barrier(len(calls))

    def started(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            barrier.wait(within_s)
            return call()

        return run

    running = [Background(started(call)) for call in calls]
    give_up = time.monotonic() + within_s
    return [each.result(max(0.1, give_up - time.monotonic()), f"thread {index}") for index, each in enumerate(running)]
