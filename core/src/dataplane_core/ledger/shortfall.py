"""Finds out why a claim gets no more samples, for the message of its timeout."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dataplane_core.errors import LeaseHolder, Shortfall
from dataplane_core.ledger.rows import Claimable, Row
from dataplane_core.spec import group_matches, matches

#: How many of each kind are named.
_NUM_NAMED: Final = 3


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
