"""Packers: pack sequences into few bins of limited capacity. Plain integers in and out.

References:
    D. S. Johnson, M. R. Garey: A 71/60 theorem for bin packing. Journal of Complexity 1 (1985), 65-106.
    G. Dósa: The tight bound of first fit decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9. ESCAPE 2007.
    M. Yue, L. Zhang: A simple proof of the inequality MFFD(L) <= 71/60 OPT(L) + 1. Acta Math. Appl. Sinica 11 (1995).
    G. Dósa, J. Sgall: First Fit bin packing: a tight analysis. STACS 2013.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappush, heapreplace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataplane_core.errors import InvalidRequestError

Lengths: TypeAlias = Sequence[int] | NDArray[np.int64]
Bins: TypeAlias = list[list[int]]


def concatenative(lengths: Lengths, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1) -> Bins:
    """Fills one bin after the other, in the order given. It needs at most twice the fewest possible bins.

    Args:
        lengths: Tokens per sequence.
        capacity: Most tokens of a bin.
        min_bin_count: Fewest bins.
        bin_count_multiple: The number of bins is a multiple of this. Each bin that the last two options add gets one
            sequence from the end of the bin that has most sequences.

    Returns:
        Bins of positions into ``lengths``; each position is in one bin.

    Raises:
        InvalidRequestError: A length is over the capacity, or there are too few sequences for the number of bins.
    """
    sizes = _sizes(lengths, capacity, min_bin_count, bin_count_multiple)
    bins: Bins = []
    room = -1
    for position, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = capacity
        bins[-1].append(position)
        room -= size
    return _enough(bins, min_bin_count, bin_count_multiple)


def first_fit_decreasing(
    lengths: Lengths, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1
) -> Bins:
    """Places the longest first, each into the first bin where it fits. Equal lengths keep their order.

    It needs at most 11/9 of the fewest possible bins, and 6/9. Arguments, result and errors are those of
    `concatenative`.
    """
    sizes = _sizes(lengths, capacity, min_bin_count, bin_count_multiple)
    return _enough(_first_fit(_longest_first(sizes), sizes, capacity), min_bin_count, bin_count_multiple)


def first_fit_shuffle(
    lengths: Lengths, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1, seed: int | None = 0
) -> Bins:
    """Places the sequences in random order, each into the first bin where it fits. It needs at
    most 1.7 times the fewest possible bins.

    Arguments, result and errors are those of `concatenative`. ``seed``, from 0 to 2**32 - 1, gives the same order on
    every machine. None draws a new seed.
    """
    if seed is not None and not 0 <= seed < 1 << 32:
        raise InvalidRequestError(f"packing refused: seed is {seed}. Expected 0 to {(1 << 32) - 1}, or None.")
    sizes = _sizes(lengths, capacity, min_bin_count, bin_count_multiple)
    # RandomState, unlike newer generators, gives the same order under every version of numpy
    order = np.random.RandomState(seed).permutation(len(sizes)).tolist()
    return _enough(_first_fit(order, sizes, capacity), min_bin_count, bin_count_multiple)


def modified_first_fit_decreasing(
    lengths: Lengths, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1
) -> Bins:
    """The five phases of Johnson and Garey (1985). They need at most 71/60 of the fewest possible bins, and 1.

    Sequences are large (over 1/2 of the capacity), medium (over 1/3), small (over 1/6) or tiny.

    1. Each large sequence gets its own bin, the longest first.
    2. Forward through these bins: add the largest medium sequence that fits.
    3. Backward through the bins without a medium one: add the smallest small one and the largest small one that fits
       beside it.
    4. Forward through all bins: add the largest sequence of any class that fits, until none fits.
    5. First fit decreasing of the rest, in new bins. Where that takes fewer bins: each into the bin with the most room.

    Arguments, result and errors are those of `concatenative`.
    """
    sizes = _sizes(lengths, capacity, min_bin_count, bin_count_multiple)
    left = _longest_first(sizes)  # those that are not placed
    negated = [-sizes[position] for position in left]
    large, medium, small = (bisect_left(negated, -(capacity // part)) for part in (2, 3, 6))  # where each class ends
    bins = [[position] for position in left[:large]]
    room = [capacity + size for size in negated[:large]]
    del left[:large], negated[:large]
    medium, small = medium - large, small - large

    def place(number: int, start: int, stop: int) -> bool:
        """Places the largest of ``left[start:stop]`` that fits in a bin, if one does."""
        at = bisect_left(negated, -room[number], start, stop)
        if at == stop:
            return False
        bins[number].append(left.pop(at))
        room[number] += negated.pop(at)
        return True

    for number in range(large):  # phase 2
        if place(number, 0, medium):
            medium, small = medium - 1, small - 1
    for number in reversed(range(large)):  # phase 3
        two_fit = small - medium > 1 and room[number] + negated[small - 1] + negated[small - 2] >= 0
        if two_fit and len(bins[number]) == 1:
            place(number, small - 1, small)
            place(number, medium, small - 1)
            small -= 2
    for number in range(large):  # phase 4
        while place(number, 0, len(left)):
            pass
    more = _first_fit(left, sizes, capacity)  # phase 5
    if len(more) > -(-sum(sizes[position] for position in left) // capacity):  # else nothing takes fewer bins
        more = min(more, _most_room(left, sizes, capacity), key=len)
    return _enough(bins + more, min_bin_count, bin_count_multiple)


#: The packers by name.
PACKERS: Final[Mapping[str, Callable[..., Bins]]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def _first_fit(order: Iterable[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Each into the first bin where it fits. Uses a tree over the bins whose nodes hold the most room below."""
    # All bins but one are more than half full
    most = min(len(sizes), 2 * -(-sum(sizes) // capacity) + 1)
    leaves = 1 << (most - 1).bit_length()
    tree = [capacity] * (2 * leaves)
    bins: Bins = []
    for position in order:
        size, node = sizes[position], 1
        while node < leaves:
            node *= 2
            if tree[node] < size:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(position)
        tree[node] = room = tree[node] - size
        while node > 1:
            room = max(room, tree[node ^ 1])
            node //= 2
            if tree[node] == room:  # as is all above it
                break
            tree[node] = room
    return bins


def _most_room(order: Iterable[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Each into the bin with the most room, if it fits there."""
    bins: Bins = []
    filled: list[tuple[int, int]] = []  # tokens and number of each bin
    for position in order:
        size = sizes[position]
        if filled and filled[0][0] + size <= capacity:
            tokens, number = filled[0]
            heapreplace(filled, (tokens + size, number))
            bins[number].append(position)
        else:
            heappush(filled, (size, len(bins)))
            bins.append([position])
    return bins


def _enough(bins: Bins, minimum: int, multiple: int) -> Bins:
    """Adds bins, each with a sequence from the end of the bin that has most."""
    target = -(-max(len(bins), minimum) // multiple) * multiple
    num_sequences = sum(map(len, bins))
    if num_sequences < target:
        raise InvalidRequestError(
            f"packing refused: {num_sequences} sequences are too few for {target} bins (at least {minimum}, a multiple "
            f"of {multiple}). Expected one sequence or more per bin."
        )
    fullest = [(-len(members), number) for number, members in enumerate(bins)]
    heapify(fullest)
    while len(bins) < target:
        count, number = fullest[0]
        heapreplace(fullest, (count + 1, number))
        bins.append([bins[number].pop()])
    return bins


def _sizes(lengths: Lengths, capacity: int, min_bin_count: int, bin_count_multiple: int) -> list[int]:
    """The lengths, checked with the options of a packer."""
    if capacity < 1 or min_bin_count < 0 or bin_count_multiple < 1:
        raise InvalidRequestError(
            f"packing refused: capacity is {capacity}, min_bin_count {min_bin_count}, bin_count_multiple "
            f"{bin_count_multiple}. Expected at least 1, 0 and 1."
        )
    sizes = as_sizes("packing", "sequence", lengths)
    if len(sizes) and int(sizes.max()) > capacity:
        raise InvalidRequestError(
            f"packing refused: sequence {int(sizes.argmax())} has {int(sizes.max())} tokens. Expected at most the "
            f"capacity of a bin, {capacity}."
        )
    listed: list[int] = sizes.tolist()
    return listed


def as_sizes(what: str, item: str, lengths: Lengths) -> NDArray[np.int64]:
    """Tokens per item, such as a row. ``what`` refuses lengths that are not integers of 0 or more."""
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (len(sizes) and sizes.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"{what} refused: lengths are {sizes.dtype} of shape {sizes.shape}. Expected one integer per {item}."
        )
    if len(sizes) and int(sizes.min()) < 0:
        raise InvalidRequestError(
            f"{what} refused: {item} {int(sizes.argmin())} has {int(sizes.min())} tokens. Expected 0 or more."
        )
    return sizes.astype(np.int64, copy=False)


# --- packers with options, and how well they pack --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequencePacker:
    """A packer with its options, as `get_packer` makes it."""

    algorithm: str
    bin_capacity: int  # most tokens of a bin
    min_bin_count: int  # fewest bins
    bin_count_multiple: int  # their number is a multiple of this
    metrics: list[PackingMetrics] | None  # one entry per `pack`, if they are collected

    def pack(self, sequence_lengths: Lengths) -> Bins:
        """Bins of positions into ``sequence_lengths``. Errors are those of `concatenative`."""
        bins = PACKERS[self.algorithm](
            sequence_lengths,
            self.bin_capacity,
            min_bin_count=self.min_bin_count,
            bin_count_multiple=self.bin_count_multiple,
        )
        if self.metrics is not None:
            self.metrics.append(packing_metrics(bins, sequence_lengths, self.bin_capacity))
        return bins


def get_packer(
    algorithm: str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """The packer of that name of `PACKERS`, in any case. None: no fewest bins, any number of bins.

    Raises:
        InvalidRequestError: There is no such packer.
    """
    if algorithm.lower() not in PACKERS:
        raise InvalidRequestError(
            f"get_packer refused: there is no algorithm '{algorithm}'. Expected one of {', '.join(PACKERS)}."
        )
    return SequencePacker(
        algorithm.lower(), bin_capacity, min_bin_count or 0, bin_count_multiple or 1, [] if collect_metrics else None
    )


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


def packing_metrics(bins: Sequence[Sequence[int]], lengths: Lengths, capacity: int) -> PackingMetrics:
    """Measures a packing, whose bins are positions into ``lengths``, as a packer returns them.

    Raises:
        InvalidRequestError: A bin is over the capacity, or the bins do not hold each position of ``lengths`` once.
    """
    if sorted(position for members in bins for position in members) != list(range(len(lengths))):
        raise InvalidRequestError(
            f"packing_metrics refused: the bins hold {sum(map(len, bins))} positions. Expected each of the "
            f"{len(lengths)} sequences once."
        )
    loads = [sum(int(lengths[position]) for position in members) for members in bins]
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
