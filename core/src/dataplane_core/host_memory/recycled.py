"""Private memory for large results, used again once nobody holds it any more.

New memory can cost more than the copy into it, because each of its pages faults. Memory that was used before has no
faults, and with huge pages the first use has few. What is too large to be kept gets no huge pages.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from typing import Any, Final

import numpy as np

#: Arrays of fewer bytes are left to malloc, which reuses its memory too.
_LEAST_BYTES: Final = 1 << 20
#: How much unused memory this process keeps for later. The blocks that were unused for longest are given up first.
_KEPT_BYTES: Final = 128 << 20
_HUGE_PAGE: Final = 2 << 20

_unused: Final[deque[_Block]] = deque()


def recycled_bytes(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An array (size_bytes,) uint8 with undefined content.

    Its memory belongs to the array and to all arrays and tensors that are made from it. When the last of them is gone,
    a later array may get the memory. The process keeps at most 128 MiB in this way.

    Example:
        >>> recycled_bytes(3).shape
        (3,)
    """
    if size_bytes < _LEAST_BYTES:
        return np.empty(size_bytes, dtype=np.uint8)
    return np.asarray(_Lease(_take(size_bytes), size_bytes))


class _Block:
    """A mapping."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        # Windows has no flags
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.mapping = mmap.mmap(-1, -(-size_bytes // _HUGE_PAGE) * _HUGE_PAGE, **private)
        whole = size_bytes // _HUGE_PAGE * _HUGE_PAGE  # the rest would take a huge page for a part of one
        if size_bytes > _KEPT_BYTES:  # used once: where free memory is in pieces, finding huge pages takes far longer
            whole = 0
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self.mapping.madvise(mmap.MADV_HUGEPAGE, 0, whole)
        self.address = int(np.frombuffer(self.mapping, dtype=np.uint8).ctypes.data)


class _Lease:
    """Holds a block for an array, and gives it back when the array is gone."""

    def __init__(self, block: _Block, size_bytes: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        _unused.append(self._block)
        with contextlib.suppress(IndexError, RuntimeError):  # another thread gave back or took one meanwhile
            while sum(block.size_bytes for block in _unused) > _KEPT_BYTES:
                _unused.popleft()


def _take(size_bytes: int) -> _Block:
    """The smallest unused block that is large enough and not more than twice too large, or a new one."""
    while True:
        try:
            fitting = [each for each in _unused if size_bytes <= each.size_bytes <= 2 * size_bytes]
            if not fitting:
                return _Block(size_bytes)
            block = min(fitting, key=lambda each: each.size_bytes)
            _unused.remove(block)
            return block
        except (RuntimeError, ValueError):  # another thread was faster
            continue
