"""Views: which units of a partition are ready for a task, for one set of required fields and one tag filter.

A view is always exact, so how many units are ready is known without a look at them. A view with a filter follows the
view without it through a log of what changed there, and looks only at that when it is asked. Views are derived from the
rows: a ledger that lost them would build them again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dataplane_core.ledger.rows import Unit
from dataplane_core.spec import matches

__all__ = ["ReadySet", "View"]

#: A filter that nobody asked with for so many seconds is forgotten, and the oldest ones where there are too many.
_FILTER_IDLE_S: Final = 60.0
_MOST_FILTERS: Final = 1024
#: Entries that may lie in a heap or a log beyond a multiple of the units that it is for.
_SLACK: Final = 1024


@dataclass(slots=True)
class ReadySet:
    """Units in order of their numbers. Adding, dropping and counting take no longer for many."""

    units: dict[int, Unit] = field(default_factory=dict)
    heap: list[int] = field(default_factory=list)  # their numbers, and some that have left

    def __len__(self) -> int:
        return len(self.units)

    @classmethod
    def of(cls, units: Iterable[Unit]) -> ReadySet:
        """A set of these."""
        by_seq = {unit.seq: unit for unit in units}
        return cls(by_seq, sorted(by_seq))

    def add(self, unit: Unit) -> None:
        """Adds a unit, if it is not in."""
        if unit.seq not in self.units:
            self.units[unit.seq] = unit
            heapq.heappush(self.heap, unit.seq)

    def discard(self, seq: int) -> bool:
        """Drops a unit; False where it was not in."""
        if self.units.pop(seq, None) is None:
            return False
        if len(self.heap) > 2 * len(self.units) + _SLACK:
            self.heap = list(self.units)
            heapq.heapify(self.heap)
        return True

    def first(self, count: int) -> list[Unit]:
        """The first ``count`` units, which must be there; the caller discards them before anything else is asked."""
        found: list[Unit] = []
        while len(found) < count:
            unit = self.units.get(heapq.heappop(self.heap))
            if unit is not None and not (found and found[-1] is unit):
                found.append(unit)
        return found


@dataclass(slots=True)
class _Matching:
    """The units of a view that match a filter, as of the ``next_change``-th change of the view."""

    tag_filter: Mapping[str, tuple[str, Any]]
    ready: ReadySet = field(default_factory=ReadySet)
    next_change: int = -1
    asked_at: float = 0.0

    def accepts(self, unit: Unit) -> bool:
        return all(matches(row.tags, self.tag_filter) for row in unit.rows)


@dataclass(slots=True)
class View:
    """The ready units of one task for one set of required fields.

    Attributes:
        required: The fields.
        ready: The units.
        ready_members: Number of a group -> how many of its members have the fields; not of groups that lost a member.
        changes: The last units that came, left, or changed their tags, by number, while there are filters.
        first_change: How many changes were before these.
        filters: Filter -> its part of the view, the one asked for longest ago first.
    """

    required: frozenset[str]
    ready: ReadySet = field(default_factory=ReadySet)
    ready_members: dict[int, int] = field(default_factory=dict)
    changes: list[int] = field(default_factory=list)
    first_change: int = 0
    filters: dict[str, _Matching] = field(default_factory=dict)

    def begin(self, units: Iterable[Unit]) -> None:
        """The units that are ready when the view is made."""
        self.ready = ReadySet.of(units)

    def add(self, unit: Unit) -> None:
        """A unit became ready."""
        self.ready.add(unit)
        self._note(unit.seq)

    def discard(self, seq: int) -> None:
        """A unit is not ready, if it was."""
        if self.ready.discard(seq):
            self._note(seq)

    def touch(self, seq: int) -> None:
        """A unit's tags changed."""
        if seq in self.ready.units:
            self._note(seq)

    def of(self, tag_filter: Mapping[str, tuple[str, Any]] | None, now: float) -> ReadySet:
        """The ready units that match a filter; costs a look at those that changed since it was last asked for."""
        if not tag_filter:
            return self.ready
        key = repr([(name, symbol, operand) for name, (symbol, operand) in sorted(tag_filter.items())])
        found = self.filters.pop(key, None)
        if found is None:
            self._forget(now)
            found = _Matching(dict(tag_filter))
        self.filters[key] = found
        found.asked_at = now
        self._catch_up(found)
        return found.ready

    def _catch_up(self, matching: _Matching) -> None:
        if matching.next_change < self.first_change:
            matching.ready = ReadySet.of(unit for unit in self.ready.units.values() if matching.accepts(unit))
        else:
            changed: Iterable[int] = self.changes[matching.next_change - self.first_change :]
            for seq in dict.fromkeys(changed):
                changed_unit = self.ready.units.get(seq)
                if changed_unit is not None and matching.accepts(changed_unit):
                    matching.ready.add(changed_unit)
                else:
                    matching.ready.discard(seq)
        matching.next_change = self.first_change + len(self.changes)

    def _note(self, seq: int) -> None:
        if not self.filters:
            return
        self.changes.append(seq)
        if len(self.changes) > 2 * len(self.ready) + _SLACK:  # who missed these looks at all units, which are fewer
            dropped = len(self.changes) // 2
            del self.changes[:dropped]
            self.first_change += dropped

    def _forget(self, now: float) -> None:
        """Before a filter is added: drops those that are not asked for any more, or for longer than others."""
        num_kept = sum(len(matching.ready) for matching in self.filters.values())
        most = 4 * len(self.ready) + _SLACK
        for key, matching in list(self.filters.items()):
            if matching.asked_at + _FILTER_IDLE_S > now and len(self.filters) < _MOST_FILTERS and num_kept <= most:
                break
            num_kept -= len(matching.ready)
            del self.filters[key]
        if not self.filters:
            self.first_change += len(self.changes)
            self.changes.clear()
