"""Bulk payload on the wire, with few copies: packs frames into rows, and receives arrays of byte strings in one buffer.

A row is what one put wrote of one sample: its frames, joined in the format of `dataplane_core.codec.join_row`.

Shape legend: ``N`` rows, ``C`` columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import InvalidResponse, ResponseError

from dataplane_core.codec import join_row
from dataplane_core.spec import FieldSpec
from dataplane_redis._protocol import pack
from dataplane_redis._route import left_s
from dataplane_redis._wire import Refs

__all__ = ["PACKED_REPLIES", "ArrayReader", "ReadPlans", "pack_rows", "row_overhead"]

#: Replies to what `pack_rows` packs.
PACKED_REPLIES: Final = 4
#: The most that a byte string of a reply takes besides its own bytes: ``$<digits>\\r\\n`` and ``\\r\\n``.
_STRING_BYTES: Final = 24
#: Added to every buffer, for the heads of the replies or an error message.
_SLACK_BYTES: Final = 64 * 1024
#: The longest number in a reply, with its kind and its sign.
_MOST_DIGITS: Final = 21


def row_overhead(num_columns: int) -> int:
    """The most bytes that a row of C cells takes in a reply besides its frames."""
    return 8 + 8 * num_columns + _STRING_BYTES


def pack_rows(key: bytes, first: int, frames: Sequence[Sequence[Any]], keep_s: float) -> list[Any]:
    """Packs an HSET of N rows. Each row is stored under its position, counted from ``first``. The hash then expires, at
    the same moment as it is written: so should this client die, the server drops the rows.

    Args:
        key: The hash.
        first: Position of the first row.
        frames: C columns of N frames.
        keep_s: Seconds until the hash expires.

    Returns:
        The parts of the commands. Frames are not copied.
    """
    num_columns, num_rows = len(frames), len(frames[0])
    sizes = np.empty((num_rows, num_columns), dtype="<i8")
    for number, column in enumerate(frames):
        sizes[:, number] = [len(frame) for frame in column]
    fixed = join_row([b""] * num_columns)[: -8 * num_columns]  # how every row of C frames starts, before the sizes
    heads = sizes.tobytes()
    step = 8 * num_columns
    totals = (sizes.sum(axis=1) + (len(fixed) + step)).tolist()
    parts: list[Any] = [*pack((b"MULTI",)), b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n" % (2 + 2 * num_rows, len(key), key)]
    for row, cells in enumerate(zip(*frames, strict=True)):
        position = b"%d" % (first + row)
        head = b"$%d\r\n%b\r\n$%d\r\n" % (len(position), position, totals[row])
        parts.append(head + fixed + heads[row * step : (row + 1) * step])
        parts += cells
        parts.append(b"\r\n")
    return [*parts, *pack((b"PEXPIRE", key, b"%d" % int(1000 * keep_s))), *pack((b"EXEC",))]


class ReadPlans:
    """Finds which refs of a row a read needs, and which of their cells. Computed once per sequence of layouts."""

    def __init__(self, fields: Sequence[str], layouts: Sequence[Mapping[str, FieldSpec]]) -> None:
        self._fields = fields
        self._slots = [{name: slot for slot, name in enumerate(layout)} for layout in layouts]
        self._known: dict[tuple[int, ...], list[tuple[int, list[tuple[int, int]]]] | None] = {}

    def of(self, refs: Refs) -> list[tuple[int, list[tuple[int, int]]]] | None:
        """(index in ``refs``, [(column, slot)...]) for every ref that is needed; None if a cell is not produced."""
        key = tuple([layout for _, _, layout, _ in refs])
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def _find(self, key: tuple[int, ...]) -> list[tuple[int, list[tuple[int, int]]]] | None:
        found: dict[int, list[tuple[int, int]]] = {}
        for column, name in enumerate(self._fields):
            for index in range(len(key) - 1, -1, -1):  # the latest write that has the field
                slot = self._slots[key[index]].get(name)
                if slot is not None:
                    found.setdefault(index, []).append((column, slot))
                    break
            else:
                return None
        return list(found.items())


class ArrayReader:
    """Reads replies that are arrays of byte strings straight into one buffer.

    Args:
        sock: A connected socket. Nothing but these replies must arrive on it.
        size_bytes: Expected size of all replies.
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    def __init__(self, sock: Any, size_bytes: int, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._buffer = np.empty(size_bytes + _SLACK_BYTES, dtype=np.uint8).data
        self._start = 0  # of the bytes that are not parsed yet
        self._stop = 0  # of the bytes that were received

    @property
    def done(self) -> bool:
        """Whether all received bytes are parsed."""
        return self._start == self._stop

    def read(self) -> list[memoryview | None]:
        """The next reply.

        Raises:
            ResponseError: The server refused the command.
            InvalidResponse: The reply is no array of byte strings.
            TimeoutError, OSError: The deadline passed; the connection was lost.
        """
        count = self._number(b"*")
        strings: list[memoryview | None] = []
        for _ in range(count):
            size = self._number(b"$")
            if size < 0:
                strings.append(None)
                continue
            self._need(size + 2)
            strings.append(self._buffer[self._start : self._start + size])
            self._start += size + 2
        return strings

    def _number(self, kind: bytes) -> int:
        """Reads ``<kind><digits>\\r\\n``."""
        line = self._line()
        if line[:1] == b"-":
            raise ResponseError(line[1:].decode("utf-8", "replace"))
        if line[:1] != kind or not line[1:].removeprefix(b"-").isdigit() or len(line) > _MOST_DIGITS:
            raise InvalidResponse(f"the reply holds {line[:20]!r}, expected {kind!r} and a number")
        return int(line[1:])

    def _line(self) -> bytes:
        while True:
            window = bytes(self._buffer[self._start : min(self._stop, self._start + 32)])
            end = window.find(b"\r\n")
            if end < 0 and self._stop - self._start > 32:  # an error message
                window = bytes(self._buffer[self._start : self._stop])
                end = window.find(b"\r\n")
            if end >= 0:
                self._start += end + 2
                return window[:end]
            seen = self._stop - self._start
            if seen > _SLACK_BYTES:
                raise InvalidResponse(f"the reply holds a line of more than {_SLACK_BYTES} bytes")
            self._need(seen + 1)

    def _need(self, size: int) -> None:
        """Receives until at least ``size`` bytes are not parsed yet."""
        while self._stop - self._start < size:
            if self._stop == len(self._buffer):
                self._grow(size)
            self._sock.settimeout(left_s(self._deadline))
            count = self._sock.recv_into(self._buffer[self._stop :])
            if not count:
                raise LostConnectionError("Connection closed by server.")
            self._stop += count

    def _grow(self, size: int) -> None:
        """Continues in a new buffer, of at most twice what was received: a forged size reserves no memory.

        Views of the old one stay valid.
        """
        rest = self._buffer[self._start : self._stop]
        self._buffer = np.empty(2 * min(size, len(rest)) + _SLACK_BYTES, dtype=np.uint8).data
        self._buffer[: len(rest)] = rest
        self._start, self._stop = 0, len(rest)
