"""A column as a backend sees it.

Shape legend: ``N`` rows, ``T`` elements of all rows together on the ragged dim, ``L`` a row's own length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows that may differ in their first dim, joined end to end. ``len(ragged)`` is N.

    Attributes:
        values: (T, *trailing), contiguous, on the host.
        offsets: (N + 1,) int64 on the host, from 0 to T.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the ragged dim, its trailing dims included."""
        return self.values.dtype.itemsize * math.prod(self.values.shape[1:])

    @property
    def lengths(self) -> Any:
        """(N,) int64, as an array."""
        cuts = self.offsets.numpy()
        return cuts[1:] - cuts[:-1]

    def dense(self) -> torch.Tensor | None:
        """A view (N, L, *trailing) if all rows have length L; else None."""
        lengths = self.lengths
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            return None
        return self.values.view(len(lengths), length, *self.values.shape[1:])


#: A dense tensor (N, ...); rows that differ in their first dim; or a list of N items, which may be frames.
WireColumn: TypeAlias = "torch.Tensor | Ragged | list[Any]"


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A column whose rows repeat. Only backends with `WireFormat.shared_rows` take and return it.

    Attributes:
        rows: The column without the repeats.
        index: For each row of the column, its row in ``rows``.
    """

    rows: WireColumn
    index: Sequence[int]

    def __len__(self) -> int:
        return len(self.index)
