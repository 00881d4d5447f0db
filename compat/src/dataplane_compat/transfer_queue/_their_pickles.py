"""The pickles in TransferQueue's checkpoints.

A pickle can run any code, and write to any object that it names. So its names stand for functions of our own, for the
few that such files have: tensors, numpy's scalars, and two classes of the controller. With ``allow_pickle`` in the
config, others are imported.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch

from dataplane_core.errors import InvalidTypeError


class _Known:
    """Stands for a known class or function, so that a file can call it, and change nothing of it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("the file changes a function or class")


class _Dtype:
    """Stands for numpy's dtype, whose own state may make numpy take bytes for the address of an object."""

    __slots__ = ("_kind", "_order")

    def __init__(self, kind: str, *_: Any) -> None:
        if not re.fullmatch(r"[biufSU][0-9]+", kind):
            raise InvalidTypeError(f"a numpy scalar of dtype {kind!r}. Expected a bool, number, str or bytes.")
        self._kind, self._order = kind, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise ValueError(f"byte order {state[1]!r}")
        self._order = state[1]

    def scalar(self, data: bytes) -> Any:
        """The Python value of a scalar."""
        return np.ndarray((), self._order + self._kind, data).item()


def _storage(data: bytes) -> torch.Tensor:
    """The elements of a storage, from what `torch.save` wrote. Memory that torch does not resize."""
    file = io.BytesIO(data)
    *_, (_, dtype, _, _, count, view), _ = [_Unpickler(file, "a storage").load() for _ in range(5)]
    held = memoryview(data)[file.tell() + 8 :]  # after their number
    if view is not None or count * dtype.itemsize != len(held):
        raise ValueError(f"a storage of {count} elements of {dtype} has {len(held)} bytes")
    return torch.frombuffer(bytearray(held or 16), dtype=dtype)  # which refuses an empty one


def _tensor(flat: torch.Tensor, offset: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """A tensor over a storage. Torch refuses one that is not inside of it."""
    _, _, dtype, metadata = (*rest, None, None)[:4]
    if metadata:
        raise ValueError(f"a tensor with {metadata}")
    return (flat if dtype is None else flat.view(dtype)).as_strided(size, stride, offset)


_STORAGES: Final = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_KNOWN: Final = {
    "collections.OrderedDict": _Known(OrderedDict),
    "collections.defaultdict": _Known(defaultdict),
    "builtins.set": _Known(set),
    "torch.Size": _Known(torch.Size),
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.storage._load_from_bytes": _Known(_storage),  # torch's own unpickles whatever is inside
    "torch._utils._rebuild_tensor_v2": _Known(lambda *given: _tensor(*given[:6], None, *given[6:])),
    "torch._utils._rebuild_tensor_v3": _Known(_tensor),
    **{f"torch.{name}": each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
}
_NUMPY: Final = {
    "numpy.dtype": _Known(_Dtype),
    "numpy._core.multiarray.scalar": _Known(_Dtype.scalar),
    "numpy.core.multiarray.scalar": _Known(_Dtype.scalar),  # numpy 1
}
#: Dataclasses of TransferQueue's controller.
_STATES: Final = ("transfer_queue.controller.DataPartitionStatus", "transfer_queue.controller.FieldMeta")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: Path | str, allow_pickle: bool = False) -> None:
        super().__init__(file)
        self._path, self._allow_pickle = path, allow_pickle

    def persistent_load(self, pid: Any) -> Any:
        return pid  # only a storage has one: what it is

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _STATES:
            return type(name, (), {})  # gets the same attributes; a new one, since a file can change it
        if full in _KNOWN:
            return _KNOWN[full]
        if self._allow_pickle:
            return super().find_class(module, name)
        if full in _NUMPY:
            return _NUMPY[full]
        raise InvalidTypeError(
            f"'{self._path}' refused: it holds a {full}. Expected tensors, numpy's scalars, and Python's own types.",
            hint="If you trust the file, set allow_pickle: true in the config: then the class is imported and run.",
        )


def load_pickle(path: Path, allow_pickle: bool) -> Any:
    """What a file holds.

    Raises:
        InvalidTypeError: An object of a class that is not allowed.
        Exception: It is damaged, or made to do harm.
    """
    return _Unpickler(io.BytesIO(path.read_bytes()), path, allow_pickle).load()
