"""Finds the padding of a batch that is written: which columns are cut to the tokens of their rows, and where these are.

Lengths alone do not tell on which side a row is padded. An attention mask in the batch does, and the first write notes
in the meta where the tokens of each row began, for the columns that are written later. Without a mask, rows begin at 0.

Shape legend: ``N`` rows, ``S`` padded sequence length, ``K`` elements of a cell.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from dataplane_core.batch.tokens import is_per_sample, row_lengths, token_columns
from dataplane_core.codec import byte_array, host_tensor
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import ATTENTION_MASK_FIELD, INPUT_IDS_FIELD, PER_TOKEN_FIELDS

#: The dtypes whose first bit is a sign, so that it does not tell zero from other values.
_SIGNED_ZERO: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
)
_PARTS: Final = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
#: How many places of all rows are compared together; what is compared then stays in the processor's cache.
_BLOCK: Final = 256

_log = logging.getLogger(__name__)
#: Whether this process was told that tokens seem to be cut off.
_has_warned = False


def find_cut(
    where: str,
    columns: Mapping[str, Any],
    lengths: Sequence[int] | None,
    declared: Collection[str] | None,
    began: Sequence[int] | None = None,
) -> tuple[list[str], list[int] | None]:
    """The columns to cut to the tokens of their rows, and where these begin.

    Args:
        where: The call. Messages begin with it.
        columns: Columns of N rows. Only dense tensors are cut.
        lengths: The tokens of each row. None: not known, so nothing is cut that is not declared.
        declared: Names of the columns to cut. What is cut off them is not looked at. None: dense columns as wide as
            ``input_ids`` (`token_columns`) that are named in `schema.PER_TOKEN_FIELDS`, or hold only padding outside
            the rows' tokens.
        began: Where the tokens of each row begin if ``columns`` have no attention mask. None: at 0.

    Returns:
        Names, and the place of each row's first token. None: all begin at 0.

    Raises:
        InvalidRequestError: The attention mask and the lengths contradict each other; a column of
            `schema.PER_TOKEN_FIELDS` has too few elements; or another column holds no padding where the others have
            it. Names the row.
    """
    named = [name for name in columns if name in (declared or ()) and not is_per_sample(name, columns[name])]
    if not lengths:
        return named if lengths is None else [], None
    counts = np.asarray(lengths, dtype=np.int64)
    starts = _starts(where, columns.get(ATTENTION_MASK_FIELD), counts)
    if starts is None and began is not None:
        starts = np.asarray(began, dtype=np.int64)
    shifted = starts if starts is not None and starts.any() else None
    checked = PER_TOKEN_FIELDS if declared is None else PER_TOKEN_FIELDS & set(named)
    _check_widths(where, columns, counts, checked, shifted is not None)
    names = named if declared is not None else _padded_columns(where, columns, counts, shifted)
    if starts is None and INPUT_IDS_FIELD in names:
        _warn_of_tokens_cut_off(where, columns[INPUT_IDS_FIELD], counts)
    return names, None if shifted is None else shifted.tolist()


def _starts(where: str, mask: Any, counts: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The place of each row's first token by an attention mask (N, S). None: there is no such mask.

    A mask may leave out tokens of a right-padded row.
    """
    if not isinstance(mask, torch.Tensor) or mask.is_nested or mask.dim() != 2 or len(mask) != len(counts):
        return None
    host = host_tensor(mask, ATTENTION_MASK_FIELD)
    if not mask.numel() or (host.is_floating_point() and bool((host < 0).any())):
        return None  # one that is added to scores has 0 for what counts
    counted = (host != 0).numpy()
    has_any = counted.any(axis=1)
    firsts = np.where(has_any, counted.argmax(axis=1), 0)
    ends = np.where(has_any, counted.shape[1] - counted[:, ::-1].argmax(axis=1), 0)
    is_right_padded = ends <= counts
    wrong = np.flatnonzero(~is_right_padded & (ends - firsts != counts))
    if len(wrong):
        row = int(wrong[0])
        raise InvalidRequestError(
            f"{where} refused: the '{ATTENTION_MASK_FIELD}' of row {row} counts the places {firsts[row]} to "
            f"{ends[row] - 1}, but its length is {counts[row]}. Expected {ends[row] - firsts[row]}."
        )
    return np.where(is_right_padded, 0, firsts)


def _check_widths(
    where: str, columns: Mapping[str, Any], counts: NDArray[np.int64], names: Collection[str], shifted: bool
) -> None:
    """Checks that columns with an element per token have one for each token, so that each lies beside its own.

    Raises:
        InvalidRequestError: One has fewer; or more, where rows do not begin at 0. Names it.
    """
    ids = columns.get(INPUT_IDS_FIELD)
    tokens = row_lengths(ids) if isinstance(ids, torch.Tensor) and not ids.is_nested else None
    for name, column in columns.items():
        found = row_lengths(column) if name in names and not is_per_sample(name, column) else None
        if found is None:
            continue
        wanted = counts if tokens is None or column.is_nested else tokens.numpy()
        elements = found.numpy()
        wrong = np.flatnonzero((elements < wanted) | (shifted and wanted is not counts and elements > wanted))
        if len(wrong):
            has, needs = elements[wrong[0]], wanted[wrong[0]]
            of_row = f"row {wrong[0]} has {has} elements and {needs} tokens"
            told = of_row if column.is_nested else f"it is {has} wide, and its tokens {needs}"
            raise InvalidRequestError(
                f"{where} refused: field '{name}' has an element per token, but {told}. Expected one for each token.",
                hint="Values of the next token (S - 1 of them) get one more in front; those of the response alone get "
                "zeros for the prompt. For a column that is something else, use another name.",
            )


def _padded_columns(
    where: str, columns: Mapping[str, Any], counts: NDArray[np.int64], starts: NDArray[np.int64] | None
) -> list[str]:
    """The columns that are cut if none are declared."""
    dense = {
        name: column for name, column in columns.items() if isinstance(column, torch.Tensor) and not column.is_nested
    }
    like = dense.get(INPUT_IDS_FIELD, dense.get(ATTENTION_MASK_FIELD) if starts is not None else None)
    tokens = row_lengths(like)
    longest = counts.max(initial=0)
    found = []
    for name in token_columns(dense, counts.tolist() if tokens is None else tokens):
        column = dense[name]
        if name in PER_TOKEN_FIELDS or (column.shape[1] >= longest and _is_padded(where, name, column, counts, starts)):
            found.append(name)
    return found


def _is_padded(
    where: str, name: str, column: torch.Tensor, counts: NDArray[np.int64], starts: NDArray[np.int64] | None
) -> bool:
    """Whether a column that is as wide as the tokens holds only padding outside of them.

    Padding is zeros. If tokens begin at other places than 0, it may also be one value for each row; and a column with
    anything else is refused, since its cells would no longer be beside their tokens.
    """
    cells = _cells(column)
    places = np.arange(cells.shape[1])
    firsts = np.zeros_like(counts) if starts is None else starts
    outside = (places < firsts[:, None]) | (places >= (firsts + counts)[:, None])
    if not cells[outside].any():
        return True
    if starts is None:
        return False
    padding = np.where((firsts > 0)[:, None], cells[:, 0], cells[:, -1])
    wrong = np.flatnonzero(((cells != padding[:, None]).any(axis=2) & outside).any(axis=1))
    if len(wrong):
        raise InvalidRequestError(
            f"{where} refused: field '{name}' is as wide as '{INPUT_IDS_FIELD}', but in row {wrong[0]} it holds other "
            f"values than padding where the row has no token by '{ATTENTION_MASK_FIELD}'. Expected one value there.",
            hint="Name the columns that have an element per token in token_aligned_fields; all others stay whole.",
        )
    return True


def _warn_of_tokens_cut_off(where: str, ids: Any, counts: NDArray[np.int64]) -> None:
    """Warns, once in a process, if what follows the tokens of a row does not look like padding.

    Padding is one value for each row, and rows do not all begin with zeros that their ends lack.
    """
    global _has_warned
    if _has_warned or not isinstance(ids, torch.Tensor) or ids.is_nested or ids.dim() < 2:
        return
    cells = _cells(ids)
    width = cells.shape[1]
    if not cells.size or width < counts.max(initial=0):
        return  # too narrow: the cut says so
    wrong = _row_that_varies(cells, counts)
    if wrong is None:
        filled = np.flatnonzero((counts < width) & (counts > 0)).tolist()
        gaps = np.minimum(width - counts, counts)
        if filled and all(cells[row, -1].any() and not cells[row, : gaps[row]].any() for row in filled):
            wrong = int(filled[0])
    if wrong is not None:
        _has_warned = True
        _log.warning(
            "%s: row %d of field 'input_ids' has %d tokens by its length, and what follows them does not look like "
            "padding. It was cut off. If the rows are padded on the left, put the column 'attention_mask' (N, S) into "
            "the batch: 1 at each token, 0 at padding. This is said once.",
            *(where, wrong, counts[wrong]),
        )


def _row_that_varies(cells: NDArray[Any], counts: NDArray[np.int64]) -> int | None:
    """The first row that has several values beyond its tokens."""
    width, found = cells.shape[1], []
    for begin in range(0, width, _BLOCK):
        end = min(begin + _BLOCK, width)
        rows = np.flatnonzero(counts < end)
        differs = (cells[rows, begin:end] != cells[rows, -1:]).any(axis=2)
        differs &= np.arange(begin, end) >= counts[rows, None]
        found += rows[differs.any(axis=1)].tolist()
    return min(found, default=None)


def _cells(column: torch.Tensor) -> NDArray[Any]:
    """The bits of a column as unsigned integers (N, S, K). -0.0, which products with a mask give, becomes zero."""
    plain = host_tensor(column, "the column")
    if plain.is_complex():
        plain = plain.unsqueeze(-1).view(_PARTS[plain.dtype])
    size = plain.element_size()
    shape = (*plain.shape[:2], -1) if plain.numel() else (*plain.shape[:2], 0)
    cells: NDArray[Any] = byte_array(plain).view(f"u{size}").reshape(shape)
    if plain.dtype in _SIGNED_ZERO:
        negative = cells == 1 << (8 * size - 1)
        if negative.any():
            cells = np.where(negative, 0, cells)
    return cells
