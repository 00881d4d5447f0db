"""Waits with time limits, so that a test fails and does not hang if a backend hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

_R = TypeVar("_R")

#: The most seconds that a call may take that must not wait, on a loaded machine. The environment variable sets it.
PROMPT_S: Final = float(os.environ.get("DATAPLANE_CONFORMANCE_PROMPT_S", "10"))
#: The most seconds that a process or a store may take to start on a loaded machine.
STARTS_S: Final = 120.0


class Background:
    """A call in a thread that is a daemon: if it hangs, its test fails, but the process can still end."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # raised again by result()
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, within_s: float = PROMPT_S, what: str = "the call") -> Any:
        """Returns the call's result or raises its error. Fails if it does not end in time."""
        self._thread.join(within_s)
        assert not self.running, f"{what} did not end within {within_s:g} s: it hangs."
        if self._error is not None:
            raise self._error
        return self._result


def bounded(call: Callable[[], _R], within_s: float = PROMPT_S, what: str = "the call") -> _R:
    result: _R = Background(call).result(within_s, what)
    return result


def eventually(condition: Callable[[], _R], within_s: float = PROMPT_S, what: str = "the condition") -> _R:
    """Polls until the condition returns something true, and returns that. Fails if it does not in time."""
    give_up = time.monotonic() + within_s
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < give_up, f"{what} did not come true within {within_s:g} s."
        time.sleep(0.005)


def in_threads(*calls: Callable[[], Any], within_s: float = 180.0) -> list[Any]:
    """Starts all calls together, each in its own thread. Returns their results in order, or raises the first error."""
    barrier = threading.Barrier(len(calls))

    def started(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            barrier.wait(within_s)
            return call()

        return run

    running = [Background(started(call)) for call in calls]
    give_up = time.monotonic() + within_s
    return [call.result(max(0.1, give_up - time.monotonic()), f"thread {index}") for index, call in enumerate(running)]
