"""Packers: pack sequences into few bins of limited capacity. Plain integers in and out.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import islice
from typing import Any, Final

import numpy as np

from dataplane_core.errors import InvalidRequestError
from dataplane_core.sharding._placing import PLACERS, Ints, stable_argsort

# --- the packers -----------------------------------------------------------------------------------------------------


def concatenative(
    lengths: Sequence[int] | Ints, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1
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
        InvalidRequestError: A length is over the capacity, or there are too few sequences for the number of bins.
    """
    return _bins("concatenative", lengths, capacity, min_bin_count=min_bin_count, bin_count_multiple=bin_count_multiple)


def first_fit_decreasing(
    lengths: Sequence[int] | Ints, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1
) -> list[list[int]]:
    """Places the longest first, each into the first bin where it fits. Equal lengths keep their order.

    Arguments, result and errors are those of `concatenative`.
    """
    return _bins(
        "first_fit_decreasing", lengths, capacity, min_bin_count=min_bin_count, bin_count_multiple=bin_count_multiple
    )


def first_fit_shuffle(
    lengths: Sequence[int] | Ints,
    capacity: int,
    *,
    min_bin_count: int = 0,
    bin_count_multiple: int = 1,
    seed: int | None = 0,
) -> list[list[int]]:
    """Places the sequences in random order, each into the first bin where it fits.

    Arguments, result and errors are those of `concatenative`. ``seed``, from 0 to 2**32 - 1, gives the same order on
    every machine. None draws a new seed.
    """
    options = {"min_bin_count": min_bin_count, "bin_count_multiple": bin_count_multiple, "seed": seed}
    return _bins("first_fit_shuffle", lengths, capacity, **options)


def modified_first_fit_decreasing(
    lengths: Sequence[int] | Ints, capacity: int, *, min_bin_count: int = 0, bin_count_multiple: int = 1
) -> list[list[int]]:
    """The five phases of Johnson and Garey (1985).

    Sequences are large (over 1/2 of the capacity), medium (over 1/3), small (over 1/6) or tiny.

    1. Each large sequence gets its own bin, the longest first.
    2. Forward through these bins: add the largest medium sequence that fits.
    3. Backward through the bins without a medium one: add the smallest small one and the largest small one that fits
       beside it.
    4. Forward through all bins: add the largest sequence of any class that fits, until none fits.
    5. First fit decreasing of the rest, in new bins. Where that takes fewer bins: each into the bin with the most room.

    Arguments, result and errors are those of `concatenative`.
    """
    return _bins(
        "modified_first_fit_decreasing",
        lengths,
        capacity,
        min_bin_count=min_bin_count,
        bin_count_multiple=bin_count_multiple,
    )


def pack_flat(
    algorithm: str,
    lengths: Sequence[int] | Ints,
    capacity: int,
    *,
    min_bin_count: int = 0,
    bin_count_multiple: int = 1,
    seed: int | None = 0,
) -> tuple[Ints, Ints]:
    """Packs with the packer of that name, as `concatenative` and the others do, without building lists.

    Args:
        algorithm: One of `PACKERS`, in any case.
        lengths: Tokens per sequence.
        capacity: Most tokens of a bin.
        min_bin_count: Fewest bins.
        bin_count_multiple: The number of bins is a multiple of this.
        seed: For `first_fit_shuffle`.

    Returns:
        The positions of all bins, bin after bin, and the number of sequences of each bin.

    Raises:
        InvalidRequestError: The algorithm is unknown, a length is over the capacity, or there are too few sequences.
    """
    if seed is not None and not 0 <= seed < 1 << 32:
        raise InvalidRequestError(f"packing refused: seed is {seed}. Expected 0 to {(1 << 32) - 1}, or None.")
    place = PLACERS.get(algorithm.lower())
    if place is None:
        raise InvalidRequestError(
            f"packing refused: there is no algorithm '{algorithm}'. Expected one of {', '.join(PLACERS)}."
        )
    sizes = _check(lengths, capacity, min_bin_count, bin_count_multiple)
    placed, bins = place(sizes, capacity, seed)
    items = placed[stable_argsort(bins)]
    counts = np.bincount(bins)
    return _raise_bin_count(items, counts, min_bin_count, bin_count_multiple)


def _bins(algorithm: str, lengths: Sequence[int] | Ints, capacity: int, **options: Any) -> list[list[int]]:
    items, counts = pack_flat(algorithm, lengths, capacity, **options)
    flat = iter(items.tolist())
    return [list(islice(flat, count)) for count in counts.tolist()]


#: The packers by name.
PACKERS: Final[Mapping[str, Callable[..., list[list[int]]]]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}


@dataclass(frozen=True, slots=True)
class SequencePacker:
    """A packer with its options, as `get_packer` makes it.

    Attributes:
        algorithm: Its name in `PACKERS`.
        bin_capacity: Most tokens of a bin.
        min_bin_count: Fewest bins.
        bin_count_multiple: The number of bins is a multiple of this.
        metrics: One entry per `pack`, if they are collected; else None.
    """

    algorithm: str
    bin_capacity: int
    min_bin_count: int
    bin_count_multiple: int
    metrics: list[PackingMetrics] | None

    def pack(self, sequence_lengths: Sequence[int] | Ints) -> list[list[int]]:
        """Bins of positions into ``sequence_lengths``. Errors are those of `concatenative`."""
        options = {"min_bin_count": self.min_bin_count, "bin_count_multiple": self.bin_count_multiple}
        bins = _bins(self.algorithm, sequence_lengths, self.bin_capacity, **options)
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
    """The packer of that name.

    Args:
        algorithm: A name of `PACKERS`, in any case.
        bin_capacity: Most tokens of a bin.
        collect_metrics: Measure each call of ``pack``.
        min_bin_count: Fewest bins; None: no minimum.
        bin_count_multiple: The number of bins is a multiple of this; None: any number.

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


def packing_metrics(bins: Sequence[Sequence[int]], lengths: Sequence[int] | Ints, capacity: int) -> PackingMetrics:
    """Measures a packing.

    Args:
        bins: Positions into ``lengths``, as a packer returns them.
        lengths: Tokens per sequence.
        capacity: Most tokens of a bin.

    Raises:
        InvalidRequestError: A bin is over the capacity, or the bins do not hold each position of ``lengths`` once.
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


# --- checks and the number of bins -----------------------------------------------------------------------------------


def _check(lengths: Sequence[int] | Ints, capacity: int, min_bin_count: int, bin_count_multiple: int) -> Ints:
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
    return sizes


def as_sizes(what: str, each: str, lengths: Sequence[int] | Ints) -> Ints:
    """Tokens per row.

    Args:
        what: What refuses others.
        each: What has a length.
        lengths: The lengths.

    Raises:
        InvalidRequestError: They are not integers of 0 or more.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (len(sizes) and sizes.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"{what} refused: lengths are {sizes.dtype} of shape {sizes.shape}. Expected one integer per {each}."
        )
    if len(sizes) and int(sizes.min()) < 0:
        raise InvalidRequestError(
            f"{what} refused: {each} {int(sizes.argmin())} has {int(sizes.min())} tokens. Expected 0 or more."
        )
    return sizes.astype(np.int64, copy=False)


def _raise_bin_count(items: Ints, counts: Ints, minimum: int, multiple: int) -> tuple[Ints, Ints]:
    target = -(-max(len(counts), minimum) // multiple) * multiple
    extra = target - len(counts)
    if not extra:
        return items, counts
    if len(items) < target:
        raise InvalidRequestError(
            f"packing refused: {len(items)} sequences are too few for {target} bins (at least {minimum}, a multiple of "
            f"{multiple}). Expected one sequence or more per bin."
        )
    # Only the bin with most sequences gives one away, so at most the `extra` fullest bins give any
    fullest = stable_argsort(-counts)[:extra]
    by_count = list(zip((-counts[fullest]).tolist(), fullest.tolist(), strict=True))  # in order, hence a heap
    last = np.cumsum(counts) - 1
    moved = []
    for _ in range(extra):
        count, number = by_count[0]
        heapreplace(by_count, (count + 1, number))
        moved.append(int(last[number]))
        last[number] -= 1
    counts = counts.copy()
    for count, number in by_count:
        counts[number] = -count
    return (
        np.concatenate([np.delete(items, moved), items[moved]]),
        np.concatenate([counts, np.ones(extra, np.int64)]),
    )
