"""Two cells that should be equal, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataplane_core.codec import take_rows


def take(column: Any, rows: Sequence[int]) -> Any:
    """Rows of a column as `tensor_rows` gives it."""
    return type(column)([column[row] for row in rows]) if isinstance(column, list) else take_rows(column, rows)


def cell(column: Any, row: int) -> Any:
    """A row of such a column."""
    one = take(column, [row])
    if isinstance(one, torch.Tensor):
        return one.unbind()[0]
    return (one if isinstance(one, list) else one.tolist())[0]


def in_words(now: Any, was: Any) -> str:
    """What two cells are. ``was`` is None if it is not known."""
    if was is None:
        return "Their digests differ."
    if not (isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor)):
        return f"It is {now!r:.100}, and was {was!r:.100}."
    if (now.dtype, now.shape) != (was.dtype, was.shape):
        return f"It is {now.dtype} of shape {tuple(now.shape)}, and was {was.dtype} of shape {tuple(was.shape)}."
    bits_now, bits_was = (each.reshape(-1, 1).view(torch.uint8) for each in (now, was))
    place = int((bits_now != bits_was).any(1).nonzero()[0, 0])
    is_now, it_was = (each.reshape(-1)[place].item() for each in (now, was))
    return f"{f'Its element {place}' if now.dim() else 'It'} is {is_now!r}, and was {it_was!r}."
