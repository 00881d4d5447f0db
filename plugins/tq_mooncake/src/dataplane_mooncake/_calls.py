"""Calls into Mooncake's engine, each with a deadline.

An engine call has no timeout of its own (it releases the interpreter's lock). So each call runs in a thread, and the
caller gives the call up at the deadline. A transfer to a suspended process would then go on for a minute, and poll all
the time. But the engine only ever waits for connections, so shutting these down ends the call at once.

When the process exits, C++ destroys the engine even if threads are still in it: the process then dies by a segmentation
fault and loses its exit status. So no thread is left in it: see `_end_all`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import psutil

from dataplane_core.errors import ClientClosedError, OperationTimeoutError
from dataplane_core.hosting import Watch

_Result = TypeVar("_Result")
#: An address and a port.
Endpoint = tuple[str, int]

#: Seconds between two checks of a waiting caller whether its client was closed.
POLL_S: Final = 0.1
#: Seconds after which a waiting caller starts to check whether the other processes are alive.
_PATIENCE_S: Final = 1.0
#: When the process exits, it waits at most `_EXIT_S` seconds for its calls. In the first `_GRACE_S` of them, a call may
#: still talk to the master: to delete rows that were stored in part, or to close an engine.
_GRACE_S: Final = 2.0
_EXIT_S: Final = 5.0
#: Idle threads that are kept for later calls.
_MAX_IDLE: Final = 8


class GivenUp(Exception):
    """Raised inside a call that was given up."""


_Work = Callable[["Call"], Any]
_Undo = Callable[[Any], None]
_Hold = Callable[["Call"], AbstractContextManager[object]]


class Call:
    """A call that runs in another thread. Its caller may give it up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._outcome: tuple[Any, BaseException | None] = (None, None)
        self.given_up = False

    @property
    def is_stuck(self) -> bool:
        """Whether it was given up and its work has not ended."""
        return self.given_up and not self._ended.is_set()

    def check(self) -> None:
        """Called between the steps of a call: raises if the call was given up."""
        if self.given_up:
            raise GivenUp

    def start(self, work: _Work, undo: _Undo | None = None, hold: _Hold = contextlib.nullcontext) -> None:
        """Runs the call in a thread; for the arguments see `bounded`."""
        _register(self)
        try:
            try:
                worker = _idle.pop()
            except IndexError:
                worker = _Worker()
            worker.tasks.put(functools.partial(self._run, work, undo, hold))
        except BaseException:
            _running.discard(self)
            raise

    def _run(self, work: _Work, undo: _Undo | None, hold: _Hold) -> None:
        try:
            with hold(self):
                result, error = None, None
                try:
                    result = work(self)
                except BaseException as raised:
                    error = raised
                if self._end(result, error) and undo is not None:
                    with contextlib.suppress(Exception):  # no caller waits for the error
                        undo(result)
        except BaseException as refused:  # by ``hold``
            self._end(None, refused)
        finally:
            _running.discard(self)

    def _end(self, result: Any, error: BaseException | None) -> bool:
        """The call has ended. Returns whether it was given up before."""
        with self._lock:
            self._outcome = result, error
            self._ended.set()
            return self.given_up

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s``. Returns whether the call has ended."""
        return self._ended.wait(timeout_s)

    def give_up(self) -> bool:
        """Gives the call up, unless it has ended. Returns whether it was given up."""
        with self._lock:
            self.given_up = not self._ended.is_set()
            return self.given_up

    def result(self) -> Any:
        """The result of an ended call; raises what the call raised."""
        result, error = self._outcome
        if error is not None:
            raise error
        return result


class _Worker:
    """A thread that runs calls, one after the other. With one thread per call, the process grew: the C library gives
    each a heap of its own, and what a call leaves there is not reused by other threads."""

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
    undo: _Undo | None = None,
    hold: _Hold = contextlib.nullcontext,
    watch: Callable[[], Watch] | None = None,
    closed: Callable[[], bool] = lambda: False,
    on_give_up: Callable[[], None] = lambda: None,
) -> _Result:
    """Runs engine calls in a thread, and waits for them until the deadline. Raises what they raise, and also
    `OperationTimeoutError`, `ClientClosedError`, and `BackendUnavailableError` if the watch found a process dead.

    Args:
        what: The operation, for messages.
        work: Makes the calls. It must not use memory that the caller may change after this returns.
        deadline: On `time.monotonic`'s clock.
        undo: Called if the work ends after the call was given up: with its result, or None if it raised.
        hold: Makes what is entered for the time of the work and of ``undo``. What it raises, this raises.
        watch: Makes a watch over the processes that the engine talks to, for calls that take long.
        closed: Whether the client was closed.
        on_give_up: Called in the caller's thread when the call was given up.
    """
    if deadline <= time.monotonic():
        raise OperationTimeoutError(f"{what}: the deadline had passed before it began. Nothing was sent.")
    call = Call()
    started = time.monotonic()
    call.start(work, undo, hold)
    watching, says = None, ""
    try:
        while not call.wait(max(0.0, min(POLL_S, deadline - time.monotonic()))):
            now = time.monotonic()
            if closed():
                raise ClientClosedError(f"{what}: this client is closed.")
            if now >= deadline:
                raise OperationTimeoutError(
                    f"{what}: no answer within {now - started:.3g} s. It may have been executed or not.",
                    hint=says or None,
                )
            if watch is not None and now - started >= _PATIENCE_S:
                watching = watching or watch()
                says = watching()
    except BaseException as error:
        given_up = call.give_up()
        if given_up:
            on_give_up()
        if given_up or not isinstance(error, Exception):  # an interrupt is raised even if the call has just ended
            raise
    result: _Result = call.result()
    return result


# --- connections ------------------------------------------------------------------------------------------------------


def listening_ports(pid: int | None = None) -> set[int]:
    """The TCP ports that a process listens on, by default this one."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def end_connections(peers: Collection[Endpoint]) -> int:
    """Shuts down this process's connections to these peers: a call that waits for one of them fails at once. Returns
    how many were shut down that were not before."""
    num_ended = 0
    wanted = {(address, port) for host, port in peers for address in _addresses(host)}
    for each in psutil.Process().net_connections("tcp"):
        if each.fd < 0 or not each.raddr or (each.raddr.ip.removeprefix("::ffff:"), each.raddr.port) not in wanted:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:
            # the descriptor may belong to another connection by now
            if connection.getpeername()[1] == each.raddr.port and connection.getsockname()[1] == each.laddr.port:
                connection.shutdown(socket.SHUT_RDWR)
                num_ended += each.status == psutil.CONN_ESTABLISHED
    return num_ended


def _addresses(host: str) -> set[str]:
    try:
        return {str(place[4][0]) for place in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}


# --- the exit of the process -----------------------------------------------------------------------------------------

_running: set[Call] = set()
_units: set[Endpoint] = set()
_masters: set[Endpoint] = set()
_pid: int | None = None  # of the process that makes calls
_exits = False


def add_peers(*, units: Collection[Endpoint] = (), master: Endpoint | None = None) -> None:
    """Adds processes that the engine has connections to: `_end_all` shuts these down."""
    _units.update(units)
    if master is not None:
        _masters.add(master)


def _register(call: Call) -> None:
    global _pid
    if _exits and threading.current_thread() is not threading.main_thread():
        raise ClientClosedError("the process exits, so its other threads make no more calls.")
    if _pid is None:
        _pid = os.getpid()
        atexit.register(_end_all)
    _running.add(call)


def _end_all() -> None:
    """When the process exits: ends the calls that still run, before C++ destroys the engine that they use."""
    global _exits
    if os.getpid() != _pid:
        _skip_cpp_teardown()  # a fork lacks the engine's threads, and the destructors would wait for them
        return
    # Python soon ends each thread that comes back to it. In C++ that aborts the process, so none may be in the engine.
    _exits = True
    started = time.monotonic()
    while _running:
        waited_s = time.monotonic() - started
        if waited_s >= _EXIT_S:
            _skip_cpp_teardown()
            return
        for call in list(_running):
            call.give_up()
        with contextlib.suppress(Exception):
            end_connections(_units if waited_s < _GRACE_S else _units | _masters)
        time.sleep(0.02)


def _skip_cpp_teardown() -> None:
    """For an ``atexit`` handler: lets this process exit without running the destructors of C++ libraries. Python shuts
    down as usual; then the C library, if it has ``on_exit``, flushes its files and exits with the same status."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        # the one registered last runs first
        for function in (libc._exit, libc.fcloseall):
            libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)
