"""Finds leases whose time is over, in the order in which they ended. Pure, like the ledger."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dataplane_core.ledger.rows import Hold, Row

#: Finds a lease that is neither settled nor cleared, by sample id, the row's ``seq`` and task.
_Find: TypeAlias = Callable[[str, int, str], "tuple[Row, Hold] | None"]
#: The heap is rebuilt when it has this many entries more than twice the running leases.
_SLACK: Final = 64


@dataclass(slots=True)
class Leases:
    """A heap of the times at which to check each lease. Every lease has an entry at or before its end.

    A renewal adds no entry. When the time of the old entry comes, the lease is found to end later, and its entry is
    moved. Entries of settled leases are dropped when their time comes, or when they are more than the others.
    """

    heap: list[tuple[float, int, str, str]] = field(default_factory=list)  # time, seq of the row, sample id, task

    def add(self, at: float, row: Row, task_name: str) -> None:
        """Adds a lease that ends at ``at``, unless it is renewed."""
        heapq.heappush(self.heap, (at, row.seq, row.sample_id, task_name))

    def next_due(self, find: _Find, now: float) -> tuple[Row, str] | None:
        """The row and task of the lease that ended first, or None. Drops and moves outdated entries."""
        while self.heap and self.heap[0][0] <= now:
            _, seq, sample_id, task_name = self.heap[0]
            found = find(sample_id, seq, task_name)
            if found is None:
                heapq.heappop(self.heap)
                continue
            row, hold = found
            if hold.expires_at <= now:
                return row, task_name
            heapq.heapreplace(self.heap, (hold.expires_at, seq, sample_id, task_name))
        return None

    def next_check(self) -> float:
        """No lease ends before this time. Infinite if there are none."""
        return self.heap[0][0] if self.heap else math.inf

    def tidy(self, find: _Find, num_running: int) -> None:
        """Rebuilds the heap with one entry per running lease, if most entries belong to none."""
        if len(self.heap) <= 2 * num_running + _SLACK:
            return
        running: dict[tuple[int, str], tuple[float, int, str, str]] = {}
        for _, seq, sample_id, task_name in self.heap:
            found = find(sample_id, seq, task_name)
            if found is not None:
                running[seq, task_name] = (found[1].expires_at, seq, sample_id, task_name)
        self.heap = list(running.values())
        heapq.heapify(self.heap)
