"""Cells as bytes: frames, rows of frames, and the items of object columns.

A frame is a header and the payload: the cell's elements in row-major order, or an object's encoded bytes. The frames of
a column differ in their first dim only, so a whole column is framed and read back without a torch call per cell. A row
is the frames of one sample, joined in one byte string.

An item of the closed set, and no subclass of its types, is encoded as msgpack. With ``allow_pickle`` any other item is
pickled as a whole.
"""

from __future__ import annotations

import copy
import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from dataplane_core.codec.compact import is_narrow, widened
from dataplane_core.codec.tensors import (
    DTYPE_CODES,
    DTYPE_OF_CODE,
    BytesLike,
    byte_view,
    bytes_of,
    host_tensor,
    join_bytes,
    joined,
    offsets_of,
    take_dense,
    take_ragged,
)
from dataplane_core.errors import FrameError, InvalidRequestError, InvalidTypeError
from dataplane_core.spec import Ragged

_Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

MAGIC: Final = b"DPF"
VERSION: Final = 1
KIND_TENSOR: Final = 1
KIND_OBJECT: Final = 2
#: magic, version, kind, dtype code, rank, a zero byte; then ``rank`` little-endian int64 dims; then the payload.
_FIXED: Final = struct.Struct("<3sBBBBB")
HEADER_SIZE: Final = _FIXED.size
#: Where a header has its dtype code.
CODE_AT: Final = 5
MAX_RANK: Final = 64
#: The most bytes of a cell, dims of 0 counted as 1. More would overflow a stride in torch.
MAX_CELL_BYTES: Final = 2**48
#: Cells of more bytes are views of one buffer; smaller ones are byte strings. These take less time each. Also, the
#: garbage collector does not track them, while thousands of new views would start a collection.
_LARGE_CELL: Final = 1024

_ROW_FIXED: Final = struct.Struct("<3sBI")
_ROW_MAGIC: Final = b"DPR"
_ROW_VERSION: Final = 1

#: Lists and dicts may be nested this deep.
MAX_DEPTH: Final = 128

_ATOMS: Final = frozenset({NoneType, bool, float, str, bytes})
_FLAT: Final = _ATOMS | {int}
_EXT_TENSOR: Final = 1
_EXT_PICKLE: Final = 2
#: A str with half of a surrogate pair, as UTF-8 that lets it pass; and a dict with such keys, as its keys and values.
_EXT_STR: Final = 3
_EXT_DICT: Final = 4
_SET: Final = "None, bool, int (64 bit), float, str, bytes, list, dict with str keys, tensor"


# --- one cell ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    kind: int
    dtype: torch.dtype  # uint8 for an object
    shape: tuple[int, ...]  # for an object, the number of its encoded bytes
    size: int  # bytes of the header, which the payload follows


def pack_header(kind: int, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """The header bytes of one cell."""
    return _FIXED.pack(MAGIC, VERSION, kind, DTYPE_CODES[dtype], len(shape), 0) + struct.pack(f"<{len(shape)}q", *shape)


def parse_header(frame: BytesLike) -> Header:
    """Reads and checks one frame's header, and that the frame has the size that it says. Raises `FrameError`."""
    length = len(frame)
    if length < HEADER_SIZE:
        raise FrameError(f"frame of {length} bytes is truncated: a header has at least {HEADER_SIZE}.")
    magic, version, kind, code, rank, zero = _FIXED.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError(f"frame starts with {magic!r}. Expected the magic {MAGIC!r}: this is not a framed cell.")
    if version != VERSION:
        raise FrameError(
            f"frame has format version {version}. Expected {VERSION}.",
            hint="It was written by another version of dataplane-core; use one version on all hosts.",
        )
    dtype = DTYPE_OF_CODE.get(code)
    is_object = kind == KIND_OBJECT and rank == 1 and dtype == torch.uint8
    if dtype is None or rank > MAX_RANK or zero or not (kind == KIND_TENSOR or is_object):
        raise FrameError(f"frame has kind {kind}, dtype code {code}, rank {rank} and flags {zero}, which none has.")
    size = HEADER_SIZE + 8 * rank
    if length < size:
        raise FrameError(f"frame of {length} bytes is truncated: its header of rank {rank} has {size}.")
    shape = struct.unpack_from(f"<{rank}q", frame, HEADER_SIZE)
    if any(dim < 0 for dim in shape) or _extent(dtype, shape) > MAX_CELL_BYTES:
        raise FrameError(f"frame has the shape {shape} of {dtype}. Expected at most {MAX_CELL_BYTES} bytes.")
    payload = dtype.itemsize * math.prod(shape)
    if length != size + payload:
        word = "truncated" if length < size + payload else "too long"
        raise FrameError(
            f"frame of {length} bytes is {word}: {dtype} of shape {shape} takes {payload} bytes after a header of "
            f"{size}."
        )
    return Header(kind, dtype, shape, size)


def _extent(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The bytes of a cell whose dims of 0 are 1."""
    return dtype.itemsize * math.prod(max(dim, 1) for dim in shape)


def check_extent(dtype: torch.dtype, shape: Sequence[int], what: str) -> None:
    """Raises `InvalidTypeError` for cells that are too large for a frame."""
    if len(shape) > MAX_RANK or _extent(dtype, shape) > MAX_CELL_BYTES:
        raise InvalidTypeError(
            f"{what} is {dtype} of shape {tuple(shape)}. Expected at most {MAX_RANK} dims and {MAX_CELL_BYTES} bytes."
        )


def pack_tensor(tensor: torch.Tensor, what: str) -> bytes:
    """One tensor of any rank as a frame. Raises `InvalidTypeError` as `host_tensor` and `check_extent`."""
    plain = host_tensor(tensor, what)
    check_extent(plain.dtype, plain.shape, what)
    return pack_header(KIND_TENSOR, plain.dtype, plain.shape) + byte_view(plain)


def unpack_tensor(frame: BytesLike) -> torch.Tensor:
    """Reads `pack_tensor`'s bytes into new memory. Raises `FrameError` if they are malformed, or hold an object."""
    header = parse_header(frame)
    if header.kind != KIND_TENSOR:
        raise FrameError("frame holds an object. Expected a tensor.")
    return join_bytes([memoryview(frame)[header.size :]], header.dtype, header.shape)


# --- columns ----------------------------------------------------------------------------------------------------------


def frame_rows(rows: Ragged | torch.Tensor, kind: int = KIND_TENSOR) -> list[Any]:
    """Frames plain rows: a dense (N, *cell) tensor, or `Ragged`. Each is a byte string or, if large, a view."""
    count = len(rows)
    data, starts = bytes_of(rows)
    if isinstance(rows, Ragged):
        values, cell = rows.values, (int(rows.lengths.max(initial=0)), *rows.values.shape[1:])
    else:
        values, cell = rows, tuple(rows.shape[1:])
    check_extent(values.dtype, cell, "a cell")
    heads = np.tile(np.frombuffer(pack_header(kind, values.dtype, cell), dtype=np.uint8), (count, 1))
    if isinstance(rows, Ragged):
        heads[:, HEADER_SIZE : HEADER_SIZE + 8] = rows.lengths.astype("<i8")[:, None].view(np.uint8)
    payload, sizes, head_size = data.data, np.diff(starts), heads.shape[1]
    if count and sizes[0] <= _LARGE_CELL and (sizes == sizes[0]).all():  # laid out in one array, which is then cut
        table = np.concatenate((heads, data.reshape(count, -1)), axis=1).tobytes()
        step = len(table) // count
        return [table[start : start + step] for start in range(0, len(table), step)]
    headers = heads.tobytes()
    parts: list[Any] = []
    for row, (start, stop) in enumerate(pairwise(starts.tolist())):
        parts.append(headers[row * head_size : (row + 1) * head_size])
        parts.append(payload[start:stop])
    if len(payload) <= _LARGE_CELL * count:
        return [head + data for head, data in zip(parts[::2], parts[1::2], strict=True)]
    whole = joined(parts, len(headers) + len(payload)).data.toreadonly()
    return [whole[start:stop] for start, stop in pairwise((starts + np.arange(count + 1) * head_size).tolist())]


def unframe_rows(frames: Sequence[BytesLike], dtype: torch.dtype | None = None) -> tuple[int, Ragged | torch.Tensor]:
    """Reads the frames of a column into new memory: their kind, and the rows, of objects as encoded bytes.

    Scalars are one dense (N,) tensor. Frames may differ in the width of their integers only if ``dtype`` says that of
    the field: then the rows have it. Raises `FrameError`.
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
    # all headers must equal row 0's except in the first dim, which must agree with the size of the frame
    same = np.ones(header.size, dtype=bool)
    lengths = np.ones(len(views), dtype=np.int64)
    if header.shape:
        same[HEADER_SIZE : HEADER_SIZE + 8] = False
        lengths = table[:, HEADER_SIZE : HEADER_SIZE + 8].copy().view("<i8").astype(np.int64).reshape(-1)
    trailing = header.shape[1:]
    extent = _extent(header.dtype, trailing)
    step = header.dtype.itemsize * math.prod(trailing)
    if (
        (table[:, same] != table[0, same]).any()
        or (lengths < 0).any()
        or (lengths > MAX_CELL_BYTES // extent).any()
        or (lengths * step != sizes - header.size).any()
        or lengths.sum(dtype=np.float64) > MAX_CELL_BYTES
    ):
        raise _first_misfit(views, header)
    cells = cells or [view[header.size :] for view in views]
    if not header.shape:
        return header.kind, join_bytes(cells, header.dtype, (len(views),))
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))
    return header.kind, Ragged(join_bytes(cells, header.dtype, (int(offsets[-1]), *trailing)), offsets)


def _of_differing_width(views: Sequence[BytesLike], codes: Any, dtype: torch.dtype) -> Ragged | torch.Tensor:
    """The rows of frames whose dtypes, given by their codes, differ."""
    parts: list[Any] = []
    order: list[int] = []
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code).tolist()
        try:
            kind, column = unframe_rows([views[row] for row in rows])
        except FrameError as error:
            if error.row is not None:
                error.message = error.message.removeprefix(f"row {error.row}: ")
                raise _in_row(error, rows[error.row]) from None
            raise
        values = column.values if isinstance(column, Ragged) else column
        if kind != KIND_TENSOR or not (values.dtype == dtype or is_narrow(values.dtype, dtype)):
            raise FrameError(f"frames of {values.dtype} do not fit a field of {dtype}.", row=rows[0])
        wide = widened(values, dtype)
        parts.append(Ragged(wide, column.offsets) if isinstance(column, Ragged) else wide)
        order += rows
    picks = np.argsort(order).tolist()
    if all(isinstance(part, Ragged) and part.values.shape[1:] == parts[0].values.shape[1:] for part in parts):
        lengths = torch.cat([part.offsets.diff() for part in parts])
        return take_ragged(Ragged(torch.cat([part.values for part in parts]), offsets_of(lengths)), picks)
    if any(isinstance(part, Ragged) for part in parts):
        raise FrameError("frames differ in more than the width of their integers: only the first dim may differ.")
    return take_dense(torch.cat(parts), picks)


def _flat(frame: BytesLike) -> BytesLike:
    if type(frame) is bytes and len(frame) <= _LARGE_CELL:
        return frame
    view = frame if type(frame) is memoryview else memoryview(frame)
    if view.ndim == 1 and view.itemsize == 1 and view.contiguous:
        return view
    return memoryview(view.tobytes())


def _form_of(header: Header) -> Any:  # what the frames of a column agree in
    return header.kind, header.dtype, len(header.shape), header.shape[1:]


def _in_row(error: FrameError, row: int) -> FrameError:
    return FrameError(f"row {row}: {error.message}", row=row, hint=error.hint)


def _first_misfit(views: Sequence[BytesLike], first: Header) -> FrameError:
    """The error for the first frame that is malformed or does not fit row 0."""
    for row, view in enumerate(views):
        try:
            header = parse_header(view)
        except FrameError as error:
            return _in_row(error, row)
        if _form_of(header) != _form_of(first):
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
    """`join_row` of the rows of tables, each of one column or more of equally many frames: the rows end to end, in
    recycled memory if they are large, and their offsets in bytes, one more than there are rows."""
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
    """The frames of each row that `join_row` made: large ones as views of its memory, small ones as byte strings.

    ``zip(*split_rows(rows))`` gives columns. A row that is damaged raises `FrameError` with its number.
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
        lengths = struct.unpack_from(f"<{count}q", view, _ROW_FIXED.size) if end <= size else ()
        if end > size or min(lengths, default=0) < 0 or end + sum(lengths) != size:
            raise FrameError(f"its {size} bytes are not those of {count} frames and their index.", row=number)
        frames: list[BytesLike] = []
        for length in lengths:
            frame = view[end : end + length]
            frames.append(frame if length > _LARGE_CELL else bytes(frame))
            end += length
        split.append(frames)
    return split


# --- items of object columns ------------------------------------------------------------------------------------------


class _OutsideError(Exception):
    """An item, or a value inside it, is outside the closed set, for a reason."""

    path = ""


def _check(item: Any, depth: int = 0) -> None:
    kind = type(item)
    if kind in _ATOMS:
        return
    if kind is int:
        if not -(2**63) <= item < 2**63:
            raise _OutsideError("an int that does not fit in 64 bits (signed)")
    elif kind is list or kind is dict:
        if depth == MAX_DEPTH:
            raise _OutsideError(f"a {kind.__name__} nested more than {MAX_DEPTH} deep, or inside itself")
        if kind is dict and not all(type(key) is str for key in item):
            strange = next(key for key in item if type(key) is not str)
            raise _OutsideError(f"a dict with a key of type {type(strange).__name__}")
        values = item if kind is list else item.values()
        kinds = set(map(type, values))
        if kinds <= _ATOMS or (kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63):
            return
        for where, value in enumerate(item) if kind is list else item.items():
            try:
                _check(value, depth + 1)
            except _OutsideError as error:
                error.path = f"[{where!r}]{error.path}"
                raise
    elif isinstance(item, torch.Tensor):
        _check_tensor(item)
    else:
        raise _OutsideError(f"of type {_name(kind)}")


def _check_tensor(item: torch.Tensor) -> None:
    if item.is_nested:
        raise _OutsideError("a nested tensor")
    plain = type(item) is torch.Tensor and item.dtype in DTYPE_CODES and item.layout == torch.strided
    if plain and item.device.type == "cpu":
        return
    try:
        host_tensor(item[:0] if item.dim() and item.layout == torch.strided else item, "it")
    except InvalidTypeError as error:
        raise _OutsideError(f"a tensor that is not carried ({error.message})") from error


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_items(items: Sequence[Any], field: str, *, allow_pickle: bool = False) -> None:
    """Refuses items outside the closed set with `InvalidTypeError`, unless they may be pickled."""
    if allow_pickle or set(map(type, items)) <= _ATOMS:
        return
    for row, item in enumerate(items):
        try:
            _check(item)
        except _OutsideError as error:
            raise _refusal(field, row, error) from None


def _refusal(field: str, row: int | None, error: _OutsideError) -> InvalidTypeError:
    path = error.path if len(error.path) <= 60 else f"{error.path[:40]}...{error.path[-12:]}"
    place = f" at {path}" if path else ""
    return InvalidTypeError(
        f"put_samples refused: object field '{field}'{'' if row is None else f', row {row}'}{place}: the item is "
        f"{error}. Expected {_SET}.",
        hint="Turn numpy values and tuples into Python numbers and lists, images into tensors, or set allow_pickle: "
        "true in the config.",
    )


# --- copies of items --------------------------------------------------------------------------------------------------


def plain(item: Any) -> Any:
    """An item with Python numbers for numpy's, and lists for tuples; also inside of dicts and lists."""
    kind = type(item)
    if kind in _FLAT:
        return item
    if isinstance(item, np.generic):
        return item.item()
    if kind is dict:
        return {key: plain(value) for key, value in item.items()}
    return [plain(value) for value in item] if kind in (list, tuple) else item


def copy_item(item: Any) -> Any:
    """A deep copy that shares no memory with ``item``. Tensors become plain, contiguous, detached host tensors."""
    kind = type(item)
    if kind in _FLAT:
        return item
    if kind is list:
        return item.copy() if set(map(type, item)) <= _FLAT else [copy_item(value) for value in item]
    if kind is dict:
        return item.copy() if set(map(type, item.values())) <= _FLAT else {k: copy_item(v) for k, v in item.items()}
    if isinstance(item, torch.Tensor) and not item.is_nested:
        plain = host_tensor(item, "a tensor in an object column")
        return plain.clone() if plain.data_ptr() == item.data_ptr() else plain
    return copy.deepcopy(item)


# --- items as bytes ---------------------------------------------------------------------------------------------------


def _pack_tensor(value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_EXT_TENSOR, pack_tensor(value, "a tensor in an object column"))


_pack: Final = msgspec.msgpack.Encoder(enc_hook=_pack_tensor).encode


def _packed(item: Any) -> bytes:
    try:
        return _pack(item)
    except UnicodeEncodeError:
        return _pack(_escaped(item))


def _escaped(item: Any) -> Any:
    """An item in which msgspec, which refuses halves of surrogate pairs, finds none."""
    if type(item) is str:
        has_half = any("\ud800" <= letter <= "\udfff" for letter in item)
        return msgspec.msgpack.Ext(_EXT_STR, item.encode(errors="surrogatepass")) if has_half else item
    if type(item) is list:
        return [_escaped(value) for value in item]
    if type(item) is dict:
        return msgspec.msgpack.Ext(_EXT_DICT, _pack([_escaped(part) for pair in item.items() for part in pair]))
    return item


def encode_items(items: Sequence[Any], field: str, *, allow_pickle: bool = False) -> list[bytes]:
    """One byte string per item, never empty. Refuses items outside the closed set with `InvalidTypeError`, or with
    ``allow_pickle`` those that cannot be pickled."""
    encoded = []
    for row, item in enumerate(items):
        try:
            _check(item)
            encoded.append(_packed(item))
        except _OutsideError as error:
            if not allow_pickle:
                raise _refusal(field, row, error) from None
            encoded.append(_pack(msgspec.msgpack.Ext(_EXT_PICKLE, _pickled(item, field, row))))
        except (ValueError, OverflowError) as error:  # msgpack's own limit is 4 GiB a value
            raise InvalidTypeError(f"put_samples refused: object field '{field}', row {row}: {error}.") from error
    return encoded


def _pickled(item: Any, field: str, row: int) -> bytes:
    try:
        return pickle.dumps(item, protocol=5)
    except Exception as error:
        raise InvalidTypeError(
            f"put_samples refused: object field '{field}', row {row}: an item of type {_name(type(item))} cannot be "
            f"pickled: {error}."
        ) from error


def encode_item(item: Any, field: str = "", *, allow_pickle: bool = False) -> bytes:
    """One item as bytes; see `encode_items`."""
    return encode_items([item], field, allow_pickle=allow_pickle)[0]


def decode_items(encoded: Sequence[BytesLike], *, allow_pickle: bool = False) -> list[Any]:
    """Reads `encode_items`' bytes. The items share no memory with them. Raises `FrameError` if they are malformed, or
    pickled without ``allow_pickle``."""
    unpack = _unpack_with_pickle if allow_pickle else _unpack
    items = []
    for row, data in enumerate(encoded):
        try:
            item = unpack(data)
            if type(item) is not _Pickled:
                _check(item)
        except FrameError as error:
            error.message, error.row = f"object in row {row}: {error.message}", row
            raise
        except Exception as error:
            raise FrameError(
                f"object in row {row}, {len(data)} bytes, is malformed: {str(error) or type(error).__name__}.", row=row
            ) from error
        items.append(item.item if type(item) is _Pickled else item)
    return items


def decode_item(data: BytesLike, *, allow_pickle: bool = False) -> Any:
    """Reads `encode_item`'s bytes; see `decode_items`."""
    return decode_items([data], allow_pickle=allow_pickle)[0]


class _Pickled(NamedTuple):
    item: Any  # may be outside the closed set


def _ext(code: int, data: memoryview) -> Any:
    if code == _EXT_TENSOR:
        return unpack_tensor(data)
    if code == _EXT_STR:
        return str(data, "utf-8", "surrogatepass")
    if code == _EXT_DICT:
        parts = _unpack(data)
        return dict(zip(parts[::2], parts[1::2], strict=True))
    if code == _EXT_PICKLE:
        raise FrameError(
            "the item is pickled, and this client does not unpickle.",
            hint="Set allow_pickle: true in the config, if every writer is to be trusted.",
        )
    raise FrameError(f"extension type {code} is not known")


def _ext_with_pickle(code: int, data: memoryview) -> Any:
    return _Pickled(pickle.loads(data)) if code == _EXT_PICKLE else _ext(code, data)


_unpack: Final = msgspec.msgpack.Decoder(ext_hook=_ext).decode
_unpack_with_pickle: Final = msgspec.msgpack.Decoder(ext_hook=_ext_with_pickle).decode
