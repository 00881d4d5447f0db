"""The bases of middleware: wrappers of single hooks, of all hooks alike, and of one event per operation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel

from dataplane_core.backends import NoOptions
from dataplane_core.errors import ClaimTimeoutError, Verdict
from dataplane_core.spec import (
    OPERATIONS,
    Claim,
    ClaimRequest,
    ClearRequest,
    DescribeRequest,
    PartitionInfo,
    SampleList,
    WireBatch,
    WireFormat,
    hookimpl,
)

#: How an operation ended: ``timeout`` for a `TimeoutError`, ``error`` for all others.
Status: TypeAlias = Literal["ok", "error", "timeout"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddlewareContext:
    """The facts about a client that its middleware gets when the client starts.

    Attributes:
        backend: Entry-point name of the backend.
        wire: The backend's wire format: the form of the columns in requests and replies.
        role: The config's ``role``, or the name of its program.
        moved_rows: How many rows the client has moved by each path; see `Backend.moved_rows`. It grows.
        waiting: Token of each claim of the client that is under way -> when it began, on `time.monotonic`'s clock. It
            changes.
        describe: Asks the store for the registration of a partition, past the middleware.
    """

    backend: str
    wire: WireFormat
    role: str = ""
    moved_rows: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, float] = field(default_factory=dict)
    describe: Callable[[DescribeRequest], PartitionInfo] | None = None


class Middleware:
    """Base of middleware. Its methods have the names of hooks, are marked ``@hookimpl(wrapper=True)``, and wrap them.

    A wrapper may change the request's attributes before ``yield`` (a new object in ``request`` has no effect), and may
    return another reply after it. Columns that it adds have names that begin with ``~``. One object serves one client
    at a time.

    Attributes:
        Config: A pydantic model of the options that a config file may give; the constructor takes its fields as
            keyword arguments.
        metrics_address: ``host:port`` where it serves metrics under ``/metrics``, which the client announces. Empty: it
            serves none.
    """

    Config: ClassVar[type[BaseModel]] = NoOptions
    metrics_address: str = ""

    def __init__(self, **options: Any) -> None:
        self.config = self.Config(**options)

    def start(self, context: MiddlewareContext) -> None:
        """Called once before the client's first operation."""

    def stop(self) -> None:
        """Called once when the client closes."""

    def note_step(self, step: int, values: Mapping[str, float]) -> None:
        """Called when a training step has ended: see `DataPlaneClient.mark_step`."""

    def note_verdict(self, verdict: Verdict) -> None:
        """Called when a claim of the client has waited for long, with the reason: ``warn_after_s`` of the config."""


def _wrapped(operation: str) -> Any:
    def wrapper(self: OperationMiddleware, request: Any) -> Generator[None, Any, Any]:
        return (yield from self.around(operation, request))

    wrapper.__name__ = operation
    wrapper.__doc__ = "See `OperationMiddleware.around`."
    return hookimpl(wrapper=True)(wrapper)


class OperationMiddleware(Middleware):
    """Base of middleware that wraps all operations alike, in `around`. A subclass may wrap some of them by themselves.

    Calls by which clients announce themselves, and those about storage units, are not wrapped.

    Examples:
        >>> class Printed(OperationMiddleware):
        ...     def around(self, operation, request):
        ...         reply = yield
        ...         print(operation)
        ...         return reply
    """

    def around(self, operation: str, request: Any) -> Generator[None, Any, Any]:
        """Wraps an operation, as the body of a wrapper of pluggy: ``reply = yield``, then ``return reply``.

        Args:
            operation: The name of the hook, such as ``"put_samples"``.
            request: Its request.
        """
        return (yield)


for _name in OPERATIONS:
    if _name not in ("announce", "list_clients", "list_units"):
        setattr(OperationMiddleware, _name, _wrapped(_name))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEvent:
    """An operation that has ended.

    Attributes:
        op: Name of the hook, or ``why``: see ``verdict``.
        partition_id: The partition.
        n_keys: Samples named by the request, or handed out, listed or dropped by the reply.
        n_bytes: Payload bytes written or read.
        wall_ms: Milliseconds inside the hook, inner middleware included. Of a claim that waited, those that its user
            waited.
        status: How it ended. A claim that waited in vain ends with ``timeout``.
        error: The name of the error's class, or "".
        task: The consumer task of a claim, an ack and the like, or "".
        fields: The fields of a put or a get.
        sample_ids: Those samples. Empty where a whole partition is cleared.
        cell_bytes: Field of a put or a get -> the bytes of each of its cells, int64 (N,), or one number if all are
            equal. A cell that samples share counts for the first of them.
        drops_all: Whether it drops what the partition held: a clear of all, or a registration that replaces another.
        verdict: Why the claim waits, in an event of its own each time that the client finds it out (``warn_after_s`` of
            the config). ``wall_ms`` is then the time for which the task has got nothing.
    """

    op: str
    partition_id: str
    n_keys: int = 0
    n_bytes: int = 0
    wall_ms: float
    status: Status = "ok"
    error: str = ""
    task: str = ""
    fields: Sequence[str] = ()
    sample_ids: Sequence[str] = field(default=(), repr=False)
    cell_bytes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    drops_all: bool = False
    verdict: Verdict | None = None


def log_event(event: OperationEvent) -> None:
    """Logs an event at level INFO. A target for ``on_event`` of `Metrics`."""
    _log.info("%s", event)


class EventMiddleware(OperationMiddleware):
    """Base of middleware that gets one event per operation, in `note`. A claim that waits asks the store many times,
    and is one operation, which ends with its answer.

    Examples:
        >>> class Printed(EventMiddleware):
        ...     def note(self, event, request, outcome):
        ...         print(event.op, event.n_bytes, event.wall_ms)
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.context = MiddlewareContext(backend="", wire=WireFormat())

    def start(self, context: MiddlewareContext) -> None:
        """Keeps the facts about the client."""
        self.context = context

    def note(self, event: OperationEvent, request: Any, outcome: Any) -> None:
        """Called when an operation has ended, in its thread. What it raises reaches the caller of the operation.

        Args:
            event: What there is to say of it.
            request: Its request, as inner middleware left it.
            outcome: Its reply, or the error that ended it.
        """

    def around(self, operation: str, request: Any) -> Generator[None, Any, Any]:
        """Makes the event."""
        start = time.monotonic()
        if isinstance(request, ClaimRequest):
            start = self.context.waiting.get(request.token, start)
        columns = getattr(request, "columns", {})
        fields = tuple(columns or getattr(request, "fields", ()))
        sample_ids: Sequence[str] = getattr(request, "sample_ids", None) or ()
        n_keys = len(sample_ids)
        cell_bytes = _cell_bytes(columns, n_keys)
        drops_all = getattr(request, "if_exists", "") == "replace"
        status: Status = "ok"
        name_of_error, outcome = "", None
        try:
            outcome = yield
            if isinstance(outcome, (Claim, SampleList)):
                sample_ids = outcome.sample_ids
                n_keys = len(sample_ids)
            elif isinstance(request, ClearRequest) and request.sample_ids is None:
                drops_all, n_keys = True, outcome
            elif isinstance(outcome, WireBatch):
                cell_bytes = _cell_bytes(outcome.columns, n_keys)
            if isinstance(outcome, Claim) and request.all_or_nothing and not outcome.answered:
                status, name_of_error = "timeout", ClaimTimeoutError.__name__  # which the client raises
            return outcome
        except BaseException as error:
            status = "timeout" if isinstance(error, TimeoutError) else "error"
            name_of_error, outcome = type(error).__name__, error
            raise
        finally:
            asks_again = status == "timeout" and isinstance(outcome, Claim) and not request.explain
            if not asks_again:
                sizes = cell_bytes.values()
                event = OperationEvent(
                    op=operation,
                    partition_id=getattr(request, "partition_id", ""),  # a listing of partitions names none
                    n_keys=n_keys,
                    n_bytes=sum(size * n_keys if isinstance(size, int) else int(size.sum()) for size in sizes),
                    wall_ms=(time.monotonic() - start) * 1e3,
                    status=status,
                    error=name_of_error,
                    task=getattr(request, "task_name", ""),
                    fields=fields,
                    sample_ids=sample_ids,
                    cell_bytes=cell_bytes,
                    drops_all=drops_all,
                )
                self.note(event, request, outcome)


def _cell_bytes(columns: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Column -> the bytes of each of its rows; one number if they are equal."""
    if not columns:
        return {}
    from dataplane_core.codec.rows import cell_nbytes  # it imports torch

    return {name: cell_nbytes(column, num_rows) for name, column in columns.items()}
