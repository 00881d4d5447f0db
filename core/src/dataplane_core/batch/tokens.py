"""Finds the token columns of a batch. Reads pad these columns; first writes and microbatches cut them.

Shape legend: ``N`` rows, ``S`` padded sequence length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from dataplane_core.codec import is_jagged, jagged_parts
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import INPUT_IDS_FIELD, MULTIMODAL_FIELDS, PER_TOKEN_FIELDS


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

    Returns:
        Names, in the order of ``columns``.
    """
    named = token_aligned_fields
    tokens = row_lengths(columns.get(INPUT_IDS_FIELD), dim) if lengths is None else as_lengths("tokens", lengths)
    longest = 0 if tokens is None or not padded or not len(tokens) else int(tokens.max())
    found: list[str] = []
    for name, column in columns.items():
        if name in (ragged_fields if named is None else ()) or (named is not None and name not in named):
            continue
        rows = row_lengths(column, dim)
        as_long = rows is not None and tokens is not None and torch.equal(rows, tokens)
        as_long |= rows is not None and longest > 0 and not column.is_nested and column.shape[dim] >= longest
        known = named is not None or (rows is not None and (tokens is None or name in PER_TOKEN_FIELDS))
        if as_long or (known and not is_per_sample(name, column)):
            found.append(name)
    return found


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
    """Row lengths as (N,) int64 on the host. Also accepts (N, 1).

    Raises:
        InvalidRequestError: There is not one integer per row.
    """
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
