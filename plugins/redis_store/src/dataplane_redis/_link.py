"""Connections to one server: sends commands and receives replies. A deadline bounds every wait.

A connection serves one call at a time; idle ones are kept. A command whose connection was lost may have run or not, so
a link does not send it again: the caller decides.

With Sentinel, a link talks to the server that the sentinels name as the primary. While they name none that answers, a
call waits until its deadline: nothing was sent yet.

In a cluster, all keys of a namespace's ledger are in one slot, so a link talks to the one node that serves that slot.
When the cluster moves the slot, the link follows it. When the node is gone, the link looks for the slot on the other
nodes. While none serves it, or its keys are moving, a call waits until its deadline: nothing was done yet.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeVar

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
    TryAgainError,
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
from dataplane_redis._sentinel import NoPrimaryError, Service, UnknownServiceError

__all__ = [
    "Address",
    "Command",
    "Link",
    "Read",
    "Rider",
    "Watch",
    "in_chunks",
    "is_moving",
    "is_temporary_refusal",
    "left_s",
    "pack",
]

#: The words of a command.
Command: TypeAlias = Sequence[bytes | bytearray | memoryview]
#: Host and port of a node of a cluster. Port 0: the server of the URL.
Address: TypeAlias = tuple[str, int]

_R = TypeVar("_R")

#: Seconds between two tries while the server refuses temporarily: it loads its data, or runs a long script.
_REFUSED_POLL_S: Final = 0.05
#: The least socket timeout in seconds. Zero would mean not to wait at all, which TLS does not support.
_MIN_TIMEOUT_S: Final = 0.001
#: Seconds between two questions to the sentinels, and the most that connecting to the server they name may take.
_SERVICE_POLL_S: Final = 0.1
_SERVICE_CONNECT_S: Final = 1.0
#: How many redirections a call follows before it gives up.
_MAX_REDIRECTIONS: Final = 8
#: Parts of a packed command below this size are joined before they are sent.
_JOIN_BYTES: Final = 1 << 20
#: Neighbouring reads are sent together until their replies reach this size.
_CHUNK_BYTES: Final = 256 * 1024


def pack(command: Command) -> list[bytes | bytearray | memoryview]:
    """Packs a command in the wire protocol, as a list of parts."""
    parts: list[bytes | bytearray | memoryview] = [b"*%d\r\n" % len(command)]
    for word in command:
        parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return parts


@dataclass(frozen=True, slots=True)
class Read:
    """A packed command that replies with an array of byte strings, and the expected size of the reply."""

    packed: bytes
    size_bytes: int


class Rider(Protocol):
    """Commands that follow a call on the same connection, in the same packet.

    Attributes:
        replies: To them; set by the link. Where one did not come, the error.
        history: The history that the connection met, see `Watch`; set by the link.
    """

    replies: list[Any]
    history: bytes

    @property
    def num_commands(self) -> int:
        """How many commands."""

    def pack(self, deadline: float) -> Sequence[Sequence[bytes | bytearray | memoryview]]:
        """The packed commands, made when they are sent."""

    def follows(self, reply: Any) -> bool:
        """Whether to read the replies, after this reply to the call. Else the connection is closed."""


class Watch(Protocol):
    """Told of the history of the data that each new connection meets."""

    def meet(self, history: bytes, ask: Callable[..., Any]) -> None:
        """A new connection met this history. ``ask`` sends a command on it and returns the reply."""

    def raise_lost(self, what: str, label: str) -> None:
        """Called before a connection is used. May raise."""


def in_chunks(reads: Sequence[_R], size_of: Callable[[_R], int]) -> list[list[_R]]:
    """Groups neighbouring reads until the replies of a chunk, of so many bytes each, are worth a round trip."""
    chunks: list[list[_R]] = []
    size_bytes = _CHUNK_BYTES
    for read in reads:
        if size_bytes >= _CHUNK_BYTES:
            chunks.append([])
            size_bytes = 0
        chunks[-1].append(read)
        size_bytes += size_of(read)
    return chunks


class Link:
    """A pool of connections to the server of a URL, to the primary of its service, or to the node of its cluster that
    serves a key. Thread-safe.

    Args:
        url: The server, a service of Sentinel, or any node of a cluster. Only the connections keep it; no message
            shows it.
        label: The name of the server in messages.
    """

    def __init__(self, url: str, label: str) -> None:
        self.label = label
        self._service = Service.of(url)
        self._pool = ConnectionPool.from_url(
            self._service.server_url if self._service is not None else url,
            protocol=2,
            retry=None,
            retry_on_timeout=False,
            socket_read_size=1 << 18,
            decode_responses=False,
        )
        self._connection_class: Any = self._pool.connection_class
        self._address: dict[str, Any] = {}  # replaces the URL's address once the cluster or a sentinel named another
        self._nodes: list[dict[str, Any]] = []  # of the cluster, if there is one
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._closed = False
        self.watch: Watch | None = None

    def close(self) -> None:
        """Closes all connections. One in use is closed when its call ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    # --- the node of a cluster ----------------------------------------------------------------------------------------

    def follow(self, what: str, deadline: float, key: bytes) -> Any:
        """Switches to the node that serves ``key``. On a server that is not a cluster, changes nothing.

        Returns:
            The reply to CLUSTER SLOTS. None if the server is not a cluster, or the ACL forbids the command.

        Raises:
            As `commands`.
        """
        self.command(what, deadline, b"EXISTS", key)
        if self._service is not None:
            return None
        reply = self._ask(what, deadline, pack((b"CLUSTER", b"SLOTS")))
        if isinstance(reply, Exception):
            return None
        self._nodes = [_place_of(self.address_of(node[0], node[1])) for _, _, *nodes in reply for node in nodes]
        return reply

    @property
    def address(self) -> Address:
        """The node that the link talks to."""
        return (self._address["host"], self._address["port"]) if self._address else ("", 0)

    def address_of(self, host: bytes | str, port: int | str) -> Address:
        """The address that a node gives. An empty host means the node that was asked."""
        name = host.decode() if isinstance(host, bytes) else host
        known = self._address.get("host") or self._pool.connection_kwargs.get("host") or "localhost"
        return name or known, int(port)

    def connect_to(self, address: Address, timeout_s: float) -> Any:
        """A new connection to a node, that this link does not keep. Raises what redis-py raises."""
        kind = self._connection_class
        if address[1] and issubclass(kind, UnixDomainSocketConnection):
            kind = Connection
        connection: Any = kind(**self._where(_place_of(address)))
        connection.socket_connect_timeout = connection.socket_timeout = timeout_s
        try:
            connection.connect()
        except (RedisError, OSError):
            connection.disconnect()
            raise
        return connection

    def _switch_to(self, address: dict[str, Any]) -> None:
        with self._lock:
            if issubclass(self._connection_class, UnixDomainSocketConnection):
                self._connection_class = Connection
            self._address = address
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _follow_redirection(self, refusal: Exception) -> bool:
        """Switches to the node that a refusal names. False if it names none."""
        text = str(refusal)
        if isinstance(refusal, MovedError):
            self._switch_to(_place_of(self.address_of(refusal.host, refusal.port)))
        elif text.startswith("MOVED "):
            host, _, port = text.split(" ")[-1].rpartition(":")
            self._switch_to(_place_of(self.address_of(host, port)))
        else:
            return False
        return True

    # --- calls --------------------------------------------------------------------------------------------------------

    def command(self, what: str, deadline: float, *words: bytes) -> Any:
        """Sends one command and returns its reply.

        Raises:
            As `commands`.
        """
        reply = self._ask(what, deadline, pack(words))
        if isinstance(reply, Exception):
            self.raise_error(what, reply)
        return reply

    def script(
        self,
        what: str,
        deadline: float,
        script: Script,
        key: bytes,
        *arguments: bytes | memoryview,
        rider: Rider | None = None,
    ) -> Any:
        """Runs a script and returns its reply. Sends the script's text first if the server does not know it.

        Raises:
            As `commands`.
        """
        packed = pack((b"EVALSHA", script.sha, b"1", key, *arguments))
        while True:
            reply = self._ask(what, deadline, packed, rider)
            if not isinstance(reply, NoScriptError):
                break
            self.command(what, deadline, b"SCRIPT", b"LOAD", script.text)
        if isinstance(reply, Exception):
            self.raise_error(what, reply)
        return reply

    def _ask(
        self,
        what: str,
        deadline: float,
        packed: Sequence[bytes | bytearray | memoryview],
        rider: Rider | None = None,
    ) -> Any:
        """Returns one reply. Tries again after a temporary refusal, and after a redirection to another node.

        That is safe: in both cases the server refused before it did anything.
        """
        num_redirections = 0
        while True:
            reply = self.retry_while_refused(deadline, lambda: self._ask_once(what, deadline, packed, rider))
            refused = isinstance(reply, Exception)
            if self._service is not None and isinstance(reply, ReadOnlyError) and _is_early(deadline, _SERVICE_POLL_S):
                self._switch_to({})  # a failover made the server a replica
                time.sleep(_SERVICE_POLL_S)
                continue
            if self._nodes and refused and is_moving(reply) and _is_early(deadline, _SERVICE_POLL_S):
                time.sleep(_SERVICE_POLL_S)
                continue
            if self._nodes and num_redirections == _MAX_REDIRECTIONS and _is_early(deadline, _SERVICE_POLL_S):
                time.sleep(_SERVICE_POLL_S)  # the nodes do not agree yet, or name one that is dead
                num_redirections = 0
            if num_redirections == _MAX_REDIRECTIONS or not (refused and self._follow_redirection(reply)):
                return reply
            num_redirections += 1

    def _ask_once(
        self,
        what: str,
        deadline: float,
        packed: Sequence[bytes | bytearray | memoryview],
        rider: Rider | None,
    ) -> Any:
        (reply,) = self.commands(what, deadline, [packed], 1, rider)
        if isinstance(reply, Exception) and is_temporary_refusal(reply):
            self.raise_error(what, reply)
        return reply

    def retry_while_refused(self, deadline: float, call: Callable[[], _R]) -> _R:
        """Returns what ``call`` returns. Repeats it while the server refuses temporarily: it loads its data, or runs a
        long script.

        Args:
            deadline: On `time.monotonic`'s clock, in seconds.
            call: May be called several times: a command that is refused temporarily has done nothing.

        Raises:
            OperationTimeoutError: The server refused until the deadline.
            Exception: Anything else that ``call`` raises.
        """
        while True:
            try:
                return call()
            except OperationTimeoutError as error:
                if not is_temporary_refusal(error.__cause__) or time.monotonic() + _REFUSED_POLL_S >= deadline:
                    raise
            time.sleep(_REFUSED_POLL_S)

    def commands(
        self,
        what: str,
        deadline: float,
        packed: Iterable[Iterable[bytes | bytearray | memoryview]],
        count: int,
        rider: Rider | None = None,
    ) -> list[Any]:
        """Sends packed commands on one connection, then reads their replies.

        Args:
            what: The operation; messages start with it.
            deadline: On `time.monotonic`'s clock, in seconds.
            packed: The parts of each command, as from `pack`. May be a generator, which is read while it is sent.
            count: The number of replies.
            rider: What to send after them. It keeps its replies, or the error that came instead of one.

        Returns:
            For each command its reply, or the exception if it was refused.

        Raises:
            OperationTimeoutError: The deadline passed; the commands may have run or not.
            BackendUnavailableError: The server cannot be reached, or the connection was lost.
        """
        connection = self._acquire(what, deadline)
        complete = False
        if rider is not None:
            rider.history = connection.dataplane_history
            packed = chain(packed, rider.pack(deadline))
        try:
            connection._sock.settimeout(left_s(deadline))
            waiting: list[bytes | bytearray | memoryview] = []
            size = 0
            for parts in packed:
                for part in parts:
                    waiting.append(part)
                    size += len(part)
                    if size >= _JOIN_BYTES:
                        connection._sock.settimeout(left_s(deadline))
                        connection.send_packed_command([b"".join(waiting)], check_health=False)
                        waiting, size = [], 0
            if waiting:
                connection.send_packed_command([b"".join(waiting)], check_health=False)
            replies = []
            for _ in range(count):
                replies.append(self._read_reply(connection, deadline))
            if rider is None:
                complete = True
            else:
                complete = rider.follows(replies[-1]) and self._read_replies_of(rider, connection, deadline)
        except (RedisError, OSError) as error:
            self.raise_error(what, error)
        finally:
            self._release(connection, complete)
        return replies

    @staticmethod
    def _read_reply(connection: Any, deadline: float) -> Any:
        connection._sock.settimeout(left_s(deadline))
        try:
            return connection.read_response(disable_decoding=True)
        except ResponseError as error:
            return error

    def _read_replies_of(self, rider: Rider, connection: Any, deadline: float) -> bool:
        """Whether all replies came. If not, the error is the last one: the call before has its own reply."""
        rider.replies = []
        try:
            for _ in range(rider.num_commands):
                rider.replies.append(self._read_reply(connection, deadline))
        except (RedisError, OSError) as error:
            rider.replies.append(error)
            return False
        return True

    def fetch(self, what: str, deadline: float, reads: Sequence[Read]) -> list[list[memoryview | None]]:
        """Sends commands that each reply with an array of byte strings, and receives these without a copy.

        Two chunks of commands are in flight at a time. If the server got all commands at once, it would copy every
        reply before it sends the first, and the client would wait.

        Args:
            what: The operation; messages start with it.
            deadline: On `time.monotonic`'s clock, in seconds.
            reads: The commands.

        Returns:
            Per command its byte strings, as views of one buffer; None for one that does not exist.

        Raises:
            As `commands`.
        """
        return self.retry_while_refused(deadline, lambda: self._fetch_once(what, deadline, reads))

    def _fetch_once(self, what: str, deadline: float, reads: Sequence[Read]) -> list[list[memoryview | None]]:
        chunks = in_chunks(reads, lambda read: read.size_bytes)
        arrays: list[list[memoryview | None]] = []
        connection = self._acquire(what, deadline)
        complete = False
        try:
            reader = ArrayReader(connection._sock, sum(read.size_bytes for read in reads), deadline)
            for number in range(-1, len(chunks)):
                if number + 1 < len(chunks):
                    connection._sock.settimeout(left_s(deadline))
                    sent = b"".join([read.packed for read in chunks[number + 1]])
                    connection.send_packed_command([sent], check_health=False)
                if number >= 0:
                    arrays += [reader.read() for _ in chunks[number]]
            complete = reader.done
        except (RedisError, OSError) as error:
            self.raise_error(what, error)
        finally:
            self._release(connection, complete)
        return arrays

    # --- errors -------------------------------------------------------------------------------------------------------

    def raise_error(self, what: str, error: Exception) -> NoReturn:
        """Raises the `DataPlaneError` for an error of redis-py, which becomes its cause."""
        raise self.to_error(what, error) from error

    def to_error(self, what: str, error: Exception) -> DataPlaneError:
        """The `DataPlaneError` for an error of redis-py. A redirection also sets the node of the next call."""
        if isinstance(error, (redis.TimeoutError, TimeoutError)):
            return OperationTimeoutError(f"{what} timed out: {self.label} did not answer in time.")
        if isinstance(error, (AuthenticationError, NoPermissionError)):
            return BackendUnavailableError(
                f"{what} refused by {self.label}: {error}.",
                retryable=False,
                hint="Check user and password of the url, and what the ACL grants. The README of dataplane-redis has a "
                "command that makes a user with enough rights.",
            )
        if isinstance(error, BusyLoadingError):
            return OperationTimeoutError(f"{what} timed out: {self.label} is still loading its data.")
        text = str(error)
        if is_temporary_refusal(error):
            return OperationTimeoutError(f"{what} timed out: {self.label} is busy with a script that takes long.")
        if text.startswith(("OOM", "command not allowed when used memory")):
            return CapacityExceededError(
                f"{what} refused: {self.label} has reached its maxmemory. Nothing was written.",
                hint="Clear samples that are consumed, or raise the server's maxmemory.",
            )
        if text.startswith(("WRONGPASS", "NOAUTH", "NOPERM", "ACL failure in script")):
            return self.to_error(what, AuthenticationError(text))
        if self._follow_redirection(error) or text.startswith(("ASK ", "TRYAGAIN")) or isinstance(error, AskError):
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
            if time.monotonic() >= deadline:  # callers may loop: this ends them
                raise OperationTimeoutError(f"{what} timed out before it was sent to {self.label}.")
            with self._lock:
                if self._closed:
                    raise BackendUnavailableError(f"{what} refused: the connection to {self.label} is closed.")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._watched(what, self._connect(what, deadline, self.watch))
            try:
                if not connection.can_read(timeout=0):
                    return self._watched(what, connection)
            except (RedisError, OSError):
                pass  # the server closed it while it was idle: try another one
            connection.disconnect()

    def open(self, what: str, deadline: float) -> Any:
        """A connection for the caller alone, who disconnects it. The watch is not told of it.

        Raises:
            As `commands`.
        """
        with self._lock:
            if self._closed:
                raise BackendUnavailableError(f"{what} refused: the connection to {self.label} is closed.")
        return self._connect(what, deadline, None)

    def leads_to(self, connection: Any) -> bool:
        """Whether a connection is to the server that calls go to now, as far as is known."""
        address = self._address
        return connection.dataplane_address == address or (self._service is not None and not address)

    def _connect(self, what: str, deadline: float, watch: Watch | None) -> Any:
        if self._service is not None:
            return self._connect_to_primary(what, deadline, self._service, watch)
        elsewhere, num_redirections = iter(list(self._nodes)), 0
        while True:
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(f"{what} timed out before it was sent to {self.label}.")
            address = self._address
            connection: Any = self._connection_class(**self._where(address))
            connection.dataplane_address = address
            most_s = min(left_s(deadline), _SERVICE_CONNECT_S) if self._nodes else left_s(deadline)
            connection.socket_connect_timeout = connection.socket_timeout = most_s
            try:
                connection.connect()
                self._greet(connection, watch)
                return connection
            except (RedisError, OSError) as error:
                connection.disconnect()
                if is_temporary_refusal(error):
                    if time.monotonic() + _REFUSED_POLL_S >= deadline:
                        self.raise_error(what, error)
                    time.sleep(_REFUSED_POLL_S)
                    continue
                if num_redirections < _MAX_REDIRECTIONS and self._follow_redirection(error):
                    num_redirections += 1
                    continue
                is_lost = isinstance(error, (LostConnectionError, redis.TimeoutError, OSError))
                node = next(elsewhere, None) if is_lost else None
                if node is None and not (is_lost and self._nodes and _is_early(deadline, _SERVICE_POLL_S)):
                    self.raise_error(what, error)
                if node is None:  # a failover takes a while
                    time.sleep(_SERVICE_POLL_S)
                    elsewhere, num_redirections = iter(list(self._nodes)), 0
                    node = next(elsewhere)
                self._switch_to(node)

    def _connect_to_primary(self, what: str, deadline: float, service: Service, watch: Watch | None) -> Any:
        """Waits until the sentinels name a primary and it answers as one."""
        while True:
            most_s = min(left_s(deadline), _SERVICE_CONNECT_S)
            connection: Any = None
            try:
                address = self._address
                if not address:
                    host, port = service.primary(deadline)
                    address = {"host": host, "port": port}
                    self._switch_to(address)
                connection = self._connection_class(**self._where(address))
                connection.dataplane_address = address
                connection.socket_connect_timeout = connection.socket_timeout = most_s
                connection.connect()
                self._greet(connection, watch)
                return connection
            except UnknownServiceError as error:
                raise BackendUnavailableError(
                    f"{what} failed: the sentinels do not watch a service '{service.name}'. They watch: {error}.",
                    retryable=False,
                    hint="Write the name of 'sentinel monitor' after the sentinels in the url.",
                ) from error
            except (RedisError, OSError, NoPrimaryError) as error:
                self._switch_to({})
                if connection is not None:
                    connection.disconnect()
                if isinstance(error, (AuthenticationError, NoPermissionError)):
                    self.raise_error(what, error)
                if not _is_early(deadline, _SERVICE_POLL_S):
                    raise BackendUnavailableError(
                        f"{what} failed: {self.label} had no primary that answers until the deadline: {error}",
                        hint="Nothing was sent: call again. If it lasts, see what the sentinels' logs say.",
                    ) from error
            time.sleep(_SERVICE_POLL_S)

    def _greet(self, connection: Any, watch: Watch | None) -> None:
        """Tells the watch which history a new connection meets. Raises what redis-py raises."""
        connection.dataplane_history = b""
        if watch is None and self._service is None:
            return

        def ask(*words: bytes) -> Any:
            connection.send_packed_command([b"".join(pack(words))], check_health=False)
            return connection.read_response(disable_decoding=True)

        replication = ask(b"INFO", b"replication")
        if self._service is not None and b"\nrole:master" not in replication:
            raise LostConnectionError("the server is not a primary")
        if watch is None:
            return
        found = re.search(rb"^master_replid:(\w+)", replication, re.MULTILINE)
        connection.dataplane_history = found.group(1) if found else b""
        watch.meet(connection.dataplane_history, ask)

    def _watched(self, what: str, connection: Any) -> Any:
        try:
            if self.watch is not None:
                self.watch.raise_lost(what, self.label)
        except DataPlaneError:
            self._release(connection, True)
            raise
        return connection

    def _where(self, address: dict[str, Any]) -> dict[str, Any]:
        kwargs: dict[str, Any] = dict(self._pool.connection_kwargs)
        if address:
            kwargs.pop("path", None)
        return kwargs | address

    def _release(self, connection: Any, complete: bool) -> None:
        with self._lock:
            keep = complete and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.disconnect()
            if self._service is not None:  # the others are connected to the same server
                self._switch_to({})


def _place_of(address: Address) -> dict[str, Any]:
    """What redis-py must know of a node."""
    return {"host": address[0], "port": address[1]} if address[1] else {}


def is_moving(error: Exception) -> bool:
    """Whether a node of a cluster refused since the keys are being moved, or since the cluster lacks a node."""
    return (
        isinstance(error, (ClusterDownError, TryAgainError))
        or (isinstance(error, AskError) and not isinstance(error, MovedError))
        or str(error).startswith(("ASK ", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"))
    )


def is_temporary_refusal(error: BaseException | None) -> bool:
    """Whether the server refused before it did anything, and will accept the command soon."""
    return isinstance(error, BusyLoadingError) or (isinstance(error, ResponseError) and str(error).startswith("BUSY "))


def _is_early(deadline: float, pause_s: float) -> bool:
    """Whether a pause still ends before the deadline."""
    return time.monotonic() + pause_s < deadline


def left_s(deadline: float) -> float:
    return max(_MIN_TIMEOUT_S, deadline - time.monotonic())
