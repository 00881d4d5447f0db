"""A client's connection: starts its backend and middleware, calls their hooks, and stops them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, NoReturn, Self, TypeVar
from weakref import WeakSet

import pluggy

from dataplane_core._compiler_marks import with_methods_not_compiled
from dataplane_core.backends import Backend
from dataplane_core.client.announcing import Announcer, RunningCall, WorkLog
from dataplane_core.client.checks import check_name, check_names
from dataplane_core.client.entrance import Entrance
from dataplane_core.client.field_names import FieldNames
from dataplane_core.client.forks import fork_hint, open_clients
from dataplane_core.client.limits import limit_hint
from dataplane_core.client.phases import Phases
from dataplane_core.client.repeating import carry_out_once
from dataplane_core.client.waiting import Waiters
from dataplane_core.config import DataPlaneConfig
from dataplane_core.durable_files import FULL
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    InvalidTypeError,
    LeaseExpiredError,
    MissingDataError,
    UnsupportedOperationError,
)
from dataplane_core.ledger import Pacer
from dataplane_core.middleware import MiddlewareContext
from dataplane_core.spec import Capability, Claim, ClaimRequest, PartitionInfo, Scope

_R = TypeVar("_R")

_MAKE_ROOM: Final = "Make room on the disk, then call again."
#: When an operation must end that waited for a thread before it ran, on `time.monotonic`'s clock.
LATEST_END: Final = ContextVar("LATEST_END", default=float("inf"))
#: Seconds that `close` has left for the rest after operations took all of ``op_timeout_s``.
_STOP_S: Final = 0.25
#: Seconds that calls of daemon threads may take to end when the program ends.
_EXIT_S: Final = 5.0
#: How many of its registrations a client remembers.
_MOST_REGISTERED: Final = 1024
#: Seconds between two looks of a close whether operations run.
_LOOK_S: Final = 0.002


class ClientFacts:
    """What a client is: the same of a `DataPlaneClient` and of an `AsyncDataPlaneClient`, which has one."""

    @property
    def _connection(self) -> Connection:
        raise NotImplementedError  # each of the two clients gets at its connection in its own way

    @property
    def backend_name(self) -> str:
        """Entry-point name of the backend."""
        return self._connection._config.backend

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the backend declares."""
        return self._connection._capabilities

    @property
    def scope(self) -> Scope:
        """Where clients of this store can be."""
        return type(self._connection._backend).scope

    @property
    def opens_anywhere(self) -> bool:
        """Whether other processes may open a client too, although the scope is ``process``: see `Backend`."""
        return type(self._connection._backend).opens_anywhere

    @property
    def bootstrapped(self) -> bool:
        """True: this client started what the backend needs, and ends it on close. False: it attached."""
        return self._connection._bootstrapped

    @property
    def config(self) -> DataPlaneConfig:
        """The config that this client was connected with."""
        return self._connection._config

    @property
    def middleware(self) -> tuple[Any, ...]:
        """The middleware objects around the backend, outermost first."""
        return tuple(self._connection._middleware)


@with_methods_not_compiled
class Connection(ClientFacts):
    """The base of `DataPlaneClient`: a started backend with its middleware."""

    def __init__(self) -> None:
        raise UnsupportedOperationError(
            "DataPlaneClient is not constructed directly.", hint="Use dataplane_core.connect(config)."
        )

    @classmethod
    def _open(
        cls,
        *,
        config: DataPlaneConfig,
        backend: Backend,
        manager: pluggy.PluginManager,
        middleware: Sequence[Any],
        context: MiddlewareContext,
        bootstrap: bool,
        deadline: float,
    ) -> Self:
        client = object.__new__(cls)
        client._begin(config, backend, manager.hook, bootstrap)
        client._entrance.guard(manager, backend)
        starting = "the backend"
        try:
            backend.start(bootstrap=bootstrap, deadline=deadline)
            for plugin in middleware:
                starting = f"middleware {type(plugin).__name__}"
                if hasattr(plugin, "start"):
                    plugin.start(context)
                client._middleware.append(plugin)
                client._to_stop.insert(-1, plugin)
        except BaseException as error:
            client._closed = True
            client._stop_all(suppress=True)
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
        open_clients.add(client)
        if config.announce_s is not None and Capability.CLIENTS in client._capabilities:
            client._announcer = Announcer(client, config.announce_s)
            client._to_stop.insert(0, client._announcer)
        return client

    def _begin(self, config: DataPlaneConfig, backend: Backend, hooks: Any, bootstrapped: bool) -> None:
        self._config = config
        self._backend = backend
        self._hooks = hooks
        self._bootstrapped = bootstrapped
        self._wire = type(backend).wire
        self._capabilities = type(backend).capabilities
        self._middleware: list[Any] = []
        self._infos: dict[str, PartitionInfo] = {}  # partition -> its registration, as last read
        self._registered: deque[str] = deque(maxlen=_MOST_REGISTERED)  # the epochs of this client's registrations
        self._opened_at = time.time()
        self._field_names = FieldNames(strict=config.strict_fields, open_partitions=config.open_partitions)
        # rank -> epoch, batches given; guarded by _state
        self._batches: dict[tuple[str, str, int | None], tuple[str | None, int]] = {}
        self._streams: WeakSet[Any] = WeakSet()  # those of `stream`
        self._closed = False
        self._to_stop: list[Any] = [backend]  # what `close` has not stopped yet
        self._pid = os.getpid()
        # A signal handler may use the client in the middle of any line of an operation of the same thread. So what all
        # operations change is changed by single steps of C, and a lock that they take may be taken again. The backend
        # need not care: no thread enters it twice.
        self._entrance = Entrance()
        self._closes_after: int | None = None  # the thread whose operation closes the client when it ends
        self._calls: set[RunningCall] = set()
        self._work = WorkLog()
        self._phases = Phases()
        self._announcer: Announcer | None = None
        # token -> the thread, request and reply of a claim that was handed samples and has not returned them yet
        self._handed: dict[str, tuple[int, ClaimRequest, Claim]] = {}
        self._state = threading.RLock()
        self._close_lock = threading.RLock()
        self._waiters = Waiters()
        self._pacer = Pacer()  # of all claims that wait on this client

    @property
    def _connection(self) -> Connection:
        return self

    # --- what its process does ----------------------------------------------------------------------------------------

    def phase(
        self, name: str, *, partition_id: str | None = None, groups: Sequence[str] = ()
    ) -> AbstractContextManager[None]:
        """While the ``with`` lasts, the client says that its process is in a phase, such as one that generates.

        `why`, `list_clients` and the commands that show clients then name the phase, and `why` names the process whose
        phase makes a group that is short of a sample. Of phases that are inside each other, the innermost counts; each
        thread, and each task of asyncio, has its own. It calls nothing: the next announcement tells it. At most 64
        phases and 256 groups are told. Without announcements (``announce_s`` is None), none are.

        Args:
            name: What the process does. Of a longer name, the first 80 letters are told.
            partition_id: The partition of ``groups``.
            groups: The groups whose samples the phase makes: what their ids have before the last ``_g``. Without any,
                those of the phase around it, while that lasts.

        Raises:
            InvalidTypeError, InvalidRequestError: A name is no str, or empty, or the groups have no partition.

        Examples:
            >>> with client.phase("generate", partition_id="step-1", groups=["p0", "p1"]):
            ...     tokens = [[1, 2, 3], [1, 2]]
        """
        check_name("name", name)
        made = check_names("groups", groups)
        if partition_id is not None:
            check_name("partition_id", partition_id)
        elif made:
            raise InvalidRequestError(f"phase('{name}') refused: groups without a partition_id. Expected theirs.")
        return nullcontext() if self._announcer is None else self._phases.within(name, partition_id or "", made)

    def mark_step(self, step: int, **values: float) -> None:
        """Says that a training step has ended, to the middleware that keeps a record of the run.

        One process of the run calls it, after the step's last operation. ``dataplane flow`` and ``dataplane audit``
        count by these marks. First it acks what the streams of this client have given, since a loop over a stream acks
        a batch only when it asks for the next one. Call it in the thread, or the task of asyncio, of that loop.

        Args:
            step: Its number.
            values: What is known of it, such as ``loss``. Numbers of numpy and torch go too. ``staleness``: how many
                weight versions old the rows were that it trained on.

        Raises:
            LeaseExpiredError: A batch of a stream was held for too long. The step is marked all the same.

        Example:
            >>> client.mark_step(7, loss=0.25, staleness=1)
        """
        with ExitStack() as each:  # the step last; all of them, whichever fails
            each.callback(self._note_step, step, values)
            for stream in list(self._streams):
                each.callback(stream.ack)

    def _note_step(self, step: int, values: Mapping[str, float]) -> None:
        for each in self._middleware:
            if hasattr(each, "note_step"):
                each.note_step(step, values)

    # --- its end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for running operations, then disconnects. Idempotent. Takes ``op_timeout_s`` at most, and a little more
        if operations took all of it.

        A client that bootstrapped its backend ends what it started. A client that attached leaves it running.

        In a signal handler, it does not wait for the operation that the handler interrupted. What that one claims under
        a lease is given back. If the store is in the middle of its work for it, the client is closed when that ends,
        or when the handler raises.
        """
        if self._pid != os.getpid():
            return  # a forked child must not end what its parent uses
        if self._is_left_alone():
            return  # the store's own processes end with this one
        self._closed = True  # if it is interrupted while it waits, it can be repeated
        self._waiters.close()
        if self._entrance.is_below:
            self._closes_after = threading.get_ident()
            return
        with self._close_lock:
            self._give_back_claims()
            until = time.monotonic() + self._config.op_timeout_s
            while self._others_run() and time.monotonic() < until:
                time.sleep(_LOOK_S)
            open_clients.discard(self)
            self._backend.stop_by = max(until, time.monotonic() + _STOP_S)
            self._stop_all(suppress=False)

    def _others_run(self) -> bool:
        """Whether operations of other threads run. One of this thread goes on only after the close."""
        this = threading.get_ident()
        return any(call.thread_id != this for call in list(self._calls))

    def _is_left_alone(self) -> bool:
        """Whether the interpreter ends while other threads are in operations: they never go on, and may hold locks."""
        return sys.is_finalizing() and self._others_run()

    def _tell_new_registration(self, error: DataPlaneError, partition_id: str) -> None:
        """Adds to an error that another client has registered the partition, if that may be its cause."""

    def _give_back_claims(self) -> None:
        """Gives back what claims were handed that this thread will not return."""

    def _stop_all(self, *, suppress: bool) -> None:
        """Stops all that is not stopped yet. What one of them raises is raised when all are stopped."""
        errors: list[Exception] = []
        ending: BaseException | None = None  # such as SystemExit
        while self._to_stop:
            try:
                stop = getattr(self._to_stop[0], "stop", None)
                del self._to_stop[0]
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
                f"close: {type(errors[0]).__name__}: {errors[0]}", backend=self.backend_name
            ) from errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(
            "a DataPlaneClient cannot be pickled.",
            backend=self.backend_name,
            hint="Send its config, and call connect(config, bootstrap=False) in the other process.",
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        begun = "bootstrapped" if self._bootstrapped else "attached"
        return f"<{type(self).__name__} backend={self.backend_name!r} {begun} {state}>"

    # --- what operations need -----------------------------------------------------------------------------------------

    @contextmanager
    def _operation(self, operation: str = "", *partition: str, needs: Capability | None = None) -> Iterator[None]:
        """While an operation runs, whose errors name the backend. If it is named, `list_clients` shows it.

        Refuses it if the backend lacks what it needs, or if its partition, where it has one, is no name.
        """
        if self._pid != os.getpid():
            raise ClientClosedError(
                f"this client was opened in process {self._pid} and is used in its fork {os.getpid()}.",
                backend=self.backend_name,
                hint=fork_hint(type(self._backend)),
            )
        if self._is_left_alone() or (_exits and threading.current_thread() is not threading.main_thread()):
            raise ClientClosedError("the program ends, and calls of other threads with it.")
        call = RunningCall(operation, *partition)
        try:
            self._calls.add(call)
            if self._closed:
                raise ClientClosedError("the client is closed.", hint="Connect another one.")
            if needs is not None:
                self._require(needs, operation)
            for name in partition:
                check_name("partition_id", name)
            yield
        except DataPlaneError as error:
            error.backend = error.backend or self.backend_name
            missing = type(error) is MissingDataError and error.missing_samples
            if partition and (missing or type(error) is LeaseExpiredError):
                self._tell_new_registration(error, *partition)
            raise
        finally:
            self._calls.discard(call)
            if self._closes_after == call.thread_id and not self._entrance.is_below:
                self._closes_after = None
                self.close()

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Names the backend in errors."""
        try:
            yield
        except DataPlaneError as error:
            error.backend = error.backend or self.backend_name
            raise

    def _deadline(self) -> float:
        return min(time.monotonic() + self._config.op_timeout_s, LATEST_END.get())

    def _require(self, capability: Capability, what: str) -> None:
        if capability not in self._capabilities:
            raise UnsupportedOperationError(
                f"{what} refused: backend '{self.backend_name}' does not declare '{capability}'.",
                hint=f"It declares: {', '.join(sorted(self._capabilities)) or 'nothing'}.",
            )

    def _call_once(self, operation: str, request: Callable[[], Any], reply_type: type[_R], deadline: float) -> _R:
        """Calls a hook that has request ids. Repeats the call if its reply was lost. See `carry_out_once`.

        Args:
            operation: The hook.
            request: Makes a copy of the request, since middleware changes the requests that it is given.
            reply_type: The type of its reply.
            deadline: That of the request.
        """
        return carry_out_once(
            lambda: self._call(operation, request(), reply_type), deadline, Capability.REPEATABLE in self._capabilities
        )

    def _call(self, operation: str, request: Any, reply_type: type[_R]) -> _R:
        """Calls a hook. It has until the request's deadline, and at most as long as an operation may take."""
        hook: Callable[..., Any] = getattr(self._hooks, operation)
        request.deadline = min(request.deadline, self._deadline())
        try:
            if not self._to_stop:
                raise ClientClosedError(f"{operation}: the client was closed meanwhile.")
            reply = hook(request=request)
        except DataPlaneError:
            raise
        except Exception as error:
            if not self._to_stop:
                raise ClientClosedError(f"{operation}: the client was closed meanwhile.") from error
            if isinstance(error, OSError) and error.errno in FULL:
                raise BackendUnavailableError(
                    f"{operation}: the disk of the store is full ({error}). It may have been done or not.",
                    hint=_MAKE_ROOM,
                ) from error
            raise BackendError(
                f"{operation} failed inside the backend or its middleware: {type(error).__name__}: {error}",
                hint=limit_hint(error),
            ) from error
        if not isinstance(reply, reply_type):
            raise BackendError(
                f"{operation}: the backend returned {type(reply).__name__}. Expected {reply_type.__name__}."
            )
        return reply


_exits = False


@atexit.register
def _end_calls() -> None:
    """Has the calls of daemon threads end before the interpreter does.

    Python ends each thread that comes back to it after that. Where it comes from C++, such as a copy of torch's, that
    aborts the process, and its status is lost.
    """
    global _exits
    _exits = True
    until = time.monotonic() + _EXIT_S
    for client in [each for each in list(open_clients) if isinstance(each, Connection) and each._pid == os.getpid()]:
        client._waiters.close()
        while client._others_run() and time.monotonic() < until:
            time.sleep(_LOOK_S)
