"""Which columns of a batch have an element per token, and where the tokens of each row lie in them.

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

from dataplane_core.arguments import check_list
from dataplane_core.codec.rows import num_rows
from dataplane_core.codec.tensors import byte_array, host_tensor, is_jagged, jagged_parts
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import ATTENTION_MASK_FIELD, INPUT_IDS_FIELD, MULTIMODAL_FIELDS, PER_TOKEN_FIELDS

#: The dtypes whose first bit is a sign, so that it does not tell zero from other values.
_SIGNED_ZERO: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
)
_PARTS: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

_log = logging.getLogger(__name__)
#: Whether this process was told that tokens seem to be cut off.
_has_warned = False


def token_columns(
    columns: Mapping[str, Any],
    lengths: torch.Tensor | Sequence[int] | None = None,
    *,
    token_aligned_fields: Collection[str] | None = None,
    ragged_fields: Collection[str] = MULTIMODAL_FIELDS,
    dim: int = 1,
    padded: bool = False,
) -> list[str]:
    """The columns with one value per token.

    A token column is a tensor whose name is in `schema.PER_TOKEN_FIELDS`, or whose rows all have exactly as many
    elements as the sample has tokens. With ``padded``, it is also a dense one at least as wide as the longest sample:
    it was written with its padding. A column of ``ragged_fields`` is never one, and one of shape (N, 1) only if no
    sample has more than one token.

    Args:
        columns: Columns of N rows, dense or jagged. One that is not a tensor, or lacks the dim, is no token column.
        lengths: The tokens of each row. Default: the row lengths of ``input_ids`` in ``columns``, padding included.
            Without either, every column that has the dim counts, except ``ragged_fields``.
        token_aligned_fields: Names of the token columns, instead of the rule above. A column of
            `schema.PER_TOKEN_FIELDS` with one value per sample is left out even so.
        ragged_fields: Names of columns whose rows may have as many elements as tokens by chance.
        dim: The dim of the tokens.
        padded: Whether dense columns may have padding.
    """
    named = None if token_aligned_fields is None else check_list("token_aligned_fields", token_aligned_fields)
    ragged = check_list("ragged_fields", ragged_fields)
    tokens = row_lengths(columns.get(INPUT_IDS_FIELD), dim) if lengths is None else as_lengths("tokens", lengths)
    longest = int(tokens.max()) if padded and tokens is not None and len(tokens) else 0
    names: list[str] = []
    for name, column in columns.items():
        if name in ragged if named is None else name not in named:
            continue
        rows = row_lengths(column, dim)
        as_long = rows is not None and tokens is not None and torch.equal(rows, tokens)
        as_long |= rows is not None and longest > 0 and not column.is_nested and column.shape[dim] >= longest
        is_known = named is not None or (rows is not None and (tokens is None or name in PER_TOKEN_FIELDS))
        if as_long or (is_known and not is_per_sample(name, column)):
            names.append(name)
    return names


def is_per_sample(name: str, column: Any) -> bool:
    """Whether a column of `PER_TOKEN_FIELDS` has one value per sample all the same, as ``advantages`` often has."""
    if name not in PER_TOKEN_FIELDS or not isinstance(column, torch.Tensor) or column.is_nested:
        return False
    return column.dim() == 1 or (column.dim() == 2 and column.shape[1] == 1)


def row_lengths(column: Any, dim: int = 1) -> torch.Tensor | None:
    """The number of elements of each row along the dim, (N,) int64. None if it is no tensor or lacks the dim."""
    if not isinstance(column, torch.Tensor) or column.dim() <= dim:
        return None
    if is_jagged(column) and dim == 1:
        return jagged_parts(column)[1].diff().to("cpu", torch.int64)
    return None if column.is_nested else torch.full((column.shape[0],), column.shape[dim], device="cpu")


def as_lengths(caller: str, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Row lengths as (N,) int64 on the host. Takes one integer per row, also as (N, 1)."""
    try:
        counts = torch.as_tensor(lengths, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:  # torch's words for what is no number
        raise InvalidRequestError(f"{caller}: lengths are {lengths!r:.80}. Expected one integer per row.") from error
    if counts.dim() == 2 and counts.shape[1] == 1:
        counts = counts[:, 0]
    integers = not (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool)
    if counts.dim() != 1 or (counts.numel() and not integers):  # an empty list makes a float tensor
        raise InvalidRequestError(
            f"{caller}: lengths are {counts.dtype} of shape {tuple(counts.shape)}. Expected one integer per row."
        )
    return counts.to(torch.int64)


# --- writes -----------------------------------------------------------------------------------------------------------


def find_cut(
    where: str,
    columns: Mapping[str, Any],
    lengths: Sequence[int] | None,
    declared: Collection[str] | None,
    began: Sequence[int] | None = None,
) -> tuple[list[str], list[int] | None]:
    """The columns of a write to cut to the tokens of their rows, and where these begin (None: all at 0).

    ``lengths``, of tokens: None if not known. ``declared``: names of the columns to cut, whatever is cut off them;
    None: what `kv_first_write` says. ``began``: where tokens begin if there is no attention mask.
    """
    named = [name for name in columns if name in (declared or ()) and not is_per_sample(name, columns[name])]
    if not lengths:
        return named if lengths is None else [], None
    counts = np.asarray(lengths, dtype=np.int64)
    for name, column in columns.items():
        rows = num_rows(column) if isinstance(column, torch.Tensor) else len(counts)
        if rows != len(counts):
            raise InvalidRequestError(f"{where} refused: field '{name}' has {rows} rows. Expected {len(counts)}.")
    starts = _starts_of_mask(where, columns.get(ATTENTION_MASK_FIELD), counts)
    if starts is None and began is not None:
        starts = np.asarray(began, dtype=np.int64)
    shifted = starts if starts is not None and starts.any() else None
    checked = PER_TOKEN_FIELDS if declared is None else PER_TOKEN_FIELDS & set(named)
    _check_widths(where, columns, counts, checked, shifted is not None)
    names = named if declared is not None else _padded_columns(where, columns, counts, shifted)
    if starts is None and INPUT_IDS_FIELD in names:
        _warn_of_tokens_cut_off(where, columns[INPUT_IDS_FIELD], counts)
    return names, None if shifted is None else shifted.tolist()


def _starts_of_mask(where: str, mask: Any, counts: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The place of each row's first token by an attention mask (N, S), if there is one. It may leave out tokens of a
    right-padded row."""
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
    """Checks that columns with an element per token have one for each token, so that each lies beside its own: not
    fewer, and where rows do not begin at 0, not more."""
    ids = columns.get(INPUT_IDS_FIELD)
    width = None if not isinstance(ids, torch.Tensor) or ids.is_nested else row_lengths(ids)
    for name, column in columns.items():
        rows = row_lengths(column) if name in names and not is_per_sample(name, column) else None
        if rows is None:
            continue
        elements = rows.numpy()
        needed = counts if width is None or column.is_nested else width.numpy()
        wrong = np.flatnonzero((elements < needed) | (shifted and needed is not counts and elements > needed))
        if len(wrong):
            has, needs = elements[wrong[0]], needed[wrong[0]]
            of_row = f"row {wrong[0]} has {has} elements and {needs} tokens"
            said = of_row if column.is_nested else f"it is {has} wide, and its tokens {needs}"
            raise InvalidRequestError(
                f"{where} refused: field '{name}' has an element per token, but {said}. Expected one for each token.",
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
    return [
        name
        for name in token_columns(dense, counts.tolist() if tokens is None else tokens)
        if name in PER_TOKEN_FIELDS
        or (dense[name].shape[1] >= longest and _is_padded(where, name, dense[name], counts, starts))
    ]


def _is_padded(
    where: str, name: str, column: torch.Tensor, counts: NDArray[np.int64], starts: NDArray[np.int64] | None
) -> bool:
    """Whether a column that is as wide as the tokens holds only padding outside of them: zeros. If not all tokens begin
    at 0, it may be one value for each row, and anything else is refused: it would not stay beside its tokens."""
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
    """Warns, once in a process, if what follows tokens does not look like padding: that is one value for each row, and
    rows do not all begin with zeros that their ends lack."""
    global _has_warned
    if _has_warned or not isinstance(ids, torch.Tensor) or ids.is_nested or ids.dim() < 2:
        return
    cells = _cells(ids)
    width = cells.shape[1]
    if not cells.size or width < counts.max(initial=0):
        return  # too narrow: the cut says so
    beyond = np.arange(width) >= counts[:, None]
    rows = np.flatnonzero(((cells != cells[:, -1:]).any(axis=2) & beyond).any(axis=1)).tolist()
    if not rows:
        rows = np.flatnonzero((counts < width) & (counts > 0)).tolist()
        gaps = np.minimum(width - counts, counts)
        if not all(cells[row, -1].any() and not cells[row, : gaps[row]].any() for row in rows):
            return
    if rows:
        _has_warned = True
        _log.warning(
            "%s: row %d of field 'input_ids' has %d tokens by its length, and what follows them does not look like "
            "padding. It was cut off. If the rows are padded on the left, put the column 'attention_mask' (N, S) into "
            "the batch: 1 at each token, 0 at padding. This is said once.",
            *(where, rows[0], counts[rows[0]]),
        )


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
