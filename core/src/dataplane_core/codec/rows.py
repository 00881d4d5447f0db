"""Rows of columns in any container: their number, and a selection of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

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

#: The spec of a column of `EmptyLists`.
EMPTY_LISTS: Final = FieldSpec.of_empty_lists()


class EmptyLists(list[list[Any]]):
    """A column of empty lists, which say nothing about their type: it leaves its field open."""


class Columns(dict[str, Any]):
    """Columns that the codec takes.

    Attributes:
        lists: The columns that were lists, as they were: a field may be known to hold another type than they became.
        ints: The columns whose ints leave their field open: floats may follow. See `FieldSpec.of_ints`.
    """

    def __init__(
        self, columns: Mapping[str, Any], lists: Mapping[str, Sequence[Any]] | None = None, ints: Iterable[str] = ()
    ) -> None:
        super().__init__(columns)
        self.lists = {name: items for name, items in (lists or {}).items() if name in columns}
        self.ints = frozenset(ints)


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
    columns = TensorDict(batch_size=[0])
    for name in names:
        spec = specs[name]
        column = empty_rows(spec, 0) if spec.rank or spec.kind == "object" else empty_tensor((0,), spec.torch_dtype)
        # not `set`: before 0.15, tensordict asks an empty stack for the names of its first item
        columns._set_str(name, column, validated=True, inplace=False, non_blocking=False)
    return columns


def empty_rows(spec: FieldSpec, count: int) -> Any:
    """Rows of length 0 of a field. Empty lists, if it holds objects or only empty lists are known of it."""
    if spec.kind == "object" or spec == EMPTY_LISTS:
        return object_column([[] for _ in range(count)])
    return empty_tensor((count, 0, *spec.trailing), spec.torch_dtype)


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


def join_parts(parts: Sequence[Any], order: Sequence[int]) -> Any:
    """Rows of one field that were read apart, in the order of a read.

    Args:
        parts: Columns that `decode_columns` returned.
        order: For each row of the result, its place among the rows of all parts.

    Returns:
        Tensors in new memory, in the wider of their dtypes; or one object per row, if a part has these.
    """
    if not all(isinstance(part, torch.Tensor) for part in parts):
        items = [row for part in parts for row in (part.unbind() if isinstance(part, torch.Tensor) else part.tolist())]
        return object_column([items[row] for row in order])
    if all(part.dim() == 1 for part in parts):
        return take_dense(torch.cat(list(parts)), order)
    rows = [ragged_of_nested(part, "a column") if part.is_nested else ragged_of_dense(part) for part in parts]
    values, lengths = zip(
        *[(each.values, each.offsets.diff()) for each in rows if isinstance(each, Ragged)], strict=True
    )
    return dense_or_jagged(take_ragged(Ragged(torch.cat(values), offsets_of(torch.cat(lengths))), order))


def take_ragged(rows: Ragged, positions: Sequence[int]) -> Ragged:
    """The rows at ``positions``, in that order, in new memory."""
    picks = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
    lengths = rows.offsets.diff().index_select(0, picks)
    return gather_rows(rows.values, rows.offsets.index_select(0, picks), offsets_of(lengths))


def take_dense(rows: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """As `take_ragged`, for rows of one shape."""
    return carrier(rows).index_select(0, torch.as_tensor(positions, dtype=torch.int64, device="cpu")).view(rows.dtype)
