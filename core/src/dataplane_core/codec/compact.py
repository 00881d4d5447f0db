"""What makes the cells of a put smaller: integers in a narrower dtype, and equal large cells once.

**Narrow integers.** Token ids, routed experts and masks are int64 in most trainers, and fit one or two bytes. A field
keeps the dtype that was put (`FieldSpec`); how narrow its cells in a store are differs from put to put. So each cell's
dtype is stored beside it: in the header of its frame, or by a backend whose wire has `WireFormat.narrow`.

**Shared rows.** The samples of a group often have the very same image or long prompt. Rows that are the same memory are
found by their address, others by a digest of their bytes. That takes half as long as to copy them, and most rows are
new. So each is probed first, at a few bytes: only rows that agree there are digested.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from dataplane_core.codec.tensors import bytes_of, empty_tensor
from dataplane_core.digests import fast_hash, lasting_hash
from dataplane_core.host_memory import copy_arrays, default_copy_threads, in_threads
from dataplane_core.spec import Ragged

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
#: Only columns whose cells have at least so many bytes on average are looked at, unless the config says otherwise.
LARGE_CELL_BYTES: Final = 64 << 10
#: A probe looks at so many places of a cell, at so many bytes each; if cells have many more bytes on average.
_PLACES: Final = 16
_PLACE_BYTES: Final = 16
LEAST_PROBED_BYTES: Final = 16 << 10


# --- narrow integers --------------------------------------------------------------------------------------------------


def is_narrow(dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether cells of a field of dtype ``wide`` may be stored in ``dtype`` instead."""
    return dtype in NARROWER.get(wide, ())


def narrowed(values: torch.Tensor) -> torch.Tensor:
    """A host tensor in the narrowest dtype that holds its values, in new memory; or itself, if it is none narrower."""
    if values.dtype not in NARROWER or values.nbytes < LEAST_BYTES:
        return values
    wide = values.reshape(-1).numpy()
    step = _PART_BYTES // wide.itemsize
    low, high = _bounds(wide[:_FIRST])
    dtype = _narrowest(values.dtype, low, high)
    if dtype is None:
        return values
    narrow = empty_tensor(wide.shape, dtype).numpy()
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
            narrow[start : start + step] = part

    starts = range(0, wide.size, step)
    in_threads([partial(convert, start) for start in starts], min(max(1, len(starts) // 2), default_copy_threads()))
    if misfits:
        dtype = _narrowest(values.dtype, min(low for low, _ in seen), max(high for _, high in seen))
        if dtype is None:
            return values
        narrow = empty_tensor(wide.shape, dtype).numpy()
        copy_arrays([(narrow, wide)])
    return torch.from_numpy(narrow).view(values.shape)


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


def widened(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the dtype of its field: in new memory if it `is_narrow`, else itself."""
    return empty_tensor(values.shape, dtype).copy_(values) if is_narrow(values.dtype, dtype) else values


# --- shared rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which rows of a column are equal."""

    firsts: list[int]  # the rows that differ from all rows before them
    index: list[int]  # for each row, its place among these

    @classmethod
    def by_key(cls, keys: Sequence[Hashable]) -> Repeats | None:
        """Rows with equal keys are equal. None: no two are."""
        first_of = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        if len(first_of) == len(keys):
            return None
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        return cls([first_of[key] for key in places], [places[key] for key in keys])

    def after(self, earlier: Repeats | None) -> Repeats:
        """These repeats, which were found among the ``firsts`` of ``earlier`` ones, as repeats of all rows."""
        if earlier is None:
            return self
        return Repeats([earlier.firsts[row] for row in self.firsts], [self.index[place] for place in earlier.index])


def same_memory(rows: Sequence[Any]) -> Repeats | None:
    """Rows that are one object or, if they are tensors, the same memory. None: there are none."""
    return Repeats.by_key(list(map(_memory_of, rows)))


def _memory_of(row: Any) -> Hashable:
    if type(row) is not torch.Tensor or row.layout != torch.strided or not row.numel():
        return id(row)
    return row.data_ptr(), row.shape, row.stride(), row.dtype, row.device, row.is_conj(), row.is_neg()


def row_probes(rows: Ragged | torch.Tensor, kind: str) -> list[bytes]:
    """A short digest of a few bytes of each row, its size and its kind: rows whose probes differ are different."""
    data, cuts = bytes_of(rows)
    sizes, first = np.diff(cuts), _kind_of(rows, kind)
    places = cuts[:-1, None] + np.maximum(sizes - _PLACE_BYTES, 0)[:, None] * np.arange(_PLACES) // (_PLACES - 1)
    at = (places[:, :, None] + np.arange(_PLACE_BYTES)).reshape(len(sizes), -1)
    taken = data[np.minimum(at, len(data) - 1)]
    return [
        fast_hash(b"%b %d %b" % (first, size, some.tobytes())).digest()
        for size, some in zip(sizes.tolist(), taken, strict=True)
    ]


def _kind_of(rows: Ragged | torch.Tensor, kind: str) -> bytes:
    return f"{kind} {rows.values.dtype if isinstance(rows, Ragged) else rows.dtype}".encode()


def row_digests(rows: Ragged | torch.Tensor, kind: str, numbers: Sequence[int]) -> list[bytes]:
    """A digest of some rows of a column (`lasting_hash`): of their bytes, dtype, and what kind of cells they are."""
    data, cuts = bytes_of(rows)
    first, digests = _kind_of(rows, kind), [b""] * len(numbers)

    def digest(place: int) -> None:
        hashed = lasting_hash(first)
        hashed.update(data.data[cuts[numbers[place]] : cuts[numbers[place] + 1]])
        digests[place] = hashed.digest()

    threads = min(max(1, len(data) // _PART_BYTES), default_copy_threads())
    in_threads([partial(digest, place) for place in range(len(numbers))], threads)
    return digests
