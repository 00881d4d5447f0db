"""Payload bytes of encoded columns, as capacity and metrics count them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from dataplane_core.codec.tensors import is_jagged, jagged_parts
from dataplane_core.spec import SharedRows, WireColumn


def row_nbytes(columns: Mapping[str, WireColumn | SharedRows], num_samples: int) -> list[int]:
    """Payload bytes per row, summed over all columns.

    Args:
        columns: Encoded columns of ``num_samples`` rows each.
        num_samples: N.

    Returns:
        N integers. Exact for tensors and frames. For native objects, the size of their values without Python's
        overhead.
    """
    total = np.zeros(num_samples, dtype=np.int64)
    for column in columns.values():
        total += cell_nbytes(column, num_samples)
    sizes: list[int] = total.tolist()
    return sizes


def cell_nbytes(column: WireColumn | SharedRows, num_samples: int) -> Any:
    """Payload bytes of each cell of one column: an int64 array (N,), or one number if all are equal.

    A shared cell counts for the first of its rows only.
    """
    if isinstance(column, SharedRows):
        num_rows = max(column.index, default=-1) + 1
        sizes = np.zeros(num_samples, dtype=np.int64)
        _, firsts = np.unique(column.index, return_index=True)
        sizes[firsts] = cell_nbytes(column.rows, num_rows)
        return sizes
    if isinstance(column, list):
        if set(map(type, column)) <= _BYTES:  # frames: 5 times as fast
            return np.fromiter(map(len, column), dtype=np.int64, count=len(column))
        return np.fromiter((_item_nbytes(item) for item in column), dtype=np.int64, count=len(column))
    if is_jagged(column):  # asking the tensor takes 9 us
        values, offsets, _, _ = jagged_parts(column)
        return np.diff(offsets.numpy()) * (values.dtype.itemsize * math.prod(values.shape[1:]))
    return column.nbytes // max(num_samples, 1)


#: What a frame may be. A memoryview is one of bytes.
_BYTES: Final = frozenset({bytes, bytearray, memoryview})


def _item_nbytes(item: Any) -> int:
    if isinstance(item, (bytes, bytearray)):
        return len(item)
    if isinstance(item, (memoryview, torch.Tensor, np.ndarray)):
        return item.nbytes
    if isinstance(item, str):
        return len(item)
    if isinstance(item, dict):
        return sum(_item_nbytes(key) + _item_nbytes(value) for key, value in item.items())
    if isinstance(item, list):
        return sum(_item_nbytes(each) for each in item)
    return 8
