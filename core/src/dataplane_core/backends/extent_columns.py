"""Columns in an extent of shared memory: a put copies them in, a read copies its rows out, or views them.

Shape legend: ``N`` rows of a write, ``n`` rows of a read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dataplane_core.backends.ledger_backend import columns_of
from dataplane_core.codec.compact import is_narrow
from dataplane_core.codec.rows import Piece, merge_pieces, rows_in_order
from dataplane_core.codec.tensors import DTYPE_CODES, DTYPE_OF_CODE, byte_array
from dataplane_core.errors import CorruptDataError
from dataplane_core.host_memory import copy_arrays
from dataplane_core.host_memory.copying import Copy
from dataplane_core.hosting.extents import Column, Layout, offsets_at
from dataplane_core.hosting.session import Bytes
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec, Ragged, SharedRows, WireColumn


class StoredRows(NamedTuple):
    """Some rows of a write, for a read.

    Attributes:
        columns: Columns of the write, by field.
        rows: Rows of these columns.
        positions: Where these rows stand in the read, one for each.
        in_place: Whether the read may return tensors on the memory of the columns. If not, it copies.
    """

    columns: Mapping[str, WireColumn]
    rows: Sequence[int]
    positions: Sequence[int]
    in_place: bool


class ExtentPlan:
    """Where the columns of a write will lie in its extent, and their bytes.

    Args:
        columns: Tensors or `Ragged` with N rows each, in the order of the write's slots.
        num_rows: N.

    Attributes:
        layout: Where they lie.
        num_rows: N.

    Example:
        >>> plan = ExtentPlan([torch.arange(3)], 3)
        >>> plan.num_rows, plan.layout.size_bytes
        (3, 24)
    """

    def __init__(self, columns: Sequence[WireColumn], num_rows: int) -> None:
        self._columns = columns
        self.num_rows = num_rows
        self.layout = Layout([])
        for column in columns:
            if isinstance(column, Ragged):
                code = DTYPE_CODES[column.values.dtype]
                self.layout.add_ragged(num_rows, len(column.values), column.itemsize, code)
            else:
                assert isinstance(column, torch.Tensor)
                length = column.shape[1] if column.dim() > 1 else 0
                step = column.dtype.itemsize * math.prod(column.shape[1:])
                self.layout.add_dense(num_rows, step, length, DTYPE_CODES[column.dtype])

    def chunks(self) -> list[tuple[int, Bytes]]:
        """The bytes of the tables and columns, ascending: where each chunk begins in the extent, and the chunk."""
        chunks: list[tuple[int, Bytes]] = []
        for column, at in zip(self._columns, self.layout.columns, strict=True):
            if isinstance(column, Ragged):
                chunks.append((at.table, column.offsets.numpy().view(np.uint8)))
            values = column.values if isinstance(column, Ragged) else column
            assert isinstance(values, torch.Tensor)
            chunks.append((at.start, byte_array(values.contiguous())))
        return chunks

    def copies_into(self, extent: Bytes) -> list[Copy]:
        """The copies of all chunks into their extent, for `copy_arrays`. ``extent`` may be longer."""
        return [(extent[start : start + len(data)], data) for start, data in self.chunks()]


def plans_of(
    writes: Mapping[int, commands.Write], columns: Mapping[str, WireColumn | SharedRows]
) -> dict[int, ExtentPlan]:
    """The plans of the writes of a put, by their ids.

    Args:
        writes: The writes.
        columns: The columns of the put.
    """
    return {
        write_id: ExtentPlan(list(columns_of(write, columns).values()), len(write.row_bytes))
        for write_id, write in writes.items()
    }


def stored_columns(
    extent: Bytes, layout: Layout, num_rows: int, slots: Mapping[str, int], specs: Mapping[str, FieldSpec]
) -> dict[str, WireColumn]:
    """Columns with all rows that lie in an extent; views of it.

    Args:
        extent: The bytes of the extent.
        layout: Where its columns lie.
        num_rows: How many rows it holds.
        slots: Field -> its place in the layout.
        specs: The specs of these fields.

    Raises:
        CorruptDataError: A column has cells that its field cannot have.
    """
    return {name: _column(extent, layout.columns[slot], num_rows, specs[name].stored) for name, slot in slots.items()}


def read_stored(
    specs: Mapping[str, FieldSpec], parts: Sequence[StoredRows], num_rows: int, threads: int | None = 1
) -> dict[str, WireColumn]:
    """The columns of a read, in the order of the request.

    Columns that may be given in place are, if their rows lie there in this order. Others are copied into new memory.

    Args:
        specs: The fields of the read.
        parts: Where their rows are.
        num_rows: n.
        threads: As for `copy_arrays`.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in specs}
    starts: dict[str, int] = {}  # the first row of each field whose rows lie in the order of the request
    for part in parts:
        for name, column in part.columns.items():
            pieces[name].append(Piece(column, part.rows, part.positions))
        in_order = part.in_place and rows_in_order(part.positions, 0, num_rows)
        if in_order and rows_in_order(part.rows, part.rows[0], num_rows):
            starts.update(dict.fromkeys(part.columns, part.rows[0]))
    copies: list[Copy] = []
    columns: dict[str, WireColumn] = {}
    for name, parts_of_field in pieces.items():
        dtype = specs[name].stored.torch_dtype if specs[name].kind == "tensor" else None
        view = _as_it_lies(parts_of_field[0].column, starts[name], num_rows, dtype) if name in starts else None
        columns[name] = merge_pieces(parts_of_field, dtype, copies) if view is None else view
    copy_arrays(copies, threads)
    return columns


def _as_it_lies(column: WireColumn, start: int, num_rows: int, dtype: torch.dtype | None) -> WireColumn | None:
    """A column on the memory of another one, from the row ``start``. None if that has narrow integers."""
    if isinstance(column, Ragged):
        if dtype not in (None, column.values.dtype):
            return None
        cuts = column.offsets.numpy()[start : start + num_rows + 1]
        return Ragged(column.values[cuts[0] : cuts[-1]], torch.from_numpy(cuts - cuts[0]))
    assert isinstance(column, torch.Tensor)
    return None if dtype not in (None, column.dtype) else column[start : start + num_rows]


def _column(extent: Bytes, column: Column, num_rows: int, spec: FieldSpec) -> WireColumn:
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
    """A tensor on an extent."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(extent[start : start + size_bytes]).view(dtype).view(shape)
