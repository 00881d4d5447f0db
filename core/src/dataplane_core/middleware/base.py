"""The base class of middleware, and the context that it gets when its client starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

from dataplane_core.backends import NoOptions
from dataplane_core.spec import WireFormat

__all__ = ["Middleware", "MiddlewareContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddlewareContext:
    """The facts about a client that its middleware gets when the client starts.

    Attributes:
        backend: Entry-point name of the backend.
        wire: The backend's wire format: the form of the columns in requests and replies.
        inner: Given an operation's name and a middleware, the hook of what that middleware wraps: the middleware inside
            it and the backend. It takes ``request=``. For a wrapper that must ask more than once.
    """

    backend: str
    wire: WireFormat
    inner: Callable[[str, object], Callable[..., Any]]


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
