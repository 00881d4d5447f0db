"""The base class of middleware, and the context that it gets when its client starts."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from dataplane_core.backends import NoOptions
from dataplane_core.errors import Verdict
from dataplane_core.spec import OPERATIONS, WireFormat, hookimpl


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddlewareContext:
    """The facts about a client that its middleware gets when the client starts.

    Attributes:
        backend: Entry-point name of the backend.
        wire: The backend's wire format: the form of the columns in requests and replies.
        role: The config's ``role``, or the name of its program.
        moved_rows: How many rows the client has moved by each path; see `Backend.moved_rows`. It grows.
    """

    backend: str
    wire: WireFormat
    role: str = ""
    moved_rows: Mapping[str, int] = field(default_factory=dict)


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
