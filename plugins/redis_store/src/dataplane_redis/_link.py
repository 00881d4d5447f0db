"""`Link`: connections to the one server that scripts run on. Finds it, sends commands, receives replies.

That server is the one of the URL, the primary that sentinels name, or the node of a cluster that serves the ledger's
slot. When that changes, the link follows.

redis-py makes the connections, logs in, and parses the replies. Its clients, pools and retries are not used: they have
one timeout for each wait instead of a deadline for the call, and send a command again although it may have run. A link
does not: what it lost the reply to, it reports, and the caller decides. It sends again only what the server refused
without having done anything: while it loads its data, after a redirection, while keys are moving or a failover goes on.

In this package, ``what`` is the operation, with which messages begin, and ``deadline`` is on `time.monotonic`'s clock.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar
from urllib.parse import urlsplit

import redis
from redis.connection import Connection, ConnectionPool, UnixDomainSocketConnection
from redis.exceptions import (
    AuthenticationError,
    ConnectionError as LostConnectionError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    DataPlaneError,
    LostReplyError,
    OperationTimeoutError,
)
from dataplane_redis._acknowledged import Acknowledgements, Receipt
from dataplane_redis._protocol import (
    ArrayReader,
    Parts,
    is_moving,
    is_temporary_refusal,
    is_untrusted,
    left_s,
    pack,
    redirection_of,
    to_error,
)
from dataplane_redis._scripts import Script
from dataplane_redis._sentinel import NoPrimaryError, Service, UnknownServiceError

_R = TypeVar("_R")
#: Host and port of a node. Port 0: the server of the URL, or the primary that the sentinels will name.
Address: TypeAlias = tuple[str, int]
_UNNAMED: Final[Address] = ("", 0)

#: Seconds between two tries while the server refuses temporarily: it loads its data, or runs a long script.
_REFUSED_POLL_S: Final = 0.05
#: Seconds between two questions to the sentinels, or to nodes of a cluster that do not serve the slot now.
_POLL_S: Final = 0.1
#: How many redirections a call follows before it gives up.
_MAX_REDIRECTIONS: Final = 8
#: The most seconds that connecting may take to the server that the sentinels name, or to a node of a cluster.
_CONNECT_S: Final = 1.0
#: Parts of commands are joined until they reach this size.
_JOIN_BYTES: Final = 1 << 20
#: Neighbouring reads are sent together until their replies reach this size.
_CHUNK_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Read:
    """A packed command that replies with an array of byte strings, and the expected size of the reply."""

    packed: bytes
    size_bytes: int


class Stream:
    """A connection while a call uses it. Joins what it sends. After an error, it sends nothing and raises it again."""

    def __init__(self, connection: Any, deadline: float, join_bytes: int = _JOIN_BYTES) -> None:
        self.connection = connection
        self.deadline = deadline
        self.error: Exception | None = None
        self._join_bytes = join_bytes
        self._waiting: list[bytes | bytearray | memoryview] = []
        self._size = 0

    def send(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Sends parts, perhaps later, together with others."""
        for part in parts:
            self._waiting.append(part)
            self._size += len(part)
            if self._size >= self._join_bytes:
                self.flush()

    def flush(self) -> None:
        """Sends what was kept back. If that fails, `read` raises the error."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        if waiting and self.error is None:
            try:
                self.connection._sock.settimeout(left_s(self.deadline))
                self.connection.send_packed_command([b"".join(waiting)], check_health=False)
            except (RedisError, OSError) as error:
                self.error = error

    def read(self) -> Any:
        """The next reply, or the refusal. Raises what redis-py raises if the connection is lost."""
        if self.error is not None:
            raise self.error
        self.connection._sock.settimeout(left_s(self.deadline))
        try:
            return self.connection.read_response(disable_decoding=True)
        except ResponseError as error:
            return error
        except (RedisError, OSError) as error:
            self.error = error
            raise
        except ValueError as error:  # redis-py cannot read a redirection
            self.error = InvalidResponse(f"the reply cannot be read: {error}")
            raise self.error from error


def fetch_arrays(streams: Sequence[Stream], reads: Sequence[Sequence[Read]]) -> Iterator[tuple[int, int, Any]]:
    """Sends the reads of each stream and receives the arrays without a copy.

    Each stream has two chunks of commands in flight at a time, and all streams work at the same time. If a server got
    all commands at once, it would copy every reply before it sends the first, and the client would wait. Yields the
    numbers of the stream and of its read, and the array: byte strings, as views of one buffer, and None for one that
    does not exist. Or the error that came instead.
    """
    readers = [
        ArrayReader(stream.connection._sock, sum(read.size_bytes for read in mine), stream.deadline)
        for stream, mine in zip(streams, reads, strict=True)
    ]
    chunks = [_in_chunks(mine) for mine in reads]
    for step in range(-1, max(map(len, chunks), default=0)):
        for stream, mine, some in zip(streams, reads, chunks, strict=True):
            if step + 1 < len(some):
                stream.send([mine[each].packed for each in some[step + 1]])
                stream.flush()
        for number, (stream, reader, some) in enumerate(zip(streams, readers, chunks, strict=True)):
            for each in some[step] if 0 <= step < len(some) else ():
                try:
                    if stream.error is not None:
                        raise stream.error
                    array: Any = reader.read()
                except ResponseError as error:
                    array = error
                except (RedisError, OSError) as error:
                    array = stream.error = error
                yield number, each, array
    for stream, reader in zip(streams, readers, strict=True):
        if not reader.done:
            stream.error = stream.error or LostConnectionError("the server sent more than was asked for")


def _in_chunks(reads: Sequence[Read]) -> list[list[int]]:
    """The numbers of neighbouring reads whose replies together are worth a round trip."""
    chunks: list[list[int]] = []
    size_bytes = _CHUNK_BYTES
    for number, read in enumerate(reads):
        if size_bytes >= _CHUNK_BYTES:
            chunks.append([])
            size_bytes = 0
        chunks[-1].append(number)
        size_bytes += read.size_bytes
    return chunks


class Idle:
    """Connections that serve no call now, by the address of their server. Thread-safe."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()
        self._connections: dict[Address, list[Any]] = defaultdict(list)

    def take(self, address: Address) -> Any:
        """A connection that the server has not closed meanwhile. None: there is none."""
        while True:
            with self._lock:
                mine = self._connections[address]
                connection: Any = mine.pop() if mine else None
            with contextlib.suppress(RedisError, OSError):
                if connection is None or not connection.can_read(timeout=0):
                    return connection
            connection.disconnect()

    def give(self, connection: Any, complete: bool) -> None:
        """Takes a connection back. If its call was cut off, or after `close`, it is closed."""
        with self._lock:
            keep = complete and not self.closed
            if keep:
                self._connections[connection.dataplane_address].append(connection)
        if not keep:
            connection.disconnect()

    def drop(self, but: Sequence[Address] = ()) -> None:
        """Closes the connections to all servers but some."""
        with self._lock:
            gone = [self._connections.pop(address) for address in set(self._connections).difference(but)]
        for each in itertools.chain(*gone):
            each.disconnect()

    def close(self) -> None:
        """Closes all. One in use is closed when its call ends."""
        self.closed = True
        self.drop()


class Link:
    """A pool of connections to the server. Thread-safe. A connection serves one call at a time.

    Args:
        url: The server, a service of Sentinel, or any node of a cluster. Only the connections keep it; no message
            shows it.
        label: What messages call the server. None: its place, without user, password and query.
        told: Is told of the history that each new connection meets, and may refuse calls.
    """

    def __init__(self, url: str, label: str | None = None, told: Acknowledgements | None = None) -> None:
        self._service = Service.of(url)
        self._pool = ConnectionPool.from_url(
            self._service.server_url if self._service is not None else url,
            protocol=2,
            retry=None,
            retry_on_timeout=False,
            driver_info=None,  # a connection costs no commands besides those that it needs
            socket_read_size=1 << 18,
            decode_responses=False,
        )
        self.label = label or _place_in(url, self._service)
        self.greeting: Callable[[], str | None] | None = None  # of a private server, which nobody starts again
        self.address = _UNNAMED  # of the node that calls go to
        self._told = told
        self._nodes: list[Address] = []  # of the cluster, if there is one
        self._idle = Idle()

    def close(self) -> None:
        """Closes all connections. One in use is closed when its call ends."""
        self._idle.close()

    # --- the nodes of a cluster ---------------------------------------------------------------------------------------

    def follow(self, what: str, deadline: float, key: bytes) -> Any:
        """Switches to the node that serves ``key``. Returns the reply to CLUSTER SLOTS; None if the server is not a
        cluster, or the ACL forbids the command."""
        self.command(what, deadline, b"EXISTS", key)
        if self._service is not None:
            return None
        try:
            reply = self.command(what, deadline, b"CLUSTER", b"SLOTS")
        except DataPlaneError as error:
            if isinstance(error.__cause__, ResponseError):
                return None
            raise
        self.know([self.address_of(node[0], node[1]) for _, _, *nodes in reply for node in nodes])
        return reply

    def know(self, nodes: Sequence[Address]) -> None:
        """Sets the nodes of the cluster, which are tried when the server is gone."""
        self._nodes = list(nodes)

    def address_of(self, host: bytes | str, port: int | str) -> Address:
        """The address that a node gives. An empty host means the node that was asked."""
        name = host.decode() if isinstance(host, bytes) else host
        known = self.address[0] or self._pool.connection_kwargs.get("host") or "localhost"
        return name or known, int(port)

    def leads_to(self, connection: Any) -> bool:
        """Whether a connection is to the server that calls go to now, as far as is known."""
        return self.address == connection.dataplane_address or (self._service is not None and self.address == _UNNAMED)

    def _switch_to(self, address: Address) -> None:
        self.address = address
        self._idle.drop()

    # --- calls --------------------------------------------------------------------------------------------------------

    def command(self, what: str, deadline: float, *words: bytes) -> Any:
        """Sends one command and returns its reply. Raises as `commands`, and if it is refused."""
        return self._ask(what, deadline, pack(words))

    def script(
        self,
        what: str,
        deadline: float,
        script: Script,
        key: bytes,
        *arguments: bytes | memoryview,
        receipt: Receipt | None = None,
    ) -> Any:
        """Runs a script, as `command`. Sends the script's text first if the server does not know it."""
        packed = pack((b"EVALSHA", script.sha, b"1", key, *arguments))
        while True:
            try:
                return self._ask(what, deadline, packed, receipt)
            except BackendError as error:
                if not isinstance(error.__cause__, NoScriptError):
                    raise
            self.command(what, deadline, b"SCRIPT", b"LOAD", script.text)

    def _ask(self, what: str, deadline: float, packed: Parts, receipt: Receipt | None = None) -> Any:
        def ask() -> Any:
            (reply,) = self.commands(what, deadline, [packed], 1, receipt)
            if isinstance(reply, Exception):
                self.raise_error(what, reply)
            return reply

        return self.retry_while_refused(deadline, ask)

    def retry_while_refused(self, deadline: float, call: Callable[[], _R]) -> _R:
        """Repeats a call until the deadline while the server refuses before it does anything, and will accept the call
        soon, or another server will: it loads its data or runs a long script, a failover made it a replica, or another
        node of the cluster serves the keys. Such an error says ``not_done``, and has the refusal as its cause. If a
        later try runs out of time, the last refusal is still told."""
        num_redirections = 0
        known: BackendUnavailableError | OperationTimeoutError | None = None  # the last refusal that was waited for
        while True:
            try:
                return call()
            except (BackendUnavailableError, OperationTimeoutError) as error:
                refusal = error.__cause__
                if known is not None and type(error) is OperationTimeoutError and not is_temporary_refusal(refusal):
                    if error.outcome == "not_done":
                        raise known from known.__cause__
                    if error.outcome == "unknown":
                        error.message += f" Before that, it was refused: {known.__cause__}"
                    raise
                if error.outcome != "not_done" or not isinstance(refusal, RedisError):
                    raise
                if is_temporary_refusal(refusal):
                    pause_s = _REFUSED_POLL_S
                elif (redirection_of(refusal) or ("",))[0] == "MOVED":
                    num_redirections += 1
                    pause_s = 0.0 if num_redirections <= _MAX_REDIRECTIONS else _POLL_S  # the nodes do not agree yet
                    if pause_s and not self._nodes:
                        raise
                elif (self._service is not None and isinstance(refusal, ReadOnlyError)) or (
                    self._nodes and is_moving(refusal)
                ):
                    pause_s = _POLL_S
                else:
                    raise
                if not _is_early(deadline, pause_s):
                    raise
                known = error.with_traceback(None) if pause_s else None  # a traceback would keep what the call sends
            time.sleep(pause_s)

    def commands(
        self, what: str, deadline: float, packed: Iterable[Parts], count: int, receipt: Receipt | None = None
    ) -> list[Any]:
        """Sends packed commands on one connection, while they are made, and returns as many replies, or refusals.

        If the last reply acknowledges what replicas must have, the wait for them follows, for the receipt.

        Raises:
            OperationTimeoutError: The deadline passed; the commands may have run or not.
            LostReplyError: The connection was lost; the commands may have run or not.
            BackendUnavailableError: The server cannot be reached. Nothing was sent.
        """
        connection = self._acquire(what, deadline)
        complete = False
        if receipt is not None:
            receipt.history = connection.dataplane_history
        try:
            stream = Stream(connection, deadline)
            for parts in packed:
                stream.send(parts)
                if stream.error is not None:
                    break
            stream.flush()
            replies = [stream.read() for _ in range(count)]
            if receipt is not None:
                self._ask_for_replicas(receipt, replies[-1], stream)
            complete = stream.error is None
        except (RedisError, OSError) as error:
            failure = self.to_error(what, error)
            lost = isinstance(error, (LostConnectionError, OSError)) and isinstance(failure, BackendUnavailableError)
            # redis-py closes the connection when it meets LOADING: what followed may have been done
            in_part = count > 1 and is_temporary_refusal(error)
            if (lost and failure.retryable) or in_part:
                raise LostReplyError(failure.message, hint=failure.hint) from error
            raise failure from error
        finally:
            self._release(connection, complete)
        return replies

    def _ask_for_replicas(self, receipt: Receipt, reply: Any, stream: Stream) -> None:
        """Keeps the reply, or the error that came instead: the call itself has its reply."""
        wait = receipt.next_command(reply, stream.deadline)
        if wait:
            stream.send(wait)
            stream.flush()
            try:
                receipt.reply = stream.read()
            except (RedisError, OSError) as error:
                receipt.reply = error

    def fetch(self, what: str, deadline: float, reads: Sequence[Read]) -> list[Any]:
        """The arrays that reads reply with, see `fetch_arrays`. Raises as `commands`, and if one is refused."""
        return self.retry_while_refused(deadline, lambda: self._fetch_once(what, deadline, reads))

    def _fetch_once(self, what: str, deadline: float, reads: Sequence[Read]) -> list[Any]:
        connection = self._acquire(what, deadline)
        complete = False
        try:
            stream = Stream(connection, deadline)
            arrays = [array for _, _, array in fetch_arrays([stream], [reads])]
            complete = stream.error is None
        finally:
            self._release(connection, complete)
        for each in arrays:
            if isinstance(each, Exception):
                self.raise_error(what, each)
        return arrays

    # --- errors -------------------------------------------------------------------------------------------------------

    def raise_error(self, what: str, error: Exception) -> NoReturn:
        """Raises the `DataPlaneError` for an error of redis-py, which becomes its cause."""
        raise self.to_error(what, error) from error

    def to_error(self, what: str, error: Exception) -> DataPlaneError:
        """The `DataPlaneError` for an error of redis-py. The next call goes to the node that a redirection names, or
        asks the sentinels if a failover made the server a replica."""
        kind, host, port = redirection_of(error) or ("", "", 0)
        if kind == "MOVED":
            self._switch_to(self.address_of(host, port))
        if self._service is not None and isinstance(error, ReadOnlyError):
            self._switch_to(_UNNAMED)
        is_lost = isinstance(error, (LostConnectionError, OSError)) and not isinstance(error, TimeoutError)
        greeting = self.greeting() if is_lost and self.greeting is not None else ""
        if greeting is None:
            return BackendUnavailableError(
                f"{what} failed: {self.label} has ended, and all that it held is gone.",
                retryable=False,
                hint="Connect again with bootstrap=True, register the partitions and produce their samples again. If "
                "it was killed, memory may have run out. For data that must outlive it, run a server of your own and "
                "name it in the option url.",
            )
        return to_error(what, self.label, LostConnectionError(greeting) if greeting else error)

    # --- connections --------------------------------------------------------------------------------------------------

    def _acquire(self, what: str, deadline: float) -> Any:
        try:
            return self._find_connection(what, deadline)
        except (BackendUnavailableError, OperationTimeoutError) as error:
            error.outcome = "not_done"
            raise

    def _find_connection(self, what: str, deadline: float) -> Any:
        while True:
            if time.monotonic() >= deadline:  # callers may loop: this ends them
                raise OperationTimeoutError(f"{what} timed out before it was sent to {self.label}.")
            self._check_open(what)
            connection = self._idle.take(self.address)
            if connection is None:
                connection = self._connect(what, deadline, self._told)
                if time.monotonic() >= deadline:
                    self._release(connection, True)
                    continue
            if self._told is None:
                return connection
            if not self._told.is_newest(connection.dataplane_history):  # it may lead to an old primary
                connection.disconnect()
                continue
            try:
                self._told.raise_lost(what, self.label)
            except DataPlaneError:
                self._release(connection, True)
                raise
            return connection

    def _check_open(self, what: str) -> None:
        if self._idle.closed:
            raise BackendUnavailableError(f"{what} refused: the connection to {self.label} is closed.")

    def _release(self, connection: Any, complete: bool) -> None:
        self._idle.give(connection, complete)
        if not complete and self.leads_to(connection):  # so do the idle ones, perhaps in vain
            if self._service is not None:
                self._switch_to(_UNNAMED)
            else:
                self._idle.drop()

    def open(self, what: str, deadline: float) -> Any:
        """A connection for the caller alone, who disconnects it. Raises as `commands`."""
        self._check_open(what)
        return self._connect(what, deadline, None)

    def connect_to(self, address: Address, timeout_s: float, greet: Callable[[Any], None] | None = None) -> Any:
        """A new connection to a node, for the caller alone. Raises what redis-py raises."""
        kind: Any = self._pool.connection_class
        options: dict[str, Any] = dict(self._pool.connection_kwargs)
        if address != _UNNAMED:
            if issubclass(kind, UnixDomainSocketConnection):
                kind = Connection
            options.pop("path", None)
            options |= {"host": address[0], "port": address[1]}
        connection: Any = kind(**options)
        connection.dataplane_address, connection.dataplane_history = address, b""
        connection.socket_connect_timeout = connection.socket_timeout = timeout_s
        try:
            connection.connect()
            if greet is not None:
                greet(connection)
        except (RedisError, OSError):
            connection.disconnect()
            raise
        return connection

    def _connect(self, what: str, deadline: float, told: Acknowledgements | None) -> Any:
        greet = partial(self._greet, told=told, deadline=deadline)
        if self._service is not None:
            return self._connect_to_primary(what, deadline, self._service, greet)
        elsewhere = iter(list(self._nodes))
        why: Exception | None = None
        while True:
            if time.monotonic() >= deadline:
                if why is not None:
                    self.raise_error(what, why)
                raise OperationTimeoutError(f"{what} timed out before it was sent to {self.label}.")
            address = self.address
            most_s = min(left_s(deadline), _CONNECT_S) if self._nodes else left_s(deadline)
            try:
                return self.connect_to(address, most_s, greet)
            except (RedisError, OSError) as error:
                why = error
                if address != self.address:
                    continue  # another thread found another node meanwhile
                is_lost = isinstance(error, (LostConnectionError, redis.TimeoutError, OSError))
                is_lost = is_lost and not is_temporary_refusal(error) and not is_untrusted(error)
                node = next(elsewhere, None) if is_lost else None
                if node is None and not (is_lost and self._nodes and _is_early(deadline, _POLL_S)):
                    self.raise_error(what, error)
                if node is None:  # a failover takes a while
                    time.sleep(_POLL_S)
                    elsewhere = iter(list(self._nodes))
                    node = next(elsewhere)
                self._switch_to(node)

    def _connect_to_primary(self, what: str, deadline: float, service: Service, greet: Callable[[Any], None]) -> Any:
        """Waits until the sentinels name a primary and it answers as one."""
        while True:
            address = self.address
            try:
                if address == _UNNAMED:
                    address = service.primary(deadline)
                    self._switch_to(address)
                return self.connect_to(address, min(left_s(deadline), _CONNECT_S), greet)
            except UnknownServiceError as error:
                raise BackendUnavailableError(
                    f"{what} failed: the sentinels do not watch a service '{service.name}'. They watch: {error}.",
                    retryable=False,
                    hint="Write the name of 'sentinel monitor' after the sentinels in the url.",
                ) from error
            except (RedisError, OSError, NoPrimaryError) as error:
                if self.address == address:
                    self._switch_to(_UNNAMED)
                if isinstance(error, (AuthenticationError, NoPermissionError)) or is_untrusted(error):
                    self.raise_error(what, error)
                why = error
            time.sleep(max(0.0, min(_POLL_S, deadline - time.monotonic())))
            if time.monotonic() >= deadline:  # looked at only here, where there is a reason to tell
                raise BackendUnavailableError(
                    f"{what} failed: {self.label} had no primary that answers until the deadline: {why}",
                    hint="Nothing was sent: call again. If it lasts, see what the sentinels' logs say.",
                ) from why

    def _greet(self, connection: Any, told: Acknowledgements | None, deadline: float) -> None:
        """Asks a new connection whether it is to a primary, and which history it meets. Raises what redis-py raises."""
        if told is None and self._service is None:
            return
        stream = Stream(connection, deadline)

        def ask(*words: bytes) -> Any:
            stream.send(pack(words))
            stream.flush()
            reply = stream.read()
            if isinstance(reply, Exception):
                raise reply
            if not self.leads_to(connection):
                raise LostConnectionError("another server was found meanwhile")
            return reply

        replication = ask(b"INFO", b"replication")
        if self._service is not None and b"\nrole:master" not in replication:
            raise LostConnectionError("the server is not a primary")
        if told is not None:
            found = re.search(rb"^master_replid:(\w+)", replication, re.MULTILINE)
            connection.dataplane_history = found.group(1) if found else b""
            told.meet(connection.dataplane_history, ask)


def _place_in(url: str, service: Service | None) -> str:
    if service is not None:
        return service.label
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"the Redis server at {parts.path}"
    return f"the Redis server at {parts.hostname or 'localhost'}:{parts.port or 6379}"


def _is_early(deadline: float, pause_s: float) -> bool:
    """Whether a pause still ends before the deadline."""
    return time.monotonic() + pause_s < deadline
