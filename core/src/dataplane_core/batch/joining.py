"""Joins the rows of several batches: those of a list, and those of all ranks of a process group."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dataplane_core.batch.columns import (
    UnsupportedColumnError,
    check_pad_value,
    checked_num_rows,
    slice_rows,
    stack_or_nest,
)
from dataplane_core.codec.lists import column_of_array
from dataplane_core.errors import InvalidRequestError, preview


def concatenate(key: str, columns: Sequence[Any], pad_value: float) -> Any:
    """Joins one column or more along dim 0. Tensors of 2 and more dims are right-padded on dim 1 to the widest, and
    mixed dtypes are promoted, as `torch.cat` does."""
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


def _concatenate_tensors(key: str, columns: Sequence[torch.Tensor], pad_value: float) -> torch.Tensor:
    if any(column.is_nested for column in columns):
        raise UnsupportedColumnError(
            f"from_batches: column '{key}' is a nested tensor. Expected a padded one: materialize(td, "
            "layout='padded').",
            hint="Name it in ragged_fields if its rows are not one value per token.",
        )
    first = columns[0]
    _require_equal(key, ((column.dim(), column.shape[2:], str(column.device)) for column in columns))
    try:
        dtype = functools.reduce(torch.promote_types, (column.dtype for column in columns))
    except RuntimeError:  # not even torch.cat joins them
        _require_equal(key, ((column.dtype,) for column in columns))
        raise
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


def join_ragged(key: str, columns: Sequence[Any | None], sizes: Sequence[int]) -> Any:
    """Joins columns whose rows differ in their first dim, row by row, without padding: dense if all rows are equal.

    Args:
        key: The column's name, for errors.
        columns: At least one that is not None. None: a batch whose samples have nothing there.
        sizes: Rows per batch. What a batch without rows holds does not count, unless no batch has rows.

    Returns:
        An array if all batches have arrays whose rows have one shape; a list of the items if a batch has objects there,
        or no batch has a tensor or numbers; else a tensor.
    """
    filled = [(column, size) for column, size in zip(columns, sizes, strict=True) if size]
    if not filled:
        return slice_rows(key, next(column for column in columns if column is not None), 0, 0)
    whole: list[Any] = [column for column, _ in filled]
    dense = all(isinstance(column, torch.Tensor) and not column.is_nested for column in whole)
    arrays = all(isinstance(column, np.ndarray) for column in whole)
    if (dense or arrays) and len({column.shape[1:] for column in whole}) == 1:  # they need no padding
        return concatenate(key, whole, 0)
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
    return stack_or_nest([row if isinstance(row, torch.Tensor) else None for row in rows], f"column '{key}'")


def _require_equal(key: str, forms: Iterable[tuple[Any, ...]]) -> None:
    different = dict.fromkeys(forms)
    if len(different) > 1:
        raise InvalidRequestError(
            f"from_batches: column '{key}' differs between batches: {' against '.join(map(str, different))}. Expected "
            "one number of dims, trailing shape, kind of dtype and device."
        )


# --- over a process group ---------------------------------------------------------------------------------------------


class _TensorForm(NamedTuple):
    """The facts about a tensor that the other ranks need."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str


def all_gather_columns(columns: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """The columns of all ranks, joined in rank order. Collective, and blocks. See `BatchedDataDict.all_gather`.

    All ranks learn before the first tensor is sent if a rank cannot send its columns, or if ranks disagree. They then
    all raise, and none waits for the others.
    """
    import torch.distributed as dist

    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, _described(columns), group=group)
    faults = [f"rank {rank}: {said}" for rank, said in enumerate(of_ranks) if isinstance(said, str)]
    if faults:
        raise InvalidRequestError(f"all_gather refused: {'; '.join(faults)}.")
    # every rank walks the columns in the same order
    names = list(dict.fromkeys(name for said in of_ranks for name in said))
    for name in names:
        _require_equal_forms(name, {rank: said for rank, said in enumerate(of_ranks) if said})
    joined: dict[str, Any] = {}
    for name in names:
        parts = [said.get(name) for said in of_ranks]
        there = [part for part in parts if part is not None]
        if isinstance(there[0], _TensorForm):
            shapes = [(0, *there[0].shape[1:]) if part is None else part.shape for part in parts]
            # by a backend config such as cpu:gloo,cuda:nccl, so the same on all ranks
            backends = str(dist.get_backend_config(group))
            on_host = "nccl" not in backends or (
                "cpu:" in backends and all(form.device_type == "cpu" for form in there)
            )
            via = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
            joined[name] = _gather_tensor(columns.get(name), there[0].dtype, shapes, via, group)
        else:
            joined[name] = concatenate(name, there, 0)
    return joined


def _described(columns: Mapping[str, Any]) -> dict[str, Any] | str:
    """Per column its `_TensorForm`, or the column itself if it is no tensor; or text that says what is wrong."""
    try:
        sizes = {name: checked_num_rows(name, column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            return f"columns differ in length: {sizes}"
        tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
        if nested := [name for name, column in tensors.items() if column.is_nested]:
            return f"columns {preview(nested)} are nested tensors; expected padded ones: materialize(td, 'padded')"
        if unsent := [
            name
            for name, column in tensors.items()
            if column.is_meta or column.layout != torch.strided or column.is_quantized
        ]:
            return f"columns {preview(unsent)} are sparse, quantised or on device 'meta'; expected dense tensors"
        forms = {name: _TensorForm(each.dtype, tuple(each.shape), each.device.type) for name, each in tensors.items()}
        # all_gather_object pickles too, but a rank that fails inside it leaves the others waiting
        pickle.dumps(described := {**columns, **forms})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return described


def _require_equal_forms(name: str, senders: Mapping[int, Mapping[str, Any]]) -> None:
    forms: dict[str, list[int]] = {}
    for rank, said in senders.items():
        part = said.get(name)
        form = "missing" if name not in said else type(part).__name__
        if isinstance(part, _TensorForm | np.ndarray):
            kind = "array of " if isinstance(part, np.ndarray) else ""
            form = f"{kind}{part.dtype} with rows of shape {part.shape[1:]}"
        forms.setdefault(form, []).append(rank)
    if len(forms) > 1:
        held = "; ".join(f"{form} on ranks {ranks}" for form, ranks in forms.items())
        raise InvalidRequestError(
            f"all_gather refused: column '{name}' is {held}. Expected one dtype and row shape; pad to a common width."
        )


def _gather_tensor(
    column: torch.Tensor | None, dtype: torch.dtype, shapes: list[tuple[int, ...]], via: torch.device, group: Any
) -> torch.Tensor:
    """Pads the leading size to the largest, gathers as bytes (so that every dtype works), and removes the padding."""
    import torch.distributed as dist

    home = via if column is None else column.device
    joined = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=home)
    if not joined.numel():
        return joined
    row_bytes = joined.element_size() * math.prod(shapes[0][1:])
    sent = torch.zeros(max(shape[0] for shape in shapes) * row_bytes, dtype=torch.uint8, device=via)
    if column is not None and len(column):
        plain = column.detach().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # dims of size 1 may have unusual strides
        sent[: len(column) * row_bytes] = flat.view(torch.uint8).to(via)
    received = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(received, sent, group=group)
    joined_bytes = joined.view(-1).view(torch.uint8)
    start = 0
    for part, shape in zip(received, shapes, strict=True):
        end = start + shape[0] * row_bytes
        joined_bytes[start:end] = part[: end - start].to(home)
        start = end
    return joined
