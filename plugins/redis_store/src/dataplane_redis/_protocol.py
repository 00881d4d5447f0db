"""Redis' protocol, where redis-py's own is not enough: commands and rows as bytes, arrays of rows, what refusals mean.

redis-py copies what it sends and makes new bytes of each value that it receives. So rows are packed here, around frames
that stay where they are, and received into one buffer. And redis-py's errors do not say whether the server did anything
before it refused; those here do.

A row is what one put wrote of one sample: its frames, joined in the format of `dataplane_core.codec.join_row`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError as LostConnectionError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    DataPlaneError,
    OperationTimeoutError,
)
from dataplane_core.host_memory import recycled_bytes

#: What is sent: commands, in parts.
Parts: TypeAlias = Sequence[bytes | bytearray | memoryview]

#: The least socket timeout in seconds. Zero would mean not to wait at all, which TLS does not support.
_MIN_TIMEOUT_S: Final = 0.001
#: Added to every buffer, for the heads of the replies or an error message.
_SLACK_BYTES: Final = 64 * 1024
#: The longest number in a reply, with its kind and its sign.
_MOST_DIGITS: Final = 21
#: How the refusals of a node begin that names another one.
_REDIRECTIONS: Final = {"MOVED": MovedError, "ASK": AskError}
#: How the refusals of a server begin that takes no writes.
_NO_WRITES: Final = ("MISCONF", "NOREPLICAS", "READONLY", "CLUSTERDOWN", "MASTERDOWN")
#: How refusals begin of a user that may not do it. The last one is of a script, by Redis 7.0.
_NO_RIGHT: Final = ("WRONGPASS", "NOAUTH", "NOPERM", "ACL failure in script", "The user executing the script")


def left_s(deadline: float) -> float:
    """The seconds until the deadline, as a socket's timeout."""
    return max(_MIN_TIMEOUT_S, deadline - time.monotonic())


# --- commands and rows ------------------------------------------------------------------------------------------------


def pack(words: Parts) -> list[bytes | bytearray | memoryview]:
    """Packs a command."""
    parts: list[bytes | bytearray | memoryview] = [b"*%d\r\n" % len(words)]
    for word in words:
        parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return parts


def pack_rows(key: bytes, first: int, frames: Sequence[Sequence[Any]]) -> list[Any]:
    """Packs an HSET of rows under their positions, from ``first`` on, without a copy of the columns' frames."""
    from dataplane_core.codec import join_row  # it imports torch, which the owner does not need

    num_columns, num_rows = len(frames), len(frames[0])
    sizes = np.empty((num_rows, num_columns), dtype="<i8")
    for number, column in enumerate(frames):
        sizes[:, number] = [len(frame) for frame in column]
    # how every row of so many frames starts, before the sizes
    fixed = join_row([b""] * num_columns)[: -8 * num_columns]
    heads = sizes.tobytes()
    step = 8 * num_columns
    totals = (sizes.sum(axis=1) + (len(fixed) + step)).tolist()
    parts: list[Any] = [b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n" % (2 + 2 * num_rows, len(key), key)]
    for row, cells in enumerate(zip(*frames, strict=True)):
        position = b"%d" % (first + row)
        head = b"$%d\r\n%b\r\n$%d\r\n" % (len(position), position, totals[row])
        parts.append(head + fixed + heads[row * step : (row + 1) * step])
        parts += cells
        parts.append(b"\r\n")
    return parts


class ArrayReader:
    """Receives arrays of byte strings into one buffer of the expected size. Nothing else must arrive on the socket."""

    def __init__(self, sock: Any, size_bytes: int, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._buffer = recycled_bytes(size_bytes + _SLACK_BYTES).data
        self._start = 0  # of the bytes that are not parsed yet
        self._stop = 0  # of the bytes that were received

    @property
    def done(self) -> bool:
        """Whether all received bytes are parsed."""
        return self._start == self._stop

    def read(self) -> list[memoryview | None]:
        """The next reply. Raises `ResponseError` if it is a refusal, and `InvalidResponse` if it is no such array."""
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
            text = line[1:].decode("utf-8", "replace")
            word, _, rest = text.partition(" ")
            raise _REDIRECTIONS[word](rest) if word in _REDIRECTIONS else ResponseError(text)
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
        """Continues in a new buffer, of at most twice what was received: a forged size reserves no memory."""
        rest = self._buffer[self._start : self._stop]
        self._buffer = np.empty(2 * min(size, len(rest)) + _SLACK_BYTES, dtype=np.uint8).data
        self._buffer[: len(rest)] = rest
        self._start, self._stop = 0, len(rest)


# --- refusals ---------------------------------------------------------------------------------------------------------


def is_moving(error: Exception) -> bool:
    """Whether a node of a cluster refused since the keys are being moved, or since the cluster lacks a node."""
    return isinstance(error, (ClusterDownError, TryAgainError, AskError)) or str(error).startswith(
        ("TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN")
    )


def is_temporary_refusal(error: BaseException | None) -> bool:
    """Whether the server refused before it did anything, and will accept the command soon."""
    return isinstance(error, BusyLoadingError) or (
        isinstance(error, ResponseError) and str(error).startswith(("BUSY ", "LOADING "))
    )


def is_untrusted(error: BaseException) -> bool:
    """Whether the certificate of the other side is refused: a later try will meet the same one."""
    # redis-py sets no cause, and the context may be of another error that the caller handles
    return isinstance(error, LostConnectionError) and "CERTIFICATE_VERIFY_FAILED" in str(error)


def to_error(what: str, label: str, error: Exception) -> DataPlaneError:
    """The error of an operation for one of redis-py. Its ``outcome`` is that of the one command which met the error."""
    if isinstance(error, (redis.TimeoutError, TimeoutError)):
        return OperationTimeoutError(f"{what} timed out: {label} did not answer in time.")
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return BackendUnavailableError(
            f"{what} refused by {label}: {error}.",
            retryable=False,
            hint="Check user and password of the url, and what the ACL grants. The README of dataplane-redis has a "
            "command that makes a user with enough rights.",
        )
    text = str(error)
    if is_temporary_refusal(error):
        does = "is busy with a script that takes long" if text.startswith("BUSY ") else "is still loading its data"
        return OperationTimeoutError(f"{what} timed out: {label} {does}.", outcome="not_done")
    if text.startswith(("OOM", "command not allowed when used memory")):
        return CapacityExceededError(
            f"{what} refused: {label} has reached its maxmemory. Nothing was written.",
            hint="Clear samples that are consumed, or raise the server's maxmemory.",
        )
    if text.startswith(_NO_RIGHT):
        return to_error(what, label, AuthenticationError(text))
    if isinstance(error, (ReadOnlyError, MasterDownError, ClusterDownError)) or text.startswith(_NO_WRITES):
        return BackendUnavailableError(f"{what} refused: {label} takes no writes: {text}", outcome="not_done")
    if is_moving(error) or isinstance(error, MovedError):
        return BackendUnavailableError(
            f"{what} refused: {label} is a cluster that is moving this namespace to another node.",
            hint="Ask again: the next call goes to the node that serves it then.",
            outcome="not_done",
        )
    if is_untrusted(error):
        return BackendUnavailableError(
            f"{what} failed: the certificate that was shown for {label} is refused: {text.rstrip('.')}.",
            retryable=False,
            hint="Check that ssl_ca_certs of the url is the authority that signed it, and that it is made for the host "
            "that the url names.",
        )
    if "max number of clients" in text:
        return BackendUnavailableError(
            f"{what} refused: {label} takes no more connections: {text}.",
            hint="Each thread that is in an operation has one. Raise the server's maxclients, and the limit of open "
            "files (ulimit -n) of the process that starts it: for a private server, that of its owner.",
        )
    if isinstance(error, (redis.ConnectionError, OSError)):
        return BackendUnavailableError(
            f"{what} failed: {label} cannot be reached: {text.rstrip('.')}.",
            hint="Check that it runs, and that the url names its host and port. A private server runs as long as its "
            "owner, which connect(config, bootstrap=True) starts.",
        )
    return BackendError(f"{what} failed on {label}: {type(error).__name__}: {text}")
