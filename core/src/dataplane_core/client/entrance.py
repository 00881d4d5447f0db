"""`Entrance`: no thread enters a backend in the middle of another call of the same client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pluggy

from dataplane_core.backends import Backend
from dataplane_core.errors import UnsupportedOperationError

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
        """Lets the hooks of a backend be called through this.

        pluggy declares the function of a hook as final, but has no other way to put something around the innermost one.
        """
        for caller in manager.get_hookcallers(backend) or ():
            for hook in caller.get_hookimpls():
                if hook.plugin is backend:
                    hook.function = partial(self.enter, caller.name, hook.function)  # type: ignore[misc]
