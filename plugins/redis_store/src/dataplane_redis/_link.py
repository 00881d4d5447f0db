"""`Link`: connections to the servers that hold the keys, and calls that are repeated until their deadline.

redis-py finds the nodes of a cluster, makes the connections, logs in and parses replies. Its clients are not used: they
copy what they send and receive, and have one timeout for each wait instead of a deadline for the call. Everything that
goes to Redis may be sent twice: a row is never changed, and a record of the log has its number. So a call whose
connection breaks is repeated: after a failover, a redirection, a restart.

In this package, ``what`` is the operation, with which messages begin, and ``deadline`` is on `time.monotonic`'s clock.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ConnectionError as LostConnectionError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    TimeoutError as SilentError,
)

from dataplane_core.errors import BackendUnavailableError, ConfigError, DataPlaneError, OperationTimeoutError
from dataplane_redis._protocol import ArrayReader, is_moving, is_temporary_refusal, is_untrusted, left_s, pack, to_error
from dataplane_redis._sentinel import NoPrimaryError, Service, UnknownServiceError

_R = TypeVar("_R")

#: Seconds between two tries.
_POLL_S: Final = 0.05
#: Seconds for which a server that cannot be reached is tried again. A service or a cluster: until the deadline.
_REACH_S: Final = 1.0
#: The most seconds that each step of making a connection may take.
_CONNECT_S: Final = 2.0
#: Parts of commands are joined until they reach this size.
_JOIN_BYTES: Final = 1 << 20
#: Neighbouring reads are sent together until their replies reach this size.
_CHUNK_BYTES: Final = 256 * 1024
#: What connections are made with.
_OPTIONS: Final[dict[str, Any]] = {
    "protocol": 2,
    "retry": None,
    "retry_on_timeout": False,
    "socket_connect_timeout": _CONNECT_S,
    "socket_timeout": _CONNECT_S,  # of the login; calls have their deadlines
    "socket_read_size": 1 << 18,
    "decode_responses": False,
}


@dataclass(frozen=True, slots=True)
class Read:
    """A packed command that replies with an array of byte strings, and the expected size of the reply."""

    packed: bytes
    size_bytes: int


class Stream:
    """A connection while a call uses it. Joins what it sends."""

    def __init__(self, connection: Any, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self._waiting: list[bytes | bytearray | memoryview] = []
        self._size = 0

    def send(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Sends parts, perhaps later, together with others."""
        for part in parts:
            self._waiting.append(part)
            self._size += len(part)
            if self._size >= _JOIN_BYTES:
                self.flush()

    def flush(self) -> None:
        """Sends what was kept back."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        if waiting:
            self.connection._sock.settimeout(left_s(self.deadline))
            self.connection.send_packed_command([b"".join(waiting)], check_health=False)

    def read(self) -> Any:
        """The next reply. Raises what redis-py raises, also for a refusal."""
        self.connection._sock.settimeout(left_s(self.deadline))
        reply = self.connection.read_response(disable_decoding=True)
        if isinstance(reply, list):
            for each in reply:
                if isinstance(each, Exception):
                    raise each
        return reply

    def ask(self, *words: bytes | memoryview) -> Any:
        """Sends one command, and returns its reply."""
        self.send(pack(words))
        self.flush()
        return self.read()

    def fetch(self, reads: Sequence[Read]) -> list[list[memoryview | None]]:
        """The arrays that reads reply with: byte strings, as views of one buffer; None for one that does not exist."""
        reader = ArrayReader(self.connection._sock, sum(read.size_bytes for read in reads), self.deadline)
        arrays: list[list[memoryview | None]] = []
        # two are in flight at a time: if the server got all at once, it would copy every reply before it sends one
        chunks = [*_in_chunks(reads), []]
        for some, following in itertools.pairwise([[], *chunks]):
            self.send([read.packed for read in following])
            self.flush()
            arrays += [reader.read() for _ in some]
        if not reader.done:
            raise LostConnectionError("the server sent more than was asked for")
        return arrays


def _in_chunks(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Neighbouring reads whose replies together are worth a round trip."""
    chunk: list[Read] = []
    size_bytes = 0
    for read in reads:
        chunk.append(read)
        size_bytes += read.size_bytes
        if size_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk


class Link:
    """Connections to a server, to the primary that sentinels name, or to the nodes of a cluster. Thread-safe.

    Messages call it by the label, or by its place, and never show the URL. ``greeting`` is that of a private server,
    which nobody starts again: what it says first; None: it has ended.
    """

    def __init__(self, url: str, label: str | None = None, greeting: Callable[[], str | None] | None = None) -> None:
        self._url = url
        self.service = Service.of(url)
        self._cluster: Any = None
        self._pool: ConnectionPool | None = None  # of the server, or of the primary of a service
        self.label = label or _place_in(url, self.service)
        self.greeting = greeting
        self._doubt: Exception | None = None  # why the next call looks which server serves the keys
        self._closed = False

    def close(self) -> None:
        """Closes all connections. One in use is closed when its call ends."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
        if self._cluster is not None:
            self._cluster.close()

    # --- servers ------------------------------------------------------------------------------------------------------

    def follow(self, what: str, deadline: float) -> None:
        """Finds out whether the server is a node of a cluster. Raises as `call`."""
        info = self.call(what, deadline, b"", lambda stream: stream.ask(b"INFO", b"cluster"))
        if b"cluster_enabled:1" in info and self.service is None:
            if self._url.startswith("unix"):
                raise ConfigError(f"{what} refused: {self.label} is a node of a cluster. Expected its host and port.")
            self._cluster = self._try(what, deadline, lambda: RedisCluster.from_url(self._url, **_OPTIONS))

    def _pool_of(self, key: bytes, deadline: float) -> ConnectionPool:
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            with contextlib.suppress(RedisError, OSError):  # no node answers now
                self._look_again(doubt)
        if self._cluster is not None:
            node = self._cluster.get_node_from_key(key)
            if node is None:
                raise LostConnectionError("no node of the cluster serves the key")
            of_node: ConnectionPool = self._cluster.get_redis_connection(node).connection_pool
            return of_node
        pool = self._pool  # which another thread may give up meanwhile, or use as soon as it is there
        if pool is None:
            if self.service is None:
                pool = ConnectionPool.from_url(self._url, **_OPTIONS)
            else:
                host, port = self.service.primary(deadline)
                pool = ConnectionPool.from_url(self.service.server_url, **_OPTIONS)
                pool.connection_kwargs |= {"host": host, "port": port}
            self._pool = pool
        return pool

    def _look_again(self, error: Exception) -> None:
        """Looks for the server that serves the keys now. Connections that lead nowhere are not used again."""
        if self._cluster is not None:
            self._cluster.nodes_manager.initialize()
            if isinstance(error, MovedError):  # the node that was asked may not have heard of it
                self._cluster.nodes_manager.move_slot(error)
        elif self._pool is not None:
            pool, self._pool = self._pool, None
            pool.disconnect(inuse_connections=False)

    # --- calls --------------------------------------------------------------------------------------------------------

    def command(self, what: str, deadline: float, key: bytes, *words: bytes | memoryview) -> Any:
        """Sends one command to the server of a key, and returns its reply. Raises as `call`."""
        return self.call(what, deadline, key, lambda stream: stream.ask(*words))

    def call(self, what: str, deadline: float, key: bytes, work: Callable[[Stream], _R]) -> _R:
        """As `call_each`, with one key. Returns what the function returns."""
        results: list[_R] = []
        self.call_each(what, deadline, [key], lambda stream, _: results.append(work(stream)))
        return results[-1]

    def call_each(
        self, what: str, deadline: float, keys: Sequence[bytes], work: Callable[[Stream, Sequence[int]], None]
    ) -> None:
        """Has a function use a connection to each server of the keys, given the positions of that server's keys.
        Repeats it until the deadline if the connection breaks, or the server refuses for a while.

        Raises:
            OperationTimeoutError: The deadline passed; it may have been done or not.
            BackendUnavailableError: The server cannot be reached, refuses the user, or takes no writes.
            CapacityExceededError: It has reached its ``maxmemory``.
            BackendError: It refuses for another reason.
        """
        left: Sequence[int] = range(len(keys))

        def once() -> None:
            nonlocal left
            if self._closed:
                raise BackendUnavailableError(f"{what} refused: the connection to {self.label} is closed.")
            groups: dict[ConnectionPool, list[int]] = {}
            for position in left:
                groups.setdefault(self._pool_of(keys[position], deadline), []).append(position)
            todo = [*groups.items()]
            while todo:
                self._use_for(*todo[0], deadline, work)
                del todo[0]
                left = [position for _, some in todo for position in some]

        self._try(what, deadline, once)

    def _use_for(
        self, pool: ConnectionPool, some: Sequence[int], deadline: float, work: Callable[[Stream, Sequence[int]], None]
    ) -> None:
        try:
            self._use(pool, deadline, lambda stream: work(stream, some))
        except MovedError:
            raise
        except AskError as error:  # the key is on its way to another node
            if len(some) > 1:
                for each in some:
                    self._use_for(pool, [each], deadline, work)
                return
            node = self._cluster.get_node(error.host, error.port)
            if node is None:
                raise

            def asking(stream: Stream) -> None:
                stream.ask(b"ASKING")
                work(stream, some)

            self._use(self._cluster.get_redis_connection(node).connection_pool, deadline, asking)

    def _use(self, pool: ConnectionPool, deadline: float, work: Callable[[Stream], _R]) -> _R:
        connection: Any = pool.get_connection()
        complete = False
        try:
            if time.monotonic() >= deadline:  # that took long
                raise TimeoutError
            result = work(Stream(connection, deadline))
            complete = True
            return result
        finally:
            if not complete:  # what is still to come would be taken for the reply to another command
                connection.disconnect()
            pool.release(connection)

    def _try(self, what: str, deadline: float, once: Callable[[], _R]) -> _R:
        reach_until = min(deadline, time.monotonic() + _REACH_S)
        cause: Exception
        while True:
            if time.monotonic() >= deadline:
                raise OperationTimeoutError(f"{what} timed out before it was sent to {self.label}.", outcome="not_done")
            try:
                return once()
            except NoPrimaryError as error:
                failure: DataPlaneError = BackendUnavailableError(
                    f"{what} failed: {self.label} has no primary now: {error}.",
                    hint="A failover may be under way: ask again.",
                )
                until, cause = deadline, error
            except UnknownServiceError as error:
                raise BackendUnavailableError(
                    f"{what} failed: the sentinels do not know {self.label}. They watch: {error}.", retryable=False
                ) from error
            except (RedisError, OSError) as error:
                if isinstance(error, DataPlaneError):
                    raise
                failure, until, cause = self._failure(what, error), self._until(error, deadline, reach_until), error
            if until:
                self._doubt = cause
            if time.monotonic() + _POLL_S >= until:
                raise failure from cause
            time.sleep(0.0 if isinstance(cause, MovedError) else _POLL_S)

    def _until(self, error: Exception, deadline: float, reach_until: float) -> float:
        """Until when a call that met an error is repeated."""
        if isinstance(error, (AuthenticationError, NoPermissionError)) or is_untrusted(error):
            return 0.0
        has_others = self.service is not None or self._cluster is not None
        if is_temporary_refusal(error) or is_moving(error) or isinstance(error, MovedError):
            return deadline
        if isinstance(error, ReadOnlyError) and has_others:
            return deadline
        if isinstance(error, (SilentError, TimeoutError)):
            return deadline
        if isinstance(error, (LostConnectionError, OSError)):
            return deadline if has_others else reach_until
        return 0.0

    def _failure(self, what: str, error: Exception) -> DataPlaneError:
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


def _place_in(url: str, service: Service | None) -> str:
    if service is not None:
        return service.label
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"the Redis server at {parts.path}"
    return f"the Redis server at {parts.hostname or 'localhost'}:{parts.port or 6379}"
