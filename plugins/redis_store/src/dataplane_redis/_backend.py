"""`RedisBackend`: rows and the log of the ledger in Redis. Everything else is core's."""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from dataplane_core.backends import Finding, RefsGoneError, RowStoreBackend, columns_of, framed_columns
from dataplane_core.errors import CorruptDataError, OperationTimeoutError
from dataplane_core.host_memory import check_capacity
from dataplane_core.ledger import commands
from dataplane_core.spec import Capability, Scope, SharedRows, WireColumn
from dataplane_redis._link import Link, Read, Stream
from dataplane_redis._protocol import left_s, pack, pack_rows
from dataplane_redis._server import (
    Durability,
    PrivateServer,
    check_server,
    diagnose,
    durability_of,
    greeting,
    private_url,
)
from dataplane_redis.config import RedisConfig, log_key, rows_key

_log = logging.getLogger("dataplane_redis")

#: Appends a record under the number that follows the newest one, which is never trimmed. Not by XINFO, whose reply has
#: the first record too, with the state of the whole ledger. A clear must be possible at ``maxmemory``.
_APPEND: Final = b"""#!lua flags=allow-oom
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local number = newest and tonumber(string.match(newest[1], '^%d+')) or 0
if number + 1 ~= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], ARGV[1] .. '-0', 'r', ARGV[2])
return 1
"""
#: Records and rows of one command.
_READ_RECORDS: Final = 1000
_READ_BYTES: Final = 1 << 20
#: About how many bytes of rows one command has: the server works on one while the next one comes.
_COMMAND_BYTES: Final = 4 << 20
_OPEN_S: Final = 10.0
#: So many rows, whose handles follow one another, are in one hash.
_GROUP_ROWS: Final = 1024
#: What a row takes at least in a reply, as a guess.
_ROW_BYTES: Final = 256


class RedisBackend(RowStoreBackend):
    """All clients connect to one Redis server, a service of Sentinel, or a Redis Cluster, from any host that reaches
    it. The ledger is in a process on the host of one of them, which all others reach over TCP.

    ``durable`` depends on the settings of the server at ``url``: a committed put survives the death of the server if it
    runs with ``appendonly yes`` and ``appendfsync always``. The data of a private server end with the server, since
    nobody starts it again. `durability` says what holds.
    """

    capabilities = frozenset(Capability) - {Capability.UNITS}
    why_not_declared: ClassVar = {
        Capability.UNITS: "Redis servers hold the payload, and their operator adds and removes them",
    }
    scope = Scope.CLUSTER
    Config = RedisConfig

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self._server: PrivateServer | None = None
        self._link: Link | None = None
        self._row_bytes = _ROW_BYTES

    @classmethod
    def isolated_options(cls, options: dict[str, Any], tag: str) -> dict[str, Any]:
        """Options of an instance that shares nothing but the server with that of ``options``."""
        name = options.get("namespace", RedisConfig.model_fields["namespace"].default)
        return {**options, "namespace": f"{name}-{tag}"[:64]}

    @classmethod
    def diagnose(cls, config: RedisConfig, *, deadline: float) -> Iterable[Finding]:
        """Checks the installed or the running server: version, eviction, persistence, access."""
        return diagnose(config, deadline)

    # --- life ---------------------------------------------------------------------------------------------------------

    def open_engine(self, *, bootstrap: bool, deadline: float) -> None:
        """Starts a private server if needed. Connects, and checks the server."""
        config: RedisConfig = self.config
        if config.url is None:
            if bootstrap:
                check_capacity(config.capacity_bytes)
                self._server = PrivateServer(config)
                self._server.start(deadline)
            label = f"the private redis-server of namespace '{config.namespace}'"
            # one that does not run may not have started yet
            link = self._link = Link(private_url(config.namespace), label, lambda: greeting(config.namespace) or "")
        else:
            link = self._link = Link(config.url.get_secret_value())
        link.follow("connect", deadline)
        durability = check_server(link, config, deadline)
        if config.url is None:
            link.greeting = functools.partial(greeting, config.namespace)
        _log.info("connected to %s: %s", link.label, durability.describe())

    def close_engine(self) -> None:
        """Disconnects. The bootstrapping client also ends its private server."""
        if self._link is not None:
            self._link.close()
        if self._server is not None:
            self._server.stop(self.stop_by)

    def durability(self, deadline: float) -> Durability:
        """How the server keeps data, by its current settings."""
        return durability_of(self._connected(), self.config, deadline)

    def owner_options(self) -> dict[str, Any]:
        """With the URL, which is a secret elsewhere."""
        url = self.config.url
        return super().owner_options() | ({} if url is None else {"url": url.get_secret_value()})

    def owner_uses_tls(self) -> bool:
        url = self.config.url
        return url is not None and url.get_secret_value().startswith("rediss")

    def owner_ip(self) -> str:
        """The address of this host that connections to the server come from."""
        if self.config.ledger_ip is not None:
            return str(self.config.ledger_ip)

        def own(stream: Stream) -> str:
            name = stream.connection._sock.getsockname()
            return name[0] if isinstance(name, tuple) else "127.0.0.1"

        return self._connected().call("connect", time.monotonic() + _OPEN_S, b"", own)

    def _connected(self) -> Link:
        assert self._link is not None
        return self._link

    # --- rows ---------------------------------------------------------------------------------------------------------

    def store_writes(
        self,
        writes: Mapping[int, commands.Write],
        columns: Mapping[str, WireColumn | SharedRows],
        deadline: float,
    ) -> None:
        """Stores rows, without a copy of their frames."""
        for first, write in writes.items():
            self._put(first, framed_columns(columns_of(write, columns)), write.row_bytes, deadline)

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        bounds, packed = offsets.tolist(), []
        for key, some in self._by_key(handles).items():
            words: list[Any] = [b"HSET", key]
            for handle in some:
                row = handle - handles[0]
                words += (b"%d" % handle, buffer[bounds[row] : bounds[row + 1]])
            packed.append((key, pack(words)))
        self._send("put_samples", packed, deadline)

    def _put(self, first: int, frames: Sequence[Sequence[Any]], row_bytes: Sequence[int], deadline: float) -> None:
        packed: list[tuple[bytes, list[Any]]] = []
        row, num_rows = 0, len(row_bytes)
        most = 1 + num_rows * _COMMAND_BYTES // (1 + sum(row_bytes))
        while row < num_rows:
            stop = min(num_rows, row + most, row + _GROUP_ROWS - (first + row) % _GROUP_ROWS)
            key = rows_key(self.config.namespace, (first + row) // _GROUP_ROWS)
            packed.append((key, pack_rows(key, first + row, [column[row:stop] for column in frames])))
            row = stop
        self._send("put_samples", packed, deadline)

    def _send(self, what: str, packed: Sequence[tuple[bytes, list[Any]]], deadline: float) -> None:
        """Sends commands, of which each has a reply, to the servers of their keys."""

        def send(stream: Stream, some: Sequence[int]) -> None:
            for position in some:
                stream.send(packed[position][1])
            stream.flush()
            for _ in some:
                stream.read()
            self._wait_for_replicas(stream)

        self._connected().call_each(what, deadline, [key for key, _ in packed], send)

    def get_rows(self, handles: Sequence[int], deadline: float) -> list[memoryview]:
        """Reads rows, each into its place in one buffer."""
        most = max(1, _READ_BYTES // self._row_bytes)
        reads: list[tuple[bytes, list[int], Read]] = []
        for key, some in self._by_key(handles).items():
            for start in range(0, len(some), most):
                part = some[start : start + most]
                words = pack((b"HMGET", key, *(b"%d" % handle for handle in part)))
                reads.append((key, part, Read(b"".join(words), len(part) * self._row_bytes)))
        rows: dict[int, memoryview | None] = {}

        def fetch(stream: Stream, some: Sequence[int]) -> None:
            arrays = stream.fetch([reads[position][2] for position in some])
            for position, array in zip(some, arrays, strict=True):
                rows.update(zip(reads[position][1], array, strict=True))

        self._connected().call_each("get_samples", deadline, [key for key, _, _ in reads], fetch)
        gone = [handle for handle, row in rows.items() if row is None]
        if gone:
            raise RefsGoneError(f"{len(gone)} rows are gone.", handles=gone)
        found = [row for handle in handles if (row := rows[handle]) is not None]
        self._row_bytes = _ROW_BYTES + max(map(len, found), default=0)  # a guess for the next read
        return found

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        """Deletes rows. A hash without rows is gone."""
        by_key = self._by_key(handles).items()
        packed = [(key, pack((b"HDEL", key, *(b"%d" % handle for handle in some)))) for key, some in by_key]
        self._send("clear_samples", packed, deadline)

    def _by_key(self, handles: Sequence[int]) -> dict[bytes, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for handle in handles:
            found[handle // _GROUP_ROWS].append(handle)
        return {rows_key(self.config.namespace, group): some for group, some in found.items()}

    def _wait_for_replicas(self, stream: Stream) -> None:
        """Waits until as many replicas have it, and the disks, as the options say."""
        config: RedisConfig = self.config
        if not (config.wait_replicas or config.wait_fsync):
            return
        timeout = b"%d" % max(1, int(900 * left_s(stream.deadline)))  # its reply says how many have it
        replicas = b"%d" % config.wait_replicas
        if config.wait_fsync:
            synced, num = stream.ask(b"WAITAOF", b"1", replicas, timeout)
        else:
            synced, num = 1, stream.ask(b"WAIT", replicas, timeout)
        if num < config.wait_replicas or not synced:
            raise OperationTimeoutError(
                f"{num} replicas of {self._connected().label} had the change at the deadline. Expected "
                f"{config.wait_replicas}{' and the disk' if config.wait_fsync else ''}. The change is on the server.",
                hint="Start the replicas, or lower wait_replicas.",
            )

    # --- the log ------------------------------------------------------------------------------------------------------

    def append(self, number: int, record: bytes, deadline: float) -> bool:
        """Adds a record, in a script. Returns when the replicas have it that the options ask for."""
        key = log_key(self.config.namespace)

        def append(stream: Stream) -> bool:
            done: bool = stream.ask(b"EVAL", _APPEND, b"1", key, b"%d" % number, record) == 1
            # also for one that was sent before: its reply was lost, or replicas were late
            if done or self._newest(stream) == [(number, record)]:
                self._wait_for_replicas(stream)
            return done

        return self._connected().call("append", deadline, key, append)

    def _newest(self, stream: Stream) -> list[tuple[int, bytes]]:
        return _records(stream.ask(b"XREVRANGE", log_key(self.config.namespace), b"+", b"-", b"COUNT", b"1"))

    def read_log(self, first: int | None, deadline: float) -> list[tuple[int, bytes]]:
        """The records from a number on, or the newest one."""
        key = log_key(self.config.namespace)

        def read(stream: Stream) -> list[tuple[int, bytes]]:
            if first is None:
                return self._newest(stream)
            found: list[tuple[int, bytes]] = []
            start = first
            while True:
                part = _records(stream.ask(b"XRANGE", key, b"%d" % start, b"+", b"COUNT", b"%d" % _READ_RECORDS))
                if found and part and part[0][0] != start:  # trimmed meanwhile
                    found = []
                found += part
                if len(part) < _READ_RECORDS:
                    return found
                start = found[-1][0] + 1

        return self._connected().call("read_log", deadline, key, read)

    def trim(self, before: int, deadline: float) -> None:
        """Drops records."""
        key = log_key(self.config.namespace)
        self._connected().command("trim", deadline, key, b"XTRIM", key, b"MINID", b"%d" % before)


def _records(reply: list[Any]) -> list[tuple[int, bytes]]:
    try:
        return [(int(name.split(b"-")[0]), bytes(fields[1])) for name, fields in reply]
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise CorruptDataError(f"the log in Redis holds something else: {error}.") from error
