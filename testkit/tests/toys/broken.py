"""What is broken, and the test of the kit that must find it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dataplane_core.backends import Backend

_Backend = TypeVar("_Backend", bound=type[Backend])


class Broken(dict[type[Backend], str]):
    """Broken backend, whose docstring is the bug report -> the test that must fail, by the name of the rule."""

    def breaks(self, test: str) -> Callable[[_Backend], _Backend]:
        """Decorates a backend that must fail this test."""

        def enter(cls: _Backend) -> _Backend:
            self[cls] = test
            return cls

        return enter
