"""Two cells that should be equal, in words."""

from __future__ import annotations

from typing import Any

import torch


def cell(column: Any, row: int) -> Any:
    """A row of a column as `tensor_rows` or `decode_columns` gives it."""
    return (column if isinstance(column, (list, torch.Tensor)) else column.tolist())[row]


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
