"""Frames: cells as bytes with a versioned header. Rows: the frames of one sample joined in one byte string.

A frame is ``DPF``, a version, the kind (tensor or object), a dtype code, the rank, a zero byte, the shape as
little-endian int64, and the payload: the cell's elements in row-major order, or an object's encoded bytes. The frames
of a column differ in their first dim only, so a whole column is framed and read back without a torch call per cell.

Shape legend: ``N`` rows, ``C`` columns, ``L`` a row's own length.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from dataplane_core.codec.header import (
    CODE_AT,
    HEADER_SIZE,
    KIND_TENSOR,
    MAX_CELL_BYTES,
    Header,
    check_extent,
    pack_header,
    parse_header,
)
from dataplane_core.codec.narrow import is_narrow
from dataplane_core.codec.objects import encode_items
from dataplane_core.codec.pieces import Piece, merge_pieces
from dataplane_core.codec.tensors import (
    Ragged,
    byte_view,
    from_bytes,
    join_bytes,
    joined,
    offsets_of,
    ragged_of_dense,
    ragged_of_nested,
)
from dataplane_core.errors import FrameError, InvalidRequestError
from dataplane_core.packed import BytesLike

_Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

#: Cells of more bytes are views of one buffer; smaller ones are byte strings. These take less time each. Also, the
#: garbage collector does not track them, while thousands of new views would start a collection.
_LARGE_CELL: Final = 1024

_ROW_FIXED: Final = struct.Struct("<3sBI")
_ROW_MAGIC: Final = b"DPR"
_ROW_VERSION: Final = 1


# --- columns ----------------------------------------------------------------------------------------------------------


def frame_ragged(column: Ragged | torch.Tensor, kind: int = KIND_TENSOR) -> list[bytes | bytearray | memoryview]:
    """Frames plain rows: a dense (N, *cell) tensor, or rows joined end to end."""
    if isinstance(column, Ragged):
        dense = column.dense()
        if dense is None:
            return _frame_unequal(column, kind)
        column = dense
    num_rows, cell = column.shape[0], column.shape[1:]
    check_extent(column.dtype, cell, "a cell")
    header = pack_header(kind, column.dtype, cell)
    if num_rows == 0:
        return []
    payload = byte_view(column)
    size = len(payload) // num_rows
    if size > _LARGE_CELL:  # large cells are joined; small ones are laid out in one array, which is then cut
        starts = np.arange(num_rows + 1, dtype=np.int64) * size
        return _interleave(header * num_rows, len(header), payload, starts)
    table = np.empty((num_rows, len(header) + size), dtype=np.uint8)
    table[:, : len(header)] = np.frombuffer(header, dtype=np.uint8)
    table[:, len(header) :] = np.frombuffer(payload, dtype=np.uint8).reshape(num_rows, size)
    data, step = table.tobytes(), table.shape[1]
    return [data[start : start + step] for start in range(0, len(data), step)]


def _frame_unequal(column: Ragged, kind: int) -> list[bytes | bytearray | memoryview]:
    lengths = column.lengths
    trailing = column.values.shape[1:]
    dtype = column.values.dtype
    check_extent(dtype, (int(lengths.max()), *trailing), "a cell")
    header = pack_header(kind, dtype, (0, *trailing))
    table = np.empty((len(lengths), len(header)), dtype=np.uint8)
    table[:] = np.frombuffer(header, dtype=np.uint8)
    table[:, HEADER_SIZE : HEADER_SIZE + 8] = lengths.astype("<i8")[:, None].view(np.uint8)
    starts = column.offsets.numpy() * (dtype.itemsize * trailing.numel())
    return _interleave(table.tobytes(), len(header), byte_view(column.values), starts)


def _interleave(headers: bytes, header_size: int, payload: memoryview, starts: _Int64) -> list[Any]:
    """Row i is header i followed by ``payload[starts[i] : starts[i + 1]]``."""
    cuts = starts.tolist()
    if len(payload) <= _LARGE_CELL * (len(cuts) - 1):
        return [
            headers[row * header_size : (row + 1) * header_size] + payload[start:stop]
            for row, (start, stop) in enumerate(pairwise(cuts))
        ]
    parts: list[BytesLike] = []
    for row, (start, stop) in enumerate(pairwise(cuts)):
        parts.append(headers[row * header_size : (row + 1) * header_size])
        parts.append(payload[start:stop])
    data = joined(parts, len(headers) + len(payload)).data.toreadonly()
    cuts = (starts + np.arange(len(starts), dtype=np.int64) * header_size).tolist()
    return [data[start:stop] for start, stop in pairwise(cuts)]


def ragged_of_items(items: Sequence[Any], name: str, *, allow_pickle: bool = False) -> Ragged:
    """Encodes items as uint8 rows, joined end to end.

    Raises:
        InvalidTypeError: An item is outside the closed set.
    """
    encoded = encode_items(items, name, allow_pickle=allow_pickle)
    data = bytearray().join(encoded)
    lengths = torch.tensor([len(each) for each in encoded], dtype=torch.int64, device="cpu")
    return Ragged(from_bytes(data, torch.uint8, (len(data),)), offsets_of(lengths))


def unframe_ragged(frames: Sequence[BytesLike], dtype: torch.dtype | None = None) -> tuple[int, Ragged | torch.Tensor]:
    """Reads frames into new memory: their kind, and the rows joined end to end.

    Scalars are returned as a dense (N,) tensor, objects as their encoded bytes.

    Args:
        frames: One per row, of one kind, dtype, rank and trailing shape.
        dtype: The dtype of the field. Its frames may be narrower, and differ in that: then the rows are returned in
            this dtype.

    Raises:
        FrameError: There is no frame, one is malformed, or the frames do not fit one column.
    """
    views: list[BytesLike] = [_flat(frame) for frame in frames]
    if not views:
        raise FrameError("a column has no frames. Expected one per row.")
    try:
        header = parse_header(views[0])
    except FrameError as error:
        raise _in_row(error, 0) from None
    sizes = np.fromiter(map(len, views), dtype=np.int64, count=len(views))
    if (sizes < header.size).any():
        raise _first_misfit(views, header)
    equal = bool((sizes == sizes[0]).all())
    cells: list[BytesLike] = []
    if equal and sizes[0] <= _LARGE_CELL:  # one array takes less time than slices of each frame
        whole = np.frombuffer(b"".join(views), dtype=np.uint8).reshape(len(views), -1)
        table = whole[:, : header.size]
        cells.append(whole[:, header.size :].tobytes())
    else:
        table = np.frombuffer(b"".join([view[: header.size] for view in views]), dtype=np.uint8)
        table = table.reshape(len(views), header.size)
    if dtype is not None and (table[:, CODE_AT] != table[0, CODE_AT]).any():
        return header.kind, _of_differing_width(views, table[:, CODE_AT], dtype)
    if len(header.shape) == 0:
        if (table != table[0]).any() or not equal:
            raise _first_misfit(views, header)
        cells = cells or [view[header.size :] for view in views]
        return header.kind, join_bytes(cells, header.dtype, (len(views),))
    # all headers must equal row 0's except in the first dim, which must agree with the size of the frame
    same = np.ones(header.size, dtype=bool)
    same[HEADER_SIZE : HEADER_SIZE + 8] = False
    lengths = table[:, HEADER_SIZE : HEADER_SIZE + 8].copy().view("<i8").astype(np.int64).reshape(-1)
    trailing = header.shape[1:]
    extent = header.dtype.itemsize * math.prod(max(dim, 1) for dim in trailing)
    step = header.dtype.itemsize * math.prod(trailing)
    if (
        (table[:, same] != table[0, same]).any()
        or (lengths < 0).any()
        or (lengths > MAX_CELL_BYTES // extent).any()
        or (lengths * step != sizes - header.size).any()
        or lengths.sum(dtype=np.float64) > MAX_CELL_BYTES
    ):
        raise _first_misfit(views, header)
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))
    cells = cells or [view[header.size :] for view in views]
    return header.kind, Ragged(join_bytes(cells, header.dtype, (int(offsets[-1]), *trailing)), offsets)


def _of_differing_width(views: Sequence[BytesLike], codes: Any, dtype: torch.dtype) -> Ragged | torch.Tensor:
    """The rows of frames whose dtypes, given by their codes, differ."""
    pieces: list[Piece] = []
    trailings = []
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code).tolist()
        try:
            kind, column = unframe_ragged([views[row] for row in rows])
        except FrameError as error:
            if error.row is not None:
                error.message = error.message.removeprefix(f"row {error.row}: ")
                raise _in_row(error, rows[error.row]) from None
            raise
        values = column.values if isinstance(column, Ragged) else column
        if kind != KIND_TENSOR or not (values.dtype == dtype or is_narrow(values.dtype, dtype)):
            raise FrameError(f"frames of {values.dtype} do not fit a field of {dtype}.", row=rows[0])
        pieces.append(Piece(column, range(len(rows)), rows))
        trailings.append(values.shape[1:])
    if len({(type(column), trailing) for (column, _, _), trailing in zip(pieces, trailings, strict=True)}) > 1:
        raise FrameError("frames differ in more than the width of their integers: only the first dim may differ.")
    merged = merge_pieces(pieces, dtype=dtype)
    assert isinstance(merged, torch.Tensor)
    if merged.dim() == 1:
        return merged
    return ragged_of_nested(merged, "a column") if merged.is_nested else ragged_of_dense(merged)


def _flat(frame: BytesLike) -> BytesLike:
    if type(frame) is bytes and len(frame) <= _LARGE_CELL:
        return frame
    view = frame if type(frame) is memoryview else memoryview(frame)
    if view.ndim == 1 and view.itemsize == 1 and view.contiguous:
        return view
    return memoryview(view.tobytes())


def _in_row(error: FrameError, row: int) -> FrameError:
    return FrameError(f"row {row}: {error.message}", row=row, hint=error.hint)


def _first_misfit(views: Sequence[BytesLike], first: Header) -> FrameError:
    """The error for the first frame that is malformed or does not fit row 0."""
    for row, view in enumerate(views):
        try:
            header = parse_header(view)
        except FrameError as error:
            return _in_row(error, row)
        told = (header.kind, header.dtype, len(header.shape), header.shape[1:])
        if told != (first.kind, first.dtype, len(first.shape), first.shape[1:]):
            return FrameError(
                f"row {row}: a frame of kind {header.kind}, {header.dtype} and shape {header.shape} does not fit row 0 "
                f"of kind {first.kind}, {first.dtype} and shape {first.shape}: only the first dim may differ.",
                row=row,
            )
    return FrameError(f"{len(views)} frames say that they hold more than {MAX_CELL_BYTES} elements together.")


# --- several cells of one sample --------------------------------------------------------------------------------------


def join_row(frames: Sequence[BytesLike]) -> bytes:
    """The frames of one sample in one byte string: ``DPR``, a version, their count, their sizes, then the frames."""
    index = _ROW_FIXED.pack(_ROW_MAGIC, _ROW_VERSION, len(frames))
    return b"".join([index, struct.pack(f"<{len(frames)}q", *map(len, frames)), *frames])


def join_rows(tables: Sequence[Sequence[Sequence[BytesLike]]]) -> tuple[memoryview, _Int64]:
    """`join_row` for many rows at once, for engines where each stored value has a cost.

    Args:
        tables: Tables of C columns of N frames each. C and N may differ from table to table.

    Returns:
        The rows of all tables end to end, and their int64 offsets in bytes, one more than there are rows. Large rows
        are in memory that is used again once nobody holds it.

    Raises:
        InvalidRequestError: The columns of a table differ in length, or it has none.
    """
    parts: list[BytesLike] = []
    sizes = []
    for columns in tables:
        counts = {len(column) for column in columns}
        if len(counts) != 1:
            raise InvalidRequestError(f"join_rows: columns must have one number of rows, got {sorted(counts)}.")
        index = np.empty((counts.pop(), 1 + len(columns)), dtype="<i8")
        fixed = _ROW_FIXED.pack(_ROW_MAGIC, _ROW_VERSION, len(columns))
        index[:, 0] = np.frombuffer(fixed, dtype="<i8")
        for position, column in enumerate(columns):
            index[:, 1 + position] = np.fromiter(map(len, column), dtype=np.int64, count=len(column))
        step = index.shape[1] * 8
        heads = index.tobytes()
        starts = [heads[at : at + step] for at in range(0, len(heads), step)]
        parts += [part for row in zip(starts, *columns, strict=True) for part in row]
        sizes.append(index[:, 1:].sum(axis=1) + step)
    offsets = np.zeros(1 + sum(map(len, sizes)), dtype=np.int64)
    np.cumsum(np.concatenate(sizes), out=offsets[1:])
    return joined(parts, int(offsets[-1])).data, offsets


def split_rows(rows: Sequence[BytesLike]) -> list[list[BytesLike]]:
    """The frames of each row: large ones as views of the row's memory, small ones as byte strings.

    ``zip(*split_rows(rows))`` gives columns.

    Args:
        rows: What `join_row` returned, or slices of `join_rows`' buffer: bytes-like or uint8 arrays.

    Raises:
        FrameError: A row has a wrong magic or version, is truncated, or its sizes do not add up. With its number.
    """
    split = []
    for number, row in enumerate(rows):
        view = memoryview(_flat(row))
        size = len(view)
        if size < _ROW_FIXED.size:
            raise FrameError(f"its {size} bytes are truncated: the index starts with {_ROW_FIXED.size}.", row=number)
        magic, version, count = _ROW_FIXED.unpack_from(view)
        if magic != _ROW_MAGIC or version != _ROW_VERSION:
            raise FrameError(
                f"it starts with {magic!r}, version {version}. Expected {_ROW_MAGIC!r}, {_ROW_VERSION}.", row=number
            )
        end = _ROW_FIXED.size + 8 * count
        if end > size:
            raise FrameError(f"its {size} bytes are truncated: the index of {count} frames takes {end}.", row=number)
        frames: list[BytesLike] = []
        for length in struct.unpack_from(f"<{count}q", view, _ROW_FIXED.size):
            if not 0 <= length <= size - end:
                raise FrameError(f"its {size} bytes hold no frame of {length} bytes at byte {end}.", row=number)
            frame = view[end : end + length]
            frames.append(frame if length > _LARGE_CELL else bytes(frame))
            end += length
        if end != size:
            raise FrameError(f"its {size} bytes are too many: the frames end at byte {end}.", row=number)
        split.append(frames)
    return split
