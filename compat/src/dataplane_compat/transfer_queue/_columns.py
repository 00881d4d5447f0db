"""Columns and tags between TransferQueue's forms and those of the client.

Shape legend: ``N`` rows, ``L`` length of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from dataplane_core.codec import as_columns, object_column, plain, tensor_columns
from dataplane_core.spec import TagValue

#: Fields whose rows, if they have two dims, have the tokens in the second one: M-RoPE's (4, L). The store wants the dim
#: that differs from row to row first, so they are stored as (L, 4).
_TOKENS_LAST: Final = frozenset({"position_ids"})
#: Begins a tag that holds a list or dict, which follows as JSON.
_JSON: Final = "~tq.json:"


def columns_to_put(fields: TensorDictBase | Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """The columns of a put. Numpy scalars become numbers.

    `NonTensorData` whose data is a list, tuple or array as long as the batch has an item for each row. Other data is
    one value for all rows, and becomes an object per row.
    """
    if isinstance(fields, LazyStackedTensorDict):  # its `get` refuses rows that differ in shape
        rows = [{name: _cell_to_put(name, row.get(name)) for name in row.keys()} for row in fields.tensordicts]
        return tensor_columns(as_columns("kv_batch_put", rows, num_rows))
    names = list(fields.keys())  # a TensorDict iterates over rows; its `get`, unlike its index, keeps non-tensor data
    return {name: _column_to_put(name, fields.get(name), num_rows) for name in names}


def _column_to_put(name: str, column: Any, num_rows: int) -> Any:
    if isinstance(column, torch.Tensor):
        if name in _TOKENS_LAST and column.dim() == 3 and not column.is_nested:
            return column.transpose(1, 2)
        if name in _TOKENS_LAST and column.dim() == 3 and len(column):
            return jagged([row.t() for row in column.unbind()])
        return column
    data = column.data if isinstance(column, NonTensorData) else column
    is_array = isinstance(data, np.ndarray) and data.ndim > 0
    is_rows = (is_array or isinstance(data, (list, tuple))) and len(data) == num_rows
    if isinstance(column, NonTensorData) and not is_rows:
        items = [data] * num_rows
    elif isinstance(data, (NonTensorStack, np.ndarray)):
        items = data.tolist()
    elif isinstance(data, (list, tuple)):
        items = [item.data if isinstance(item, NonTensorData) else item for item in data]
    else:
        return column  # the client names what it is
    return object_column(list(map(plain, items)))


def shape_to_show(name: str, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape of a row as it was put, from that of the row as it is stored."""
    return shape[::-1] if shape is not None and len(shape) == 2 and name in _TOKENS_LAST else shape


def _cell_to_put(name: str, cell: Any) -> Any:
    if isinstance(cell, torch.Tensor):
        return cell.t() if name in _TOKENS_LAST and cell.dim() == 2 else cell
    return plain(cell)


def one_row(fields: TensorDictBase | Mapping[str, Any]) -> dict[str, Any]:
    """The columns of one row, from values without a batch dimension. A TensorDict has that dimension already."""
    if isinstance(fields, TensorDictBase):
        return columns_to_put(fields, 1)
    if not isinstance(fields, Mapping):
        raise ValueError("`fields` can only be dict or TensorDict")
    row: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise ValueError("Please use (async)kv_batch_put for batch operation: a nested tensor is many rows.")
            row[name] = _column_to_put(name, value.unsqueeze(0), 1)
        else:
            row[name] = object_column([plain(value)])
    return row


def to_batch(columns: TensorDictBase) -> TensorDict:
    """The columns as TransferQueue returns them: rows of rank 1 and more are jagged, even if they are equally long.

    Columns of equal lengths share their offsets, so that torch can combine them.
    """
    offsets: dict[int, torch.Tensor] = {}
    shown: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, torch.Tensor) and not column.is_nested and column.dim() > 1:
            rows, length = column.shape[:2]  # N, L
            if length not in offsets:
                offsets[length] = torch.arange(rows + 1, device=column.device) * length
            values = column.reshape(rows * length, *column.shape[2:])
            column = torch.nested.nested_tensor_from_jagged(
                values, offsets[length], min_seqlen=length, max_seqlen=length
            )
        if name in _TOKENS_LAST and isinstance(column, torch.Tensor) and column.dim() == 3:
            rows_first: Any = column
            values = rows_first.values().t().contiguous()
            column = torch.nested.nested_tensor_from_jagged(values, rows_first.offsets(), jagged_dim=2)
        shown[name] = column
    return TensorDict(shown, batch_size=columns.batch_size)


def parsed(columns: Mapping[str, Any], data_parser: Callable[[Any], Any]) -> dict[str, Any]:
    """The columns after a caller's parser changed their values in place, such as URLs into what they point to.

    The parser gets a dict: dense columns as tensors, all others as lists of rows.

    Raises:
        ValueError: The parser added or removed columns or rows.
    """
    batch = {}
    for name, column in columns.items():
        is_tensor = isinstance(column, torch.Tensor)
        is_dense = is_tensor and not column.is_nested
        batch[name] = column if is_dense else list(column.unbind() if is_tensor else column.tolist())
    sizes = {name: len(values) for name, values in batch.items()}
    changed = data_parser(batch)
    changed = batch if changed is None else changed
    if {name: len(values) for name, values in changed.items()} != sizes:
        raise ValueError(
            f"data_parser changed the columns or their number of rows: {sizes} before. Expected the same after."
        )
    return {name: _joined(values) for name, values in changed.items()}


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows as one column that is jagged, even if they are equally long."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _joined(values: Any) -> Any:
    """Rows as one column. Tensors that do not fit one are objects."""
    if isinstance(values, torch.Tensor):
        return values
    are_tensors = all(isinstance(value, torch.Tensor) for value in values)
    if not are_tensors or len({(value.dtype, value.dim(), value.shape[1:]) for value in values}) != 1:
        return object_column(list(map(plain, values)))
    return jagged(values) if values[0].dim() else torch.stack(list(values))


def tags_to_put(tags: Sequence[Mapping[str, Any]]) -> list[dict[str, TagValue]]:
    """Tags as the client takes them: primitives. Lists and dicts become JSON."""
    return [{name: _tag(name, value) for name, value in row.items()} for row in tags]


def _tag(name: str, value: Any) -> TagValue:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    own: TagValue = plain(value)
    if own is None or type(own) in (bool, int, float):
        return own
    if type(own) is str and not own.startswith(_JSON):  # one that does is written as JSON, since it is read so
        return own
    try:
        return _JSON + json.dumps(own)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"tag '{name}' is a {type(value).__name__}. Expected None, a bool, int, float or str, or a list or dict of "
            "these. Put larger values in a field."
        ) from error


def tags_to_show(tags: Mapping[str, Any]) -> dict[str, Any]:
    """A row's tags as they were put."""
    return {
        name: json.loads(value.removeprefix(_JSON)) if type(value) is str and value.startswith(_JSON) else value
        for name, value in tags.items()
    }
