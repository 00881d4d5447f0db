"""The bin-packing algorithms of `dataplane_core.sharding.packing`.

A placer takes sizes, each at most the capacity. It returns the positions in the order in which it placed them, and the
bin of each. Bins are numbered in the order in which they are opened.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush, heapreplace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
_Placed: TypeAlias = tuple[Ints, Ints]

#: Sizes up to this many tokens are looked up in a table, larger ones by bisection.
_LARGEST_TABLE: Final = 1 << 17


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
    return order, _first_fit_of_runs(*_runs(sizes[order]), capacity)


def _place_by_class(sizes: Ints, capacity: int, seed: int | None) -> _Placed:
    order = stable_argsort(-sizes)
    falling = sizes[order]
    # How many sizes are over 1/2, 1/3 and 1/6 of the capacity
    large, medium, small = (int(np.searchsorted(-falling, -(capacity // part))) for part in (2, 3, 6))
    if not large:
        return order, _place_rest(falling, capacity)
    as_list = falling[:small].tolist()
    room = (capacity - falling[:large]).tolist()  # rises from bin to bin
    ends = np.cumsum(_runs(falling[:large])[1]).tolist()
    ordinals, bins = _pair_with_medium(as_list, large, medium, room, itertools.pairwise([0, *ends]))
    more_ordinals, more_bins = _pair_with_two_small(as_list, medium, small, room, set(bins))
    pairs = np.asarray([[*ordinals, *more_ordinals], [*bins, *more_bins]], dtype=np.int64)
    placed, in_bins = np.concatenate([np.tile(np.arange(large), (2, 1)), pairs], axis=1)
    is_left = np.ones(len(falling), dtype=bool)
    is_left[placed] = False
    left = np.flatnonzero(is_left)
    fitted, fitted_bins, left = _fill_up(falling, left, np.asarray(room))
    rest_bins = _place_rest(falling[left], capacity) + large
    return order[np.concatenate([placed, fitted, left])], np.concatenate([in_bins, fitted_bins, rest_bins])


def _pair_with_medium(
    falling: list[int], first: int, end: int, room: list[int], groups: Iterable[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Phase 2. Room rises from bin to bin, so the sizes that fit form a stack with the largest on top.

    Args:
        falling: All sizes.
        first: Where the medium ones begin.
        end: Where they end.
        room: Room of each bin. Changed in place.
        groups: Neighbouring bins with the same room, as (first, end).

    Returns:
        The ordinals that were placed, and the bin of each.
    """
    placed: list[int] = []
    bins: list[int] = []
    fitting: list[int] = []
    smallest = end - 1
    for number, stop in groups:
        free = room[number]
        while smallest >= first and falling[smallest] <= free:
            fitting.append(smallest)
            smallest -= 1
        if fitting:
            taken = fitting[: -(stop - number) - 1 : -1]
            del fitting[-len(taken) :]
            placed += taken
            bins += range(number, number + len(taken))
            for ordinal in taken:
                room[number] = free - falling[ordinal]
                number += 1
    return placed, bins


def _pair_with_two_small(
    falling: list[int], first: int, end: int, room: list[int], with_medium: set[int]
) -> tuple[list[int], list[int]]:
    """Phase 3. Room falls from bin to bin and the smallest size rises, so the largest that fits beside it only falls.

    Arguments and result are as in `_pair_with_medium`. ``with_medium`` are bins to skip.
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


def _fill_up(falling: Ints, left: Ints, room: Ints) -> tuple[Ints, Ints, Ints]:
    """Phase 4. Equal sizes are one entry. An entry that is used up points to the next smaller one.

    Neighbouring bins with the same room choose the same size while there is enough of it, so they are handled as one
    group. When the size runs out, the bins that got some continue first, as if each bin had been filled alone.

    Args:
        falling: All sizes.
        left: The ordinals that are not placed yet.
        room: Room of each bin.

    Returns:
        The ordinals that were placed, the bin of each, and the ordinals that are left, in order.
    """
    sizes, counts = _runs(falling[left])
    if not sizes:
        return left, left, left
    sizes.reverse()
    counts.reverse()  # rising
    starts = len(left) - np.cumsum(counts)  # where the ordinals of each entry begin in `left`
    smaller = list(range(-1, len(sizes) - 1))
    entries, firsts, bins, per_bin = array("q"), array("q"), array("q"), array("q")
    lowest = 0  # no entry below it has any left
    begins = np.flatnonzero(np.diff(room, prepend=-1)).tolist()
    for begin, end in itertools.pairwise([*begins, len(room)]):
        pending = [(begin, end, int(room[begin]))]
        while pending and lowest < len(sizes):
            first, stop, free = pending.pop()
            if free < sizes[lowest]:
                continue
            entry = bisect_right(sizes, free) - 1
            if not counts[entry]:
                entry = _used_up_to(entry, counts, smaller)
                if entry < 0:
                    while lowest < len(sizes) and not counts[lowest]:
                        lowest += 1
                    continue
            size, count = sizes[entry], counts[entry]
            each = min(count, free // size) if size else count
            full = min(count // each, stop - first)
            counts[entry] -= full * each
            entries.append(entry)
            firsts.append(first)
            bins.append(full)
            per_bin.append(each)
            if first + full < stop:
                pending.append((first + full, stop, free))
            pending.append((first, first + full, free - each * size))
    group = [np.frombuffer(words, dtype=np.int64) for words in (firsts, bins, per_bin)]
    # The k-th to be placed of an entry is its k-th ordinal
    of_entry = np.repeat(np.frombuffer(entries, dtype=np.int64), group[1] * group[2])
    by_entry = stable_argsort(of_entry)
    many = np.bincount(of_entry, minlength=len(sizes))
    places = np.empty(len(of_entry), np.int64)
    places[by_entry] = np.arange(len(of_entry)) + np.repeat(starts - (np.cumsum(many) - many), many)
    return left[places], _expand(*group), np.delete(left, places)


def _place_rest(falling: Ints, capacity: int) -> Ints:
    """Phase 5: the bin of each size, counted from 0."""
    first_fit = _first_fit_of_runs(*_runs(falling), capacity)
    if not len(falling) or first_fit.max() < -(-int(falling.sum()) // capacity):  # no placement takes fewer bins
        return first_fit
    most_room = _most_room(falling.tolist(), capacity)
    return most_room if most_room.max() < first_fit.max() else first_fit


def _most_room(falling: list[int], capacity: int) -> Ints:
    """Each size goes into the bin with the most room, if it fits there; the bin of each."""
    bins, filled = np.empty(len(falling), np.int64), list[tuple[int, int]]()
    for place, size in enumerate(falling):
        if filled and filled[0][0] + size <= capacity:
            number = filled[0][1]
            heapreplace(filled, (filled[0][0] + size, number))
        else:
            number = len(filled)
            heappush(filled, (size, number))
        bins[place] = number
    return bins


def _used_up_to(entry: int, counts: list[int], smaller: list[int]) -> int:
    """The next smaller entry that has any left, or -1. Shortens the path of pointers to it."""
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


def _first_fit_of_runs(sizes: list[int], counts: list[int], capacity: int) -> Ints:
    """First fit of falling sizes, each with its count; the bin of each sequence.

    Neighbouring bins with the same room are one group, named by its first bin, and a run of equal sizes fills a group
    at once. Since sizes fall, a group with room for this size has room for all later ones until it is filled. A heap
    holds the groups that have room; the others wait for the first size that fits.
    """
    if not sizes:
        return np.empty(0, np.int64)
    rising, least = sizes[::-1], sizes[-1]
    fits_from: list[int] = []  # room -> rank of the first size that fits
    if sizes[0] <= _LARGEST_TABLE:
        fits_from = (len(sizes) - np.searchsorted(rising, np.arange(sizes[0]), side="right")).tolist()
    waiting: list[list[int] | None] = [None] * len(sizes)
    fitting: list[int] = []
    room: list[int] = []  # of each bin of the group that begins here
    stop: list[int] = []  # where the group that begins here ends
    # What was filled: the first bin, the number of bins, sequences per bin. Arrays that numpy can use without a copy
    firsts, bins, per_bin = array("q"), array("q"), array("q")
    for rank, (size, left) in enumerate(zip(sizes, counts, strict=True)):
        for first in waiting[rank] or ():
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
            firsts.append(first)
            if each > left:  # less than one bin takes
                bins.append(1)
                per_bin.append(left)
                room[first] = free - left * size
                if first + 1 < end:
                    stop[first] = first + 1
                    room[first + 1] = free
                    stop[first + 1] = end
                    heappush(fitting, first + 1)
                break
            full = 1 if first + 1 == end else min(left // each, end - first)
            bins.append(full)
            per_bin.append(each)
            left -= full * each
            if first + full == end:
                heappop(fitting)
            else:
                room[first + full] = free
                stop[first + full] = end
                heapreplace(fitting, first + full)
                stop[first] = first + full
            rest = free - each * size
            if least <= rest < size:  # always below the size, except for size 0, which is the last
                room[first] = rest
                wanted = fits_from[rest] if fits_from else len(sizes) - bisect_right(rising, rest)
                others = waiting[wanted]
                if others is None:
                    waiting[wanted] = [first]
                else:
                    others.append(first)
    return _expand(*(np.frombuffer(words, dtype=np.int64) for words in (firsts, bins, per_bin)))


def _expand(first: Ints, bins: Ints, each: Ints) -> Ints:
    """The bin of each sequence, from groups of bins that were filled one after the other."""
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
    """As numpy's stable argsort. Uses a radix sort if the values span less than 2**16."""
    if not len(values):
        return np.empty(0, np.int64)
    low = int(values.min())
    if int(values.max()) - low < 1 << 16:
        return np.argsort((values - low).astype(np.uint16), kind="stable")
    return np.argsort(values, kind="stable")
