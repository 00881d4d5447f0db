"""Counts how often a client copies its payload, by the memory that it allocates. The result does not depend on time."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_R = TypeVar("_R")


def allocated(call: Callable[[], _R]) -> tuple[_R, int]:
    """Makes a call and counts the bytes that it allocated in this process. This makes the call several times slower.

    These are all tensor memory that torch's operators allocated in the calling thread, even if it was freed, and the
    peak of the memory of Python objects and numpy arrays in all threads, minus that before. It does not see memory that
    an engine's own library allocates in C.
    """
    gc.collect()
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with _Storages() as storages:
            result = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not tracing:
            tracemalloc.stop()
    return result, storages.size_bytes + peak - before


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hooks untyped
    """Adds up the bytes of storages that operators return and that were not among their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.size_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = dict(_sized((args, kwargs)))
        self.size_bytes += sum(size for address, size in dict(_sized(result)).items() if address not in known)
        return result


def _sized(values: Any) -> Iterator[tuple[int, int]]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            plain = leaf.values() if leaf.is_nested and leaf.layout == torch.jagged else leaf
            if plain.device.type == "cpu" and not plain.is_nested:
                storage = plain.untyped_storage()
                yield storage.data_ptr(), storage.nbytes()
