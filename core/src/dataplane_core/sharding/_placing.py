"""Which sequence goes into which bin: the algorithms behind `dataplane_core.sharding.packing`.

A placer takes sizes, each at most the capacity, and returns the positions in the order in which it placed them, and the
bin of each; bins are numbered in the order in which they are opened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from heapq import heappop, heappush, heapreplace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["PLACERS", "Ints", "stable_argsort"]

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
    # Frozen, unlike the newer generators: the same order under every version of numpy
    order = np.random.RandomState(seed).permutation(len(sizes))
    return order, np.asarray(_first_fit(sizes[order].tolist(), capacity), dtype=np.int64)


def _place_decreasing(sizes: Ints, capacity: int, seed: int | None) -> _Placed:
    order = stable_argsort(-sizes)
    return order, _first_fit_of_runs(*_runs(sizes[order]), capacity)


def _place_by_class(sizes: Ints, capacity: int, seed: int | None) -> _Placed:
    order = stable_argsort(-sizes)
    falling = sizes[order]
    # How many are over 1/2, 1/3 and 1/6 of the capacity
    large, medium, small = (int(np.searchsorted(-falling, -(capacity // part))) for part in (2, 3, 6))
    if not large:
        return order, _first_fit_of_runs(*_runs(falling), capacity)
    as_list = falling.tolist()
    room = (capacity - falling[:large]).tolist()  # rises from bin to bin
    ordinals, bins = _pair_with_medium(as_list, large, medium, room)
    more_ordinals, more_bins = _pair_with_two_small(as_list, medium, small, room, set(bins))
    placed = np.asarray([*range(large), *ordinals, *more_ordinals], dtype=np.int64)
    in_bins = np.asarray([*range(large), *bins, *more_bins], dtype=np.int64)
    is_left = np.ones(len(falling), dtype=bool)
    is_left[placed] = False
    left = np.flatnonzero(is_left)
    fitted, fitted_bins, left = _fill_up(falling, left, room)
    rest_bins = _first_fit_of_runs(*_runs(falling[left]), capacity) + large  # phase 5
    return order[np.concatenate([placed, fitted, left])], np.concatenate([in_bins, fitted_bins, rest_bins])


def _pair_with_medium(falling: list[int], first: int, end: int, room: list[int]) -> tuple[list[int], list[int]]:
    """Phase 2. Room rises from bin to bin, so what fits is a stack: the largest is the last to have become fit.

    Args:
        falling: All sizes.
        first: Where the medium ones begin.
        end: Where they end.
        room: Of each bin; is used up.

    Returns:
        The ordinals that are placed, and the bin of each.
    """
    placed, bins, fitting = [], [], []
    smallest = end - 1
    for number, free in enumerate(room):
        while smallest >= first and falling[smallest] <= free:
            fitting.append(smallest)
            smallest -= 1
        if fitting:
            ordinal = fitting.pop()
            room[number] = free - falling[ordinal]
            placed.append(ordinal)
            bins.append(number)
    return placed, bins


def _pair_with_two_small(
    falling: list[int], first: int, end: int, room: list[int], with_medium: set[int]
) -> tuple[list[int], list[int]]:
    """Phase 3. Room falls from bin to bin and the smallest rises, so the largest that fits beside it only falls.

    Arguments and result are as in `_pair_with_medium`, and the bins to leave out.
    """
    placed: list[int] = []
    bins: list[int] = []
    largest, smallest = first, end - 1
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
    return placed, bins


def _fill_up(falling: Ints, left: Ints, room: list[int]) -> tuple[Ints, Ints, Ints]:
    """Phase 4. Equal sizes are one entry; an entry that is used up points to the next smaller one.

    Args:
        falling: All sizes.
        left: The ordinals of those that are not placed.
        room: Of each bin.

    Returns:
        The ordinals that are placed, the bin of each, and the ordinals that are left, in order.
    """
    sizes, counts = _runs(falling[left])
    sizes.reverse()
    counts.reverse()  # rising
    starts = len(left) - np.cumsum(counts)  # where the ordinals of each entry begin in `left`
    smaller = list(range(-1, len(sizes) - 1))
    entries: list[int] = []
    bins: list[int] = []
    lowest = 0  # no entry below it has any left
    for number, free in enumerate(room):
        while lowest < len(sizes) and free >= sizes[lowest]:
            entry = bisect_right(sizes, free) - 1
            if not counts[entry]:
                entry = _used_up_to(entry, counts, smaller)
                if entry < 0:
                    while lowest < len(sizes) and not counts[lowest]:
                        lowest += 1
                    break
            size = sizes[entry]
            count = min(counts[entry], free // size) if size else counts[entry]
            counts[entry] -= count
            free -= count * size
            if count == 1:
                entries.append(entry)
                bins.append(number)
            else:
                entries += [entry] * count
                bins += [number] * count
    # The k-th to be placed of an entry is its k-th ordinal
    of_entry = np.asarray(entries, dtype=np.int64)
    by_entry = stable_argsort(of_entry)
    many = np.bincount(of_entry, minlength=len(sizes))
    places = np.empty(len(of_entry), np.int64)
    places[by_entry] = np.arange(len(of_entry)) + np.repeat(starts - (np.cumsum(many) - many), many)
    return left[places], np.asarray(bins, dtype=np.int64), np.delete(left, places)


def _used_up_to(entry: int, counts: list[int], smaller: list[int]) -> int:
    """The next smaller entry that has any left, or -1; shortens the way there."""
    path = []
    while entry >= 0 and not counts[entry]:
        path.append(entry)
        entry = smaller[entry]
    for each in path:
        smaller[each] = entry
    return entry


PLACERS: Final[Mapping[str, Callable[[Ints, int, int | None], _Placed]]] = {
    "concatenative": _place_in_order,
    "first_fit_decreasing": _place_decreasing,
    "first_fit_shuffle": _place_shuffled,
    "modified_first_fit_decreasing": _place_by_class,
}


# --- first fit -------------------------------------------------------------------------------------------------------


def _first_fit(sizes: list[int], capacity: int) -> list[int]:
    """The bin of each, in order of arrival: a tree over the bins whose nodes hold the most room below them."""
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


def _first_fit_of_runs(sizes: list[int], counts: list[int], capacity: int) -> Ints:
    """The bin of each, for falling sizes, each with how many there are of it.

    Neighbouring bins with the same room are one group, known by its first bin, and a run of equal sizes fills it at
    once. Since sizes fall, a group that has room for this size has room for all later ones until it is used: a heap
    holds the groups that have room, the others wait for the first size that they have room for.
    """
    rising = sizes[::-1]
    smallest = rising[0] if rising else 0
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    fitting: list[int] = []
    room: list[int] = []  # of each bin of the group that begins here
    stop: list[int] = []  # where the group that begins here ends
    filled: list[tuple[int, int, int]] = []  # first bin, bins, sequences for each
    for rank, (size, left) in enumerate(zip(sizes, counts, strict=True)):
        for first in waiting.pop(rank, ()):
            heappush(fitting, first)
        while left:
            if not fitting:
                new = -(-left // (capacity // size)) if size else 1
                fitting.append(len(room))
                stop += [len(room) + new] * new
                room += [capacity] * new
            first = fitting[0]
            free = room[first]
            end = stop[first]
            each = free // size if size else left
            full = left // each
            if full:
                if full > end - first:
                    full = end - first
                left -= full * each
                filled.append((first, full, each))
                rest = free - each * size
                if first + full == end:
                    heappop(fitting)
                else:
                    room[first + full] = free
                    stop[first + full] = end
                    heapreplace(fitting, first + full)
                    stop[first] = first + full
                if rest >= smallest:
                    room[first] = rest
                    waiting[len(sizes) - bisect_right(rising, rest)].append(first)
            else:  # less than one bin takes
                filled.append((first, 1, left))
                room[first] = free - left * size
                left = 0
                if first + 1 < end:
                    stop[first] = first + 1
                    room[first + 1] = free
                    stop[first + 1] = end
                    heappush(fitting, first + 1)
    return _expand(filled)


def _expand(filled: list[tuple[int, int, int]]) -> Ints:
    """The bin of each sequence, of groups that were filled one after the other."""
    first, bins, each = np.asarray(filled, dtype=np.int64).reshape(-1, 3).T
    total = bins * each
    within = np.arange(int(total.sum())) - np.repeat(np.cumsum(total) - total, total)
    found: Ints = np.repeat(first, total) + within // np.repeat(each, total)
    return found


def _runs(falling: Ints) -> tuple[list[int], list[int]]:
    """The different sizes of a sorted array and how many there are of each."""
    if not len(falling):
        return [], []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(falling)) + 1])
    counts = np.diff(np.concatenate([starts, [len(falling)]]))
    return falling[starts].tolist(), counts.tolist()


def stable_argsort(values: Ints) -> Ints:
    """As numpy's stable argsort, by radix sort where the values lie close enough for it."""
    if not len(values):
        return np.empty(0, np.int64)
    low = int(values.min())
    if int(values.max()) - low < 1 << 16:
        return np.argsort((values - low).astype(np.uint16), kind="stable")
    return np.argsort(values, kind="stable")
