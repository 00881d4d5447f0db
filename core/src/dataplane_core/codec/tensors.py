"""Plain tensors for the codec: copies to host memory, rows joined end to end, tensors as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dataplane_core.errors import InvalidTypeError, SchemaMismatchError
from dataplane_core.host_memory import recycled_bytes
from dataplane_core.spec import Ragged

BytesLike: TypeAlias = bytes | bytearray | memoryview
ByteArray: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: The code of each dtype in a frame's header. Part of the format: codes are never reused.
DTYPE_CODES: Final[dict[torch.dtype, int]] = {
    torch.bool: 1,
    torch.uint8: 2,
    torch.uint16: 3,
    torch.uint32: 4,
    torch.uint64: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.float16: 10,
    torch.bfloat16: 11,
    torch.float32: 12,
    torch.float64: 13,
    torch.complex32: 14,
    torch.complex64: 15,
    torch.complex128: 16,
    torch.float8_e4m3fn: 17,
    torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2: 19,
    torch.float8_e5m2fnuz: 20,
    torch.float8_e8m0fnu: 21,
}
DTYPE_OF_CODE: Final = {code: dtype for dtype, code in DTYPE_CODES.items()}
#: Every dtype that the contract promises to carry bit for bit.
ALL_DTYPES: Final = frozenset(DTYPE_CODES)

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Parts of at least so many bytes on average are copied one by one.
_LARGE_PART: Final = 1024


# --- from what callers have to plain tensors --------------------------------------------------------------------------


def is_jagged(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a ``torch.jagged`` nested tensor."""
    return isinstance(tensor, NestedTensor)


def host_tensor(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor as plain, contiguous, detached host memory. Aliases ``tensor`` if it is that already.

    Raises `InvalidTypeError`, which begins with ``what``, for one that has no such form or whose dtype is not carried.
    """
    if tensor.is_nested:
        raise InvalidTypeError(f"{what} is a nested tensor. Expected a plain tensor for each row.")
    if tensor.dtype not in DTYPE_CODES:
        kind = "a quantised tensor" if tensor.is_quantized else "a tensor"
        raise InvalidTypeError(
            f"{what} is {kind} of dtype {tensor.dtype}, which is not carried. Expected one of torch's integer, "
            "floating, bool, complex, bfloat16 or float8 dtypes."
        )
    if tensor.device.type == "meta":
        raise InvalidTypeError(f"{what} is a meta-device tensor, which has no data. Expected a tensor with storage.")
    if tensor.layout != torch.strided:
        raise InvalidTypeError(
            f"{what} is a sparse tensor (layout {tensor.layout}). Expected a dense or nested tensor; call .to_dense()."
        )
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        if _is_wrapper(tensor) or tensor.untyped_storage().device.type == "meta":
            raise InvalidTypeError(
                f"{what} is a {type(tensor).__name__}, which wraps other tensors. Expected a plain tensor; for a "
                "DTensor call .full_tensor() or .to_local()."
            )
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if 1 in tensor.shape or 0 in tensor.shape:  # such dims may have unusual strides: a view of another dtype then fails
        strides = _strides(tensor.shape)
        return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)
    return tensor


def _is_wrapper(tensor: object) -> bool:  # the type checker takes torch's own answer for a contradiction
    return is_traceable_wrapper_subclass(tensor)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def plain_rows(column: torch.Tensor, what: str) -> Ragged | torch.Tensor:
    """The rows of a tensor of any layout, by `ragged_of_nested` or `host_tensor`."""
    return ragged_of_nested(column, what) if column.is_nested else host_tensor(column, what)


def jagged_parts(nested: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """A jagged tensor's values, offsets, lengths (None: no gaps between rows), and the ragged dim of the values.

    Reads private attributes where torch's public methods take 37 us, since they go through its dispatcher.
    """
    parts: Any = nested
    return parts._values, parts.offsets(), parts.lengths(), parts._ragged_idx - 1


def check_ragged(rows: Ragged, what: str) -> Ragged:
    """The rows as plain host memory, by `host_tensor`. Refuses offsets that are not those of the values."""
    values = host_tensor(rows.values, what)
    offsets = host_tensor(rows.offsets, what)
    if offsets.dtype != torch.int64 or not _fit(offsets, values):
        raise InvalidTypeError(
            f"{what} has ragged rows whose offsets are not int64, ascending, and from 0 to the length of their values, "
            f"{tuple(values.shape)}."
        )
    return Ragged(values, offsets)


def _fit(offsets: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether these are the offsets of rows that lie end to end and are all of the values."""
    cuts = offsets.numpy()
    if cuts.ndim != 1 or not len(cuts) or not values.dim():
        return False
    return bool(cuts[0] == 0 and cuts[-1] == len(values) and (cuts[1:] >= cuts[:-1]).all())


def ragged_of_nested(nested: torch.Tensor, what: str) -> Ragged | torch.Tensor:
    """The rows of a nested tensor of either layout. Raises, and returns scalars, as `ragged_of_rows`."""
    if not is_jagged(nested):
        return ragged_of_rows(list(nested.detach().unbind()), what)
    values, offsets, lengths, dim = jagged_parts(nested)
    offsets = offsets.detach().to(device="cpu", dtype=torch.int64).contiguous()
    if dim == 0 and lengths is None and _fit(offsets, values):  # the usual case
        return Ragged(host_tensor(values, what), offsets)
    starts = offsets[:-1]
    sizes = offsets.diff() if lengths is None else lengths.detach().to(device="cpu", dtype=torch.int64)
    if dim != 0:
        rows = [
            values.detach().narrow(dim, start, size)
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
        return ragged_of_rows(rows, what)
    values = host_tensor(values, what)
    ends = starts + sizes
    if len(starts) and (int(starts.min()) < 0 or int(sizes.min()) < 0 or int(ends.max()) > len(values)):
        raise InvalidTypeError(f"{what} is a nested tensor whose offsets do not lie within its {len(values)} values.")
    return gather_rows(values, starts, offsets_of(sizes))


def ragged_of_rows(rows: Sequence[torch.Tensor], what: str) -> Ragged | torch.Tensor:
    """Rows, of which there is one at least, joined end to end. Dense (N,) if they are scalars.

    Raises `SchemaMismatchError` if they differ in dtype, rank, or a dim other than their first, and as `host_tensor`.
    """
    plain: Sequence[torch.Tensor] = rows
    if {(type(row), row.device.type, row.layout, row.is_nested) for row in rows} != _PLAIN:
        plain = [host_tensor(row, what) for row in rows]
    first = plain[0]
    forms = [(row.dtype, row.dim(), row.shape[1:]) for row in plain]
    if len(set(forms)) > 1:
        number = next(number for number, form in enumerate(forms) if form != forms[0])
        raise SchemaMismatchError(
            f"{what} has rows that do not fit one column: row 0 is {_describe(first)}, row {number} is "
            f"{_describe(plain[number])}. Expected one dtype and rank; only the first dim of a row may differ."
        )
    host_tensor(first, what)  # refuses dtypes that are not carried
    with torch.no_grad():
        if first.dim() == 0:
            return host_tensor(torch.stack(list(plain)), what)
        offsets = offsets_of([row.shape[0] for row in plain])
        joined = empty_tensor((int(offsets[-1]), *first.shape[1:]), first.dtype)
        torch.cat(list(plain), out=joined)
    return Ragged(joined, offsets)


_PLAIN: Final = {(torch.Tensor, "cpu", torch.strided, False)}


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


# --- rows end to end --------------------------------------------------------------------------------------------------


def offsets_of(lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """The (N + 1,) int64 offsets of rows of these lengths."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.as_tensor(lengths, dtype=torch.int64, device="cpu"), 0, out=offsets[1:])
    return offsets


def as_ragged(rows: Ragged | torch.Tensor) -> Ragged:
    """Rows end to end, of a dense tensor (N, L, *trailing) too. Aliases it if it is contiguous."""
    if isinstance(rows, Ragged):
        return rows
    return Ragged(rows.flatten(0, 1), torch.arange(len(rows) + 1, device="cpu") * rows.shape[1])


def gather_rows(values: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor) -> Ragged:
    """Copies rows from ``values`` (T, *trailing), which are contiguous, and joins them end to end in new memory.

    ``starts`` (N,) int64: where each row starts in ``values``. ``offsets`` (N + 1,): where they lie in the result.
    """
    step = values.dtype.itemsize * math.prod(values.shape[1:])
    cuts = map(slice, (starts * step).tolist(), ((starts + offsets.diff()) * step).tolist())
    parts = list(map(byte_view(values).__getitem__, cuts))
    return Ragged(join_bytes(parts, values.dtype, (int(offsets[-1]), *values.shape[1:])), offsets)


def take_ragged(rows: Ragged, positions: Sequence[int]) -> Ragged:
    """The rows at ``positions``, in that order, in new memory."""
    picks = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
    lengths = rows.offsets.diff().index_select(0, picks)
    return gather_rows(rows.values, rows.offsets.index_select(0, picks), offsets_of(lengths))


def take_dense(rows: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """As `take_ragged`, for rows of one shape."""
    return carrier(rows).index_select(0, torch.as_tensor(positions, dtype=torch.int64, device="cpu")).view(rows.dtype)


def pad_rows(rows: Ragged, width: int, value: float | bool | complex = 0) -> torch.Tensor:
    """Right-pads rows with ``value`` to (N, width, *trailing). New memory. No row may be longer than ``width``."""
    dtype, size = rows.values.dtype, width * rows.itemsize
    cuts = (rows.offsets * rows.itemsize).tolist()
    gap = size - min((end - begin for begin, end in pairwise(cuts)), default=size)
    if value == 0:
        filler = memoryview(bytes(gap))
    else:
        filler = byte_view(torch.full((gap // dtype.itemsize,), value, dtype=dtype, device="cpu"))
    source = byte_view(rows.values)
    parts = []
    for begin, end in pairwise(cuts):
        parts.append(source[begin:end])
        parts.append(filler[: size - (end - begin)])
    return join_bytes(parts, dtype, (len(rows), width, *rows.values.shape[1:]))


def bounds_of(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[int, int]:
    """The smallest and the largest length; zeros if there are no rows."""
    return (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)


def to_nested(ragged: Ragged, bounds: tuple[int, int] | None = None) -> torch.Tensor:
    """One jagged nested tensor with cached min and max length. Aliases ``ragged``.

    Calls the private constructor, as torch's own operations do: `torch.nested.nested_tensor_from_jagged` takes four
    times as long, because it makes a view that autograd tracks. ``bounds``: those of the lengths, if known already.
    """
    # a nested tensor caches a length as the size of an empty tensor
    lengths = zip(("min_seqlen", "max_seqlen"), bounds_of(ragged.lengths) if bounds is None else bounds, strict=True)
    kept = {name: torch.empty(length, 0, dtype=torch.float32, device="cpu") for name, length in lengths}
    return NestedTensor(ragged.values, ragged.offsets, _metadata_cache=kept)


def dense_or_ragged(rows: Ragged | torch.Tensor) -> torch.Tensor | Ragged:
    """Rows as a column: a dense tensor, which aliases them, if all have the same shape."""
    dense = rows.dense() if isinstance(rows, Ragged) else rows
    return rows if dense is None else dense


def dense_or_jagged(rows: Ragged | torch.Tensor) -> torch.Tensor:
    """Rows as one tensor, which aliases them: dense if all have the same shape, else jagged."""
    column = dense_or_ragged(rows)
    return to_nested(column) if isinstance(column, Ragged) else column


def carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an integer dtype of the same size. float8 and uint16 lack some indexing operators."""
    dtype = _CARRIERS.get(tensor.dtype.itemsize)
    return tensor if dtype is None else tensor.view(dtype)


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of `recycled_bytes`, with undefined content."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.from_numpy(recycled_bytes(size)).view(dtype).view(tuple(shape))


# --- bytes ------------------------------------------------------------------------------------------------------------


def byte_array(tensor: torch.Tensor) -> ByteArray:
    """The bytes of a contiguous host tensor, without a copy."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    array: ByteArray = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def bytes_of(rows: Ragged | torch.Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The bytes of all rows, and where each begins, and the last one ends."""
    if isinstance(rows, Ragged):
        return byte_array(rows.values), rows.offsets.numpy() * rows.itemsize
    data = byte_array(rows)
    return data, np.arange(len(rows) + 1, dtype=np.int64) * (len(data) // max(len(rows), 1))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """`byte_array` as a memoryview."""
    return byte_array(tensor).data


def joined(parts: Sequence[BytesLike], size_bytes: int) -> ByteArray:
    """Bytes end to end, in new memory. ``size_bytes`` is their size.

    Large parts are copied one by one into memory of `recycled_bytes`, which seldom has page faults: with them, a join
    of 40 MB takes six times as long. ``bytearray.join`` takes less time for each of many small parts.
    """
    if size_bytes < max(1, _LARGE_PART * len(parts)):
        return np.frombuffer(bytearray().join(parts), dtype=np.uint8)
    array = recycled_bytes(size_bytes)
    memory, start = array.data, 0
    for part in parts:
        stop = start + len(part)
        memory[start:stop] = part
        start = stop
    return array


def join_bytes(parts: Sequence[BytesLike], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Joins bytes into a new tensor. Their number must fit ``shape``."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.from_numpy(joined(parts, size)).view(dtype).view(tuple(shape))
