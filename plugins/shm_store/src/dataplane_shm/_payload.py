"""Columns in the arena: a put copies them in, a read copies its rows out, or views them.

Shape legend: ``N`` rows of the put, ``n`` rows of a read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from dataplane_core.codec import (
    DTYPE_CODES,
    DTYPE_OF_CODE,
    JaggedColumns,
    Piece,
    Ragged,
    StoredColumn,
    byte_array,
    is_narrow,
    jagged_parts,
    merge_pieces,
    rows_in_order,
)
from dataplane_core.errors import CorruptDataError
from dataplane_core.host_memory import Copy, copy_arrays
from dataplane_core.hosting import Bytes, Column, Layout, Place, offsets_at
from dataplane_core.ledger import Located, commands
from dataplane_core.spec import FieldSpec, WireColumn


def plan(columns: Sequence[WireColumn], num_rows: int) -> Layout:
    """Where columns will lie in the extent of a put.

    Args:
        columns: Dense or jagged tensors with ``num_rows`` rows, in the order of the put's slots.
        num_rows: N.
    """
    layout = Layout([])
    for column in columns:
        assert isinstance(column, torch.Tensor)
        if column.is_nested:
            values = jagged_parts(column)[0]
            step = values.dtype.itemsize * math.prod(values.shape[1:])
            layout.add_ragged(num_rows, len(values), step, DTYPE_CODES[values.dtype])
        else:
            length = column.shape[1] if column.dim() > 1 else 0
            step = column.dtype.itemsize * math.prod(column.shape[1:])
            layout.add_dense(num_rows, step, length, DTYPE_CODES[column.dtype])
    return layout


def write(extent: Bytes, layout: Layout, columns: Sequence[WireColumn], threads: int | None = 1) -> None:
    """Copies columns into the extent that was planned for them. ``threads``: as for `copy_arrays`."""
    copies: list[Copy] = []
    for column, at in zip(columns, layout.columns, strict=True):
        assert isinstance(column, torch.Tensor)
        if column.is_nested:
            values, offsets, _, _ = jagged_parts(column)
            copies.append(_copy(extent, at.table, byte_array(offsets.to(torch.int64).contiguous())))
        else:
            values = column.contiguous()
        copies.append(_copy(extent, at.start, byte_array(values)))
    copy_arrays(copies, threads)


def _copy(extent: Bytes, start: int, data: Bytes) -> Copy:
    return extent[start : start + len(data)], data


def read(arena: Bytes, located: Located, places: Mapping[int, Place], threads: int | None = 1) -> dict[str, WireColumn]:
    """Copies the rows of a read out of the arena, in the order of the request, into new memory."""
    pieces: dict[str, list[Piece]] = {name: [] for name in located.specs}
    for part in located.parts:
        for name, column in _stored(arena, part, places[part.write_id], located.specs):
            pieces[name].append(Piece(column, part.positions, part.rows))
    jagged, copies = JaggedColumns(), list[Copy]()
    dtypes = {name: spec.stored.torch_dtype for name, spec in located.specs.items() if spec.kind == "tensor"}
    columns = {name: merge_pieces(each, jagged, dtypes.get(name), copies) for name, each in pieces.items()}
    copy_arrays(copies, threads)
    return columns


def view(arena: Bytes, located: Located, places: Mapping[int, Place], num_rows: int) -> dict[str, WireColumn] | None:
    """The rows of a read where they lie in the arena, or None if they do not lie there in the order of the request.

    Args:
        arena: The arena.
        located: The cells, in one put or in several.
        places: Where these puts lie.
        num_rows: n.
    """
    columns: dict[str, WireColumn] = {}
    jagged = JaggedColumns()
    for part in located.parts:
        start = part.positions[0]
        if not (rows_in_order(part.rows, 0, num_rows) and rows_in_order(part.positions, start, num_rows)):
            return None
        for name, column in _stored(arena, part, places[part.write_id], located.specs):
            if isinstance(column, Ragged):
                cuts = column.offsets.numpy()[start : start + num_rows + 1]
                values = column.values[cuts[0] : cuts[-1]]
                columns[name] = jagged.add(values, torch.from_numpy(cuts - cuts[0]))
            else:
                assert isinstance(column, torch.Tensor)
                columns[name] = column[start : start + num_rows]
    return columns


def _stored(
    arena: Bytes, part: commands.Part, place: Place, specs: Mapping[str, FieldSpec]
) -> list[tuple[str, StoredColumn]]:
    """The columns of a part with all rows of their put; views of the arena."""
    extent = arena[place.offset : place.offset + place.layout.size_bytes]
    columns = place.layout.columns
    return [
        (name, _column(extent, columns[slot], place.num_rows, specs[name].stored))
        for name, slot in zip(part.fields, part.slots, strict=True)
    ]


def _column(extent: Bytes, column: Column, num_rows: int, spec: FieldSpec) -> StoredColumn:
    is_object = spec.kind == "object"
    dtype, rank = (torch.uint8, 1) if is_object else (spec.torch_dtype, spec.rank)
    stored = DTYPE_OF_CODE.get(column.dtype) if column.dtype else dtype
    if stored is None or not (stored == dtype or is_narrow(stored, dtype)):
        raise CorruptDataError(f"a put has cells of {stored} of a field of {dtype}.")
    if column.table < 0:
        shape = (num_rows, *spec.trailing) if rank == 0 else (num_rows, column.length, *spec.trailing)
        return _tensor(extent, column.start, shape, stored)
    offsets = torch.from_numpy(offsets_at(extent, column, num_rows))
    return Ragged(_tensor(extent, column.start, (int(offsets[-1]), *spec.trailing), stored), offsets)


def _tensor(extent: Bytes, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the arena."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(extent[start : start + size_bytes]).view(dtype).view(shape)
