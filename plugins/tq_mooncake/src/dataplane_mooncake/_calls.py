"""Calls into Mooncake's engine, every one bounded in time.

Engine calls block without a limit of their own (they release the interpreter's lock), so each runs in a thread that is
given up when time is up. None of these threads is left in the engine when the process exits: see `_end_all`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

from dataplane_core.errors import ClientClosedError, OperationTimeoutError
from dataplane_mooncake._ending import Endpoint, end_connections, skip_cpp_teardown
from dataplane_tq_simple._exchange import Watch

__all__ = ["POLL_S", "Call", "bounded", "know_peers"]

_Result = TypeVar("_Result")

#: How often a waiting caller looks whether its client was closed, in seconds.
POLL_S: Final = 0.1
#: How long a caller waits before it starts to ask after the other processes, in seconds.
_PATIENCE_S: Final = 1.0
#: When the process exits, calls are waited for as long as `_EXIT_S`, in seconds. Within the first `_GRACE_S` of these
#: they may still speak to the master, to delete what was stored in part, or to close an engine.
_GRACE_S: Final = 2.0
_EXIT_S: Final = 5.0
#: Threads that are kept while there is no call for them.
_MAX_IDLE: Final = 8


class GivenUp(Exception):
    """Raised in the thread of a call that was given up."""


class Call:
    """A call that runs in another thread, until it ends or is given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._outcome: tuple[Any, BaseException | None] = (None, None)
        self.given_up = False

    def check(self) -> None:
        """Called between the steps of a call: ends it where it was given up."""
        if self.given_up:
            raise GivenUp

    def start(self, work: Callable[[Call], Any], undo: Callable[[Any], None] | None = None) -> None:
        """Has a thread make it; for ``work`` and ``undo`` see `bounded`."""
        _register(self)
        try:
            try:
                worker = _idle.pop()
            except IndexError:
                worker = _Worker()
            worker.tasks.put(functools.partial(self._run, work, undo))
        except BaseException:
            _running.discard(self)
            raise

    def _run(self, work: Callable[[Call], Any], undo: Callable[[Any], None] | None) -> None:
        result, error = None, None
        try:
            try:
                result = work(self)
            except BaseException as raised:
                error = raised
            with self._lock:
                self._outcome = result, error
                self._ended.set()
                late = self.given_up
            if late and undo is not None:
                with contextlib.suppress(Exception):  # nobody is left to tell
                    undo(result)
        finally:
            _running.discard(self)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        return self._ended.wait(timeout_s)

    def give_up(self) -> bool:
        """Gives it up, unless it has ended meanwhile; says whether."""
        with self._lock:
            self.given_up = not self._ended.is_set()
            return self.given_up

    def result(self) -> Any:
        """Its result, once it has ended; raises what it raised."""
        result, error = self._outcome
        if error is not None:
            raise error
        return result


class _Worker:
    """A thread that makes calls, one after the other.

    Threads are kept for later calls: the C library gives each new one another of its heaps, and what a call leaves
    there is not used by the next, so a thread per call made the process grow.
    """

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="dataplane-mooncake", daemon=True).start()

    def _work(self) -> None:
        while True:
            self.tasks.get()()
            if len(_idle) >= _MAX_IDLE:
                return
            _idle.append(self)


_idle: list[_Worker] = []


def bounded(
    what: str,
    work: Callable[[Call], _Result],
    deadline: float,
    *,
    undo: Callable[[Any], None] | None = None,
    watch: Callable[[], Watch] | None = None,
    closed: Callable[[], bool] = lambda: False,
    on_give_up: Callable[[], None] = lambda: None,
) -> _Result:
    """Runs engine calls in a thread and waits for them no longer than until the deadline.

    Args:
        what: The operation, for messages.
        work: The calls; it must not touch what the caller may change meanwhile.
        deadline: On `time.monotonic`'s clock, in seconds.
        undo: Called with the result, or None if there is none, when it comes after the call was given up.
        watch: Makes a watch over the processes that the engine speaks to, for calls that take long.
        closed: Whether the client was closed.
        on_give_up: Called by the caller's thread once the call was given up.

    Raises:
        OperationTimeoutError: Time was up.
        ClientClosedError: The client was closed meanwhile.
        BackendUnavailableError: The watch found one of the processes dead.
        Exception: What ``work`` raised.
    """
    if deadline <= time.monotonic():
        raise OperationTimeoutError(f"{what}: time was up before it began. Nothing was sent.")
    call = Call()
    started = time.monotonic()
    call.start(work, undo)
    watching: Watch | None = None
    try:
        while not call.wait(max(0.0, min(POLL_S, deadline - time.monotonic()))):
            now = time.monotonic()
            if closed():
                raise ClientClosedError(f"{what}: this client is closed.")
            if now >= deadline:
                raise OperationTimeoutError(
                    f"{what}: no answer within {now - started:.3g} s. It may have been carried out or not.",
                    hint=watching.describe() if watching else None,
                )
            if watch is not None and now - started >= _PATIENCE_S:
                watching = watching or watch()
                watching.check()
    except BaseException as error:
        given_up = call.give_up()
        if given_up:
            on_give_up()
        if given_up or not isinstance(error, Exception):  # an interrupt is not lost, though the call has just ended
            raise
    result: _Result = call.result()
    return result


# --- the exit of the process -----------------------------------------------------------------------------------------

_running: set[Call] = set()
_units: set[Endpoint] = set()
_masters: set[Endpoint] = set()
_pid: int | None = None  # of the process that makes calls


def know_peers(*, units: Collection[Endpoint] = (), master: Endpoint | None = None) -> None:
    """Names processes that the engine has connections to, besides those named before."""
    _units.update(units)
    if master is not None:
        _masters.add(master)


def _register(call: Call) -> None:
    global _pid
    if _pid is None:
        _pid = os.getpid()
        atexit.register(_end_all)
    _running.add(call)


def _end_all() -> None:
    """At the exit of the process: ends the calls that still run, before C++ destroys the engine under them."""
    if os.getpid() != _pid:
        skip_cpp_teardown()  # a fork has the engine without its threads, for which the destructors would wait
        return
    started = time.monotonic()
    while _running:
        waited_s = time.monotonic() - started
        if waited_s >= _EXIT_S:
            skip_cpp_teardown()
            return
        for call in list(_running):
            call.give_up()
        with contextlib.suppress(Exception):
            end_connections(_units if waited_s < _GRACE_S else _units | _masters)
        time.sleep(0.02)
