"""What the process of a client does outside of the store, as it says itself: phases with names."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from dataplane_core.spec import PhaseInfo

#: How many phases are announced, and how many groups of all of them together.
_MOST_PHASES: Final = 64
_MOST_GROUPS: Final = 256
_MOST_LETTERS: Final = 80


class _Phase:
    """A phase that began now."""

    __slots__ = ("began_at", "groups", "name", "outer", "partition_id")

    def __init__(self, name: str, partition_id: str, groups: list[str], outer: _Phase | None) -> None:
        self.name = name[:_MOST_LETTERS]
        self.partition_id = partition_id
        self.groups = groups[:_MOST_GROUPS]
        self.outer = outer
        self.began_at = time.monotonic()


#: The innermost phase of this thread or task, of any client.
_INNERMOST: Final[ContextVar[_Phase | None]] = ContextVar("_INNERMOST", default=None)


class Phases:
    """The phases of a client that have not ended. Any thread may use it: it changes by single steps of C."""

    def __init__(self) -> None:
        self._open: set[_Phase] = set()

    @contextmanager
    def within(self, name: str, partition_id: str, groups: list[str]) -> Iterator[None]:
        """While the ``with`` lasts, this thread or task is in a phase."""
        outer = _INNERMOST.get()
        if outer is not None and not groups:
            partition_id, groups = outer.partition_id, outer.groups
        phase = _Phase(name, partition_id, groups, outer)
        try:
            self._open.add(phase)
            _INNERMOST.set(phase)
            yield
        finally:
            _INNERMOST.set(outer)  # not reset: a generator may be closed in another context than it was begun in
            self._open.discard(phase)
            phase.outer = None  # else phases whose ends cross would hold each other

    def told(self, now: float) -> list[PhaseInfo]:
        """As they are announced: those that no other one is within, what began first first."""
        phases = list(self._open)
        outer = {each.outer for each in phases}
        inner = [each for each in phases if each not in outer]
        found, left = [], _MOST_GROUPS
        for each in heapq.nsmallest(_MOST_PHASES, inner, lambda each: each.began_at):
            groups = each.groups[:left]
            left -= len(groups)
            found.append(
                PhaseInfo(name=each.name, running_s=now - each.began_at, partition_id=each.partition_id, groups=groups)
            )
        return found
