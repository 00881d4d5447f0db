"""Samplers: which ready samples a claim gives, and to which data-parallel rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from dataplane_core.ledger import commands
from dataplane_core.ledger.rows import Claimable
from dataplane_core.ledger.views import ReadySet
from dataplane_core.schema import INPUT_LENGTHS_TAG
from dataplane_core.spec import Sampler


class _FirstWrite:
    """In order of first write, divided into ranges. O(k log n) for k of n."""

    def choose(self, ready: ReadySet, count: int) -> list[Claimable]:
        """Chooses ``count`` of the ready claimables; there are so many."""
        return ready.first(count)

    def share(self, claimables: Sequence[Claimable], dp_size: int) -> list[list[Claimable]]:
        """Divides claimables among the ranks, so that their numbers differ by at most one."""
        least, more = divmod(len(claimables), dp_size)
        ends = [least * rank + min(rank, more) for rank in range(dp_size + 1)]  # the first ranks get one more
        return [list(claimables[start:end]) for start, end in pairwise(ends)]


class _Freshest(_FirstWrite):
    """The last written first. O(n log k) for k of n."""

    def choose(self, ready: ReadySet, count: int) -> list[Claimable]:
        return [ready.claimables[seq] for seq in heapq.nlargest(count, ready.claimables)]


class _Balanced(_FirstWrite):
    """In order of first write, divided so that all ranks get about as many tokens.

    The longest first, each to the rank with the fewest tokens so far among those that still need one (Graham's longest
    processing time rule, with equal counts). Within a rank, the order of first write stays.
    """

    def share(self, claimables: Sequence[Claimable], dp_size: int) -> list[list[Claimable]]:
        least, more = divmod(len(claimables), dp_size)
        parts: list[list[Claimable]] = [[] for _ in range(dp_size)]
        heap = [(0, rank) for rank in range(dp_size)]
        for claimable in sorted(claimables, key=lambda each: (-_length(each), each.seq)):
            while True:
                total, rank = heapq.heappop(heap)
                room = least + (rank < more)  # the first ranks get one more
                if len(parts[rank]) < room:
                    break
            parts[rank].append(claimable)
            heapq.heappush(heap, (total + _length(claimable), rank))
        return [sorted(part, key=lambda each: each.seq) for part in parts]


def _length(claimable: Claimable) -> int:
    lengths = [row.tags.get(INPUT_LENGTHS_TAG, 0) for row in claimable.rows]
    return sum(int(each) for each in lengths if isinstance(each, (int, float)) and math.isfinite(each))


#: Name -> sampler.
SAMPLERS: Final[dict[Sampler, _FirstWrite]] = {
    "first_write": _FirstWrite(),
    "freshest": _Freshest(),
    "balanced": _Balanced(),
}


def ranks_of(claim: commands.ClaimRequest) -> int:
    """For how many ranks a claim chooses its batch."""
    return 1 if claim.dp_rank is None else claim.dp_size or 1
