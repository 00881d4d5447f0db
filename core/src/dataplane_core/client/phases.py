"""What the process of a client does outside of the store, as it says itself: phases with names."""

from __future__ import annotations

import heapq
import time
from contextvars import ContextVar
from typing import Final

from dataplane_core.spec import PhaseInfo

#: How many phases are announced, and how many groups of all of them together.
_MOST_PHASES: Final = 64
_MOST_GROUPS: Final = 256
_MOST_LETTERS: Final = 80


class _Phase:
    """A phase that began now, within others, outermost first."""

    __slots__ = ("around", "began_at", "groups", "has_ended", "name", "partition_id")

    def __init__(self, name: str, partition_id: str, groups: list[str], around: tuple[_Phase, ...]) -> None:
        self.name = name[:_MOST_LETTERS]
        self.partition_id = partition_id
        self.groups = groups[:_MOST_GROUPS]
        self.around = around
        self.began_at = time.monotonic()
        self.has_ended = False


#: The phases of this thread or task, of any client, outermost first. Some may have ended, if a task outlived them.
_WITHIN: Final[ContextVar[tuple[_Phase, ...]]] = ContextVar("_WITHIN", default=())


def _still_open() -> tuple[_Phase, ...]:
    return tuple(each for each in _WITHIN.get() if not each.has_ended)


class Within:
    """While a ``with`` of it lasts, this thread or task is in a phase. It may be used again."""

    def __init__(self, phases: set[_Phase], name: str, partition_id: str, groups: list[str]) -> None:
        self._phases, self._told = phases, (name, partition_id, groups)
        self._begun: list[_Phase] = []

    def __enter__(self) -> None:
        around = _still_open()
        phase = _Phase(*self._told, around)
        self._begun.append(phase)
        try:
            self._phases.add(phase)
            _WITHIN.set((*around, phase))
        except BaseException:  # an interrupt
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        phase = self._begun.pop()
        self._phases.discard(phase)
        phase.has_ended = True
        phase.around = ()  # else phases whose ends cross would hold each other
        # not reset: ends may cross, and a generator may be closed in another context than it was begun in
        _WITHIN.set(_still_open())


class Phases:
    """The phases of a client that have not ended. Any thread may use it: it changes by single steps of C."""

    def __init__(self) -> None:
        self._open: set[_Phase] = set()

    def within(self, name: str, partition_id: str, groups: list[str]) -> Within:
        """While the ``with`` lasts, this thread or task is in a phase."""
        return Within(self._open, name, partition_id, groups)

    def told(self, now: float) -> list[PhaseInfo]:
        """As they are announced: those that no other one is within, what began first first."""
        phases = list(self._open)
        outer = {each for phase in phases for each in phase.around}
        inner = [each for each in phases if each not in outer]
        found, left = [], _MOST_GROUPS
        for each in heapq.nsmallest(_MOST_PHASES, inner, lambda each: each.began_at):
            makes = (some for some in (each, *reversed(each.around)) if some.groups and not some.has_ended)
            made = next(makes, each)
            groups = made.groups[:left]
            left -= len(groups)
            found.append(
                PhaseInfo(name=each.name, running_s=now - each.began_at, partition_id=made.partition_id, groups=groups)
            )
        return found
