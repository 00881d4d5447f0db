"""Converts padded columns to jagged ones and back.

Trainers compute on padded tensors; the data plane stores each row with its own length. All functions work on host
memory (CUDA inputs are copied), return detached tensors, and move whole columns as bytes, without an operation per row.

Shape legend: ``N`` samples, ``S`` padded length, ``L`` a row's own length, ``T`` elements of all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from dataplane_core._compiler_marks import not_compiled
from dataplane_core.arguments import check_columns, check_dict, check_iterable, check_number, takes
from dataplane_core.batch.batched_data_dict import BatchedDataDict
from dataplane_core.batch.selection import check_pad_value, objects_of, rows_as_column
from dataplane_core.batch.tokens import as_lengths, is_per_sample
from dataplane_core.codec import (
    Ragged,
    as_column,
    bounds_of,
    byte_slices,
    gather_rows,
    host_tensor,
    object_column,
    offsets_of,
    pad_rows,
    ragged_of_dense,
    ragged_of_nested,
    to_nested,
)
from dataplane_core.errors import InvalidRequestError, InvalidTypeError

# --- pack -------------------------------------------------------------------------------------------------------------


def to_nested_by_length(padded: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Cuts the padding off a right-padded column.

    Args:
        padded: (N, S, ...), any strides.
        lengths: N integers of 0 to S.

    Returns:
        One jagged nested tensor of N rows (L, ...), in new memory, with cached min and max length.

    Raises:
        InvalidRequestError: The column has fewer than 2 dims, there is not one length per row, or a length is outside
            [0, S].
        InvalidTypeError: The dtype or kind of tensor is not carried.
    """
    return _Cut("to_nested_by_length", lengths).pack(padded)


def pack_per_token_field(column: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """`to_nested_by_length` for a column with one element per token, padded to any width or jagged already.

    Args:
        column: (N, W, ...) with W at least the longest row (a forward under sequence parallelism may round W up), or
            jagged rows of exactly these lengths, which are not cut.
        lengths: Tokens per row.

    Raises:
        InvalidRequestError: Sizes do not fit.
    """
    return _Cut("pack_per_token_field", lengths).pack_or_pass(column)


@not_compiled
@takes(fields=check_columns, token_aligned_fields=check_iterable)
def pack_jagged_fields(
    fields: Mapping[str, Any] | TensorDictBase,
    *,
    lengths: torch.Tensor | Sequence[int] | None,
    token_aligned_fields: Collection[str] = (),
    starts: torch.Tensor | None = None,
) -> TensorDict:
    """Makes the token-aligned columns of a batch jagged. The others stay as they are.

    A column that is named in `schema.PER_TOKEN_FIELDS`, but has one value per sample, (N,) or (N, 1), stays too.

    Args:
        fields: Columns of N rows: tensors, what `codec.inputs.as_column` makes columns of, such as lists and arrays,
            and objects as object arrays or ``NonTensorStack``.
        lengths: N token counts; None: no column is made jagged.
        token_aligned_fields: Names of columns with one element per token on dim 1. Names that ``fields`` lacks are
            ignored, so that a declaration may cover more than one write.
        starts: (N,) int64, the place of each row's first token in dense columns. None: 0, as in right-padded ones.

    Returns:
        A TensorDict of batch size [N]. The jagged columns share their offsets, so that torch can combine them.

    Raises:
        InvalidRequestError: Sizes do not fit. The message names the field.
        InvalidTypeError: A column is neither a tensor nor one object per row.
    """
    if lengths is None:
        return to_tensordict({name: fields.get(name) for name in fields.keys()}, None)
    cut = _Cut("pack_jagged_fields", lengths, starts)
    columns: dict[str, Any] = {}
    for name in fields.keys():
        column = as_column(f"field '{name}'", fields.get(name))
        if name in token_aligned_fields and isinstance(column, torch.Tensor) and not is_per_sample(name, column):
            try:
                column = cut.pack_or_pass(column)
            except (InvalidRequestError, InvalidTypeError) as error:
                error.message = f"field '{name}': {error.message}"
                raise
        columns[name] = column
    return to_tensordict(columns, len(cut.counts))


def to_tensordict(columns: Mapping[str, Any], num_samples: int | None) -> TensorDict:
    """Columns as a TensorDict of batch size [N]; `codec.inputs.as_column` says what lists and arrays become.

    N is ``num_samples``, or if that is None, the rows of the first column.

    Raises:
        InvalidRequestError: A column of another number of rows; names it.
        InvalidTypeError: A column that is neither a tensor nor one object per row.
    """
    ready: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, NonTensorData) and isinstance(column.data, np.ndarray):
            column = column.data
        column = as_column(f"field '{name}'", column)
        if isinstance(column, np.ndarray) and column.ndim == 1:  # of objects
            column = object_column(list(column))
        if not isinstance(column, (torch.Tensor, NonTensorStack)):
            raise InvalidTypeError(
                f"field '{name}' is a non-tensor column: a {type(column).__name__}. Expected a tensor, or a list of "
                "one object per sample."
            )
        found = column.size(0) if column.dim() else 0
        num_samples = found if num_samples is None else num_samples
        if found != num_samples:
            raise InvalidRequestError(f"field '{name}' has {found} rows. Expected {num_samples}, one per sample.")
        ready[name] = column
    return TensorDict(ready, batch_size=[num_samples or 0])


@overload
def stack_or_nest(rows: Sequence[torch.Tensor]) -> torch.Tensor: ...


@overload
def stack_or_nest(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | list[Any]: ...


def stack_or_nest(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | list[Any]:
    """Rows as one column in new memory, on the device of the first: dense if all have the same shape, else jagged.

    Args:
        rows: N tensors (L, ...) or N scalars. None stands for a sample that has nothing there, such as one without
            images: its row has length 0.

    Returns:
        The column. If all rows are None, a list of N empty lists: a put of them leaves the field's dtype and shape
        open, until a put says them.

    Raises:
        InvalidRequestError: There are no rows, or they differ in dtype, rank, or a dim other than their first.
    """
    if not len(rows):
        raise InvalidRequestError("stack_or_nest: no rows were given, so the column's dtype and shape are not known.")
    return rows_as_column(rows, "stack_or_nest: the column")


def response_from_nested(full: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """The response part of a per-token model output, shifted left by one token.

    A model's output at a position is for the next token. So the outputs for the last R tokens of a row are at the R
    positions that end one before the row's end.

    Args:
        full: Jagged (or dense) rows of prompt and response, (L, ...).
        response_mask: Jagged (or dense) rows of response length, (R, ...); only the lengths count.

    Returns:
        One jagged nested tensor of rows (R, ...), in new memory.

    Raises:
        InvalidRequestError: Row counts differ, or a response has no token before it.
    """
    rows, mask = _rows(full, "full"), _rows(response_mask, "response_mask")
    if rows.num_rows != mask.num_rows:
        raise InvalidRequestError(
            f"response_from_nested: full has {rows.num_rows} rows and response_mask {mask.num_rows}. Expected one "
            "response per row."
        )
    wide, need = rows.lengths, mask.lengths
    short = np.flatnonzero((need > 0) & (need >= wide))
    if len(short):
        row = int(short[0])
        raise InvalidRequestError(
            f"response_from_nested: row {row} has {wide[row]} tokens and a response of {need[row]}. Expected at least "
            "one token before the response."
        )
    starts = torch.from_numpy(np.where(need > 0, rows.offsets.numpy()[1:] - need - 1, 0))
    return to_nested(gather_rows(rows.values, starts, offsets_of(torch.from_numpy(need))))


class _Cut:
    """Cuts columns to given row lengths. Columns share their offsets and slices."""

    def __init__(self, caller: str, lengths: torch.Tensor | Sequence[int], starts: torch.Tensor | None = None) -> None:
        self.caller = caller
        self.counts = as_lengths(caller, lengths)
        self.firsts: torch.Tensor | int = 0 if starts is None else starts
        self.offsets = offsets_of(self.counts)
        self.bounds = bounds_of(self.counts.numpy())
        self._slices: dict[tuple[int, int], list[slice]] = {}

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Cuts a padded column."""
        counts = self.counts
        if padded.is_nested or padded.dim() < 2:
            kind = "a nested tensor" if padded.is_nested else f"of shape {tuple(padded.shape)}"
            raise InvalidRequestError(f"{self.caller}: the column is {kind}. Expected a padded tensor (N, S, ...).")
        if len(counts) != len(padded):
            raise InvalidRequestError(
                f"{self.caller}: {len(counts)} lengths for {len(padded)} rows. Expected one per row."
            )
        width = padded.shape[1]
        ends = counts + self.firsts
        if len(counts) and (self.bounds[0] < 0 or int(ends.max()) > width):
            row = int(torch.nonzero((counts < 0) | (ends > width))[0])
            raise InvalidRequestError(
                f"{self.caller}: row {row} has length {int(counts[row])}, but the column is padded to {width}. "
                f"Expected lengths of 0 to {width}."
            )
        plain = host_tensor(padded, f"{self.caller}: the column")
        step = plain.element_size() * math.prod(plain.shape[2:])
        starts = torch.arange(len(counts), device="cpu") * width + self.firsts
        if (width, step) not in self._slices:
            self._slices[width, step] = byte_slices(starts, counts, step)
        rows = gather_rows(plain.flatten(0, 1), starts, self.offsets, self._slices[width, step])
        return to_nested(rows, self.bounds)

    def pack_or_pass(self, column: torch.Tensor) -> torch.Tensor:
        """Cuts a padded column. A column that is jagged already must have these lengths."""
        if not column.is_nested:
            return self.pack(column)
        rows = _rows(column, "the column")
        if not torch.equal(rows.offsets, self.offsets):
            raise InvalidRequestError(
                f"{self.caller}: the column's {rows.num_rows} rows are jagged already, but not of the given lengths."
            )
        return to_nested(Ragged(rows.values, self.offsets), self.bounds)


def _rows(column: torch.Tensor, what: str) -> Ragged:
    """The rows of a jagged, nested or dense column, joined end to end."""
    if column.is_nested:
        rows = ragged_of_nested(column, what)
        if isinstance(rows, Ragged):
            return rows
        column = rows
    if column.dim() < 2:
        raise InvalidRequestError(f"{what} is of shape {tuple(column.shape)}. Expected rows of rank 1 or more.")
    return ragged_of_dense(host_tensor(column, what))


# --- unpack -----------------------------------------------------------------------------------------------------------


@not_compiled
@takes(td=check_columns, pad_value_dict=check_dict, pad_to_seqlen=check_number, token_aligned_fields=check_iterable)
def materialize(
    td: TensorDictBase | Mapping[str, Any],
    layout: Literal["padded", "jagged"] = "padded",
    pad_value_dict: Mapping[str, float] | None = None,
    pad_to_seqlen: int = 0,
    *,
    token_aligned_fields: Collection[str] | None = None,
) -> BatchedDataDict:
    """Converts what `get_samples` returned to the batch that trainers compute on.

    Args:
        td: Columns of N rows.
        layout: ``padded``: jagged columns are right-padded to their longest row, and every column of two dims or more
            to ``pad_to_seqlen`` if that is larger. ``jagged``: tensors stay as they are.
        pad_value_dict: Field -> pad value. Default: 0.
        pad_to_seqlen: The padded length in elements of dim 1; 0: as long as the longest row.
        token_aligned_fields: Pad only these to ``pad_to_seqlen``. Default: every column of two dims or more, since a
            dense column does not tell a sequence from a feature dim.

    Returns:
        A BatchedDataDict: padded columns in new memory, others as they are in ``td``; object columns as
        ``np.ndarray(dtype=object)`` of shape (N,).

    Raises:
        InvalidRequestError: An unknown layout, or a pad value that the column's dtype cannot hold.
    """
    if layout not in ("padded", "jagged"):
        raise InvalidRequestError(f"materialize: layout must be 'padded' or 'jagged', got {layout!r}.")
    if pad_to_seqlen < 0:
        raise InvalidRequestError(f"materialize: pad_to_seqlen must be 0 or more, got {pad_to_seqlen}.")
    columns: dict[str, Any] = {}
    for name in td.keys():
        column = td.get(name)
        columns[name] = column
        if not isinstance(column, torch.Tensor):
            columns[name] = objects_of(column, f"field '{name}'")
        elif layout == "padded" and column.dim() >= 2:
            width = pad_to_seqlen if token_aligned_fields is None or name in token_aligned_fields else 0
            columns[name] = _pad(name, column, (pad_value_dict or {}).get(name, 0), width)
    return BatchedDataDict(columns)


def _pad(name: str, column: torch.Tensor, value: float, width: int) -> torch.Tensor:
    if column.is_nested:
        rows = _rows(column, f"field '{name}'")
        check_pad_value(f"materialize: field '{name}'", value, rows.values.dtype)
        return pad_rows(rows, max(width, int(rows.lengths.max(initial=0))), value)
    if column.shape[1] >= width:
        return column
    check_pad_value(f"materialize: field '{name}'", value, column.dtype)
    padded = column.new_empty((column.shape[0], width, *column.shape[2:]))
    padded[:, : column.shape[1]] = column
    padded[:, column.shape[1] :] = torch.full((), value, dtype=column.dtype, device=column.device)
    return padded
