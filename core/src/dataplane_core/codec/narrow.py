"""Narrow integers: a column of int64, int32 or int16 goes in the narrowest dtype that holds what a put has in it.

Token ids, routed experts and masks are int64 in most trainers, and fit one or two bytes. A field keeps the dtype that
was put (`FieldSpec`); only its cells in a store may be narrower, and how narrow differs from put to put. So each cell's
dtype is stored beside it: in the header of its frame, or by a backend whose wire has `WireFormat.narrow`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
import torch

from dataplane_core.codec.tensors import Ragged, empty_tensor, is_jagged, jagged_parts, to_nested
from dataplane_core.host_memory import copy_arrays, default_copy_threads, in_threads

#: The dtypes that a column may be sent in, the narrowest first, with the least and the largest value of each.
_NARROW: Final = [
    (dtype, torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32)
]
#: The dtypes of columns that are narrowed -> those that they may be sent in.
NARROWER: Final = {
    wide: frozenset(dtype for dtype, _, _ in _NARROW if dtype.itemsize < wide.itemsize)
    for wide in (torch.int16, torch.int32, torch.int64)
}
#: Columns of fewer bytes stay as they are. To look at one and to convert it takes about 10 us at both ends, in which as
#: many bytes are copied.
LEAST_BYTES: Final = 16 << 10
#: A column is looked at and converted in parts of so many bytes, which stay in the processor's cache in between.
_PART_BYTES: Final = 1 << 20
#: These elements are looked at before all others: most columns that are wide show it here.
_FIRST: Final = 4096


def is_narrow(dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether cells of a field of dtype ``wide`` may be stored in ``dtype`` instead."""
    return dtype in NARROWER.get(wide, ())


def narrowed(values: torch.Tensor) -> torch.Tensor:
    """A host tensor in the narrowest dtype that holds its values, in new memory; or itself, if it is none narrower.

    Large ones are looked at and converted by several threads.
    """
    if values.dtype not in NARROWER or values.nbytes < LEAST_BYTES:
        return values
    wide = values.reshape(-1).numpy()
    step = _PART_BYTES // wide.itemsize
    low, high = _bounds(wide[:_FIRST])
    dtype = _narrowest(values.dtype, low, high)
    if dtype is None:
        return values
    found = empty_tensor(wide.shape, dtype).numpy()
    seen: list[tuple[int, int]] = []
    misfits: list[torch.dtype | None] = []

    def convert(start: int) -> None:
        if None in misfits:  # the column is wide
            return
        part = wide[start : start + step]
        bounds = _bounds(part)
        seen.append(bounds)
        least = _narrowest(values.dtype, min(low, bounds[0]), max(high, bounds[1]))
        if least != dtype:
            misfits.append(least)
        elif not misfits:
            found[start : start + step] = part

    starts = range(0, wide.size, step)
    in_threads([partial(convert, start) for start in starts], min(max(1, len(starts) // 2), default_copy_threads()))
    if misfits:
        dtype = _narrowest(values.dtype, min(each for each, _ in seen), max(each for _, each in seen))
        if dtype is None:
            return values
        found = empty_tensor(wide.shape, dtype).numpy()
        copy_arrays([(found, wide)])
    return torch.from_numpy(found).view(values.shape)


def _bounds(part: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Bounds of some values and of 0. The upper one is a power of 2, less 1: no dtype ends in between."""
    low, bits = 0, int(np.bitwise_or.reduce(part))  # takes half the time of the minimum and maximum
    if bits < 0:
        low, bits = int(part.min()), max(0, int(part.max()))
    return low, (1 << bits.bit_length()) - 1


def _narrowest(wide: torch.dtype, low: int, high: int) -> torch.dtype | None:
    """The first of the dtypes narrower than ``wide`` that holds all values between these bounds."""
    fitting = (dtype for dtype, least, most in _NARROW if least <= low and high <= most)
    return next((dtype for dtype in fitting if dtype in NARROWER[wide]), None)


def widened(column: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A dense or jagged column in the dtype of its field: in new memory if it `is_narrow`, else itself."""
    if not is_narrow(column.dtype, dtype):
        return column
    if not is_jagged(column):
        return _converted(column, dtype)
    values, offsets, _, _ = jagged_parts(column)
    return to_nested(Ragged(_converted(values, dtype), offsets))


def _converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return empty_tensor(values.shape, dtype).copy_(values)
