"""How clients and scripts encode names, tags, layouts and rows."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np

from dataplane_core.backends import Bundle
from dataplane_core.codec import unpack_msgpack
from dataplane_core.errors import CorruptDataError
from dataplane_core.spec import FieldSpec, TagValue

__all__ = [
    "INLINE_BYTES",
    "INLINE_ROWS",
    "MARK",
    "Refs",
    "pack_filter",
    "pack_parts",
    "pack_request",
    "pack_strings",
    "pack_tags",
    "text_of",
    "to_bytes",
    "tuples_of",
    "unpack_layout",
    "unpack_rows",
    "unpack_tags",
]

#: Puts and reads of at most so many bytes and rows are sent inside their script, in one round trip.
INLINE_BYTES: Final = 32 * 1024
INLINE_ROWS: Final = 512
#: What no part of a partition is without, see common.lua.
MARK: Final = b"\xff"
#: Names may hold lone surrogates, which are legal in a str.
_ERRORS: Final = "surrogatepass"
_SIZE: Final = struct.Struct("<I")
_FLOAT: Final = struct.Struct("<d")
#: Up to this magnitude, a double holds every integer exactly.
_MAX_EXACT_INT: Final = 1 << 53

_ROW_HEAD: Final = 8
_REF: Final = np.dtype([("write", "V16"), ("position", "<u4"), ("layout", "<u4"), ("size", "<u8")])
#: Every ref of a row, the latest write last: (write, position, number of the layout, bytes of the cells).
Refs: TypeAlias = list[tuple[bytes, int, int, int]]


def to_bytes(text: str) -> bytes:
    """Encodes a name for the server."""
    return text.encode("utf-8", _ERRORS)


def text_of(data: bytes) -> str:
    """Decodes a name from the server."""
    return data.decode("utf-8", _ERRORS)


def tuples_of(flat: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """What a script replied one after another, in tuples of so many."""
    return zip(*[iter(flat)] * size, strict=True)


def pack_request(*values: Any) -> bytes:
    """Packs the request argument of a script: strings, bytes, numbers, and lists of them."""
    return _pack(values)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=False, unicode_errors=_ERRORS)
    return packed


# --- tags -------------------------------------------------------------------------------------------------------------


def _pack_value(value: TagValue) -> bytes:
    if value is None:
        return b"n"
    if value is True:
        return b"t"
    if value is False:
        return b"u"
    if isinstance(value, float):
        return b"f" + _FLOAT.pack(value)
    if isinstance(value, str):
        return b"s" + to_bytes(value)
    if -_MAX_EXACT_INT <= value <= _MAX_EXACT_INT:
        return b"i%d" % value
    return b"I%d:%d" % (value - int(float(value)), value)  # Lua's numbers are doubles: send the rounding error too


def _unpack_value(data: bytes) -> TagValue:
    kind = data[:1]
    if kind == b"n":
        return None
    if kind == b"t":
        return True
    if kind == b"u":
        return False
    if kind == b"f":
        (number,) = _FLOAT.unpack(data[1:])
        return float(number)
    if kind == b"s":
        return text_of(data[1:])
    if kind in (b"i", b"I"):
        return int(data[1:] if kind == b"i" else data.partition(b":")[2])
    raise ValueError(f"it is of the unknown kind {kind!r}")


def pack_tags(tags: Mapping[str, TagValue]) -> bytes:
    """Packs one row's tags."""
    return _pack({name: _pack_value(value) for name, value in tags.items()})


def unpack_tags(data: bytes | None) -> dict[str, TagValue]:
    """Reads tags that `pack_tags` packed or a script merged.

    Raises:
        CorruptDataError: They are damaged.
    """
    if not data:
        return {}
    try:
        found = unpack_msgpack(data, raw=True, strict_map_key=False)
        return {text_of(name): _unpack_value(value) for name, value in found.items()} if found else {}
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise _damaged("the tags of a row", error) from error


def pack_filter(tag_filter: Mapping[str, tuple[str, Any]] | None) -> list[Any]:
    """The conditions of a tag filter in its full form: (name, symbol, operand) each."""
    return [
        [name, symbol, [_pack_value(each) for each in operand] if symbol == "in" else _pack_value(operand)]
        for name, (symbol, operand) in (tag_filter or {}).items()
    ]


# --- rows -------------------------------------------------------------------------------------------------------------


def pack_strings(strings: Iterable[str]) -> bytes:
    """Packs strings in order."""
    parts: list[bytes] = []
    for each in map(to_bytes, strings):
        parts += (_SIZE.pack(len(each)), each)
    return b"".join(parts)


def pack_parts(bundles: Sequence[Bundle], specs: Mapping[str, FieldSpec]) -> list[list[Any]]:
    """What a script must know of each bundle of a put: its layout, the sizes of its rows, and where each sample's row
    is (or nothing, if sample i has row i). A layout is the bundle's fields in order, each with its spec."""
    return [
        [
            pack_strings(text for name in bundle.columns for text in (name, specs[name].to_text())),
            bundle.row_bytes,
            "" if bundle.positions is None else bundle.positions,
        ]
        for bundle in bundles
    ]


@functools.lru_cache(maxsize=1024)
def unpack_layout(data: bytes) -> Mapping[str, FieldSpec]:
    """Reads a layout: its fields in order, with their specs.

    Raises:
        CorruptDataError: It is damaged.
    """
    strings = []
    at = 0
    try:
        while at < len(data):
            (size,) = _SIZE.unpack_from(data, at)
            at += _SIZE.size + size
            strings.append(text_of(data[at - size : at]))
        if at != len(data):
            raise ValueError("it is cut off")
        names, texts = strings[::2], strings[1::2]
        return dict(zip(names, map(FieldSpec.from_text, texts), strict=True))
    except (ValueError, struct.error) as error:
        raise _damaged("the fields of a write", error) from error


def _damaged(what: str, error: Exception) -> CorruptDataError:
    return CorruptDataError(
        f"{what} cannot be read: {error}. Another program may have changed the keys of this namespace."
    )


def unpack_rows(rows: Sequence[bytes]) -> list[Refs]:
    """Reads the refs of each row.

    Raises:
        CorruptDataError: A row is damaged.
    """
    if not rows:
        return []
    sizes = [len(row) - _ROW_HEAD for row in rows]
    if any(size < 0 or size % _REF.itemsize for size in sizes):
        raise CorruptDataError(
            "a row on the server has a length that this package never writes. Another program may have changed it."
        )
    table = np.frombuffer(b"".join([row[_ROW_HEAD:] for row in rows]), dtype=_REF)
    refs: Refs = table.tolist()
    found: list[Refs] = []
    at = 0
    for size in sizes:
        count = size // _REF.itemsize
        found.append(refs[at : at + count])
        at += count
    return found
