"""Counts a client's copies of its payload by what it allocates, so that the result does not depend on time."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Allocated", "allocated"]

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a call allocated in this process.

    Attributes:
        tensor_bytes: Bytes of all tensor memory that torch's operators allocated in the calling thread, freed or not.
        python_bytes: The most that Python objects and numpy arrays held beyond what they held before, in any thread.
    """

    tensor_bytes: int
    python_bytes: int

    def copies_of(self, payload_bytes: int) -> float:
        """The allocated bytes as a multiple of the payload."""
        return (self.tensor_bytes + self.python_bytes) / payload_bytes


def allocated(call: Callable[[], _R]) -> tuple[_R, Allocated]:
    """Makes a call, and counts what it allocated. Several times slower than the call alone.

    Memory that an engine's own library allocates in C is not seen.
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
    return result, Allocated(storages.size_bytes, peak - before)


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hooks untyped
    """Adds up the storages that operators allocate: those that they return and did not get as arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.size_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = set(_storages((args, kwargs)))
        made = {where: size for where, size in _sized(result) if where not in known}
        self.size_bytes += sum(made.values())
        return result


def _storages(values: Any) -> Iterator[int]:
    return (where for where, _ in _sized(values))


def _sized(values: Any) -> Iterator[tuple[int, int]]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            plain = leaf.values() if leaf.is_nested and leaf.layout == torch.jagged else leaf
            if plain.device.type == "cpu" and not plain.is_nested:
                storage = plain.untyped_storage()
                yield storage.data_ptr(), storage.nbytes()
