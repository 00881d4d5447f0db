"""Msgpack: written fast, and read from elsewhere without more memory than the bytes are worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import msgpack
import msgspec

BytesLike: TypeAlias = bytes | bytearray | memoryview

#: A message of more bytes is first parsed without building objects, so that forged lengths in it cannot make the
#: decoder allocate more than the message holds: lists may be nested 500 deep, each said to be as long as the message.
_TRUSTED_SIZE: Final = 1024


def pack_msgpack(value: Any) -> bytes:
    """Writes one value of msgpack's own types."""
    try:
        return msgspec.msgpack.encode(value)  # the same bytes, in a third of the time
    except TypeError:  # it takes no subclasses of str and int
        packed: bytes = msgpack.packb(value)
        return packed


def unpack_msgpack(data: BytesLike, **options: Any) -> Any:
    """Reads one value.

    Args:
        data: The whole message.
        options: As for `msgpack.unpackb`.

    Raises:
        ValueError: It is no msgpack, is cut off, goes on after the value, or is nested too deep.
        Exception: What a hook among the options raised.
    """
    if len(data) > _TRUSTED_SIZE:
        walker = msgpack.Unpacker(max_buffer_size=len(data), strict_map_key=False)
        walker.feed(data)
        try:
            walker.skip()
        except msgpack.OutOfData:
            raise ValueError("it is cut off") from None
    return msgpack.unpackb(data, **options)


def unpack_msgpack_stream(data: BytesLike) -> Iterator[Any]:
    """Reads values that stand one after another.

    Raises:
        ValueError: As `unpack_msgpack`, but at once or when the damaged value is taken. A value that is cut off at the
            end ends the stream.
    """
    if len(data) > _TRUSTED_SIZE:
        walker = msgpack.Unpacker(max_buffer_size=len(data), strict_map_key=False)
        walker.feed(data)
        try:
            while True:
                walker.skip()
        except msgpack.OutOfData:
            pass
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    return iter(unpacker)
