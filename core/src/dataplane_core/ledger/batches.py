"""The batches that the data-parallel ranks of a task were given."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from dataplane_core.ledger.rows import Row

#: How many of the batches that a rank was given before are looked at when it is given another one.
_LOOKED_AT: Final = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that were given to a rank, and are given to every claim that asks for the same batch.

    Attributes:
        sample_ids: The samples. Empty if none was left for this rank.
        token: The lease token, or None without a lease.
        exhausted: Whether the partition could give the task no more.
        last_seq: The greatest number of its rows. A row with a greater one was written anew after a clear.
        num_ranks: How many ranks have samples in it, if one claim chose for all ranks.
    """

    sample_ids: Sequence[str]
    token: str | None
    exhausted: bool
    last_seq: int
    num_ranks: int | None = None

    def present(self, rows: Mapping[str, Row]) -> Iterator[Row]:
        """Its rows that were not cleared, among those of the partition."""
        found = (rows.get(sample_id) for sample_id in self.sample_ids)
        return (row for row in found if row is not None and row.seq <= self.last_seq)


class Ranges(list[int]):
    """Numbers: the first of a range of them, the one after its last, the first of the next range, and so on."""

    def has(self, number: int) -> bool:
        """Whether the number is one of them."""
        return bisect_right(self, number) % 2 == 1

    def include(self, number: int) -> None:
        """Adds a number, unless it is there."""
        if self.has(number):
            return
        for bound in (number, number + 1):  # a bound that is there already joins two ranges
            at = bisect_left(self, bound)
            if self[at : at + 1] == [bound]:
                del self[at]
            else:
                self.insert(at, bound)


@dataclass(slots=True)
class RankBatches:
    """The batches that one rank was given.

    Attributes:
        kept: Index -> batch.
        gone: The indexes of batches that were forgotten, since their rows are all cleared.
        ended: The indexes of batches of which one claim found for all ranks that there are none.
    """

    kept: dict[int, Batch] = field(default_factory=dict)
    gone: Ranges = field(default_factory=Ranges)
    ended: Ranges = field(default_factory=Ranges)

    def give(self, index: int, batch: Batch, rows: Mapping[str, Row]) -> None:
        """Keeps a new batch, and looks at a few of the others in turn: forgets those whose rows are all cleared."""
        for each in list(islice(self.kept, _LOOKED_AT)):
            known = self.kept.pop(each)
            if known.sample_ids and not any(known.present(rows)):
                self.gone.include(each)
            else:
                self.kept[each] = known
        self.kept[index] = batch
