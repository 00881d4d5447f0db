"""XXH3-64 of each cell of an encoded column.

Shape legend: ``N`` rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from xxhash import xxh3_64_digest

from dataplane_core.codec.narrow import widened
from dataplane_core.codec.objects import encode_item
from dataplane_core.codec.rows import num_rows
from dataplane_core.codec.tensors import Ragged, byte_view, host_tensor, ragged_of_nested
from dataplane_core.errors import InvalidTypeError
from dataplane_core.packed import BytesLike
from dataplane_core.spec import FieldSpec, SharedRows, WireColumn, WireFormat

_Sums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


def cell_digests(column: WireColumn | SharedRows, spec: FieldSpec, wire: WireFormat) -> _Sums:
    """A digest of each cell, (N,) uint64.

    On a wire of tensors they are digests of the cells' bytes in the dtype that was put, whatever their container and
    their width on the wire. A scalar of up to 8 bytes is its own digest. On a wire of bytes they are digests of the
    frames. An object that only pickle could encode has the digest of no bytes.

    Args:
        column: Encoded for the wire.
        spec: Its spec.
        wire: The form of the column.
    """
    spec = spec.stored
    if wire.narrow and spec.kind == "tensor":
        column = _as_put(column, spec.torch_dtype)  # how narrow its cells are differs from put to put
    return _digests(column, spec, wire)


def _as_put(column: WireColumn | SharedRows, dtype: torch.dtype) -> WireColumn | SharedRows:
    """A column of tensors in the dtype that was put."""
    if isinstance(column, SharedRows):
        return SharedRows(cast("WireColumn", _as_put(column.rows, dtype)), column.index)
    if isinstance(column, list):
        return [widened(row, dtype) for row in column]
    return widened(column, dtype)


def _digests(column: WireColumn | SharedRows, spec: FieldSpec, wire: WireFormat) -> _Sums:
    """64 bits of each cell: a scalar of up to 8 bytes is its own digest, any other cell is hashed."""
    if isinstance(column, SharedRows):
        digests: _Sums = _digests(column.rows, spec, wire)[np.asarray(column.index)]
        return digests
    if spec.kind != "object" and spec.rank == 0 and spec.torch_dtype.itemsize <= 8 and not wire.bytes:
        size = spec.torch_dtype.itemsize
        data = (
            byte_view(host_tensor(column, "a column"))
            if isinstance(column, torch.Tensor) and not column.is_nested
            else b"".join(_row_bytes(column, spec, wire))
        )
        if len(data) == size * num_rows(column):
            words = np.zeros((num_rows(column), 8), dtype=np.uint8)
            words[:, :size] = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
            return words.view("<u8").reshape(-1).astype(np.uint64, copy=False)
    hashed = b"".join(map(xxh3_64_digest, _row_bytes(column, spec, wire)))
    return np.frombuffer(hashed, dtype=">u8").astype(np.uint64)


def _row_bytes(column: WireColumn | SharedRows, spec: FieldSpec, wire: WireFormat) -> Iterable[BytesLike]:
    """The bytes of each cell of an encoded column in any container. No copy if they are contiguous."""
    if isinstance(column, SharedRows):
        cells = list(_row_bytes(column.rows, spec, wire))
        return [cells[row] for row in column.index]
    if isinstance(column, torch.Tensor):
        rows = ragged_of_nested(column, "a column") if column.is_nested else host_tensor(column, "a column")
        plain, cuts = (
            (rows.values, (rows.offsets * rows.itemsize).tolist())
            if isinstance(rows, Ragged)
            else (rows, range(0, rows.nbytes + 1, max(1, rows.nbytes // len(rows))))
        )
        if plain.nbytes == 0:
            return [b""] * num_rows(column)
        return map(byte_view(plain).__getitem__, map(slice, cuts[:-1], cuts[1:]))
    if wire.bytes:
        return column
    if spec.kind == "object" and wire.objects == "native":
        return map(_item_bytes, column if isinstance(column, list) else column.tolist())
    return (byte_view(host_tensor(row, "a row")) for row in column)


def _item_bytes(item: Any) -> bytes:
    try:
        return encode_item(item)
    except InvalidTypeError:  # allow_pickle is on, but a native object is not pickled
        return b""
