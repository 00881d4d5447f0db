"""What rows cost a trainer, and how they are divided so that all parts cost about as much."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Literal

from dataplane_core.arguments import Count, check_dict, checked
from dataplane_core.errors import Frozen, InvalidRequestError


class Balance(Frozen, frozen=True):
    """By which cost ranks get about as much work.

    Attributes:
        cost: ``flops``: those of a transformer. Linear layers cost by the length of a row, attention by its square.
        hidden_size: The width of the model.
    """

    cost: Literal["flops"]
    hidden_size: Count

    @classmethod
    def read(cls, what: str, option: Any) -> Balance:
        """The option ``what`` of a user, such as ``{"cost": "flops", "hidden_size": 4096}``."""
        check_dict(what, option)
        if option.keys() != {"cost", "hidden_size"}:
            keys = ", ".join(map(repr, option)) or "none"
            raise InvalidRequestError(f"{what} refused: its keys are {keys}. Expected 'cost' and 'hidden_size'.")
        return checked(what, cls, **option)

    def of(self, length: Any) -> Any:
        """The FLOPs of a layer for a row of so many tokens, in ``4 * hidden_size``; of an array, those of each."""
        return length * (6 * self.hidden_size + length)


def divide_evenly(costs: Sequence[float], sizes: Sequence[int]) -> list[list[int]]:
    """Divides positions into parts of these sizes, which cost about as much, by Graham's longest processing time rule:
    the costliest first, each to the part that costs least so far among those that are not full."""
    parts: list[list[int]] = [[] for _ in sizes]
    heap: list[tuple[float, int]] = [(0, number) for number, size in enumerate(sizes) if size]
    for position in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        total, number = heappop(heap)
        parts[number].append(position)
        if len(parts[number]) < sizes[number]:
            heappush(heap, (total + costs[position], number))
    return [sorted(part) for part in parts]
