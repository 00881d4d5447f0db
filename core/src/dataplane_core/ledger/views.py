"""The rows and groups of a partition that are ready for a task, for each set of required fields and each tag filter.

A claimable is what a claim hands out as a whole: a row or a group. A view is always exact, so the number of ready
claimables is known without looking at them. A view with a tag filter is updated from a log of changes of the view
without one: it looks only at the claimables that changed since the last claim with this filter. Views are derived from
the rows, so a ledger can build them again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dataplane_core.ledger.rows import Claimable
from dataplane_core.spec import group_matches

#: A filter is dropped if no claim used it for this many seconds; if there are too many, the least recently used go.
_FILTER_IDLE_S: Final = 60.0
_MOST_FILTERS: Final = 1024
#: How many entries a heap or a log may have beyond a multiple of its claimables.
_SLACK: Final = 1024


@dataclass(slots=True)
class ReadySet:
    """Claimables in order of ``seq``."""

    claimables: dict[int, Claimable] = field(default_factory=dict)
    heap: list[int] = field(default_factory=list)  # the seq of each, and of some that were dropped

    def __len__(self) -> int:
        return len(self.claimables)

    @classmethod
    def of(cls, claimables: Iterable[Claimable]) -> ReadySet:
        """A set of these claimables."""
        by_seq = {claimable.seq: claimable for claimable in claimables}
        return cls(by_seq, sorted(by_seq))

    def add(self, claimable: Claimable) -> None:
        """Adds a claimable, unless the set has it."""
        if claimable.seq not in self.claimables:
            self.claimables[claimable.seq] = claimable
            heapq.heappush(self.heap, claimable.seq)

    def discard(self, seq: int) -> bool:
        """Drops a claimable. False if the set does not have it."""
        if self.claimables.pop(seq, None) is None:
            return False
        if len(self.heap) > 2 * len(self.claimables) + _SLACK:
            self.heap = list(self.claimables)
            heapq.heapify(self.heap)
        return True

    def first(self, count: int) -> list[Claimable]:
        """The first ``count`` claimables; there must be so many. The caller must discard them before the next call."""
        found: list[Claimable] = []
        while len(found) < count:
            claimable = self.claimables.get(heapq.heappop(self.heap))
            if claimable is not None and not (found and found[-1] is claimable):
                found.append(claimable)
        return found


@dataclass(slots=True)
class _Matching:
    """The claimables of a view that match a filter, up to the change number ``next_change`` of the view."""

    tag_filter: Mapping[str, tuple[str, Any]]
    ready: ReadySet = field(default_factory=ReadySet)
    next_change: int = -1
    asked_at: float = 0.0

    def accepts(self, claimable: Claimable) -> bool:
        return group_matches([row.tags for row in claimable.rows], self.tag_filter)


@dataclass(slots=True)
class ReadyView:
    """The ready claimables of one task for one set of required fields.

    Attributes:
        required: The fields.
        ready: The claimables.
        ready_members: ``seq`` of a group -> the number of its members that have the fields. Groups that lost a member
            have no entry.
        changes: ``seq`` of the claimables that were last added, dropped or tagged. Empty if there are no filters.
        first_change: The number of changes before these.
        filters: Filter -> its part of the view, the least recently used first.
    """

    required: frozenset[str]
    ready: ReadySet = field(default_factory=ReadySet)
    ready_members: dict[int, int] = field(default_factory=dict)
    changes: list[int] = field(default_factory=list)
    first_change: int = 0
    filters: dict[str, _Matching] = field(default_factory=dict)

    def add(self, claimable: Claimable) -> None:
        """Adds a claimable that became ready."""
        self.ready.add(claimable)
        self._note(claimable.seq)

    def discard(self, seq: int) -> None:
        """Drops a claimable that is no longer ready, if it was."""
        if self.ready.discard(seq):
            self._note(seq)

    def touch(self, seq: int) -> None:
        """Notes that a claimable's tags changed."""
        if seq in self.ready.claimables:
            self._note(seq)

    def of(self, tag_filter: Mapping[str, tuple[str, Any]] | None, now: float) -> ReadySet:
        """The ready claimables that match a filter. Looks only at those that changed since the filter was last used."""
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
            matching.ready = ReadySet.of(filter(matching.accepts, self.ready.claimables.values()))
        else:
            changed: Iterable[int] = self.changes[matching.next_change - self.first_change :]
            for seq in dict.fromkeys(changed):
                claimable = self.ready.claimables.get(seq)
                if claimable is not None and matching.accepts(claimable):
                    matching.ready.add(claimable)
                else:
                    matching.ready.discard(seq)
        matching.next_change = self.first_change + len(self.changes)

    def _note(self, seq: int) -> None:
        if not self.filters:
            return
        self.changes.append(seq)
        if len(self.changes) > 2 * len(self.ready) + _SLACK:  # a filter that has not seen them yet is built again
            dropped = len(self.changes) // 2
            del self.changes[:dropped]
            self.first_change += dropped

    def _forget(self, now: float) -> None:
        """Before a filter is added: drops idle filters, and the least recently used if there are too many."""
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
