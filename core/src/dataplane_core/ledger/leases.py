"""When leases end, in the order of their ends. Pure, like the ledger."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dataplane_core.ledger.rows import Hold, Row

__all__ = ["Leases"]

#: Finds a lease that is neither settled nor cleared, by id, number and task.
_Find: TypeAlias = Callable[[str, int, str], "tuple[Row, Hold] | None"]
#: Entries kept beyond twice the leases that run.
_SLACK: Final = 64


@dataclass(slots=True)
class Leases:
    """When to look at which lease: each has an entry at or before its end.

    A renewal adds none: whoever comes to the entry finds a later end, and moves it there. Entries of leases that were
    settled are dropped when they come up, or once they are more than the others.
    """

    heap: list[tuple[float, int, str, str]] = field(default_factory=list)  # time, number of the row, id, task

    def add(self, at: float, row: Row, task_name: str) -> None:
        """A lease ends at ``at``, unless it is renewed."""
        heapq.heappush(self.heap, (at, row.seq, row.sample_id, task_name))

    def next_due(self, find: _Find, now: float) -> tuple[Row, str] | None:
        """The row and task of the lease that ended first, or None; drops and moves entries on the way."""
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

    def all_due(self, find: _Find, now: float) -> list[tuple[Row, str]]:
        """Every row and task whose lease has ended, in the order of the ends; their entries stay."""
        found: dict[tuple[int, str], tuple[Row, str]] = {}
        entries: list[tuple[float, int, str, str]] = []
        while (due := self.next_due(find, now)) is not None:
            found.setdefault((due[0].seq, due[1]), due)
            entries.append(heapq.heappop(self.heap))
        for entry in entries:
            heapq.heappush(self.heap, entry)
        return list(found.values())

    def tidy(self, find: _Find, num_running: int) -> None:
        """Keeps one entry per running lease, once most entries belong to none."""
        if len(self.heap) <= 2 * num_running + _SLACK:
            return
        running: dict[tuple[int, str], tuple[float, int, str, str]] = {}
        for _, seq, sample_id, task_name in self.heap:
            found = find(sample_id, seq, task_name)
            if found is not None:
                running[seq, task_name] = (found[1].expires_at, seq, sample_id, task_name)
        self.heap = list(running.values())
        heapq.heapify(self.heap)
