"""Where the server of a store is: finds it, and opens connections to it. A deadline bounds every wait.

With Sentinel, that is the server that the sentinels name as the primary. While they name none that answers, a call
waits until its deadline: nothing was sent yet.

In a cluster, all keys of a namespace's ledger are in one slot, so it is the one node that serves that slot. When the
cluster moves the slot, the route follows it. When the node is gone, the route looks for the slot on the other nodes.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import redis
from redis.connection import Connection, ConnectionPool, UnixDomainSocketConnection
from redis.exceptions import AuthenticationError, NoPermissionError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as LostConnectionError

from dataplane_core.errors import BackendUnavailableError, DataPlaneError, OperationTimeoutError
from dataplane_redis._protocol import is_temporary_refusal, pack, redirection_of, to_error
from dataplane_redis._sentinel import NoPrimaryError, Service, UnknownServiceError

__all__ = ["MAX_REDIRECTIONS", "POLL_S", "REFUSED_POLL_S", "Address", "Route", "Watch", "is_early", "left_s"]

#: Host and port of a node of a cluster. Port 0: the server of the URL.
Address: TypeAlias = tuple[str, int]

#: Seconds between two tries while the server refuses temporarily: it loads its data, or runs a long script.
REFUSED_POLL_S: Final = 0.05
#: Seconds between two questions to the sentinels, or to nodes of a cluster that do not serve the slot now.
POLL_S: Final = 0.1
#: How many redirections a call follows before it gives up.
MAX_REDIRECTIONS: Final = 8
#: The least socket timeout in seconds. Zero would mean not to wait at all, which TLS does not support.
_MIN_TIMEOUT_S: Final = 0.001
#: The most seconds that connecting may take to the server that the sentinels name, or to a node of a cluster.
_CONNECT_S: Final = 1.0


class Watch(Protocol):
    """Told of the history of the data that each new connection meets."""

    def meet(self, history: bytes, ask: Callable[..., Any]) -> None:
        """A new connection met this history. ``ask`` sends a command on it and returns the reply."""

    def is_newest(self, history: bytes) -> bool:
        """Whether a connection that met this history may still be used."""

    def raise_lost(self, what: str, label: str) -> None:
        """Called before a connection is used. May raise."""


class Route:
    """Finds the server of a URL, the primary of its service, or the node of its cluster that calls go to. Thread-safe.

    Args:
        url: The server, a service of Sentinel, or any node of a cluster. Only the connections keep it; no message
            shows it.
        label: The name of the server in messages.

    Attributes:
        has_ended: For a private server, which nobody starts again: whether it has ended. Asked when a connection
            is lost.
    """

    def __init__(self, url: str, label: str) -> None:
        self.label = label
        self.has_ended: Callable[[], bool] | None = None
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
        self._connection_class: Any = self._pool.connection_class
        self._address: dict[str, Any] = {}  # replaces the URL's address once the cluster or a sentinel named another
        self._nodes: list[dict[str, Any]] = []  # of the cluster, if there is one
        self._lock = threading.Lock()

    def _close_idle(self) -> None:
        """Closes the connections that no call uses: they lead to another server than the next call."""

    # --- the server ---------------------------------------------------------------------------------------------------

    @property
    def address(self) -> Address:
        """The node that calls go to."""
        return (self._address["host"], self._address["port"]) if self._address else ("", 0)

    def address_of(self, host: bytes | str, port: int | str) -> Address:
        """The address that a node gives. An empty host means the node that was asked."""
        name = host.decode() if isinstance(host, bytes) else host
        known = self._address.get("host") or self._pool.connection_kwargs.get("host") or "localhost"
        return name or known, int(port)

    def connect_to(self, address: Address, timeout_s: float) -> Any:
        """A new connection to a node, for the caller alone. Raises what redis-py raises."""
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

    def know(self, nodes: Sequence[Address]) -> None:
        """Sets the nodes of the cluster, which are tried when the server is gone."""
        self._nodes = [_place_of(each) for each in nodes]

    def _switch_to(self, address: dict[str, Any]) -> None:
        with self._lock:
            if issubclass(self._connection_class, UnixDomainSocketConnection):
                self._connection_class = Connection
            self._address = address
        self._close_idle()

    def _follow_redirection(self, refusal: Exception) -> bool:
        """Switches to the node that a refusal names. False if it names none."""
        kind, host, port = redirection_of(refusal) or ("", "", 0)
        if kind == "MOVED":
            self._switch_to(_place_of(self.address_of(host, port)))
        return kind == "MOVED"

    # --- errors -------------------------------------------------------------------------------------------------------

    def raise_error(self, what: str, error: Exception) -> NoReturn:
        """Raises the `DataPlaneError` for an error of redis-py, which becomes its cause."""
        raise self.to_error(what, error) from error

    def to_error(self, what: str, error: Exception) -> DataPlaneError:
        """The `DataPlaneError` for an error of redis-py. The next call goes to the node that a redirection names, or
        asks the sentinels if a failover made the server a replica."""
        self._follow_redirection(error)
        if self._service is not None and isinstance(error, ReadOnlyError):
            self._switch_to({})
        is_lost = isinstance(error, (LostConnectionError, OSError)) and not isinstance(error, TimeoutError)
        if is_lost and self.has_ended is not None and self.has_ended():
            return BackendUnavailableError(
                f"{what} failed: {self.label} has ended, and all that it held is gone.",
                retryable=False,
                hint="Connect again with bootstrap=True, register the partitions and produce their samples again. If "
                "it was killed, memory may have run out. For data that must outlive it, run a server of your own and "
                "name it in the option url.",
            )
        return to_error(what, self.label, error)

    # --- connections --------------------------------------------------------------------------------------------------

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
            most_s = min(left_s(deadline), _CONNECT_S) if self._nodes else left_s(deadline)
            connection.socket_connect_timeout = connection.socket_timeout = most_s
            try:
                connection.connect()
                self._greet(connection, watch, deadline)
                return connection
            except (RedisError, OSError) as error:
                connection.disconnect()
                if not self.leads_to(connection):
                    continue  # another thread found another node meanwhile
                if is_temporary_refusal(error):
                    if time.monotonic() + REFUSED_POLL_S >= deadline:
                        self.raise_error(what, error)
                    time.sleep(REFUSED_POLL_S)
                    continue
                if num_redirections < MAX_REDIRECTIONS and self._follow_redirection(error):
                    num_redirections += 1
                    continue
                is_lost = isinstance(error, (LostConnectionError, redis.TimeoutError, OSError))
                node = next(elsewhere, None) if is_lost else None
                if node is None and not (is_lost and self._nodes and is_early(deadline, POLL_S)):
                    self.raise_error(what, error)
                if node is None:  # a failover takes a while
                    time.sleep(POLL_S)
                    elsewhere, num_redirections = iter(list(self._nodes)), 0
                    node = next(elsewhere)
                self._switch_to(node)

    def _connect_to_primary(self, what: str, deadline: float, service: Service, watch: Watch | None) -> Any:
        """Waits until the sentinels name a primary and it answers as one."""
        while True:
            connection: Any = None
            try:
                address = self._address
                if not address:
                    host, port = service.primary(deadline)
                    address = {"host": host, "port": port}
                    self._switch_to(address)
                connection = self._connection_class(**self._where(address))
                connection.dataplane_address = address
                connection.socket_connect_timeout = connection.socket_timeout = min(left_s(deadline), _CONNECT_S)
                connection.connect()
                self._greet(connection, watch, deadline)
                return connection
            except UnknownServiceError as error:
                raise BackendUnavailableError(
                    f"{what} failed: the sentinels do not watch a service '{service.name}'. They watch: {error}.",
                    retryable=False,
                    hint="Write the name of 'sentinel monitor' after the sentinels in the url.",
                ) from error
            except (RedisError, OSError, NoPrimaryError) as error:
                if connection is not None:
                    connection.disconnect()
                if connection is None or self.leads_to(connection):
                    self._switch_to({})
                if isinstance(error, (AuthenticationError, NoPermissionError)):
                    self.raise_error(what, error)
                if not is_early(deadline, POLL_S):
                    raise BackendUnavailableError(
                        f"{what} failed: {self.label} had no primary that answers until the deadline: {error}",
                        hint="Nothing was sent: call again. If it lasts, see what the sentinels' logs say.",
                    ) from error
            time.sleep(POLL_S)

    def _greet(self, connection: Any, watch: Watch | None, deadline: float) -> None:
        """Tells the watch which history a new connection meets. Raises what redis-py raises."""
        connection.dataplane_history = b""
        if watch is None and self._service is None:
            return

        def ask(*words: bytes) -> Any:
            connection._sock.settimeout(left_s(deadline))
            connection.send_packed_command([b"".join(pack(words))], check_health=False)
            reply = connection.read_response(disable_decoding=True)
            if not self.leads_to(connection):
                raise LostConnectionError("another server was found meanwhile")
            return reply

        replication = ask(b"INFO", b"replication")
        if self._service is not None and b"\nrole:master" not in replication:
            raise LostConnectionError("the server is not a primary")
        if watch is None:
            return
        found = re.search(rb"^master_replid:(\w+)", replication, re.MULTILINE)
        connection.dataplane_history = found.group(1) if found else b""
        watch.meet(connection.dataplane_history, ask)

    def _where(self, address: dict[str, Any]) -> dict[str, Any]:
        kwargs: dict[str, Any] = dict(self._pool.connection_kwargs)
        if address:
            kwargs.pop("path", None)
        return kwargs | address


def _place_of(address: Address) -> dict[str, Any]:
    """What redis-py must know of a node."""
    return {"host": address[0], "port": address[1]} if address[1] else {}


def is_early(deadline: float, pause_s: float) -> bool:
    """Whether a pause still ends before the deadline."""
    return time.monotonic() + pause_s < deadline


def left_s(deadline: float) -> float:
    """The seconds until the deadline, as a socket's timeout."""
    return max(_MIN_TIMEOUT_S, deadline - time.monotonic())
