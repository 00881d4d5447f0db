"""The bin-packing algorithms of `dataplane_core.sharding.packing`.

A placer takes sizes, each at most the capacity. It returns the positions in the order in which it placed them, and the
bin of each. Bins are numbered in the order in which they are opened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
_Placed: TypeAlias = tuple[Ints, Ints]


# --- placing ---------------------------------------------------------------------------------------------------------


def _place_in_order(sizes: Ints, capacity: int, seed: int | None) -> _Placed:
    ends = np.cumsum(sizes).tolist()
    starts, start, filled = [], 0, 0
    while start < len(ends):
        starts.append(start)
        start = bisect_right(ends, filled + capacity, start)
        filled = ends[start - 1]
    counts = np.diff(np.asarray([*starts, len(ends)]))
    return np.arange(len(sizes)), np.repeat(np.arange(len(starts)), counts)


def _place_shuffled(sizes: Ints, capacity: int, seed: int | None) -> _Placed:
    # RandomState, unlike newer generators, gives the same order under every version of numpy
    order = np.random.RandomState(seed).permutation(len(sizes))
    return order, np.asarray(_first_fit(sizes[order].tolist(), capacity), dtype=np.int64)


def _place_decreasing(sizes: Ints, capacity: int, seed: int | None) -> _Placed:
    order = stable_argsort(-sizes)
    return order, np.asarray(_first_fit(sizes[order].tolist(), capacity), dtype=np.int64)


def _place_by_class(sizes: Ints, capacity: int, seed: int | None) -> _Placed:
    order = stable_argsort(-sizes)
    falling = sizes[order].tolist()
    # How many sizes are over 1/2, 1/3 and 1/6 of the capacity
    large, medium, small = (int(np.searchsorted(-sizes[order], -(capacity // part))) for part in (2, 3, 6))
    room = [capacity - size for size in falling[:large]]  # rises from bin to bin
    placed, bins = list(range(large)), list(range(large))  # phase 1
    _pair_with_medium(falling, range(large, medium), room, placed, bins)
    _pair_with_two_small(falling, range(medium, small), room, placed, bins)
    left = np.delete(np.arange(len(falling)), placed).tolist()
    _fill_up(falling, left, room, placed, bins)
    left = np.delete(np.arange(len(falling)), placed).tolist()
    placed += left
    bins += [large + each for each in _first_fit([falling[ordinal] for ordinal in left], capacity)]  # phase 5
    return order[np.asarray(placed, dtype=np.int64)], np.asarray(bins, dtype=np.int64)


# The next three place some of the ``falling`` sizes, named by their ordinals, in bins of which each has some ``room``.
# They add what they place to ``placed`` and ``bins``.


def _pair_with_medium(falling: list[int], medium: range, room: list[int], placed: list[int], bins: list[int]) -> None:
    """Phase 2. Room rises from bin to bin, so the sizes that fit form a stack with the largest on top."""
    fitting: list[int] = []
    smallest = medium.stop - 1
    for number, free in enumerate(room):
        while smallest >= medium.start and falling[smallest] <= free:
            fitting.append(smallest)
            smallest -= 1
        if fitting:
            ordinal = fitting.pop()
            room[number] -= falling[ordinal]
            placed.append(ordinal)
            bins.append(number)


def _pair_with_two_small(falling: list[int], small: range, room: list[int], placed: list[int], bins: list[int]) -> None:
    """Phase 3. Room falls from bin to bin and the smallest size rises, so what fits beside it only falls."""
    with_medium = set(bins[len(room) :])
    largest, smallest = small.start, small.stop - 1
    for number in range(len(room) - 1, -1, -1):
        if number in with_medium:
            continue
        free = room[number] - falling[smallest] if largest < smallest else -1
        while largest < smallest and falling[largest] > free:
            largest += 1
        if largest >= smallest:
            break
        room[number] = free - falling[largest]
        placed += (smallest, largest)
        bins += (number, number)
        largest += 1
        smallest -= 1


def _fill_up(falling: list[int], left: list[int], room: list[int], placed: list[int], bins: list[int]) -> None:
    """Phase 4. A size that is placed points to the next smaller one; such paths are shortened when they are walked."""
    rising = [falling[ordinal] for ordinal in reversed(left)]
    smaller = list(range(len(left)))  # place in `rising` -> the largest place at or below it that is left; -1: none
    for number, free in enumerate(room):
        at = bisect_right(rising, free) - 1
        while at >= 0:
            path = []
            while at >= 0 and smaller[at] != at:
                path.append(at)
                at = smaller[at]
            for each in path:
                smaller[each] = at
            if at >= 0:
                free -= rising[at]
                placed.append(left[len(left) - 1 - at])
                bins.append(number)
                smaller[at] = at - 1
                at = min(at - 1, bisect_right(rising, free, 0, at) - 1)


PLACERS: Final[Mapping[str, Callable[[Ints, int, int | None], _Placed]]] = {
    "concatenative": _place_in_order,
    "first_fit_decreasing": _place_decreasing,
    "first_fit_shuffle": _place_shuffled,
    "modified_first_fit_decreasing": _place_by_class,
}


def _first_fit(sizes: list[int], capacity: int) -> list[int]:
    """First fit in the order given; the bin of each. Uses a tree over the bins whose nodes hold the most room below."""
    # All bins but one are more than half full
    most = min(len(sizes), 2 * -(-sum(sizes) // capacity) + 1)
    leaves = 1 << (most - 1).bit_length()
    tree = [capacity] * (2 * leaves)
    bins = []
    for size in sizes:
        node = 1
        while node < leaves:
            node += node
            if tree[node] < size:
                node += 1
        bins.append(node - leaves)
        room = tree[node] - size
        tree[node] = room
        while node > 1:
            sibling = tree[node ^ 1]
            if sibling > room:
                room = sibling
            node >>= 1
            if tree[node] == room:
                break
            tree[node] = room
    return bins


def stable_argsort(values: Ints) -> Ints:
    """As numpy's stable argsort. Uses a radix sort if the values span less than 2**16."""
    if not len(values):
        return np.empty(0, np.int64)
    low = int(values.min())
    if int(values.max()) - low < 1 << 16:
        return np.argsort((values - low).astype(np.uint16), kind="stable")
    return np.argsort(values, kind="stable")
