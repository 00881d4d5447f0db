"""Connections to one server: commands in, replies out, every wait bounded by a deadline.

A connection serves one call at a time; idle ones are kept. Nothing is sent twice on its own: whether a command that
lost its connection ran is for the caller to say.

In a cluster all keys of a namespace lie in one slot, so a link speaks to one node: the one that serves that slot. It
follows the slot when the cluster moves it, and looks for it on the other nodes when its node is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import redis
from redis.connection import Connection, ConnectionPool, UnixDomainSocketConnection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as LostConnectionError

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    DataPlaneError,
    OperationTimeoutError,
)
from dataplane_redis._rows import ArrayReader
from dataplane_redis._scripts import Script

__all__ = ["Command", "Link", "Read", "pack"]

#: A command: its words; or one that is packed already.
Command: TypeAlias = Sequence[bytes | bytearray | memoryview]

_R = TypeVar("_R")

#: Seconds between two tries where the server refuses for now: it is still loading its data, or busy with a long script.
_REFUSED_POLL_S: Final = 0.05
#: The least socket timeout in seconds: zero would mean not to wait at all, which TLS cannot.
_LEAST_S: Final = 0.001
#: How often a call follows its slot from node to node before it gives up.
_MOST_MOVES: Final = 8
#: Parts of a packed command below this size are joined before they are sent.
_JOIN_BYTES: Final = 1 << 20
#: Replies of less than this are asked for together.
_LOT_BYTES: Final = 256 * 1024


def pack(command: Command) -> list[bytes | bytearray | memoryview]:
    """A command as the server reads it, in parts."""
    parts: list[bytes | bytearray | memoryview] = [b"*%d\r\n" % len(command)]
    for word in command:
        parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return parts


@dataclass(frozen=True, slots=True)
class Read:
    """A packed command that replies with an array of byte strings, and how large the reply is, as far as is known."""

    packed: bytes
    size_bytes: int


def _lots(reads: Sequence[Read]) -> list[list[Read]]:
    """Neighbours joined until a lot's replies are worth a round trip."""
    lots: list[list[Read]] = []
    size_bytes = _LOT_BYTES
    for read in reads:
        if size_bytes >= _LOT_BYTES:
            lots.append([])
            size_bytes = 0
        lots[-1].append(read)
        size_bytes += read.size_bytes
    return lots


class Link:
    """A pool of connections to the server of a URL, or to the node of its cluster that serves a key. May be used from
    several threads.

    Args:
        url: Where the server is; of a cluster any node. Kept inside the connections only; never part of a message.
        label: What messages call the server.
    """

    def __init__(self, url: str, label: str) -> None:
        self.label = label
        self._pool = ConnectionPool.from_url(
            url, protocol=2, retry=None, retry_on_timeout=False, socket_read_size=1 << 18, decode_responses=False
        )
        self._connection_class: Any = self._pool.connection_class
        self._address: dict[str, Any] = {}  # in place of the URL's, once the cluster named another
        self._nodes: list[dict[str, Any]] = []  # of the cluster, where there is one
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Closes all connections; those in use, once their call ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    # --- the node of a cluster ----------------------------------------------------------------------------------------

    def follow(self, what: str, deadline: float, key: bytes) -> None:
        """Turns to the node that serves ``key``. On a server that is no cluster asks once and changes nothing.

        Raises:
            As `commands`.
        """
        self.command(what, deadline, b"EXISTS", key)
        reply = self._ask(what, deadline, pack((b"CLUSTER", b"SLOTS")))
        if isinstance(reply, Exception):
            return  # no cluster, or the ACL forbids the question
        self._nodes = [self._address_of(node[0], node[1]) for _, _, *nodes in reply for node in nodes]

    def _address_of(self, host: bytes | str, port: int | str) -> dict[str, Any]:
        name = host.decode() if isinstance(host, bytes) else host
        # an empty name is that of the node that was asked
        known = self._address.get("host") or self._pool.connection_kwargs.get("host") or "localhost"
        return {"host": name or known, "port": int(port)}

    def _turn_to(self, address: dict[str, Any]) -> None:
        with self._lock:
            if issubclass(self._connection_class, UnixDomainSocketConnection):
                self._connection_class = Connection
            self._address = address
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _turn_as_told(self, refusal: Exception) -> bool:
        """Turns to the node that a refusal names; False where it names none."""
        text = str(refusal)
        if isinstance(refusal, MovedError):
            self._turn_to(self._address_of(refusal.host, refusal.port))
        elif text.startswith("MOVED "):
            host, _, port = text.split(" ")[-1].rpartition(":")
            self._turn_to(self._address_of(host, port))
        else:
            return False
        return True

    # --- calls --------------------------------------------------------------------------------------------------------

    def command(self, what: str, deadline: float, *words: bytes) -> Any:
        """One command; its reply.

        Raises:
            As `commands`.
        """
        reply = self._ask(what, deadline, pack(words))
        if isinstance(reply, Exception):
            self.refuse(what, reply)
        return reply

    def script(self, what: str, deadline: float, script: Script, key: bytes, *arguments: bytes | memoryview) -> Any:
        """Runs a script, which is sent first where the server does not know it; its reply.

        Raises:
            As `commands`.
        """
        packed = pack((b"EVALSHA", script.sha, b"1", key, *arguments))
        while True:
            reply = self._ask(what, deadline, packed)
            if not isinstance(reply, NoScriptError):
                break
            self.command(what, deadline, b"SCRIPT", b"LOAD", script.text)
        if isinstance(reply, Exception):
            self.refuse(what, reply)
        return reply

    def _ask(self, what: str, deadline: float, packed: Sequence[bytes | bytearray | memoryview]) -> Any:
        """One reply. A server that refuses for now, or does not serve the slot, does so before it does anything, so it,
        or the one that it names, is asked again."""
        moves = 0
        while True:
            reply = self.again_where_refused(deadline, lambda: self._ask_once(what, deadline, packed))
            if moves == _MOST_MOVES or not (isinstance(reply, Exception) and self._turn_as_told(reply)):
                return reply
            moves += 1

    def _ask_once(self, what: str, deadline: float, packed: Sequence[bytes | bytearray | memoryview]) -> Any:
        (reply,) = self.commands(what, deadline, [packed], 1)
        if isinstance(reply, Exception) and _refuses_for_now(reply):
            self.refuse(what, reply)
        return reply

    def again_where_refused(self, deadline: float, call: Callable[[], _R]) -> _R:
        """What ``call`` returns; called again while the server refuses for now, since it loads its data or is busy with
        a long script.

        Args:
            deadline: On `time.monotonic`'s clock, in seconds.
            call: May be called several times: a command that is refused for now has done nothing.

        Raises:
            OperationTimeoutError: The server refused until the deadline.
            Exception: What ``call`` raises else.
        """
        while True:
            try:
                return call()
            except OperationTimeoutError as error:
                if not _refuses_for_now(error.__cause__) or time.monotonic() + _REFUSED_POLL_S >= deadline:
                    raise
            time.sleep(_REFUSED_POLL_S)

    def commands(
        self, what: str, deadline: float, packed: Iterable[Iterable[bytes | bytearray | memoryview]], count: int
    ) -> list[Any]:
        """Sends packed commands on one connection, then reads their replies.

        Args:
            what: The operation, to open messages with.
            deadline: On `time.monotonic`'s clock, in seconds.
            packed: The parts of each command, as `pack` gives them; may make them as they are sent.
            count: How many replies there will be.

        Returns:
            A reply each, or the exception of a command that was refused.

        Raises:
            OperationTimeoutError: The deadline passed; the commands may have run or not.
            BackendUnavailableError: The server cannot be reached, or the connection was lost meanwhile.
        """
        connection = self._acquire(what, deadline)
        whole = False
        try:
            connection._sock.settimeout(_left_s(deadline))
            waiting: list[bytes | bytearray | memoryview] = []
            size = 0
            for parts in packed:
                for part in parts:
                    waiting.append(part)
                    size += len(part)
                    if size >= _JOIN_BYTES:
                        connection._sock.settimeout(_left_s(deadline))
                        connection.send_packed_command([b"".join(waiting)], check_health=False)
                        waiting, size = [], 0
            if waiting:
                connection.send_packed_command([b"".join(waiting)], check_health=False)
            replies = []
            for _ in range(count):
                connection._sock.settimeout(_left_s(deadline))
                try:
                    replies.append(connection.read_response(disable_decoding=True))
                except ResponseError as error:
                    replies.append(error)
            whole = True
        except (RedisError, OSError) as error:
            self.refuse(what, error)
        finally:
            self._release(connection, whole)
        return replies

    def fetch(self, what: str, deadline: float, reads: Sequence[Read]) -> list[list[memoryview | None]]:
        """Sends commands that each reply with an array of byte strings, and receives these without a copy.

        Two lots of commands are under way at a time: a server that has them all at once copies every reply before it
        sends the first, while the client waits.

        Args:
            what: The operation, to open messages with.
            deadline: On `time.monotonic`'s clock, in seconds.
            reads: The commands.

        Returns:
            Per command its byte strings, as views of one buffer; None for what is not there.

        Raises:
            As `commands`.
        """
        return self.again_where_refused(deadline, lambda: self._fetch_once(what, deadline, reads))

    def _fetch_once(self, what: str, deadline: float, reads: Sequence[Read]) -> list[list[memoryview | None]]:
        lots = _lots(reads)
        arrays: list[list[memoryview | None]] = []
        connection = self._acquire(what, deadline)
        whole = False
        try:
            reader = ArrayReader(connection._sock, sum(read.size_bytes for read in reads), deadline)
            for number in range(-1, len(lots)):
                if number + 1 < len(lots):
                    connection._sock.settimeout(_left_s(deadline))
                    sent = b"".join([read.packed for read in lots[number + 1]])
                    connection.send_packed_command([sent], check_health=False)
                if number >= 0:
                    arrays += [reader.read() for _ in lots[number]]
            whole = reader.done
        except (RedisError, OSError) as error:
            self.refuse(what, error)
        finally:
            self._release(connection, whole)
        return arrays

    # --- errors -------------------------------------------------------------------------------------------------------

    def refuse(self, what: str, error: Exception) -> NoReturn:
        """Raises what an error of redis-py means to a user, with that error as its cause."""
        raise self.explain(what, error) from error

    def explain(self, what: str, error: Exception) -> DataPlaneError:
        """What an error of redis-py means to a user. After a redirection the next call goes where it points."""
        if isinstance(error, (redis.TimeoutError, TimeoutError)):
            return OperationTimeoutError(f"{what} timed out: {self.label} did not answer in time.")
        if isinstance(error, (AuthenticationError, NoPermissionError)):
            return BackendUnavailableError(
                f"{what} refused by {self.label}: {error}.",
                retryable=False,
                hint="Check user and password of the url, and what the ACL grants: +@all -@admin -@dangerous +info "
                "+config|get on the keys 'dp:*' is enough.",
            )
        if isinstance(error, BusyLoadingError):
            return OperationTimeoutError(f"{what} timed out: {self.label} is still loading its data.")
        text = str(error)
        if _refuses_for_now(error):
            return OperationTimeoutError(f"{what} timed out: {self.label} is busy with a script that takes long.")
        if text.startswith(("OOM", "command not allowed when used memory")):
            return CapacityExceededError(
                f"{what} refused: {self.label} has reached its maxmemory. Nothing was written.",
                hint="Clear samples that are consumed, or raise the server's maxmemory.",
            )
        if text.startswith(("WRONGPASS", "NOAUTH", "NOPERM", "ACL failure in script")):
            return self.explain(what, AuthenticationError(text))
        if self._turn_as_told(error) or text.startswith(("ASK ", "TRYAGAIN")) or isinstance(error, AskError):
            return BackendUnavailableError(
                f"{what} refused: {self.label} is a cluster that is moving this namespace to another node.",
                hint="Ask again: the next call goes to the node that serves it then.",
            )
        if isinstance(error, (ReadOnlyError, MasterDownError, ClusterDownError)) or text.startswith("MISCONF"):
            return BackendUnavailableError(f"{what} refused: {self.label} takes no writes: {text}")
        if isinstance(error, (redis.ConnectionError, OSError)):
            return BackendUnavailableError(f"{what} failed: {self.label} cannot be reached: {text}")
        return BackendError(f"{what} failed on {self.label}: {type(error).__name__}: {text}")

    # --- connections --------------------------------------------------------------------------------------------------

    def _acquire(self, what: str, deadline: float) -> Any:
        while True:
            if time.monotonic() >= deadline:  # so that no caller's loop outlives it
                raise OperationTimeoutError(f"{what} timed out before it was sent to {self.label}.")
            with self._lock:
                if self._closed:
                    raise BackendUnavailableError(f"{what} refused: the connection to {self.label} is closed.")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(what, deadline)
            try:
                if not connection.can_read(timeout=0):
                    return connection
            except (RedisError, OSError):
                pass  # the server closed it while it was idle; another one is tried
            connection.disconnect()

    def _connect(self, what: str, deadline: float) -> Any:
        elsewhere = iter(list(self._nodes))
        while True:
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(f"{what} timed out before it was sent to {self.label}.")
            connection: Any = self._connection_class(**self._where())
            connection.socket_connect_timeout = connection.socket_timeout = _left_s(deadline)
            try:
                connection.connect()
                return connection
            except (RedisError, OSError) as error:
                connection.disconnect()
                if _refuses_for_now(error):
                    if time.monotonic() + _REFUSED_POLL_S >= deadline:
                        self.refuse(what, error)
                    time.sleep(_REFUSED_POLL_S)
                    continue
                node = next(elsewhere, None) if isinstance(error, (LostConnectionError, OSError)) else None
                if node is None:
                    self.refuse(what, error)
                self._turn_to(node)

    def _where(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = dict(self._pool.connection_kwargs)
        if self._address:
            kwargs.pop("path", None)
        return kwargs | self._address

    def _release(self, connection: Any, whole: bool) -> None:
        with self._lock:
            keep = whole and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.disconnect()


def _refuses_for_now(error: BaseException | None) -> bool:
    """Whether the server refused before it did anything, and will not for long."""
    return isinstance(error, BusyLoadingError) or (isinstance(error, ResponseError) and str(error).startswith("BUSY "))


def _left_s(deadline: float) -> float:
    return max(_LEAST_S, deadline - time.monotonic())
