"""Rows of columns in any container: their number, and a selection of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from dataplane_core.codec.objects import copy_item
from dataplane_core.codec.tensors import (
    JaggedColumns,
    Ragged,
    carrier,
    dense_or_jagged,
    empty_tensor,
    gather_rows,
    host_tensor,
    is_jagged,
    jagged_parts,
    offsets_of,
    ragged_of_dense,
    ragged_of_nested,
    ragged_of_rows,
)
from dataplane_core.errors import SchemaMismatchError
from dataplane_core.spec import FieldSpec, SharedRows


class EmptyLists(list[list[Any]]):
    """A column of empty lists, which say nothing about their type: it leaves its field open."""


class TensorRows(list[torch.Tensor]):
    """A tensor column as its rows. Rows may be the same memory: large ones are then stored once."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows. Also of tensors that are not carried: `torch.Tensor.nbytes` raises for some of these."""
        return sum(row.numel() * row.element_size() for row in self)

    def joined(self, what: str) -> Ragged | torch.Tensor:
        """The rows end to end. Raises as `ragged_of_rows`."""
        try:
            return ragged_of_rows(self, what)
        except SchemaMismatchError as error:
            error.hint = "Write NonTensorStack(*items) for one object per sample."
            raise


def num_rows(column: Any) -> int:
    """Rows of a column in any container: tensor, nested tensor, ``NonTensorStack``, object array, list, shared rows."""
    if isinstance(column, SharedRows):
        return len(column.index)
    if isinstance(column, torch.Tensor):
        return len(jagged_parts(column)[1]) - 1 if is_jagged(column) else column.size(0)
    return len(column)


def object_column(items: Sequence[Any]) -> NonTensorStack:
    """Items, one per row, as an object column for a TensorDict. Keeps references to them."""
    return NonTensorStack(*[NonTensorData(data=item) if is_tensor_collection(item) else item for item in items])


def empty_columns(specs: Mapping[str, FieldSpec], names: Iterable[str]) -> TensorDict:
    """Columns of no rows, of the dtypes that fields have.

    Returns:
        Per field a tensor of shape ``(0,)``, or ``(0, 0, *trailing)``; objects as a ``NonTensorStack``.
    """
    columns: dict[str, Any] = {}
    for name in names:
        spec = specs[name]
        if spec.kind == "object":
            columns[name] = object_column(())
        else:
            columns[name] = empty_tensor((0, 0, *spec.trailing) if spec.rank else (0,), spec.torch_dtype)
    return TensorDict(columns, batch_size=[0])


def take_rows(column: Any, positions: Sequence[int], jagged: JaggedColumns | None = None) -> Any:
    """The rows at ``positions``, in that order. Repeats are allowed.

    Args:
        column: What `decode_columns` returns.
        positions: Row numbers, not negative.
        jagged: The jagged columns of the same read.

    Returns:
        Tensors in new memory: dense if all rows taken have the same shape, else jagged. A repeated item of a
        ``NonTensorStack`` is copied, so that rows stay independent.
    """
    if isinstance(column, torch.Tensor):
        if not column.is_nested:
            return take_dense(host_tensor(column, "a column"), positions)
        rows = ragged_of_nested(column, "a column")
        assert isinstance(rows, Ragged)
        return dense_or_jagged(take_ragged(rows, positions), jagged)
    items = column.tolist()
    seen: set[int] = set()
    taken_items = []
    for position in positions:
        taken_items.append(copy_item(items[position]) if position in seen else items[position])
        seen.add(position)
    return object_column(taken_items)


def with_empty_rows(column: Any, places: Sequence[int], num_samples: int, spec: FieldSpec) -> Any:
    """A column of a read, with the rows that were written as empty lists before the field's type was known.

    Args:
        column: The other rows. None: there are none.
        places: Where the empty rows stand in the read, ascending.
        num_samples: N, of all rows.
        spec: What the field has by now.

    Returns:
        A tensor column, with rows of length 0; or objects, with empty lists, if these are objects or still open.
    """
    is_tensor = spec.kind == "tensor" and not spec.is_open
    if is_tensor and (column is None or isinstance(column, torch.Tensor)):
        rows = Ragged(torch.empty((0, *spec.trailing), dtype=spec.torch_dtype, device="cpu"), offsets_of(_zeros(0)))
        if column is not None:
            some = ragged_of_nested(column, "a column") if column.is_nested else ragged_of_dense(column)
            assert isinstance(some, Ragged)
            rows = some
        lengths = _zeros(num_samples)
        lengths[_others(places, num_samples)] = rows.offsets.diff()
        return dense_or_jagged(Ragged(rows.values, offsets_of(lengths)))
    items: list[Any] = [None] * num_samples
    for place, item in zip(_others(places, num_samples), [] if column is None else column.tolist(), strict=True):
        items[place] = item
    for place in places:
        items[place] = torch.empty((0, *spec.trailing), dtype=spec.torch_dtype, device="cpu") if is_tensor else []
    return object_column(items)


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device="cpu")


def _others(places: Sequence[int], count: int) -> list[int]:
    empty = set(places)
    return [place for place in range(count) if place not in empty]


def take_ragged(rows: Ragged, positions: Sequence[int]) -> Ragged:
    """The rows at ``positions``, in that order, in new memory."""
    picks = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
    lengths = rows.offsets.diff().index_select(0, picks)
    return gather_rows(rows.values, rows.offsets.index_select(0, picks), offsets_of(lengths))


def take_dense(rows: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """As `take_ragged`, for rows of one shape."""
    return carrier(rows).index_select(0, torch.as_tensor(positions, dtype=torch.int64, device="cpu")).view(rows.dtype)
