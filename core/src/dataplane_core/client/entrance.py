"""`Entrance`: no thread enters a backend in the middle of another call of the same client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pluggy

from dataplane_core.backends import Backend
from dataplane_core.errors import UnsupportedOperationError
from dataplane_core.spec.operations import OPERATIONS, hookimpl

_R = TypeVar("_R")


class Entrance:
    """The way into the backend of one client.

    A signal handler, a logging handler or a ``__del__`` may come between any two lines of a backend, and would then
    wait for ever for a lock that its own thread has.
    """

    def __init__(self) -> None:
        self._inside: set[int] = set()  # ids of threads

    @property
    def is_below(self) -> bool:
        """Whether this thread is in the middle of a call of the backend."""
        return threading.get_ident() in self._inside

    def enter(self, what: str, function: Callable[..., _R], *args: Any) -> _R:
        """Calls a part of the backend.

        Raises:
            UnsupportedOperationError: This thread is in the middle of another one.
        """
        this = threading.get_ident()
        if this in self._inside:
            raise UnsupportedOperationError(
                f"{what} refused: it was called in the middle of another call of the same client and thread, which a "
                "signal handler, a logging handler or a '__del__' has interrupted. Nothing was done.",
                hint="Let the handler note what it wants, and do it when the other call has ended; or give it a client "
                "of its own.",
            )
        try:
            self._inside.add(this)
            return function(*args)
        finally:
            self._inside.discard(this)

    def guard(self, manager: pluggy.PluginManager, backend: Backend) -> None:
        """Registers the operations of a backend, as the innermost hooks, so that they are called through this."""
        operations = {
            name: self._guarded(name, getattr(backend, name)) for name in OPERATIONS if hasattr(backend, name)
        }
        manager.register(SimpleNamespace(**operations), name=f"backend {backend.name}")

    def _guarded(self, name: str, operation: Callable[[Any], _R]) -> Callable[[Any], _R]:
        def hook(request: Any) -> _R:
            return self.enter(name, operation, request)

        return hookimpl(hook)
