"""Connections to one server: sends commands and receives replies. A deadline bounds every wait.

A connection serves one call at a time; idle ones are kept. A command whose connection was lost may have run or not, so
a link does not send it again: the caller decides. What the server refused without having done anything is sent again:
while it loads its data, after a redirection to another node, and while keys are moving or a failover goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    DataPlaneError,
    LostReplyError,
    OperationTimeoutError,
)
from dataplane_redis._protocol import is_moving, is_temporary_refusal, pack, redirection_of
from dataplane_redis._route import MAX_REDIRECTIONS, POLL_S, REFUSED_POLL_S, Route, Watch, is_early, left_s
from dataplane_redis._rows import ArrayReader
from dataplane_redis._scripts import Script

__all__ = ["Link", "Read", "Rider", "Sender", "in_chunks"]

_R = TypeVar("_R")

#: Parts of packed commands are joined until they reach this size.
_JOIN_BYTES: Final = 1 << 20
#: Neighbouring reads are sent together until their replies reach this size.
_CHUNK_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Read:
    """A packed command that replies with an array of byte strings, and the expected size of the reply."""

    packed: bytes
    size_bytes: int


class Sender:
    """Sends commands on a connection. Joins their parts until they reach ``join_bytes``."""

    def __init__(self, connection: Any, deadline: float, join_bytes: int) -> None:
        self.connection = connection
        self.deadline = deadline
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
        """Sends what was kept back."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        if waiting:
            self.connection._sock.settimeout(left_s(self.deadline))
            self.connection.send_packed_command([b"".join(waiting)], check_health=False)


class Rider(Protocol):
    """A command that may follow a call on the same connection.

    Attributes:
        reply: To it, or the error that came instead; set by the link.
        history: The history that the connection met, see `Watch`; set by the link.
    """

    reply: Any
    history: bytes

    def next_command(self, reply: Any, deadline: float) -> Sequence[bytes | bytearray | memoryview] | None:
        """The packed command that follows after this reply to the call. None: nothing does."""


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


class Link(Route):
    """A pool of connections to the server of a URL, to the primary of its service, or to the node of its cluster that
    serves a key. Thread-safe. Arguments as for `Route`.
    """

    def __init__(self, url: str, label: str) -> None:
        super().__init__(url, label)
        self._idle: list[Any] = []
        self._closed = False
        self.watch: Watch | None = None

    def close(self) -> None:
        """Closes all connections. One in use is closed when its call ends."""
        self._closed = True
        self._close_idle()

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
        try:
            reply = self.command(what, deadline, b"CLUSTER", b"SLOTS")
        except DataPlaneError as error:
            if isinstance(error.__cause__, ResponseError):
                return None
            raise
        self.know([self.address_of(node[0], node[1]) for _, _, *nodes in reply for node in nodes])
        return reply

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    # --- calls --------------------------------------------------------------------------------------------------------

    def command(self, what: str, deadline: float, *words: bytes) -> Any:
        """Sends one command and returns its reply.

        Raises:
            As `commands`.
        """
        return self._ask(what, deadline, pack(words))

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
            try:
                return self._ask(what, deadline, packed, rider)
            except BackendError as error:
                if not isinstance(error.__cause__, NoScriptError):
                    raise
            self.command(what, deadline, b"SCRIPT", b"LOAD", script.text)

    def _ask(
        self,
        what: str,
        deadline: float,
        packed: Sequence[bytes | bytearray | memoryview],
        rider: Rider | None = None,
    ) -> Any:
        """Returns the reply to one command. Raises if it is refused."""

        def ask() -> Any:
            (reply,) = self.commands(what, deadline, [packed], 1, rider)
            if isinstance(reply, Exception):
                self.raise_error(what, reply)
            return reply

        return self.retry_while_refused(deadline, ask)

    def retry_while_refused(self, deadline: float, call: Callable[[], _R]) -> _R:
        """Returns what ``call`` returns. Repeats it while the server refuses before it does anything, and will accept
        the call soon, or another server will: it loads its data or runs a long script, a failover made it a replica, or
        another node of the cluster serves the keys, now or soon.

        Args:
            deadline: On `time.monotonic`'s clock, in seconds.
            call: May be called several times. The error of a refusal has it as the cause, and says ``not_done``.

        Raises:
            OperationTimeoutError, BackendUnavailableError: The server refused until the deadline.
            Exception: Anything else that ``call`` raises.
        """
        num_redirections = 0
        while True:
            try:
                return call()
            except (BackendUnavailableError, OperationTimeoutError) as error:
                refusal = error.__cause__
                if error.outcome != "not_done" or not isinstance(refusal, RedisError):
                    raise
                if is_temporary_refusal(refusal):
                    pause_s = REFUSED_POLL_S
                elif (redirection_of(refusal) or ("",))[0] == "MOVED":
                    num_redirections += 1
                    pause_s = 0.0 if num_redirections <= MAX_REDIRECTIONS else POLL_S  # the nodes do not agree yet
                    if pause_s and not self._nodes:
                        raise
                elif (self._service is not None and isinstance(refusal, ReadOnlyError)) or (
                    self._nodes and is_moving(refusal)
                ):
                    pause_s = POLL_S
                else:
                    raise
                if not is_early(deadline, pause_s):
                    raise
            time.sleep(pause_s)

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
            rider: What may follow the last reply. It keeps its reply, or the error that came instead.

        Returns:
            For each command its reply, or the exception if it was refused.

        Raises:
            OperationTimeoutError: The deadline passed; the commands may have run or not.
            LostReplyError: The connection was lost; the commands may have run or not.
            BackendUnavailableError: The server cannot be reached. Nothing was sent.
        """
        try:
            connection = self._acquire(what, deadline)
        except (BackendUnavailableError, OperationTimeoutError) as error:
            error.outcome = "not_done"
            raise
        complete = False
        if rider is not None:
            rider.history = connection.dataplane_history
        try:
            sender = Sender(connection, deadline, _JOIN_BYTES)
            for parts in packed:
                sender.send(parts)
            sender.flush()
            replies = []
            for _ in range(count):
                replies.append(self._read_reply(connection, deadline))
            complete = rider is None or self._ask_rider(rider, replies[-1], connection, deadline)
        except (RedisError, OSError) as error:
            failure = self.to_error(what, error)
            lost = isinstance(error, (LostConnectionError, OSError)) and isinstance(failure, BackendUnavailableError)
            # redis-py closes the connection when it meets LOADING: what followed may have been done
            in_part = count > 1 and is_temporary_refusal(error)
            if (lost and failure.retryable) or in_part:
                raise LostReplyError(failure.message) from error
            raise failure from error
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

    def _ask_rider(self, rider: Rider, reply: Any, connection: Any, deadline: float) -> bool:
        """Sends what follows the reply. False if the connection was lost; the call itself has its reply."""
        command = rider.next_command(reply, deadline)
        if command is None:
            return True
        try:
            connection.send_packed_command([b"".join(command)], check_health=False)
            rider.reply = self._read_reply(connection, deadline)
            return True
        except (RedisError, OSError) as error:
            rider.reply = error
            return False

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
                connection = self._connect(what, deadline, self.watch)
                if time.monotonic() < deadline:
                    return self._watched(what, connection)
                self._release(connection, True)
                continue
            try:
                if not connection.can_read(timeout=0) and self._is_newest(connection):
                    return self._watched(what, connection)
            except (RedisError, OSError):
                pass  # the server closed it while it was idle: try another one
            connection.disconnect()

    def _is_newest(self, connection: Any) -> bool:
        """False if the history is another one since this connection was made. It may lead to an old primary."""
        return self.watch is None or self.watch.is_newest(connection.dataplane_history)

    def open(self, what: str, deadline: float) -> Any:
        """A connection for the caller alone, who disconnects it. The watch is not told of it.

        Raises:
            As `commands`.
        """
        with self._lock:
            if self._closed:
                raise BackendUnavailableError(f"{what} refused: the connection to {self.label} is closed.")
        return self._connect(what, deadline, None)

    def _watched(self, what: str, connection: Any) -> Any:
        try:
            if self.watch is not None:
                self.watch.raise_lost(what, self.label)
        except DataPlaneError:
            self._release(connection, True)
            raise
        return connection

    def _release(self, connection: Any, complete: bool) -> None:
        with self._lock:
            keep = complete and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.disconnect()
        if not complete and self.leads_to(connection):  # so do the idle ones, perhaps in vain
            if self._service is not None:
                self._switch_to({})
            else:
                self._close_idle()
