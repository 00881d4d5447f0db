"""Redis' protocol, as far as redis-py leaves it to us: commands as bytes, and what refusals mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
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
    StalePartitionError,
)

__all__ = ["Command", "is_moving", "is_temporary_refusal", "pack", "redirection_of", "to_error"]

#: How the refusals of a server begin that takes no writes.
_NO_WRITES: Final = ("MISCONF", "NOREPLICAS", "READONLY", "CLUSTERDOWN", "MASTERDOWN")
#: How refusals begin of a user that may not do it. The last one is of a script, by Redis 7.0.
_NO_RIGHT: Final = ("WRONGPASS", "NOAUTH", "NOPERM", "ACL failure in script", "The user executing the script")
#: The keys that scripts look for, by the name in common.lua.
_LOST_PARTS: Final = {
    "p": "the registration of the partition",
    "r": "the index of the partition's rows",
    "t": "the tags of the partition",
    "o": "the order of the partition's rows",
    "w": "the times of the partition's writes",
    "s": "the types of the partition's fields",
    "l": "the layouts of the partition's rows",
    "u": "the list of the partition's writes",
    "n": "the list of rows that several samples of the partition share",
    "x": "the list of the partition's cleared samples",
    "g": "the groups of the partition",
    "gm": "members of the partition's groups",
    "h": "what a consumer task of the partition holds",
    "k": "the leases of the partition",
    "q": "the times when leases of the partition end",
    "a": "the samples of a lease of the partition",
    "v": "the queue of a consumer task of the partition",
    "vw": "the list of the partition's queues",
    "parts": "the list of the partitions",
    "clients": "the list of the clients",
}
#: What to do if it is no partition's own.
_MENDS: Final = {
    "parts": "Then connect with another namespace, and produce all samples again.",
    "clients": "The list is complete again when all clients have announced themselves.",
}
#: The words of a command.
Command: TypeAlias = Sequence[bytes | bytearray | memoryview]


def pack(command: Command) -> list[bytes | bytearray | memoryview]:
    """Packs a command in the wire protocol, as a list of parts."""
    parts: list[bytes | bytearray | memoryview] = [b"*%d\r\n" % len(command)]
    for word in command:
        parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return parts


def redirection_of(refusal: Exception) -> tuple[str, str, int] | None:
    """``MOVED`` or ``ASK``, host and port, if a refusal names another node. An empty host: the node that was asked."""
    if isinstance(refusal, AskError):  # MovedError is one
        return "MOVED" if isinstance(refusal, MovedError) else "ASK", refusal.host, int(refusal.port)
    kind, _, place = str(refusal).partition(" ")
    if kind not in ("MOVED", "ASK"):
        return None
    host, _, port = place.split(" ")[-1].rpartition(":")
    return kind, host, int(port)


def is_moving(error: Exception) -> bool:
    """Whether a node of a cluster refused since the keys are being moved, or since the cluster lacks a node."""
    return (
        isinstance(error, (ClusterDownError, TryAgainError))
        or str(error).startswith(("TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"))
        or (redirection_of(error) or ("",))[0] == "ASK"
    )


def is_temporary_refusal(error: BaseException | None) -> bool:
    """Whether the server refused before it did anything, and will accept the command soon."""
    return isinstance(error, BusyLoadingError) or (
        isinstance(error, ResponseError) and str(error).startswith(("BUSY ", "LOADING "))
    )


def to_error(what: str, label: str, error: Exception) -> DataPlaneError:
    """The `DataPlaneError` for an error of redis-py. Its ``outcome`` is that of the one command which met the error.

    Args:
        what: The operation; the message starts with it.
        label: The name of the server in the message.
        error: The error.
    """
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
    if text.startswith("LOST "):
        part = text.split()[1]
        return StalePartitionError(
            f"{what} failed: {label} has lost {_LOST_PARTS.get(part, part)}. What is left is not used.",
            retryable=False,
            hint="A key was deleted, or evicted: set the server's maxmemory-policy to noeviction. "
            + _MENDS.get(part, "Then register the partition again, and produce its samples again."),
        )
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
    if is_moving(error) or redirection_of(error) is not None:
        return BackendUnavailableError(
            f"{what} refused: {label} is a cluster that is moving this namespace to another node.",
            hint="Ask again: the next call goes to the node that serves it then.",
            outcome="not_done",
        )
    if isinstance(error, (redis.ConnectionError, OSError)):
        return BackendUnavailableError(
            f"{what} failed: {label} cannot be reached: {text.rstrip('.')}.",
            hint="Check that it runs, and that the url names its host and port. A private server runs as long as its "
            "owner, which connect(config, bootstrap=True) starts.",
        )
    return BackendError(f"{what} failed on {label}: {type(error).__name__}: {text}")
