"""Items of object columns: checks them, copies them, and converts them to bytes and back with msgpack.

The closed set of types is None, bool, int (64 bit), float, str, bytes, list, dict with str keys, and tensors of any
rank, without their subclasses. With ``allow_pickle`` any other item is pickled as a whole.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Final

import msgpack
import torch

from dataplane_core.codec.header import (
    pack_tensor,
    unpack_tensor,
)
from dataplane_core.codec.tensors import (
    DTYPE_CODES,
    host_tensor,
)
from dataplane_core.errors import FrameError, InvalidTypeError
from dataplane_core.packed import BytesLike, unpack_msgpack

#: Lists and dicts may be nested this deep.
MAX_DEPTH: Final = 128

_ATOMS: Final = frozenset({NoneType, bool, float, str, bytes})
_FLAT: Final = _ATOMS | {int}
_EXT_TENSOR: Final = 1
_EXT_PICKLE: Final = 2
_SET: Final = "None, bool, int (64 bit), float, str, bytes, list, dict with str keys, tensor"


class _OutsideError(Exception):
    """An item, or a value inside it, is outside the closed set."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = ""


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
    """Refuses items outside the closed set.

    Args:
        items: One item per row.
        field: The field, for error messages.
        allow_pickle: Accept every item.

    Raises:
        InvalidTypeError: Names the field, the row, the place in the item, and the type.
    """
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
        f"{error.reason}. Expected {_SET}.",
        hint="Turn numpy values and tuples into Python numbers and lists, images into tensors, or set allow_pickle: "
        "true in the config.",
    )


# --- copies -----------------------------------------------------------------------------------------------------------


def copy_item(item: Any) -> Any:
    """A deep copy that shares no memory with ``item``. Tensors become plain, contiguous, detached host tensors.

    Items outside the closed set are copied with `copy.deepcopy`; `check_items` decides whether they are allowed.
    """
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


# --- bytes ------------------------------------------------------------------------------------------------------------


def _pack_tensor(value: Any) -> msgpack.ExtType:
    if not isinstance(value, torch.Tensor):
        raise _OutsideError(f"of type {_name(type(value))}")
    return msgpack.ExtType(_EXT_TENSOR, pack_tensor(value, "a tensor in an object column"))


def encode_items(items: Sequence[Any], field: str, *, allow_pickle: bool = False) -> list[bytes]:
    """One byte string per item, never empty.

    Args:
        items: One item per row.
        field: The field, for error messages.
        allow_pickle: Pickle items outside the closed set instead of refusing them.

    Raises:
        InvalidTypeError: An item is outside the closed set, or cannot be pickled.
    """
    pack = _packer()
    encoded = []
    for row, item in enumerate(items):
        try:
            _check(item)
            encoded.append(pack(item))
        except _OutsideError as error:
            if not allow_pickle:
                raise _refusal(field, row, error) from None
            encoded.append(pack(msgpack.ExtType(_EXT_PICKLE, _pickled(item, field, row))))
        except (ValueError, OverflowError) as error:  # msgpack's own limit is 4 GiB a value
            raise InvalidTypeError(f"put_samples refused: object field '{field}', row {row}: {error}.") from error
    return encoded


def _packer() -> Callable[[Any], bytes]:
    # strict_types: subclasses and tuples go to `default`, which refuses them; surrogatepass: lone surrogates are valid
    pack: Callable[[Any], bytes] = msgpack.Packer(
        default=_pack_tensor, strict_types=True, unicode_errors="surrogatepass"
    ).pack
    return pack


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
    """Reads `encode_items`' bytes. The items share no memory with them.

    Raises:
        FrameError: The bytes are malformed, or an item is pickled and ``allow_pickle`` is not set.
    """
    hook = _ext_with_pickle if allow_pickle else _ext
    items = []
    for row, data in enumerate(encoded):
        try:
            item = unpack_msgpack(data, ext_hook=hook, unicode_errors="surrogatepass")
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


class _Pickled:
    """An item that was unpickled. It may be outside the closed set."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item


def _ext(code: int, data: bytes) -> Any:
    if code == _EXT_TENSOR:
        return unpack_tensor(data)
    if code == _EXT_PICKLE:
        raise FrameError(
            "the item is pickled, and this client does not unpickle.",
            hint="Set allow_pickle: true in the config, if every writer is to be trusted.",
        )
    raise FrameError(f"extension type {code} is not known")


def _ext_with_pickle(code: int, data: bytes) -> Any:
    return _Pickled(pickle.loads(data)) if code == _EXT_PICKLE else _ext(code, data)
