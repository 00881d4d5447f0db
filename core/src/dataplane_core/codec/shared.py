"""Equal large cells of a put: finds them, so that they are stored once and moved once.

The samples of a group often have the very same image or long prompt. Rows that are the same memory are found by their
address, others by a hash of their bytes. Small cells are not looked at: to store them apart costs more than it saves.

Shape legend: ``N`` rows, ``U`` rows that differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack

from dataplane_core.codec.rows import take_rows
from dataplane_core.codec.tensors import ByteArray, JaggedColumns, Ragged, byte_array

#: Only columns whose cells have at least so many bytes on average are looked at.
LARGE_CELL_BYTES: Final = 128 << 10
#: Bytes read at each of so many places of a cell, to tell most cells apart without reading them.
_SAMPLE_BYTES: Final = 8
_SAMPLES: Final = 8


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which rows of a column are equal.

    Attributes:
        firsts: The U rows that differ from all rows before them.
        index: For each of the N rows, its place among these.
    """

    firsts: list[int]
    index: list[int]

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
    """Rows that are the same object or, if they are tensors, the same memory. None: there are none."""
    objects = Repeats.by_key(list(map(id, rows)))
    others = rows if objects is None else [rows[row] for row in objects.firsts]
    found = _of_one_address(others)
    return objects if found is None else found.after(objects)


def _of_one_address(rows: Sequence[Any]) -> Repeats | None:
    """Different objects that are tensors of the same memory."""
    if set(map(type, rows)) == {torch.Tensor}:
        with suppress(RuntimeError):  # a sparse tensor has no address
            found = Repeats.by_key([row.data_ptr() or -id(row) for row in rows])  # an empty one has the address 0
            if found is None:
                return None
            firsts = [rows[row] for row in found.firsts]
            if all(_is_plain_alias(firsts[at], row) for at, row in zip(found.index, rows, strict=True)):
                return found
    return Repeats.by_key([_memory_of(row) for row in rows])


def _is_plain_alias(first: torch.Tensor, row: torch.Tensor) -> bool:
    """Whether two rows that begin at the same address are the same, and neither conjugated nor negated lazily."""
    return first.is_set_to(row) and first.dtype == row.dtype and not row.is_neg() and not row.is_conj()


def _memory_of(row: Any) -> Hashable:
    if type(row) is not torch.Tensor or row.layout != torch.strided or not row.numel():
        return id(row)
    return row.data_ptr(), row.shape, row.stride(), row.dtype, row.device, row.is_conj(), row.is_neg()


def equal_rows(column: Ragged | torch.Tensor) -> Repeats | None:
    """Rows with equal bytes. None: there are none, or the cells are small.

    Reads a few bytes of each cell, and all bytes only of those whose few bytes are equal. A hash (XXH3) finds the equal
    ones, and a comparison confirms it.
    """
    values, num_rows = (column.values, column.num_rows) if isinstance(column, Ragged) else (column, column.shape[0])
    if num_rows < 2 or values.nbytes < LARGE_CELL_BYTES * num_rows:
        return None
    data = byte_array(values)
    if isinstance(column, Ragged):
        cuts = column.offsets.numpy() * column.itemsize
    else:
        cuts = np.arange(num_rows + 1, dtype=np.int64) * (len(data) // num_rows)
    starts, sizes = cuts[:-1], np.diff(cuts)
    samples = _samples(data, starts, sizes)
    alike = Repeats.by_key([(size, sample.tobytes()) for size, sample in zip(sizes.tolist(), samples, strict=True)])
    if alike is None:
        return None
    cells: list[Any] = [data[start:stop] for start, stop in zip(starts.tolist(), cuts[1:].tolist(), strict=True)]
    counts = np.bincount(alike.index)
    hashes = [
        xxhash.xxh3_64_intdigest(cell) if counts[at] > 1 else 0 for at, cell in zip(alike.index, cells, strict=True)
    ]
    found = Repeats.by_key(list(zip(alike.index, hashes, strict=True)))
    if found is None:
        return None
    for row, at in enumerate(found.index):
        first = found.firsts[at]
        if first != row and not np.array_equal(cells[row], cells[first]):
            return None  # two cells with one hash
    return found


def _samples(data: ByteArray, starts: Any, sizes: Any) -> Any:
    """Bytes of each row, (N, places * bytes); zeros for rows that are too short."""
    last = np.maximum(sizes - _SAMPLE_BYTES, 0)
    places = starts[:, None] + last[:, None] * np.arange(_SAMPLES) // (_SAMPLES - 1)
    at = (places[:, :, None] + np.arange(_SAMPLE_BYTES)).reshape(len(starts), -1)
    found = data[np.minimum(at, len(data) - 1)]
    found[sizes < _SAMPLE_BYTES] = 0
    return found


def spread(column: Any, index: Sequence[int], jagged: JaggedColumns, *, share: bool) -> Any:
    """The N rows of a decoded column of U rows.

    Args:
        column: A tensor, or a ``NonTensorStack`` of items.
        index: The row of ``column`` that each row of the result is.
        jagged: The jagged columns of the same read.
        share: Return a ``NonTensorStack`` of row tensors or items, in which equal rows are one object. If False, every
            row has memory of its own.
    """
    if not share:
        return take_rows(column, index, jagged)
    rows: Sequence[Any] = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
    wrapped = [NonTensorData(data=row) for row in rows]  # once each: it takes as long as copying some KB
    return NonTensorStack(*[wrapped[at] for at in index])
