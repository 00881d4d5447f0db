"""Columns as one block of bytes, for saves: dtypes, ragged rows and objects are kept, and no pickle is used.

A block is the size of its head (8 bytes, little-endian), the head (a msgpack map), and the frames of all cells end to
end. Rows of a column that are equal are stored once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypedDict, cast

import msgpack
import torch
from tensordict import NonTensorStack

from dataplane_core.arguments import fits
from dataplane_core.codec import (
    Columns,
    EmptyLists,
    TensorRows,
    decode_columns,
    encode_columns,
)
from dataplane_core.errors import CorruptDataError
from dataplane_core.packed import BytesLike, unpack_msgpack
from dataplane_core.spec import FieldSpec, SharedRows, WireColumn, WireFormat

_FRAMES: Final = WireFormat(bytes=True, shared_rows=True)
_SIZE: Final = struct.Struct("<Q")


class _Column(TypedDict):
    """What the head of a block holds of a column."""

    name: str
    spec: str
    sizes: Sequence[int]
    index: Sequence[int] | None


class _Block(TypedDict):
    """The head of a block."""

    num_rows: int
    columns: Sequence[_Column]
    head: Mapping[str, Any]


def pack_rows(
    columns: Mapping[str, Any], num_rows: int, head: Mapping[str, Any], *, allow_pickle: bool = False
) -> bytes:
    """Packs columns.

    Args:
        columns: Columns of ``num_rows`` rows, as for the codec. May be empty.
        num_rows: N.
        head: Further values for msgpack, which `unpack_rows` returns.
        allow_pickle: As for the codec.
    """
    packed: list[dict[str, Any]] = []
    frames: list[BytesLike] = []
    encoded, specs = encode_columns(columns, num_rows, _FRAMES, allow_pickle=allow_pickle) if columns else ({}, {})
    for name, column in encoded.items():
        rows, index = (column.rows, list(column.index)) if isinstance(column, SharedRows) else (column, None)
        cells = cast("Sequence[BytesLike]", rows)
        frames += cells
        packed.append(
            {"name": name, "spec": specs[name].to_text(), "sizes": [len(cell) for cell in cells], "index": index}
        )
    packed_head = msgpack.packb({"num_rows": num_rows, "columns": packed, "head": dict(head)})
    return b"".join((_SIZE.pack(len(packed_head)), packed_head, *frames))


def unpack_rows(
    block: bytes, *, allow_pickle: bool = False, rows: Callable[[Mapping[str, Any]], Sequence[int]] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads what `pack_rows` packed: the columns, whose equal large rows share memory, and the head.

    Args:
        block: What `pack_rows` returned.
        allow_pickle: As for the codec.
        rows: From the head, which rows to read, by number. None: all.

    Raises:
        CorruptDataError: The block is not of that form.
        BackendError: A column is not as its spec says.
    """
    view = memoryview(block)
    try:
        (size,) = _SIZE.unpack_from(view)
        start = _SIZE.size + size
        held = unpack_msgpack(view[_SIZE.size : start])
        if not fits(held, _Block):
            raise ValueError("its head has a part of a wrong type")
        num_rows, head = held["num_rows"], held["head"]
        picks = range(num_rows) if rows is None else rows(head)
        columns: dict[str, WireColumn | SharedRows] = {}
        specs: dict[str, FieldSpec] = {}
        for column in held["columns"]:
            if min(column["sizes"], default=0) < 0:
                raise ValueError("a cell has a negative size")
            sizes, index = column["sizes"], column["index"]
            if not sizes or num_rows != len(sizes if index is None else index):
                raise ValueError("a column has another number of rows")
            cuts = list(accumulate(sizes, initial=start))
            frames: Any = [view[begin:end] for begin, end in pairwise(cuts)]
            start = cuts[-1]
            columns[column["name"]] = (
                [frames[row] for row in picks] if index is None else SharedRows(frames, [index[row] for row in picks])
            )
            specs[column["name"]] = FieldSpec.from_text(column["spec"])
    except (struct.error, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CorruptDataError(f"a block of a save cannot be read: {type(error).__name__}: {error}.") from error
    if start != len(view):
        raise CorruptDataError(f"a block of a save has {len(view)} bytes. Expected {start}.")
    if not columns or (rows is not None and not picks):
        return {}, head
    decoded = decode_columns(columns, specs, len(picks), _FRAMES, allow_pickle=allow_pickle, share_rows=True)
    return tensor_rows(decoded, specs), head


def tensor_rows(columns: Mapping[str, Any], specs: Mapping[str, FieldSpec]) -> Columns:
    """The columns of a read with ``share_rows``, in a form in which a put takes shared rows of tensors as tensors, and
    leaves open fields open."""
    ints = [name for name in columns if specs[name].lists == "ints"]
    return Columns({name: _tensor_rows(column, specs[name]) for name, column in columns.items()}, ints=ints)


def _tensor_rows(column: Any, spec: FieldSpec) -> Any:
    if spec.kind != "tensor" or not isinstance(column, NonTensorStack):
        return column
    items = column.tolist()
    if spec.lists != "empty":
        return TensorRows(items)
    return (
        EmptyLists(items) if not any(isinstance(item, torch.Tensor) or item for item in items) else column
    )  # the field was closed meanwhile
