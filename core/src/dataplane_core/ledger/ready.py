"""What a claim may be given: the rows and groups that are ready for a task, which of them it gets, and why no more.

A claimable is what a claim hands out as a whole: a row or a group. For each task and each set of required fields there
is a view. It is always exact, so the number of ready claimables is known without looking at them. A view with a tag
filter is updated from a log of changes of the view without one: it looks only at the claimables that changed since the
last claim with this filter. Views are derived from the rows, so a ledger can build them again. Pure, like the ledger.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from dataplane_core.errors import LeaseHolder, Shortfall
from dataplane_core.ledger.rows import Claimable, Row
from dataplane_core.schema import INPUT_LENGTHS_TAG
from dataplane_core.spec import ClaimRequest, Sampler, group_matches, matches

#: A filter is dropped if no claim used it for this many seconds; if there are too many, the least recently used go.
_FILTER_IDLE_S: Final = 60.0
_MOST_FILTERS: Final = 1024
#: How many entries a heap or a log may have beyond a multiple of its claimables.
_SLACK: Final = 1024
#: How many samples of each kind a shortfall names.
_NUM_NAMED: Final = 3


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

    def choose(self, sampler: Sampler, count: int) -> list[Claimable]:
        """Chooses ``count`` claimables; there must be so many. The caller must discard them before the next call."""
        if sampler == "freshest":  # O(n log k) for k of n
            return [self.claimables[seq] for seq in heapq.nlargest(count, self.claimables)]
        first: list[Claimable] = []  # O(k log n)
        while len(first) < count:
            claimable = self.claimables.get(heapq.heappop(self.heap))
            if claimable is not None and not (first and first[-1] is claimable):
                first.append(claimable)
        return first


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
        matching = self.filters.pop(key, None)
        if matching is None:
            self._forget(now)
            matching = _Matching(dict(tag_filter))
        self.filters[key] = matching
        matching.asked_at = now
        self._catch_up(matching)
        return matching.ready

    def _catch_up(self, matching: _Matching) -> None:
        if matching.next_change < self.first_change:
            matching.ready = ReadySet.of(filter(matching.accepts, self.ready.claimables.values()))
        else:
            for seq in dict.fromkeys(self.changes[matching.next_change - self.first_change :]):
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


# --- data-parallel ranks ----------------------------------------------------------------------------------------------


def ranks_of(claim: ClaimRequest) -> int:
    """For how many ranks a claim chooses its batch."""
    return 1 if claim.dp_rank is None else claim.dp_size or 1


def shares(sampler: Sampler, claimables: Sequence[Claimable], dp_size: int) -> list[list[Claimable]]:
    """Divides claimables among the ranks, so that their numbers differ by at most one: into ranges, or balanced.

    ``balanced`` gives all ranks about as many tokens. The longest first, each to the rank with the fewest tokens so far
    among those that still need one (Graham's longest processing time rule, with equal counts). Within a rank, the order
    of first write stays.
    """
    least, more = divmod(len(claimables), dp_size)
    sizes = [least + (rank < more) for rank in range(dp_size)]  # the first ranks get one more
    if sampler != "balanced":
        left = iter(claimables)
        return [list(islice(left, size)) for size in sizes]
    parts: list[list[Claimable]] = [[] for _ in range(dp_size)]
    heap = [(0, rank) for rank in range(dp_size)]
    for claimable in sorted(claimables, key=lambda claimable: (-_length(claimable), claimable.seq)):
        while True:
            total, rank = heapq.heappop(heap)
            if len(parts[rank]) < sizes[rank]:
                break
        parts[rank].append(claimable)
        heapq.heappush(heap, (total + _length(claimable), rank))
    return [sorted(part, key=lambda claimable: claimable.seq) for part in parts]


def _length(claimable: Claimable) -> int:
    lengths = [row.tags.get(INPUT_LENGTHS_TAG, 0) for row in claimable.rows]
    return sum(int(length) for length in lengths if isinstance(length, (int, float)) and math.isfinite(length))


# --- why a claim gets no more -----------------------------------------------------------------------------------------


def find_shortfall(
    claimables: Iterable[Claimable],
    task_name: str,
    required: frozenset[str],
    tag_filter: Mapping[str, tuple[str, Any]] | None,
    is_whole: Callable[[Claimable], bool],
    now: float,
) -> Shortfall:
    """Counts and names the samples that the task cannot be given now. Looks at every row.

    Args:
        claimables: All claimables of the partition, in order of first write.
        task_name: The task that claims.
        required: The fields that the claim requires.
        tag_filter: The filter of the claim.
        is_whole: Whether a claimable has all its members and never lost one.
        now: The time in seconds.
    """
    leased: list[tuple[float, int, Row]] = []
    passed: list[tuple[int, Claimable]] = []
    num_not_matching = num_incomplete = num_lacking = 0
    groups: dict[str, int] = {}
    cells: dict[str, tuple[str, ...]] = {}
    for claimable in claimables:
        free: list[Row] = []
        for row in claimable.rows:
            hold = row.holds.get(task_name)
            if hold is None:
                free.append(row)
            elif not hold.done:
                leased.append((hold.expires_at, row.seq, row))
        if not free:
            continue
        if tag_filter and not group_matches([row.tags for row in claimable.rows], tag_filter):
            num_not_matching += len(free)
            passed.append((claimable.seq, claimable))
        elif not is_whole(claimable):
            num_incomplete += len(free)
            if len(groups) < _NUM_NAMED:
                groups[free[0].group or ""] = len(claimable.rows)
        elif not all(required <= row.cells.fields.keys() for row in free):
            num_lacking += len(free)
            if len(cells) < _NUM_NAMED:
                lacking = {row.sample_id: tuple(sorted(required - row.cells.fields.keys())) for row in free}
                cells.update((sample_id, names) for sample_id, names in lacking.items() if names)
    return Shortfall(
        num_leased=len(leased),
        leased=tuple(
            LeaseHolder(sample_id=row.sample_id, holder=row.holds[task_name].holder, left_s=max(0.0, expires_at - now))
            for expires_at, _, row in heapq.nsmallest(_NUM_NAMED, leased)
        ),
        num_not_matching=num_not_matching,
        not_matching=tuple(
            max((row.seq, row.sample_id) for row in claimable.rows if not matches(row.tags, tag_filter))[1]
            for _, claimable in heapq.nlargest(_NUM_NAMED, passed)
        ),
        num_incomplete=num_incomplete,
        incomplete_groups=groups,
        num_lacking=num_lacking,
        missing_cells=dict(list(cells.items())[:_NUM_NAMED]),
    )
