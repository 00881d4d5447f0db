"""Counts, selects and joins rows of columns, for `BatchedDataDict`.

Shape legend: ``N`` rows, ``S`` padded sequence length.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from dataplane_core.arguments import check_list
from dataplane_core.codec import carrier, column_of_array, dense_or_jagged, jagged_parts, num_rows, ragged_of_rows
from dataplane_core.errors import InvalidRequestError, InvalidTypeError

#: A column: rows along dim 0.
Column: TypeAlias = torch.Tensor | list[Any] | np.ndarray[Any, Any]

#: Types that torch's `index_select` lacks for columns (N,).
_UNSIGNED: Final = (torch.uint16, torch.uint32, torch.uint64)


class UnsupportedColumnError(InvalidTypeError, NotImplementedError):
    """A column that is neither a tensor with rows, a list nor an array."""


def checked_num_rows(key: str, column: Any) -> int:
    """Number of rows, as `num_rows`, of what a `BatchedDataDict` can hold.

    Raises:
        UnsupportedColumnError: It is not a column.
    """
    found = type(column).__name__
    if not isinstance(column, torch.Tensor | np.ndarray | list):
        raise UnsupportedColumnError(
            f"column '{key}' is of type {found}. Expected a tensor, a list or an array, one row per sample."
        )
    if not isinstance(column, list) and not column.ndim:
        raise UnsupportedColumnError(
            f"column '{key}' is a {found} without dims. Expected one row per sample along dim 0."
        )
    return num_rows(column)


def slice_rows(key: str, column: Any, start: int, end: int) -> Any:
    """The rows ``[start, end)``, which must lie within the column. Tensors (also jagged ones) and arrays are views."""
    if not (isinstance(column, torch.Tensor) and column.is_nested):
        return column[start:end]
    values, offsets = _end_to_end(key, column)
    cuts = offsets[start : end + 1]
    return _jagged(values[int(cuts[0]) : int(cuts[-1])], cuts - cuts[0])


def select_rows(columns: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The rows at ``rows``, each of which lies in ``[0, N)``. Copies tensors and arrays, not the items of lists.

    Raises:
        UnsupportedColumnError: The rows of a nested tensor are not joined end to end.
    """
    index = np.asarray(rows, dtype=np.int64)
    by_device: dict[torch.device, torch.Tensor] = {}
    picked: dict[str, Any] = {}
    for key, column in columns.items():
        if isinstance(column, torch.Tensor):
            if column.device not in by_device:
                by_device[column.device] = torch.from_numpy(index).to(column.device)
            here = by_device[column.device]
            picked[key] = _select_jagged(key, column, here) if column.is_nested else _select_dense(column, here)
        elif isinstance(column, np.ndarray):
            picked[key] = column[index]
        else:
            picked[key] = [column[row] for row in rows]
    return picked


def _select_dense(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if column.dtype in _UNSIGNED:
        return carrier(column).index_select(0, rows).view(column.dtype)
    return column.index_select(0, rows)


def _select_jagged(key: str, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    values, offsets = _end_to_end(key, column)
    lengths = offsets.diff()[rows]
    cuts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    places = (offsets[rows] - cuts[:-1]).repeat_interleave(lengths) + torch.arange(int(cuts[-1]), device=cuts.device)
    return _jagged(carrier(values).index_select(0, places).view(values.dtype), cuts)


def _end_to_end(key: str, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A jagged column's values (T, ...) and int64 offsets (N + 1,), on its device."""
    values, offsets, lengths, dim = (
        jagged_parts(column) if column.layout is torch.jagged else (column, column, None, -1)
    )
    if lengths is not None or dim != 0:
        raise UnsupportedColumnError(
            f"column '{key}' is a nested tensor of layout {column.layout} whose rows do not lie end to end. Expected "
            "a torch.jagged one that is ragged on its first dim after the batch, without holes.",
            hint="torch.nested.as_nested_tensor(list(column.unbind()), layout=torch.jagged) makes one.",
        )
    return values, offsets.to(torch.int64)


def _jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    lengths = offsets.diff()
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=low, max_seqlen=high)
    return nested


def object_array(items: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A 1-D object array of items of any type."""
    array = np.empty(len(items), dtype=object)
    for position, item in enumerate(items):  # a slice assignment would unpack lists of equal length
        array[position] = item
    return array


def objects_of(column: Any, what: str = "a column") -> np.ndarray[Any, Any]:
    """A column of objects, in any container, as a 1-D object array."""
    if isinstance(column, NonTensorData):
        column = column.data
    if isinstance(column, np.ndarray):
        return column
    return object_array(column.tolist() if isinstance(column, NonTensorStack) else check_list(what, column))


def concatenate(key: str, columns: Sequence[Any], pad_value: float) -> Column:
    """Joins columns along dim 0. Tensors of 2 and more dims are right-padded on dim 1 to the widest.

    Mixed dtypes are promoted, as `torch.cat` does: int64 joined with float32 gives float32.

    Args:
        key: The column's name, for errors.
        columns: At least one.
        pad_value: What tensors are padded with.

    Raises:
        UnsupportedColumnError: A column has another type, or the types differ.
        InvalidRequestError: Tensors or arrays differ in number of dims, trailing dims or device, or no dtype holds the
            values of all of them, or theirs does not hold the pad value.
    """
    for column in columns:
        checked_num_rows(key, column)
    if all(isinstance(column, torch.Tensor) for column in columns):
        return _concatenate_tensors(key, columns, pad_value)
    if all(isinstance(column, np.ndarray) for column in columns):
        _require_equal(key, (column.shape[1:] for column in columns))
        return np.concatenate(list(columns))
    if any(isinstance(column, torch.Tensor) for column in columns):
        raise UnsupportedColumnError(
            f"from_batches: column '{key}' is {' and '.join(sorted({type(column).__name__ for column in columns}))}. "
            "Expected one type in every batch."
        )
    return [item for column in columns for item in column]


def join_ragged(key: str, columns: Sequence[Any | None], sizes: Sequence[int]) -> Column:
    """Joins columns whose rows differ in their first dim, row by row, without padding: dense if all rows are equal.

    Args:
        key: The column's name, for errors.
        columns: At least one that is not None. None: a batch whose samples have nothing there.
        sizes: Rows per batch. What a batch without rows holds does not count, unless no batch has rows.

    Returns:
        An array if all batches have arrays whose rows have one shape; a list of the items if a batch has objects there,
        or no batch has a tensor or numbers; else a tensor.

    Raises:
        InvalidRequestError: Rows differ in device, dtype, rank, or a dim other than their first.
    """
    filled = [(column, size) for column, size in zip(columns, sizes, strict=True) if size]
    if not filled:
        nothing: Column = slice_rows(key, next(column for column in columns if column is not None), 0, 0)
        return nothing
    if _are_alike([column for column, _ in filled]):
        return concatenate(key, [column for column, _ in filled], 0)
    rows: list[Any] = []
    for column, size in filled:
        if isinstance(column, np.ndarray) and column.dtype.kind in "biufc":
            column = column_of_array(f"column '{key}'", column)
        if column is None:
            rows += [None] * size
        else:
            rows += column.unbind() if isinstance(column, torch.Tensor) else list(column)
    if any(not (row is None or isinstance(row, torch.Tensor) or (isinstance(row, list) and not row)) for row in rows):
        return [[] if row is None else row for row in rows]
    _require_equal(key, ((str(row.device),) for row in rows if isinstance(row, torch.Tensor)))
    return rows_as_column([row if isinstance(row, torch.Tensor) else None for row in rows], f"column '{key}'")


def _are_alike(columns: Sequence[Any]) -> bool:
    """Whether all are dense tensors, or all arrays, of one shape per row: they need no padding."""
    arrays = all(isinstance(column, np.ndarray) for column in columns)
    dense = all(isinstance(column, torch.Tensor) and not column.is_nested for column in columns)
    return (arrays or dense) and len({column.shape[1:] for column in columns}) == 1


def rows_as_column(rows: Sequence[torch.Tensor | None], what: str) -> torch.Tensor | list[Any]:
    """Rows as one column in new memory, on their device, as `stack_or_nest` describes. ``what`` names it in errors."""
    like = next((row for row in rows if row is not None), None)
    if like is None:
        return [[] for _ in rows]
    if not like.dim() and any(row is None for row in rows):
        raise InvalidRequestError(f"{what} has scalars and None. Expected rows of rank 1 or more beside None.")
    empty = like.new_empty((0, *like.shape[1:]))
    joined = ragged_of_rows([empty if row is None else row for row in rows], what)
    column = joined if isinstance(joined, torch.Tensor) else dense_or_jagged(joined)
    return column.to(like.device)


def _concatenate_tensors(key: str, columns: Sequence[torch.Tensor], pad_value: float) -> torch.Tensor:
    if any(column.is_nested for column in columns):
        raise UnsupportedColumnError(
            f"from_batches: column '{key}' is a nested tensor. Expected a padded one: materialize(td, "
            "layout='padded').",
            hint="Name it in ragged_fields if its rows are not one value per token.",
        )
    first = columns[0]
    _require_equal(key, ((column.dim(), column.shape[2:], str(column.device)) for column in columns))
    dtypes = dict.fromkeys(column.dtype for column in columns)
    try:
        dtype = reduce(torch.promote_types, dtypes)
    except RuntimeError as error:
        raise InvalidRequestError(
            f"from_batches: column '{key}' differs between batches: {' against '.join(map(str, dtypes))}. Expected "
            "dtypes that torch.cat joins."
        ) from error
    widths = {column.shape[1] for column in columns} if first.dim() > 1 else {0}
    if len(widths) == 1:
        return torch.cat([column.to(dtype) for column in columns])
    check_pad_value(f"from_batches: column '{key}'", pad_value, dtype)
    total = sum(len(column) for column in columns)
    joined = first.new_full((total, max(widths), *first.shape[2:]), pad_value, dtype=dtype)
    start = 0
    for column in columns:
        joined[start : start + len(column), : column.shape[1]] = column
        start += len(column)
    return joined


def _require_equal(key: str, forms: Iterable[tuple[Any, ...]]) -> None:
    different = dict.fromkeys(forms)
    if len(different) > 1:
        raise InvalidRequestError(
            f"from_batches: column '{key}' differs between batches: {' against '.join(map(str, different))}. Expected "
            "one number of dims, trailing shape and device."
        )


def check_pad_value(what: str, value: Any, dtype: torch.dtype) -> None:
    """Refuses a pad value that a dtype cannot hold: an integer exactly, a float without becoming infinite.

    Raises:
        InvalidRequestError: The dtype cannot. The message begins with ``what``.
    """
    message = f"{what} of {dtype} cannot be padded with {value!r}."
    try:
        stored = torch.full((), value, dtype=dtype, device="cpu")
        if dtype.is_floating_point or dtype.is_complex:
            fits = cmath.isfinite(stored.item()) or not cmath.isfinite(value)
        else:
            fits = stored.item() == value
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(message) from error
    if not fits:
        raise InvalidRequestError(message)
