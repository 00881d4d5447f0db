"""A client's connection: starts its backend and middleware, calls their hooks, and stops them."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NoReturn, Self, TypeVar

import pluggy

from dataplane_core.backends import Backend
from dataplane_core.client.announcing import Announcer, RunningCall
from dataplane_core.client.field_names import FieldNames
from dataplane_core.client.forks import fork_hint, open_clients
from dataplane_core.client.repeating import carry_out_once
from dataplane_core.client.waiting import Waiters
from dataplane_core.config import DataPlaneConfig
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    ClientClosedError,
    DataPlaneError,
    InvalidTypeError,
    UnsupportedOperationError,
)
from dataplane_core.ledger import Pacer
from dataplane_core.middleware import MiddlewareContext
from dataplane_core.spec import Capability, PartitionInfo, Scope

__all__ = ["LATEST_END", "Connection"]

_R = TypeVar("_R")

#: Errors of the system when a disk, or somebody's share of it, is full.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM: Final = "Make room on the disk, then call again."
#: When an operation must end that waited for a thread before it ran, on `time.monotonic`'s clock.
LATEST_END: Final = ContextVar("LATEST_END", default=float("inf"))
#: Seconds that `close` has left for the rest after operations took all of ``op_timeout_s``.
_STOP_S: Final = 0.25


class Connection:
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
        starting = "the backend"
        try:
            backend.start(bootstrap=bootstrap, deadline=deadline)
            for plugin in middleware:
                starting = f"middleware {type(plugin).__name__}"
                if hasattr(plugin, "start"):
                    plugin.start(context)
                client._middleware.append(plugin)
        except BaseException as error:
            client._closed = client._stopped = True
            client._stop_all(suppress=True)
            if isinstance(error, DataPlaneError):
                error.backend = error.backend or config.backend
                raise
            if isinstance(error, Exception):
                raise BackendError(
                    f"connect failed while starting {starting}: {type(error).__name__}: {error}",
                    backend=config.backend,
                ) from error
            raise
        open_clients.add(client)
        if config.announce_s is not None and Capability.CLIENTS in client._capabilities:
            client._announcer = Announcer(client, config.announce_s)
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
        self._field_names = FieldNames(strict=config.strict_fields, open_partitions=config.open_partitions)
        # rank -> epoch, batches given; guarded by _state
        self._batches: dict[tuple[str, str, int | None], tuple[str | None, int]] = {}
        self._closed = False  # guarded by _state
        self._stopped = False  # guarded by _close_lock
        self._pid = os.getpid()
        self._in_flight = 0
        self._calls: dict[int, RunningCall] = {}  # guarded by _state
        self._announcer: Announcer | None = None
        self._state = threading.Lock()
        self._idle = threading.Condition(self._state)  # no operation is under way
        self._close_lock = threading.Lock()
        self._waiters = Waiters()
        self._pacer = Pacer()  # of all claims that wait on this client

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def backend_name(self) -> str:
        """Entry-point name of the backend."""
        return self._config.backend

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the backend declares."""
        return self._capabilities

    @property
    def scope(self) -> Scope:
        """Where clients of this store can be."""
        return type(self._backend).scope

    @property
    def bootstrapped(self) -> bool:
        """True: this client started what the backend needs, and ends it on close. False: it attached."""
        return self._bootstrapped

    @property
    def config(self) -> DataPlaneConfig:
        """The config that this client was connected with."""
        return self._config

    @property
    def middleware(self) -> tuple[Any, ...]:
        """The middleware objects around the backend, outermost first."""
        return tuple(self._middleware)

    # --- its end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for running operations, then disconnects. Idempotent. Takes ``op_timeout_s`` at most, and a little more
        if operations took all of it.

        A client that bootstrapped its backend ends what it started. A client that attached leaves it running.
        """
        if self._pid != os.getpid():
            return  # a forked child must not end what its parent uses
        with self._close_lock:
            if self._stopped:
                return
            until = time.monotonic() + self._config.op_timeout_s
            with self._state:
                self._closed = True
                self._waiters.close()
                self._idle.wait_for(lambda: self._in_flight == 0, timeout=self._config.op_timeout_s)
            open_clients.discard(self)
            self._backend.stop_by = until = max(until, time.monotonic() + _STOP_S)
            if self._announcer is not None:
                self._announcer.stop(until)
            self._stopped = True  # only now: a close that was interrupted while it waited can be repeated
            self._stop_all(suppress=False)

    def _stop_all(self, *, suppress: bool) -> None:
        errors: list[Exception] = []
        for stoppable in [*self._middleware, self._backend]:
            try:
                if hasattr(stoppable, "stop"):
                    stoppable.stop()
            except Exception as error:  # raised below, once the others are stopped
                errors.append(error)
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
    def _operation(self, operation: str = "", partition_id: str = "") -> Iterator[None]:
        """While an operation runs. If it is named, `list_clients` shows it."""
        if self._pid != os.getpid():
            raise ClientClosedError(
                f"this client was opened in process {self._pid} and is used in its fork {os.getpid()}.",
                backend=self.backend_name,
                hint=fork_hint(type(self._backend)),
            )
        with self._state:
            if self._closed:
                raise ClientClosedError("the client is closed.", backend=self.backend_name)
            self._in_flight += 1
            if operation:
                call = RunningCall(operation, partition_id)
                self._calls[id(call)] = call
        try:
            with self._naming_errors():
                yield
        finally:
            with self._state:
                self._in_flight -= 1
                if operation:
                    del self._calls[id(call)]
                if self._in_flight == 0:
                    self._idle.notify_all()

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
        hook: Callable[..., Any] = getattr(self._hooks, operation)
        try:
            reply = hook(request=request)
        except DataPlaneError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise BackendUnavailableError(
                    f"{operation}: the disk of the store is full ({error}). It may have been done or not.",
                    hint=_MAKE_ROOM,
                ) from error
            raise BackendError(
                f"{operation} failed inside the backend or its middleware: {type(error).__name__}: {error}",
            ) from error
        if not isinstance(reply, reply_type):
            raise BackendError(
                f"{operation}: the backend returned {type(reply).__name__}. Expected {reply_type.__name__}."
            )
        return reply
