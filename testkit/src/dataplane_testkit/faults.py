"""`Faults`: a middleware that counts the calls of a backend's hooks and injects errors, delays and truncated replies.

It works with any backend: ``connect({..., "middleware": [Faults()]})``. Without a fault, it changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from msgspec.structs import replace

from dataplane_core.middleware import OperationMiddleware
from dataplane_core.spec import Ragged, SharedRows, WireBatch, hookimpl

__all__ = ["Faults"]

#: Operation -> what is called around it, that of the outer block first.
_Actions = dict[str, tuple[Callable[..., Any], ...]]


def _wrapper(operation: str) -> Any:
    """Of the operations that core's base does not wrap."""

    @hookimpl(wrapper=True)
    def wrap(self: Faults, request: Any) -> Generator[None, Any, Any]:
        return (yield from self.around(operation, request))

    return wrap


class Faults(OperationMiddleware):
    """Counts hook calls, and injects faults before or after them. Can be used from several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._logs: list[list[str]] = []
        self._before: _Actions = {}
        self._after: _Actions = {}

    @classmethod
    def of(cls, client: Any) -> Faults:
        """The one in a client's middleware."""
        return next(plugin for plugin in client.middleware if isinstance(plugin, cls))

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """Yields the list of the hooks that any thread calls in the block, in order.

        Without ``announce``: a client announces itself whenever it is time, whatever a test does.
        """
        log: list[str] = []
        with self._lock:
            self._logs.append(log)
        try:
            yield log
        finally:
            with self._lock:
                self._logs = [other for other in self._logs if other is not log]

    def before(self, operation: str, action: Callable[[Any], None]) -> AbstractContextManager[None]:
        """Calls ``action(request)`` before the backend gets the request. If it raises, the client gets that error.

        In nested blocks, the action of the outer one is called first.
        """
        return _active(self._before, operation, action)

    def after(self, operation: str, action: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
        """Calls ``action(request, reply)`` after the backend has replied. Its result replaces the reply.

        In nested blocks, the action of the inner one gets what that of the outer one returned.
        """
        return _active(self._after, operation, action)

    def error_before(self, operation: str, error: Exception) -> AbstractContextManager[None]:
        """The backend never gets the request. The client gets ``error``."""
        return self.before(operation, lambda request: _fail(error))

    def error_after(self, operation: str, error: Exception) -> AbstractContextManager[None]:
        """The backend executes the request, but its reply is lost. The client gets ``error``."""
        return self.after(operation, lambda request, reply: _fail(error))

    def late(self, operation: str, allowed_s: float = 0.01) -> AbstractContextManager[None]:
        """Sets the deadline to ``allowed_s`` seconds after the call, and passes the request on after this deadline."""

        def act(request: Any) -> None:
            request.deadline = min(request.deadline, time.monotonic() + allowed_s)
            time.sleep(max(0.0, request.deadline - time.monotonic()) + allowed_s)

        return self.before(operation, act)

    def truncation(
        self, num_rows: int = 1, field: str | None = None, operation: str = "get_samples"
    ) -> AbstractContextManager[None]:
        """Removes ``num_rows`` rows from each reply: from the columns of a read, the tags and tokens of a claim, the
        tags of a listing, the fields of samples, or the number that a put, ack, nack or renew confirms.

        With ``field``, a read returns all rows but not this column.
        """

        def act(request: Any, reply: Any) -> Any:
            if isinstance(reply, WireBatch) and field is not None:
                return replace(reply, columns={name: c for name, c in reply.columns.items() if name != field})
            if isinstance(reply, WireBatch):
                kept = {name: _without_last(column, num_rows) for name, column in reply.columns.items()}
                return replace(reply, columns=kept)
            names = [name for name in ("tags", "lease_tokens", "patterns") if getattr(reply, name, None) is not None]
            if names:
                return replace(reply, **{name: getattr(reply, name)[:-num_rows] for name in names})
            return reply - num_rows

        return self.after(operation, act)

    def around(self, operation: str, request: Any) -> Generator[None, Any, Any]:
        """Counts an operation and injects the active faults."""
        with self._lock:
            for log in self._logs if operation != "announce" else ():
                log.append(operation)
        for before in self._before.get(operation, ()):
            before(request)
        reply = yield
        for after in self._after.get(operation, ()):
            reply = after(request, reply)
        return reply

    announce, list_clients, list_units = map(_wrapper, ("announce", "list_clients", "list_units"))


@contextmanager
def _active(actions: _Actions, operation: str, action: Callable[..., Any]) -> Iterator[None]:
    outer = actions.get(operation, ())
    actions[operation] = (*outer, action)
    try:
        yield
    finally:
        actions[operation] = outer


def _fail(error: Exception) -> Any:
    raise error


def _without_last(column: Any, num_rows: int) -> Any:
    if isinstance(column, SharedRows):
        return SharedRows(column.rows, column.index[:-num_rows])
    if isinstance(column, Ragged):
        return Ragged(column.values[: column.offsets[-1 - num_rows]], column.offsets[:-num_rows])
    return column[:-num_rows]
