"""A column as a backend sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

#: One column as a backend sees it: a dense or jagged tensor, or a list of row tensors, of frames or of items.
WireColumn: TypeAlias = "torch.Tensor | list[Any]"


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A column whose rows repeat. Only backends with `WireFormat.shared_rows` take and return it.

    Attributes:
        rows: The column without the repeats.
        index: For each row of the column, its row in ``rows``.
    """

    rows: WireColumn
    index: Sequence[int]
