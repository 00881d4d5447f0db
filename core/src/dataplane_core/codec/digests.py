"""XXH3-64 of each cell of an encoded column.

Shape legend: ``N`` rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
from xxhash import xxh3_64_digest

from dataplane_core.codec.narrow import is_narrow, widened
from dataplane_core.codec.objects import encode_item
from dataplane_core.codec.rows import num_rows
from dataplane_core.codec.tensors import Ragged, byte_view, host_tensor, ragged_of_nested
from dataplane_core.errors import InvalidTypeError
from dataplane_core.packed import BytesLike
from dataplane_core.spec import FieldSpec, SharedRows, WireColumn, WireFormat

#: Narrow cells are hashed in parts of so many elements, which stay in the processor's cache in between.
_PART: Final = 1 << 16
_Sums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
_Cuts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


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
    if isinstance(column, SharedRows):
        digests: _Sums = cell_digests(column.rows, spec, wire)[np.asarray(column.index)]
        return digests
    spec = spec.stored
    if wire.narrow and spec.kind == "tensor" and not (isinstance(column, torch.Tensor) and spec.rank):
        rows = cast("list[torch.Tensor] | torch.Tensor", column)
        column = (
            widened(rows, spec.torch_dtype)
            if isinstance(rows, torch.Tensor)
            else [widened(row, spec.torch_dtype) for row in rows]
        )
    if _is_own_digest(spec) and not wire.bytes:
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


def scalar_of_digest(digest: int, spec: FieldSpec) -> torch.Tensor | None:
    """The scalar whose digest this is, on the host. None: cells of this field are hashed.

    Example:
        >>> scalar_of_digest(7, FieldSpec("tensor", "int64", 0, ()))
        tensor(7)
    """
    spec = spec.stored
    if not _is_own_digest(spec):
        return None
    return torch.frombuffer(bytearray(digest.to_bytes(8, "little")), dtype=spec.torch_dtype, count=1)[0]


def _is_own_digest(spec: FieldSpec) -> bool:
    return spec.kind != "object" and spec.rank == 0 and spec.torch_dtype.itemsize <= 8


def _row_bytes(column: WireColumn, spec: FieldSpec, wire: WireFormat) -> Iterable[BytesLike]:
    """The bytes of each cell of an encoded column in any container, in the dtype that was put. Each holds until the
    next one is taken. No copy if they are contiguous, and not narrow."""
    if isinstance(column, torch.Tensor):
        rows = ragged_of_nested(column, "a column") if column.is_nested else host_tensor(column, "a column")
        plain = rows.values if isinstance(rows, Ragged) else rows
        if plain.nbytes == 0:
            return [b""] * num_rows(column)
        cuts = rows.offsets.numpy() if isinstance(rows, Ragged) else np.arange(len(rows) + 1)
        cuts = cuts * (plain.numel() // len(plain))  # of elements
        if wire.narrow and spec.kind == "tensor" and is_narrow(plain.dtype, spec.torch_dtype):
            wide = torch.empty(0, dtype=spec.torch_dtype, device="cpu").numpy().dtype
            return _wide_cells(plain.reshape(-1).numpy(), cuts, wide)
        return _cut(byte_view(plain), cuts * plain.itemsize)
    if wire.bytes:
        return column
    if spec.kind == "object" and wire.objects == "native":
        return map(_item_bytes, column if isinstance(column, list) else column.tolist())
    return (byte_view(host_tensor(row, "a row")) for row in column)


def _wide_cells(values: np.ndarray[Any, Any], cuts: _Cuts, dtype: np.dtype[Any]) -> Iterator[BytesLike]:
    """The bytes in ``dtype`` of cells that lie end to end in a narrower one: how narrow differs from put to put."""
    part = np.empty(max(_PART, int(np.diff(cuts).max())), dtype)
    data, first = part.view(np.uint8).data, 0
    while first + 1 < len(cuts):
        start = int(cuts[first])
        last = int(cuts.searchsorted(start + len(part), "right")) - 1
        end = int(cuts[last])
        part[: end - start] = values[start:end]
        yield from _cut(data, (cuts[first : last + 1] - start) * dtype.itemsize)
        first = last


def _cut(data: memoryview, cuts: _Cuts) -> Iterator[BytesLike]:
    places = cuts.tolist()
    return map(data.__getitem__, map(slice, places[:-1], places[1:]))


def _item_bytes(item: Any) -> bytes:
    try:
        return encode_item(item)
    except InvalidTypeError:  # allow_pickle is on, but a native object is not pickled
        return b""
