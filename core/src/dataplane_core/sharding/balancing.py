"""Balances packed plans by what rows cost: ranks that wait for each other take as long as the costliest bin of each
microbatch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import fsum, inf
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane_core.errors import InvalidRequestError
from dataplane_core.sharding.packing import Bins
from dataplane_core.spec.costs import Balance

#: By what plans are balanced: ``{"cost": "flops", "hidden_size": 4096}``, or a function: tokens of a row -> its cost.
BalanceBy: TypeAlias = Mapping[str, Any] | Callable[[int], float]
#: The most that a row may cost: sums of costs stay finite.
_MOST: Final = 1e100


def costs_of(balance: BalanceBy, lengths: NDArray[np.int64]) -> list[float]:
    """What each row costs. Refuses what is no known cost, and costs that are no numbers from 0 to `_MOST`."""
    if not callable(balance):
        by_name: list[float] = Balance.read("sharding: balance", balance).of(lengths.astype(np.float64)).tolist()
        return by_name
    costs = [balance(length) for length in lengths.tolist()]
    for row, cost in enumerate(costs):
        if not (isinstance(cost, (int, float, np.integer, np.floating)) and 0 <= cost <= _MOST):
            raise InvalidRequestError(
                f"sharding refused: balance gives {cost!r} for row {row} of {lengths[row]} tokens. Expected a number "
                f"from 0 to {_MOST:g}."
            )
    return list(map(float, costs))


def balanced_bins(bins: Bins, tokens: Sequence[int], costs: Sequence[float], capacity: int, shards: int) -> list[Bins]:
    """Fills as many bins anew, and gives each shard its bins, one per microbatch, the costliest first.

    A microbatch has bins of about the same cost, of which the shard that has the least so far gets the costliest. If
    rows do not fit anew, or nothing is won, bins keep their rows.
    """
    ways = [_costliest_first(bins, costs)]
    for capped in (True, False):
        filled = _filled(len(bins), tokens, costs, capacity, shards, capped)
        if filled is not None:
            ways.append(_costliest_first(filled, costs))
            break
    best = min(ways, key=lambda way: fsum(cost for cost, _ in way[::shards]))
    dealt: list[Bins] = [[] for _ in range(shards)]
    totals = [0.0] * shards
    for start in range(0, len(best), shards):
        lightest_first = sorted(range(shards), key=totals.__getitem__)
        for shard, (cost, rows) in zip(lightest_first, best[start : start + shards], strict=True):
            dealt[shard].append(rows)
            totals[shard] += cost
    return dealt


def _costliest_first(bins: Bins, costs: Sequence[float]) -> list[tuple[float, list[int]]]:
    """Bins with their costs."""
    return sorted(((fsum(costs[row] for row in rows), rows) for rows in bins), key=lambda entry: -entry[0])


def _filled(
    count: int, tokens: Sequence[int], costs: Sequence[float], capacity: int, shards: int, capped: bool
) -> Bins | None:
    """Packs all rows into ``count`` bins, none of them empty. None if they do not fit in this way.

    If the longest row costs more than bins do on average, its microbatch takes as long as that row anyhow. So that
    microbatch gets the longest rows, and all that fits beside them: less is left for the others. ``capped``: none of
    its bins gets costlier than the longest row. The rest is spread over the other bins.
    """
    left = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)
    sizes, prices = [-tokens[row] for row in left], [-costs[row] for row in left]  # rising, to be bisected
    filled: Bins = []
    rest = fsum(costs)
    while count > shards and -prices[0] * count > rest:
        count -= shards
        begun, highest = left[:shards], -prices[0]
        del left[:shards], sizes[:shards], prices[:shards]
        for row in begun:
            rows, room, more = [row], capacity - tokens[row], highest - costs[row] if capped else inf
            while len(left) > count:  # each of the other bins needs a row
                place = max(bisect_left(sizes, -room), bisect_left(prices, -more))
                if place == len(left):
                    break
                rows.append(left.pop(place))
                room, more = room + sizes.pop(place), more + prices.pop(place)
            filled.append(rows)
            rest -= fsum(costs[row] for row in rows)
    spread = _spread(left, count, tokens, costs, capacity)
    return None if spread is None else filled + spread


def _spread(
    rows: Sequence[int], count: int, tokens: Sequence[int], costs: Sequence[float], capacity: int
) -> Bins | None:
    """Places the rows, the longest first, each into the bin that costs least among those where it fits."""
    bins = [[row] for row in rows[:count]]
    room = [capacity - tokens[row] for row in rows[:count]]
    loads = [(costs[row], number) for number, row in enumerate(rows[:count])]
    heapify(loads)
    full: list[tuple[int, float, int]] = []  # bins where the row does not fit, by their room
    for row in rows[count:]:
        while full and -full[0][0] >= tokens[row]:
            heappush(loads, heappop(full)[1:])
        while loads and room[loads[0][1]] < tokens[row]:
            cost, number = heappop(loads)
            heappush(full, (-room[number], cost, number))
        if not loads:
            return None
        cost, number = loads[0]
        heapreplace(loads, (cost + costs[row], number))
        room[number] -= tokens[row]
        bins[number].append(row)
    return bins
