"""Finds where the tokens of a padded batch are, and refuses a cut that would lose some.

Shape legend: ``N`` rows, ``S`` padded sequence length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from dataplane_core.codec import byte_array, byte_view, host_tensor
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import ATTENTION_MASK_FIELD, INPUT_IDS_FIELD

__all__ = ["check_right_padded", "is_constant_outside", "is_zero_outside", "token_starts"]

#: The dtypes whose first bit is a sign, so that it does not tell zero from other values.
_SIGNED_ZERO: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
)
_PARTS: Final = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def token_starts(columns: Mapping[str, Any], lengths: Sequence[int]) -> NDArray[np.int64] | None:
    """Where each row's tokens begin, (N,), as the column ``attention_mask`` (N, S) says. None without such a mask.

    Raises:
        InvalidRequestError: The mask of a row does not mark one stretch of as many tokens as the row has.
    """
    mask = columns.get(ATTENTION_MASK_FIELD)
    if not isinstance(mask, torch.Tensor) or mask.is_nested or mask.dim() != 2 or len(mask) != len(lengths):
        return None
    marked = (mask.detach().cpu() != 0).numpy()
    starts: NDArray[np.int64] = marked.argmax(1) if marked.shape[1] else np.zeros(len(marked), np.int64)
    wrong = np.flatnonzero((_inside(marked.shape[1], starts, lengths) != marked).any(1))
    if len(wrong):
        row = int(wrong[0])
        raise InvalidRequestError(
            f"row {row} has {lengths[row]} tokens, and its '{ATTENTION_MASK_FIELD}' marks {int(marked[row].sum())}, "
            "or not one stretch. Expected one stretch of as many tokens as the row's length.",
            hint="Write masks of another meaning, such as a loss mask, under another name.",
        )
    return starts


def check_right_padded(name: str, column: torch.Tensor, lengths: Sequence[int]) -> None:
    """Refuses a column (N, S) without a mask, unless what lies beyond its rows is padding.

    The cut part of each row must have one value. Token ids are looked at more closely, since one token is one value
    too: all rows must end in the same one, no row may begin with it, and not all may begin with zeros instead.

    Raises:
        InvalidRequestError: It may hold tokens; names the field and the row.
    """
    plain = host_tensor(column, f"field '{name}'")
    width = plain.shape[1]
    counts = np.asarray(lengths, np.int64)
    short = np.flatnonzero((counts < width) & (counts >= 0))
    if not len(short) or not plain.numel():
        return
    if name == INPUT_IDS_FIELD and plain.dim() == 2:
        row = _row_without_one_pad_id(plain, counts, short)
    else:
        row = _row_that_varies(plain, np.zeros(len(counts), np.int64), lengths)
    if row is not None:
        raise InvalidRequestError(
            f"field '{name}', row {row}: what lies beyond its {counts[row]} tokens may be tokens, not padding. The "
            f"batch has no '{ATTENTION_MASK_FIELD}', so rows must be padded on the right, with one value.",
            hint=f"Add the column '{ATTENTION_MASK_FIELD}' (N, S): 1 at each token, 0 at padding on either side."
            + (
                ""
                if name == INPUT_IDS_FIELD
                else f" Or, if '{name}' is padded on the right, name it in token_aligned_fields."
            ),
        )


def _row_without_one_pad_id(ids: torch.Tensor, counts: NDArray[np.int64], short: NDArray[np.int64]) -> int | None:
    """The first row of token ids (N, S) whose end need not be padding."""
    width, size = ids.shape[1], ids.element_size()
    first = int(short[0])
    pad = bytes(byte_view(ids[first, -1:].clone()))
    padding, memory = pad * width, byte_view(ids)
    for row in short.tolist():  # bytes are compared faster than elements
        end = memory[(row * width + int(counts[row])) * size : (row + 1) * width * size].tobytes()
        if not padding.startswith(end):
            return int(row)
    begins = ids[torch.from_numpy(short), 0]
    for row in short[(begins == ids[first, -1]).cpu().numpy()].tolist():
        if (ids[row, : counts[row]] != ids[row, width - counts[row] :]).any():  # else both sides give the same
            return int(row)
    if (begins == 0).all() and ids[first, -1] != 0:
        gaps = np.minimum(width - counts[short], counts[short]).tolist()
        if all(not ids[row, :gap].any() for row, gap in zip(short.tolist(), gaps, strict=True)):
            return first
    return None


def is_zero_outside(column: torch.Tensor, starts: NDArray[np.int64] | None, lengths: Sequence[int]) -> bool:
    """Whether all elements (N, S) outside the rows are zero, or -0.0, which products with a mask give."""
    plain = host_tensor(column, "the column")
    return not _cells(plain)[~_inside(plain.shape[1], starts, lengths)].any()


def is_constant_outside(column: torch.Tensor, starts: NDArray[np.int64], lengths: Sequence[int]) -> bool:
    """Whether the elements (N, S) outside of each row are equal."""
    return _row_that_varies(host_tensor(column, "the column"), starts, lengths) is None


def _row_that_varies(plain: torch.Tensor, starts: NDArray[np.int64], lengths: Sequence[int]) -> int | None:
    if not plain.numel():
        return None
    cells, outside = _cells(plain), ~_inside(plain.shape[1], starts, lengths)
    one = cells[np.arange(len(cells)), outside.argmax(1)]
    varies = np.flatnonzero(((cells != one[:, None]).any(2) & outside).any(1))
    return int(varies[0]) if len(varies) else None


def _inside(width: int, starts: NDArray[np.int64] | None, lengths: Sequence[int]) -> NDArray[np.bool_]:
    places = np.arange(width) - (0 if starts is None else starts[:, None])
    inside: NDArray[np.bool_] = (places >= 0) & (places < np.asarray(lengths, np.int64)[:, None])
    return inside


def _cells(plain: torch.Tensor) -> NDArray[Any]:
    """The bits of each element, (N, S, ...); those of -0.0 are those of 0.0."""
    if plain.is_complex():
        plain = plain.unsqueeze(-1).view(_PARTS[plain.dtype])
    size = plain.element_size()
    cells = byte_array(plain).view(f"u{size}").reshape(*plain.shape[:2], -1 if plain.numel() else 1)
    if plain.dtype in _SIGNED_ZERO:
        cells = np.where(cells == 1 << (8 * size - 1), 0, cells)
    return cells
