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


@dataclass(slots=True)
class RankBatches:
    """The batches that one rank was given.

    Attributes:
        kept: Index -> batch.
        gone: The indexes of batches that were forgotten, since their rows are all cleared: the first index of a range
            of them, the index after its last, the same of the next range, and so on.
        ended: The indexes of batches of which one claim found for all ranks that there are none. As ``gone``.
    """

    kept: dict[int, Batch] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def is_gone(self, index: int) -> bool:
        """Whether the batch was given and is forgotten."""
        return _is_in(self.gone, index)

    def is_end(self, index: int) -> bool:
        """Whether it was found that there is no such batch, for any rank."""
        return _is_in(self.ended, index)

    def give(self, index: int, batch: Batch, rows: Mapping[str, Row]) -> None:
        """Keeps a new batch, and looks at a few of the others in turn: forgets those whose rows are all cleared."""
        for each in list(islice(self.kept, _LOOKED_AT)):
            known = self.kept.pop(each)
            if known.sample_ids and not any(known.present(rows)):
                self.forget(each)
            else:
                self.kept[each] = known
        self.kept[index] = batch

    def forget(self, index: int) -> None:
        """Notes only that a batch was given."""
        _include(self.gone, index)

    def end(self, index: int) -> None:
        """Notes that there is no such batch, for any rank."""
        _include(self.ended, index)


def _is_in(ranges: list[int], index: int) -> bool:
    return bisect_right(ranges, index) % 2 == 1


def _include(ranges: list[int], index: int) -> None:
    if _is_in(ranges, index):
        return
    for bound in (index, index + 1):  # a bound that is there already joins two ranges
        at = bisect_left(ranges, bound)
        if ranges[at : at + 1] == [bound]:
            del ranges[at]
        else:
            ranges.insert(at, bound)
