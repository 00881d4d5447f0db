"""Packers: which sequences share a bin, so that bins are few and none is overfull. Plain integers in and out.

Each packer takes lengths in tokens and a capacity, and returns bins of positions into the lengths:

- `concatenative`: in order, a new bin whenever the next sequence does not fit. At most 2 OPT.
- `first_fit_shuffle`: in a random order, each into the first bin where it fits. At most 1.7 OPT.
- `first_fit_decreasing`: the longest first, each into the first bin where it fits. At most 11/9 OPT + 6/9.
- `modified_first_fit_decreasing`: long sequences get their partners before the rest is spread. At most 71/60 OPT + 1.

OPT is the smallest possible number of bins. All take O(n log n) for n sequences, whatever the capacity.

References:
    D. S. Johnson, M. R. Garey: A 71/60 theorem for bin packing. Journal of Complexity 1 (1985), 65-106.
    G. Dósa: The tight bound of first fit decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9. ESCAPE 2007.
    M. Yue, L. Zhang: A simple proof of the inequality MFFD(L) <= 71/60 OPT(L) + 1. Acta Math. Appl. Sinica 11 (1995).
    G. Dósa, J. Sgall: First Fit bin packing: a tight analysis. STACS 2013.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane_core.errors import InvalidRequestError

__all__ = [
    "PACKERS",
    "PackingMetrics",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
    "pack_flat",
    "packing_metrics",
]

_Ints: TypeAlias = NDArray[np.int64]
#: Positions in the order in which they were placed, and the bin of each.
_Placed: TypeAlias = tuple[_Ints, _Ints]


# --- the packers -----------------------------------------------------------------------------------------------------


def concatenative(
    lengths: Sequence[int] | _Ints, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1
) -> list[list[int]]:
    """Fills one bin after the other, in the order given.

    Args:
        lengths: Tokens per sequence.
        capacity: Most tokens of a bin.
        min_bin_count: Fewest bins.
        bin_count_multiple: The number of bins is a multiple of this. Each bin that the last two options add gets one
            sequence from the end of the bin that has most sequences.

    Returns:
        Bins of positions into ``lengths``; each position is in one bin.

    Raises:
        InvalidRequestError: A length over the capacity, or too few sequences for the number of bins.
    """
    return _bins("concatenative", lengths, capacity, min_bin_count, bin_count_multiple, None)


def first_fit_decreasing(
    lengths: Sequence[int] | _Ints, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1
) -> list[list[int]]:
    """Places the longest first, each into the first bin where it fits. Equal lengths keep their order.

    Arguments, result and errors are those of `concatenative`.
    """
    return _bins("first_fit_decreasing", lengths, capacity, min_bin_count, bin_count_multiple, None)


def first_fit_shuffle(
    lengths: Sequence[int] | _Ints,
    capacity: int,
    *,
    min_bin_count: int = 0,
    bin_count_multiple: int = 1,
    seed: int | None = 0,
) -> list[list[int]]:
    """Places the sequences in random order, each into the first bin where it fits.

    Arguments, result and errors are those of `concatenative`; ``seed`` fixes the order, None draws a new one.
    """
    return _bins("first_fit_shuffle", lengths, capacity, min_bin_count, bin_count_multiple, seed)


def modified_first_fit_decreasing(
    lengths: Sequence[int] | _Ints, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1
) -> list[list[int]]:
    """The five phases of Johnson and Garey (1985).

    Sequences are large (over 1/2 of the capacity), medium (over 1/3), small (over 1/6) or tiny.

    1. Each large one gets a bin, the longest first.
    2. Forward through those bins: the largest medium one that fits.
    3. Backward through those without a medium one: the smallest small one and the largest that fits beside it.
    4. Forward through all of them: again and again the largest one that fits, of any class.
    5. First fit decreasing, in new bins, of what is left.

    Arguments, result and errors are those of `concatenative`.
    """
    return _bins("modified_first_fit_decreasing", lengths, capacity, min_bin_count, bin_count_multiple, None)


def pack_flat(
    algorithm: str,
    lengths: Sequence[int] | _Ints,
    capacity: int,
    *,
    min_bin_count: int = 0,
    bin_count_multiple: int = 1,
    seed: int | None = 0,
) -> tuple[_Ints, _Ints]:
    """Packs with the packer of that name, as `concatenative` and the others do, without building lists.

    Args:
        algorithm: One of `PACKERS`.
        lengths: Tokens per sequence.
        capacity: Most tokens of a bin.
        min_bin_count: Fewest bins.
        bin_count_multiple: The number of bins is a multiple of this.
        seed: For `first_fit_shuffle`.

    Returns:
        The positions of all bins, bin after bin, and the number of sequences of each bin.

    Raises:
        InvalidRequestError: An unknown algorithm, a length over the capacity, too few sequences for the bins.
    """
    place = _PLACERS.get(algorithm)
    if place is None:
        raise InvalidRequestError(
            f"packing refused: there is no algorithm '{algorithm}'. Expected one of {', '.join(_PLACERS)}."
        )
    sizes = np.asarray(lengths, dtype=np.int64)
    _check(sizes, capacity, min_bin_count, bin_count_multiple)
    if not len(sizes):
        items, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    else:
        placed, bins = place(sizes, capacity, seed)
        items = placed[stable_argsort(bins)]
        counts = np.bincount(bins)
    return _raise_bin_count(items, counts, min_bin_count, bin_count_multiple)


def _bins(
    algorithm: str,
    lengths: Sequence[int] | _Ints,
    capacity: int,
    min_bin_count: int,
    bin_count_multiple: int,
    seed: int | None,
) -> list[list[int]]:
    items, counts = pack_flat(
        algorithm,
        lengths,
        capacity,
        min_bin_count=min_bin_count,
        bin_count_multiple=bin_count_multiple,
        seed=seed,
    )
    flat, start, bins = items.tolist(), 0, []
    for count in counts.tolist():
        bins.append(flat[start : start + count])
        start += count
    return bins


#: The packers by name.
PACKERS: Final[Mapping[str, Callable[..., list[list[int]]]]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}


# --- how well they pack ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingMetrics:
    """How full the bins of a packing are.

    Attributes:
        bins: Number of bins.
        lower_bound: ``ceil(tokens / capacity)``: no packing has fewer bins.
        tokens: Sum of the lengths.
        capacity: Most tokens of a bin.
        utilisation: Share of the bins' capacity that holds tokens, from 0 to 1; 1 without bins.
        waste: Tokens of capacity that hold nothing.
    """

    bins: int
    lower_bound: int
    tokens: int
    capacity: int
    utilisation: float
    waste: int

    @property
    def excess(self) -> float:
        """Bins over the lower bound, as a share of it: 0.05 is 5 % more bins than the bound."""
        return self.bins / self.lower_bound - 1 if self.lower_bound else 0.0


def packing_metrics(bins: Sequence[Sequence[int]], lengths: Sequence[int] | _Ints, capacity: int) -> PackingMetrics:
    """Measures a packing.

    Args:
        bins: Positions into ``lengths``, as a packer returns them.
        lengths: Tokens per sequence.
        capacity: Most tokens of a bin.

    Raises:
        InvalidRequestError: A bin over the capacity, or positions that are not those of ``lengths``, each once.
    """
    if sorted(position for each in bins for position in each) != list(range(len(lengths))):
        raise InvalidRequestError(
            f"packing_metrics refused: the bins hold {sum(map(len, bins))} positions. Expected each of the "
            f"{len(lengths)} sequences once."
        )
    loads = [sum(int(lengths[position]) for position in each) for each in bins]
    if capacity < 1 or max(loads, default=0) > capacity:
        raise InvalidRequestError(
            f"packing_metrics refused: the fullest bin has {max(loads, default=0)} tokens. Expected at most the "
            f"capacity of {capacity}."
        )
    tokens, room = sum(loads), len(bins) * capacity
    return PackingMetrics(
        bins=len(bins),
        lower_bound=-(-tokens // capacity),
        tokens=tokens,
        capacity=capacity,
        utilisation=tokens / room if room else 1.0,
        waste=room - tokens,
    )


# --- placing ---------------------------------------------------------------------------------------------------------


def _place_in_order(sizes: _Ints, capacity: int, seed: int | None) -> _Placed:
    ends = np.cumsum(sizes).tolist()
    starts, start, filled = [], 0, 0
    while start < len(ends):
        starts.append(start)
        start = bisect_right(ends, filled + capacity, start)
        filled = ends[start - 1]
    counts = np.diff(np.asarray([*starts, len(ends)]))
    return np.arange(len(sizes)), np.repeat(np.arange(len(starts)), counts)


def _place_shuffled(sizes: _Ints, capacity: int, seed: int | None) -> _Placed:
    order = np.random.default_rng(seed).permutation(len(sizes))
    return order, np.asarray(_first_fit(sizes[order].tolist(), capacity), dtype=np.int64)


def _place_decreasing(sizes: _Ints, capacity: int, seed: int | None) -> _Placed:
    order = stable_argsort(-sizes)
    bins = _first_fit_of_runs(*_runs(sizes[order]), capacity)
    return order, np.asarray(bins, dtype=np.int64)


def _place_by_class(sizes: _Ints, capacity: int, seed: int | None) -> _Placed:
    order = stable_argsort(-sizes)
    falling_array = sizes[order]
    falling = falling_array.tolist()
    # How many are over 1/2, 1/3 and 1/6 of the capacity
    large, medium, small = (
        int(np.searchsorted(-falling_array, -(capacity // part), side="left")) for part in (2, 3, 6)
    )
    placed, bins = list(range(large)), list(range(large))  # phase 1
    room = (capacity - falling_array[:large]).tolist()  # rises from bin to bin
    taken = np.zeros(len(falling), dtype=bool)
    taken[:large] = True
    _pair_with_medium(falling, large, medium, room, placed, bins)
    taken[placed] = True
    _pair_with_two_small(falling, medium, small, room, set(bins[large:]), placed, bins)
    taken[placed] = True
    left = _fill_up(falling, np.flatnonzero(~taken), room, placed, bins)
    # Phase 5
    ordinals = np.asarray(left, dtype=np.int64)
    rest = _first_fit_of_runs(*_runs(falling_array[ordinals]), capacity)
    in_order = np.concatenate([np.asarray(placed, dtype=np.int64), ordinals])
    in_bins = np.concatenate([np.asarray(bins, dtype=np.int64), np.asarray(rest, dtype=np.int64) + large])
    return order[in_order], in_bins


def _pair_with_medium(
    falling: list[int], first: int, end: int, room: list[int], placed: list[int], bins: list[int]
) -> None:
    """Phase 2. Room rises from bin to bin, so what fits is a stack: the largest is the last to have become fit."""
    fitting: list[int] = []
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


def _pair_with_two_small(
    falling: list[int],
    first: int,
    end: int,
    room: list[int],
    with_medium: set[int],
    placed: list[int],
    bins: list[int],
) -> None:
    """Phase 3. Room falls from bin to bin and the smallest rises, so the largest that fits beside it only falls."""
    largest, smallest = first, end - 1
    for number in range(len(room) - 1, -1, -1):
        if number in with_medium:
            continue
        free = room[number] - falling[smallest] if largest < smallest else -1
        while largest < smallest and falling[largest] > free:
            largest += 1
        if largest >= smallest:
            return
        room[number] = free - falling[largest]
        placed += (smallest, largest)
        bins += (number, number)
        largest += 1
        smallest -= 1


def _fill_up(falling: list[int], ordinals: _Ints, room: list[int], placed: list[int], bins: list[int]) -> list[int]:
    """Phase 4. Equal sizes are one entry; an entry that is used up points to the next smaller one.

    Returns:
        The ordinals that are left, in order.
    """
    remaining: list[int] = ordinals.tolist()
    if not remaining or not room:
        return remaining
    sizes, counts = _runs(np.asarray(falling, dtype=np.int64)[ordinals])
    sizes.reverse()
    counts.reverse()  # rising
    ends = (np.cumsum([0, *counts[:-1]])).tolist()  # how many are smaller
    ends = [len(remaining) - each for each in ends]  # position after the entry's last ordinal
    smaller = list(range(-1, len(sizes) - 1))
    lowest = 0
    used: set[int] = set()
    for number, free in enumerate(room):
        while lowest < len(sizes) and not counts[lowest]:
            lowest += 1
        if lowest == len(sizes):
            break
        while free >= sizes[lowest]:
            entry = bisect_right(sizes, free) - 1
            path = []
            while entry >= 0 and not counts[entry]:
                path.append(entry)
                entry = smaller[entry]
            for each in path:
                smaller[each] = entry
            if entry < 0:
                break
            size = sizes[entry]
            count = min(counts[entry], free // size) if size else counts[entry]
            last = ends[entry]
            chosen = remaining[last - counts[entry] : last - counts[entry] + count]
            placed += chosen
            used.update(chosen)
            bins += [number] * count
            counts[entry] -= count
            free -= size * count
    return [ordinal for ordinal in remaining if ordinal not in used]


_PLACERS: Final[Mapping[str, Callable[[_Ints, int, int | None], _Placed]]] = {
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


def _first_fit_of_runs(sizes: list[int], counts: list[int], capacity: int) -> list[int]:
    """The bin of each, for falling sizes, each with how many there are of it.

    Since sizes fall, a bin that has room for this one has room for all later ones until it is used: a heap holds the
    bins that have room, by number; the others wait for the first size that they have room for.
    """
    rising = sizes[::-1]
    waiting: dict[int, list[int]] = {}
    room: list[int] = []
    fitting: list[int] = []
    bins: list[int] = []
    for rank, (size, left) in enumerate(zip(sizes, counts, strict=True)):
        if rank in waiting:
            for number in waiting.pop(rank):
                heappush(fitting, number)
        while left:
            if fitting:
                number = fitting[0]
                free = room[number]
            else:
                number = len(room)
                free = capacity
                room.append(free)
                fitting.append(number)
            count = min(left, free // size) if size else left
            left -= count
            free -= count * size
            room[number] = free
            bins += [number] * count
            if free < size:
                heappop(fitting)
                later = len(sizes) - bisect_right(rising, free)
                if later < len(sizes):
                    waiting.setdefault(later, []).append(number)
    return bins


def _runs(falling: _Ints) -> tuple[list[int], list[int]]:
    """The different sizes of a sorted array and how many there are of each."""
    if not len(falling):
        return [], []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(falling)) + 1])
    counts = np.diff(np.concatenate([starts, [len(falling)]]))
    return falling[starts].tolist(), counts.tolist()


def stable_argsort(values: _Ints) -> _Ints:
    """As numpy's stable argsort, by radix sort where the values lie close enough for it."""
    if not len(values):
        return np.empty(0, np.int64)
    low = int(values.min())
    if int(values.max()) - low < 1 << 16:
        return np.argsort((values - low).astype(np.uint16), kind="stable")
    return np.argsort(values, kind="stable")


# --- checks and the number of bins -----------------------------------------------------------------------------------


def _check(sizes: _Ints, capacity: int, min_bin_count: int, bin_count_multiple: int) -> None:
    if capacity < 1 or min_bin_count < 0 or bin_count_multiple < 1:
        raise InvalidRequestError(
            f"packing refused: capacity is {capacity}, min_bin_count {min_bin_count}, bin_count_multiple "
            f"{bin_count_multiple}. Expected at least 1, 0 and 1."
        )
    if len(sizes) and int(sizes.min()) < 0:
        raise InvalidRequestError(
            f"packing refused: sequence {int(sizes.argmin())} has {int(sizes.min())} tokens. Expected 0 or more."
        )
    if len(sizes) and int(sizes.max()) > capacity:
        raise InvalidRequestError(
            f"packing refused: sequence {int(sizes.argmax())} has {int(sizes.max())} tokens. Expected at most the "
            f"capacity of a bin, {capacity}."
        )


def _raise_bin_count(items: _Ints, counts: _Ints, minimum: int, multiple: int) -> tuple[_Ints, _Ints]:
    target = -(-max(len(counts), minimum) // multiple) * multiple
    extra = target - len(counts)
    if not extra:
        return items, counts
    if len(items) < target:
        raise InvalidRequestError(
            f"packing refused: {len(items)} sequences are too few for {target} bins (at least {minimum}, a multiple of "
            f"{multiple}). Expected one sequence or more per bin."
        )
    ends = np.cumsum(counts)
    by_count = [(-count, number) for number, count in enumerate(counts.tolist())]
    heapify(by_count)
    moved = []
    for _ in range(extra):
        count, number = by_count[0]
        heapreplace(by_count, (count + 1, number))
        kept = -count - 1
        moved.append(int(ends[number] - counts[number]) + kept)
    remaining = np.empty(len(counts), np.int64)
    for count, number in by_count:
        remaining[number] = -count
    return (
        np.concatenate([np.delete(items, moved), items[moved]]),
        np.concatenate([remaining, np.ones(extra, np.int64)]),
    )
