"""A client's connection: starts its backend and middleware, calls their hooks, repeats lost calls, and stops them."""

from __future__ import annotations

import atexit
import errno
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final, NoReturn, Self, TypeVar, cast
from weakref import WeakSet

import pluggy
from msgspec.structs import replace

from dataplane_core.arguments import check_name
from dataplane_core.backends import Backend
from dataplane_core.client.announcing import Announcer, Phases, RunningCall, WorkLog, program_name
from dataplane_core.config import DataPlaneConfig
from dataplane_core.durable_files import FULL
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    ClientClosedError,
    DataPlaneError,
    LeaseExpiredError,
    LostReplyError,
    MissingDataError,
    Outcome,
    Unanswered,
    UnsupportedOperationError,
)
from dataplane_core.middleware import MiddlewareContext
from dataplane_core.spec import Capability, Claim, ClaimRequest, DescribeRequest, PartitionInfo, Scope
from dataplane_core.spec.operations import OPERATIONS, hookimpl
from dataplane_core.spec.requests import NackRequest, Request

_Q = TypeVar("_Q", bound=Request)
_R = TypeVar("_R")

#: The type of a request -> its hook.
_NAMES: Final = {operation.request: name for name, operation in OPERATIONS.items()}

_MAKE_ROOM: Final = "Make room on the disk, then call again."
#: When an operation must end that waited for a thread before it ran, on `time.monotonic`'s clock.
LATEST_END: Final = ContextVar("LATEST_END", default=float("inf"))
#: Seconds that a look at a registration may take. It is advice, which must not hold up a put or a claim.
ADVICE_S: Final = 1.0
#: Seconds that `close` has left for the rest after operations took all of ``op_timeout_s``.
_STOP_S: Final = 0.25
#: Seconds that calls of daemon threads may take to end when the program ends.
_EXIT_S: Final = 5.0
#: Seconds that an interrupted claim may take to give back what it was handed.
_GIVE_BACK_S: Final = 1.0
#: How many of its own registrations a client remembers.
_MOST_REGISTERED: Final = 1024
#: Seconds between two looks of a close whether operations run.
_LOOK_S: Final = 0.002

#: The connections that are open in this process. In a fork, also those of the parent process.
_open: Final[WeakSet[Connection]] = WeakSet()


class ClientFacts:
    """What a client is: the same of a `DataPlaneClient` and of an `AsyncDataPlaneClient`, which has one."""

    _connection: Connection

    @property
    def backend_name(self) -> str:
        """Entry-point name of the backend."""
        return self._connection.config.backend

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the backend declares."""
        return self._connection.capabilities

    @property
    def scope(self) -> Scope:
        """Where clients of this store can be."""
        return type(self._connection.backend).scope

    @property
    def opens_anywhere(self) -> bool:
        """Whether other processes may open a client too, although the scope is ``process``: see `Backend`."""
        return type(self._connection.backend).opens_anywhere

    @property
    def bootstrapped(self) -> bool:
        """True: this client started what the backend needs, and ends it on close. False: it attached."""
        return self._connection.bootstrapped

    @property
    def config(self) -> DataPlaneConfig:
        """The config that this client was connected with."""
        return self._connection.config

    @property
    def middleware(self) -> tuple[Any, ...]:
        """The middleware objects around the backend, outermost first."""
        return tuple(self._connection.middleware)


class Waiters:
    """What waits on a client or a stream, to be woken when that closes. Safe for threads."""

    def __init__(self, message: str = "the client was closed while a claim waited.") -> None:
        self._message = message
        self._wakes: set[Callable[[], object]] = set()
        self.closed = False

    @contextmanager
    def waiting(self, wake: Callable[[], object]) -> Iterator[None]:
        """While the ``with`` lasts, ``wake`` is called when this closes, or at once if it is closed."""
        try:
            self._wakes.add(wake)
            if self.closed:
                wake()
            yield
        finally:
            self._wakes.discard(wake)

    def check(self) -> None:
        """Raises `ClientClosedError` if it was closed."""
        if self.closed:
            raise ClientClosedError(self._message)

    def wake(self) -> None:
        """Wakes all, so that they ask again now."""
        for wake in list(self._wakes):
            wake()

    def close(self) -> None:
        """Wakes all, for the last time."""
        self.closed = True
        self.wake()


@pluggy.HookspecMarker("dataplane")(firstresult=True)
def _spec(request: Any) -> Any:
    """What pluggy knows of each operation."""


class Connection:
    """A started backend with its middleware, and what runs on it now. Safe for threads.

    A signal handler may use the client in the middle of any line of an operation of the same thread. So what all
    operations change is changed by single steps of C, and a lock that they take may be taken again. The backend need
    not care: no thread enters it twice.
    """

    def __init__(
        self, config: DataPlaneConfig, backend: Backend, middleware: Sequence[Any], bootstrapped: bool
    ) -> None:
        self.config = config
        self.backend = backend
        self.bootstrapped = bootstrapped
        self.wire = type(backend).wire
        self.capabilities = type(backend).capabilities
        self.middleware: list[Any] = []
        self.registered: deque[str] = deque(maxlen=_MOST_REGISTERED)  # the epochs of this client's registrations
        self.opened_at = time.time()
        self.advice: set[str] = set()  # what its user was told of field names
        # rank -> epoch, batches given; guarded by state
        self.batches: dict[tuple[str, str, int | None], tuple[str | None, int]] = {}
        self.state = threading.RLock()
        self.streams: WeakSet[Any] = WeakSet()  # those of `stream`
        self.closed = False
        self.pid = os.getpid()
        self._inside: set[int] = set()  # ids of threads that are in the middle of a call of the backend
        self.closes_after: int | None = None  # the thread whose operation closes the client when it ends
        self.calls: set[RunningCall] = set()
        self.work = WorkLog()
        self.phases = Phases()
        self.announcer: Announcer | None = None
        # token -> the thread, request and reply of a claim that was handed samples and has not returned them yet
        self.handed: dict[str, tuple[int, ClaimRequest, Claim]] = {}
        self.waiters = Waiters()
        self._hooks = self._register(middleware)
        self.to_stop: list[Any] = [backend]  # what `close` has not stopped yet
        self._close_lock = threading.RLock()

    @classmethod
    def open(
        cls, config: DataPlaneConfig, backend: Backend, middleware: Sequence[Any], bootstrap: bool, deadline: float
    ) -> Self:
        """Starts the backend and the middleware around it, outermost first. Both are checked already."""
        connection = cls(config, backend, middleware, bootstrap)
        context = MiddlewareContext(
            backend=config.backend,
            wire=connection.wire,
            role=config.role or program_name(),
            moved_rows=backend.moved_rows,
            waiting=connection.work.waiting,
            # `Backend` itself has no operations; each backend has this one, since it needs no capability
            describe=lambda request: cast("Any", backend).describe_partition(request),
        )
        starting = "the backend"
        try:
            backend.start(bootstrap=bootstrap, deadline=deadline)
            for plugin in middleware:
                starting = f"middleware {type(plugin).__name__}"
                if hasattr(plugin, "start"):
                    plugin.start(context)
                connection.middleware.append(plugin)
                connection.to_stop.insert(-1, plugin)
        except BaseException as error:
            connection.closed = True
            connection._stop_all(suppress=True)
            if isinstance(error, DataPlaneError):
                error.backend = error.backend or config.backend
                raise
            if isinstance(error, Exception):
                raise BackendError(
                    f"connect failed while starting {starting}: {type(error).__name__}: {error}",
                    backend=config.backend,
                    hint=limit_hint(error),
                ) from error
            raise
        _open.add(connection)
        if config.announce_s is not None and Capability.CLIENTS in connection.capabilities:
            connection.announcer = Announcer(connection, config.announce_s)
            connection.to_stop.insert(0, connection.announcer)
        return connection

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that opened the client."""
        return self.pid != os.getpid()

    def check_process(self) -> None:
        """Refuses a fork: it has neither the threads nor the leases of its parent."""
        if self.is_forked:
            raise ClientClosedError(
                f"this client was opened in process {self.pid} and is used in its fork {os.getpid()}.",
                backend=self.config.backend,
                hint=_fork_hint(type(self.backend)),
            )

    # --- its end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `DataPlaneClient.close`."""
        if self.is_forked:
            return  # a forked child must not end what its parent uses
        if self._is_left_alone():
            return  # the store's own processes end with this one
        self.closed = True  # if it is interrupted while it waits, it can be repeated
        self.waiters.close()
        if self._is_inside:
            self.closes_after = threading.get_ident()
            return
        with self._close_lock:
            this = threading.get_ident()
            for token, (thread_id, _, _) in self.handed.copy().items():
                if thread_id == this:  # of a claim of this thread, which will not return them
                    self.give_back(token)
            until = time.monotonic() + self.config.op_timeout_s
            while self.others_run() and time.monotonic() < until:
                time.sleep(_LOOK_S)
            _open.discard(self)
            self.backend.stop_by = max(until, time.monotonic() + _STOP_S)
            self._stop_all(suppress=False)

    def others_run(self) -> bool:
        """Whether operations of other threads run. One of this thread goes on only after the close."""
        return any(call.thread_id != threading.get_ident() for call in list(self.calls))

    def _is_left_alone(self) -> bool:
        """Whether the interpreter ends while other threads are in operations: they never go on, and may hold locks."""
        return sys.is_finalizing() and self.others_run()

    def give_back(self, token: str) -> None:
        """Gives back what a claim was handed, if it has not returned it."""
        handed = self.handed.pop(token, None)
        if handed is not None:
            _, request, claim = handed
            nack = NackRequest(
                partition_id=request.partition_id,
                task_name=request.task_name,
                sample_ids=list(claim.sample_ids),
                lease_tokens=list(claim.lease_tokens or ()),
                deadline=time.monotonic() + _GIVE_BACK_S,
            )
            with suppress(DataPlaneError):  # the leases end by themselves
                self.call(nack)

    def _stop_all(self, *, suppress: bool) -> None:
        """Stops all that is not stopped yet. What one of them raises is raised when all are stopped."""
        errors: list[Exception] = []
        ending: BaseException | None = None  # such as SystemExit
        while self.to_stop:
            try:
                stop = getattr(self.to_stop[0], "stop", None)
                del self.to_stop[0]
                if stop is not None:
                    stop()
            except Exception as error:
                errors.append(error)
            except BaseException as error:
                ending = ending or error
        if ending is not None:
            raise ending
        if errors and not suppress:
            raise BackendError(
                f"close: {type(errors[0]).__name__}: {errors[0]}", backend=self.config.backend
            ) from errors[0]

    # --- the way into the backend -------------------------------------------------------------------------------------

    def _register(self, middleware: Sequence[Any]) -> Any:
        """The hooks: the operations of the backend, and the middleware around them."""
        manager = pluggy.PluginManager("dataplane")
        manager.add_hookspecs(type("Operations", (), dict.fromkeys(OPERATIONS, _spec)))
        operations = [name for name in OPERATIONS if hasattr(self.backend, name)]
        entered = {name: hookimpl(self.entering(name, getattr(self.backend, name))) for name in operations}
        manager.register(SimpleNamespace(**entered), name=f"backend {self.backend.name}")
        # pluggy calls the wrapper that was registered last first, so the outermost is registered last
        for position, plugin in reversed(list(enumerate(middleware))):
            manager.register(plugin, name=f"middleware {position} {type(plugin).__name__}")
        return manager.hook

    @property
    def _is_inside(self) -> bool:
        """Whether this thread is in the middle of a call of the backend."""
        return threading.get_ident() in self._inside

    def entering(self, what: str, function: Callable[[Any], _R]) -> Callable[[Any], _R]:
        """A part of the backend, guarded: a thread that is in the middle of another one is refused.

        A signal handler, a logging handler or a ``__del__`` may come between any two lines of a backend, and would then
        wait for ever for a lock that its own thread has.
        """

        def enter(request: Any) -> _R:  # the name that hooks have
            this = threading.get_ident()
            if this in self._inside:
                raise UnsupportedOperationError(
                    f"{what} refused: it was called in the middle of another call of the same client and thread, which "
                    "a signal handler, a logging handler or a '__del__' has interrupted. Nothing was done.",
                    hint="Let the handler note what it wants, and do it when the other call has ended; or give it a "
                    "client of its own.",
                )
            try:
                self._inside.add(this)
                return function(request)
            finally:
                self._inside.discard(this)

        return enter

    # --- what operations need -----------------------------------------------------------------------------------------

    @contextmanager
    def operation(self, operation: str = "", *partition: str, needs: Capability | None = None) -> Iterator[None]:
        """While an operation runs, whose errors name the backend. If it is named, `list_clients` shows it.

        Refuses it if the backend lacks what it needs, or if its partition, where it has one, is no name.
        """
        if self.pid != os.getpid():  # without a call for each operation
            self.check_process()
        if _exits and (self._is_left_alone() or threading.current_thread() is not threading.main_thread()):
            raise ClientClosedError("the program ends, and calls of other threads with it.")
        call = RunningCall(operation, partition[0] if partition else "")
        try:
            self.calls.add(call)
            if self.closed:
                raise ClientClosedError("the client is closed.", hint="Connect another one.")
            if needs is not None:
                self.require(needs, operation)
            for name in partition:
                check_name("partition_id", name)
            yield
        except DataPlaneError as error:
            error.backend = error.backend or self.config.backend
            missing = type(error) is MissingDataError and error.missing_samples
            if partition and (missing or type(error) is LeaseExpiredError):
                self._tell_new_registration(error, *partition)
            raise
        finally:
            self.calls.discard(call)
            if self.closes_after == call.thread_id and not self._is_inside:
                self.closes_after = None
                self.close()

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Names the backend in errors of what is made of several operations, between which a close may come."""
        try:
            yield
        except DataPlaneError as error:
            error.backend = error.backend or self.config.backend
            raise

    def require(self, capability: Capability, what: str) -> None:
        """Refuses what the backend does not declare."""
        if capability not in self.capabilities:
            raise UnsupportedOperationError(
                f"{what} refused: backend '{self.config.backend}' does not declare '{capability}'.",
                hint=f"It declares: {', '.join(sorted(self.capabilities)) or 'nothing'}.",
            )

    def call(self, request: Request) -> Any:
        """Calls the hook of a request, and returns its reply.

        It has until the request's deadline, and at most as long as an operation may take. Middleware, which may change
        the request, gets a copy. An operation that is made once is called again, until the deadline, if its reply was
        lost. ``outcome`` and message of an `Unanswered` error then say whether it was carried out.
        """
        name = _NAMES[type(request)]
        request.deadline = min(request.deadline, time.monotonic() + self.config.op_timeout_s, LATEST_END.get())
        if not OPERATIONS[name].once:
            return self._call(name, request)
        repeatable = Capability.REPEATABLE in self.capabilities
        lost: LostReplyError | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._call(name, request)
            except CapacityExceededError:  # an answer: a request that was done before would not wait for room
                raise
            except Unanswered as error:
                last = error
            if isinstance(last, LostReplyError):
                lost = lost or last
            may_answer = isinstance(last, BackendUnavailableError) and last.retryable
            if lost is None or not repeatable or not may_answer or time.monotonic() + pause_s >= request.deadline:
                _raise_at_end(last, lost)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _call(self, name: str, request: Request) -> Any:
        hook: Callable[..., Any] = getattr(self._hooks, name)
        try:
            if not self.to_stop:
                raise ClientClosedError(f"{name}: the client was closed meanwhile.")
            reply = hook(request=_copy_of(request) if self.middleware else request)
        except DataPlaneError:
            raise
        except Exception as error:
            if not self.to_stop:
                raise ClientClosedError(f"{name}: the client was closed meanwhile.") from error
            if isinstance(error, OSError) and error.errno in FULL:
                raise BackendUnavailableError(
                    f"{name}: the disk of the store is full ({error}). It may have been done or not.",
                    hint=_MAKE_ROOM,
                ) from error
            raise BackendError(
                f"{name} failed inside the backend or its middleware: {type(error).__name__}: {error}",
                hint=limit_hint(error),
            ) from error
        expected = OPERATIONS[name].reply
        if not isinstance(reply, expected):
            raise BackendError(f"{name}: the backend returned {type(reply).__name__}. Expected {expected.__name__}.")
        return reply

    def describe(self, partition_id: str, deadline: float = math.inf) -> PartitionInfo:
        """The registration of a partition."""
        info: PartitionInfo = self.call(DescribeRequest(partition_id, deadline=deadline))
        return info

    def _tell_new_registration(self, error: DataPlaneError, partition_id: str) -> None:
        """Adds to an error that samples or leases are gone because another client has registered the partition."""
        with suppress(DataPlaneError):
            info = self.describe(partition_id, time.monotonic() + ADVICE_S)
            is_new = info.registered_at > self.opened_at and info.epoch not in self.registered
            if is_new and info.registered_by:
                ago_s = max(0.0, time.time() - info.registered_at)
                who = f"{info.registered_by} registered the partition {ago_s:.0f} s ago."
                error.hint = f"{error.hint or ''} {who}".lstrip()


def check_counts(where: str, num_samples: int, **counts: int) -> None:
    """Refuses a backend's reply with a wrong number of items."""
    for what, count in counts.items():
        if count != num_samples:
            raise BackendError(f"{where}: the backend's reply holds {count} {what} for {num_samples} samples.")


def note_step(connection: Connection, step: int, values: Mapping[str, float]) -> None:
    """Says that a training step has ended, to the middleware that keeps a record of the run."""
    connection.check_process()
    for plugin in connection.middleware:
        if hasattr(plugin, "note_step"):
            plugin.note_step(step, values)


_exits = False


@atexit.register
def _end_calls() -> None:
    """Has the calls of daemon threads end before the interpreter does, and announcements with them.

    Python ends each thread that comes back to it after that. Where it comes from C++, such as a copy of torch's, that
    aborts the process, and its status is lost.
    """
    global _exits
    _exits = True
    until = time.monotonic() + _EXIT_S
    for connection in [connection for connection in list(_open) if not connection.is_forked]:
        connection.waiters.close()
        while connection.others_run() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if connection.announcer is not None:
            connection.announcer.end()


def _copy_of(request: _Q) -> _Q:
    """A copy, since middleware changes the requests that it is given, and the lists and dicts in them."""
    copied: dict[str, Any] = {}
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if type(value) is list:  # of ids or names, or of the tags of rows
            copied[name] = list(map(dict, value)) if value and type(value[0]) is dict else list(value)
        elif type(value) is dict:  # columns may be lists
            copied[name] = {key: list(column) if type(column) is list else column for key, column in value.items()}
        elif isinstance(value, Request):  # what a put or a claim registers
            copied[name] = _copy_of(value)
    return replace(request, **copied)


# --- lost replies -----------------------------------------------------------------------------------------------------

#: Seconds until the first repetition. Each later pause is twice as long, up to the most.
_FIRST_PAUSE_S: Final = 0.02
_MOST_PAUSE_S: Final = 0.5
_SAYS: Final[dict[Outcome, str]] = {
    "done": "It was done.",
    "not_done": "It was not done.",
    "unknown": "It may have been done or not.",
}


def _raise_at_end(last: Unanswered, lost: LostReplyError | None) -> NoReturn:
    """Raises the last error, or the first lost reply if the store did not answer after it."""
    if lost is None or lost is last or last.outcome == "done":
        _say(last)
        raise last
    _say(lost)
    lost.message += f" It was repeated: {last.message}"
    if isinstance(last, BackendUnavailableError) and not last.retryable:  # the store is gone for good
        lost.retryable, lost.hint = False, last.hint
    raise lost from last


def _say(error: Unanswered) -> None:
    """Adds to the message whether the operation was carried out."""
    words = _SAYS[error.outcome]
    if words not in error.message and (error.retryable or error.outcome != "unknown"):
        error.message = f"{error.message} {words}"


# --- forks ------------------------------------------------------------------------------------------------------------

_CONNECT: Final = "Call connect(config, bootstrap=False) in this process: each opens a client of its own."
_SPAWN: Final = (
    "Start the process with 'spawn' instead (multiprocessing.get_context('spawn'); of a torch DataLoader: "
    "multiprocessing_context='spawn') and call connect(config, bootstrap=False) in it."
)
_IN_ONE_PROCESS: Final = (
    "The store is in the memory of the process that opened it: use it there, or choose a backend of scope host or "
    "cluster."
)


def _fork_hint(backend_class: type[Backend]) -> str:
    """What to do in a fork instead of using the client of the parent."""
    if backend_class.scope is Scope.PROCESS:
        return _IN_ONE_PROCESS
    return _CONNECT if backend_class.opens_in_forks else _SPAWN


def _all_open() -> list[Connection]:
    while True:
        try:
            return list(_open)
        except RuntimeError:  # another thread opened a client; no lock here, since a fork could inherit it locked
            continue


def refuse_in_fork(backend_class: type[Backend], name: str) -> None:
    """Refuses to open a backend in a fork of a process that has it open, if its engine does not survive a fork."""
    if backend_class.opens_in_forks:
        return
    for connection in _all_open():
        if type(connection.backend) is backend_class and connection.is_forked:
            raise BackendUnavailableError(
                f"connect refused: this process {os.getpid()} is a fork of {connection.pid}, which has a client of "
                f"backend '{name}' open, and its engine does not survive a fork.",
                backend=name,
                retryable=False,
                hint=_fork_hint(backend_class),
            )


# --- limits of a process ----------------------------------------------------------------------------------------------

_NO_THREAD = (
    "This process may start no more threads: raise its limit of processes and threads (ulimit -u, or pids.max of its "
    "container), or end threads that nobody needs."
)
_NO_MEMORY = (
    "This process may have no more memory: raise its limit of address space (ulimit -v) or of its container above the "
    "store's capacity_bytes and what the program needs, or lower capacity_bytes."
)


def limit_hint(error: BaseException) -> str | None:
    """What to set, if a limit of this process is the cause of an error."""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return _NO_THREAD
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return _NO_MEMORY
    return None
