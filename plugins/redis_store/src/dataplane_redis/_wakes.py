"""Wakes claims that wait, and puts that wait for room: a connection on which the server says which of them can go on.

The connection is opened when one of them waits for the first time, and a thread reads from it. The server keeps the
claims that wait (lua/wakes.lua) and the puts (lua/line.lua), and sends the token or the write of the one to wake. The
client that it was for may be gone, so those that wait also ask by themselves, rarely. While there is no such
connection, they ask at the pace of `Claims` and `Puts`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from redis.exceptions import ConnectionError as LostConnectionError, RedisError

from dataplane_core.errors import BackendUnavailableError, DataPlaneError
from dataplane_core.spec import ClaimRequest, Wake
from dataplane_redis._protocol import pack
from dataplane_redis._scripts import to_bytes
from dataplane_redis._session import Session

_log = logging.getLogger("dataplane_redis")

#: Seconds that one try to listen may take, and that the rest of a message or one call of the thread may take.
_LISTEN_S: Final = 1.0
_CALL_S: Final = 2.0
#: Seconds between two tries to listen: at first, and at most.
_PAUSE_S: Final = 0.1
_PAUSE_MOST_S: Final = 5.0
#: Seconds without a message after which the thread checks that the server still answers; then it waits as long again.
_CHECK_S: Final = 15.0
#: Seconds between two questions that the claims of a client ask by themselves, if they ask the same; and the most
#: between two of one claim.
_ASK_S: Final = 0.25
_ASK_MOST_S: Final = 10.0
#: Claims that the thread says have ended before it looks for messages again.
_LEAVE_AT_ONCE: Final = 20

_Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)


class Question(NamedTuple):
    """What a claim asks: the values that its scripts name so. Equal filters are equal bytes."""

    name: str
    task_name: str
    batch_size: int
    required: bytes
    filter: bytes


@dataclass(slots=True)
class _Waiting:
    """A claim that waits."""

    wake: Wake
    question: Question
    entered: bool = False  # whether the server may know that it waits
    promised: bool = False  # whether the server said that it will wake it
    woken: bool = False  # whether it was told to ask again, and did not yet


@dataclass(slots=True)
class Turns:
    """So many claims of this client take turns in asking by themselves. The last turn given is at ``next_at``."""

    count: int = 0
    next_at: float = 0.0

    def take(self, each_s: float, most_s: float) -> float:
        """Seconds until the next turn: so long after the one before it, but at most so long from now."""
        now = time.monotonic()
        self.next_at = min(max(self.next_at, now) + each_s, now + most_s)
        return self.next_at - now


class Wakes:
    """The claims and puts of one client that wait. Thread-safe. ``client`` is the client's id, 8 random bytes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.client: Final = os.urandom(8)
        self._channel = b"%s:wake:%s" % (session.base, self.client.hex().encode())
        self._waiting: dict[str, _Waiting] = {}
        self._puts: dict[bytes, threading.Event] = {}  # by write
        self._lines: dict[Question, Turns] = {}  # the claims that ask the same
        self._left: deque[tuple[Question, str]] = deque()  # claims that ended, while the server thinks that they wait
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tried = threading.Event()  # whether there was a first try to listen
        self._connection: Any = None  # while it listens
        self._sockets: list[socket.socket] = []  # a pair: a byte sent on the second wakes the thread
        self._refused = False
        self._closed = False

    def close(self, until: float = 0.0) -> None:
        """Ends the thread and its connection, and waits for that, on `time.monotonic`'s clock. May be called again."""
        self._closed = True
        self._wake_puts()
        self._nudge()
        if self._thread is not None and until:
            self._thread.join(max(0.0, until - time.monotonic()))

    # --- claims -------------------------------------------------------------------------------------------------------

    def enter(self, request: ClaimRequest, question: Question) -> bytes:
        """Before a question: how the server knows this claim, if this client listens; else nothing."""
        wake, token = request.wake, request.token
        if wake is None or self._refused or self._closed:
            return b""
        with self._lock:
            waiting = self._waiting.get(token)
            if waiting is None:
                waiting = self._waiting[token] = _Waiting(wake, question)
                self._lines.setdefault(question, Turns()).count += 1
                wake.at_end = partial(self._end, token)
            connection = self._connection
            if connection is None:
                return b""
            waiting.entered, waiting.woken = True, False
        if not self._session.connected()[0].leads_to(connection):
            self._nudge()
        return self.client + to_bytes(token)

    def listens(self, deadline: float) -> bool:
        """Called when a claim or a put waits. Whether this client listens.

        Starts to listen if nothing waited before, and blocks until it does, for a short time at most.
        """
        if self._refused or self._closed:
            return False
        if not self._tried.is_set():
            self._start()
            self._tried.wait(max(0.0, min(_LISTEN_S, deadline - time.monotonic())))
        return self._connection is not None

    def answer(self, token: str, *, waits: bool, promised: bool = False) -> None:
        """After a question: whether the server keeps the claim, and says that it will wake it."""
        with self._lock:
            if not waits:
                self._forget(token)
            elif token in self._waiting:
                self._waiting[token].promised = promised

    def pause_s(self, token: str, interval_s: float) -> float | None:
        """How long a claim that the server will wake may pause before it asks by itself: at least ``interval_s`` after
        this client's last question. None: nobody will wake it."""
        with self._lock:
            waiting = self._waiting.get(token)
            if waiting is None or not waiting.promised or self._connection is None:
                return None
            line, each_s = self._lines[waiting.question], max(_ASK_S, interval_s)
            return line.take(each_s, min(_ASK_MOST_S, each_s * line.count))

    def take_woken(self, token: str) -> bool:
        """Whether this claim was woken since this was asked last."""
        waiting = self._waiting.get(token)
        if waiting is None or not waiting.woken:
            return False
        waiting.woken = False
        return True

    def _end(self, token: str) -> None:
        """A claim does not wait any longer. If the server was not told, the thread tells it."""
        with self._lock:
            waiting = self._forget(token)
            if waiting is None or not waiting.entered:
                return
            self._left.append((waiting.question, token))
        self._nudge()

    def _forget(self, token: str) -> _Waiting | None:
        """Under the lock."""
        waiting = self._waiting.pop(token, None)
        if waiting is not None:
            line = self._lines[waiting.question]
            line.count -= 1
            if not line.count:
                del self._lines[waiting.question]
        return waiting

    def _wake(self, token: str) -> None:
        waiting = self._waiting.get(token)
        if waiting is None:
            return
        waiting.woken = True
        if not waiting.wake():
            self._end(token)

    # --- puts ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def for_room(self, write: bytes) -> Iterator[threading.Event]:
        """While a put waits for room: what is set when the server, a new connection or `close` has it ask again."""
        event = self._puts[write] = threading.Event()
        try:
            yield event
        finally:
            del self._puts[write]

    def listener(self, deadline: float) -> bytes:
        """Before a question of a put that waits: the client's id if it listens, else nothing. Blocks as `listen`."""
        if not self.listens(deadline):
            return b""
        connection = self._connection
        if connection is not None and not self._session.connected()[0].leads_to(connection):
            self._nudge()
        return self.client

    def _wake_puts(self) -> None:
        for event in list(self._puts.values()):
            event.set()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed:
                return
            thread = threading.Thread(target=self._run, name="dataplane-redis-wakes", daemon=True)
            thread.start()
            self._thread = thread

    def _nudge(self) -> None:
        """Wakes the thread."""
        if self._sockets:
            with contextlib.suppress(OSError):  # it has ended, or has enough to read
                self._sockets[1].send(b".")

    def _run(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # its start was interrupted: another one is started when it is needed
        pause_s = _PAUSE_S
        try:
            self._sockets = list(socket.socketpair())  # here no signal handler can come in between
            for each in self._sockets:
                each.setblocking(False)
            _open.add(self)
            while not (self._closed or self._refused):
                connection = self._subscribe()
                if connection is not None:
                    pause_s = _PAUSE_S
                    self._serve(connection)
                self._tried.set()
                if not self._refused:
                    self._sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MOST_S)
        except OSError as error:  # there are no more sockets
            _log.warning("claims and puts that wait are not woken, but ask the store now and then: %s", error)
        finally:
            self._tried.set()
            _open.discard(self)
            for each in self._sockets:
                each.close()

    def _subscribe(self) -> Any:
        """A connection that listens, or None. Notes if the server refuses for good."""
        try:
            link, _ = self._session.connected()
            connection = link.open("listen", time.monotonic() + _LISTEN_S)
        except DataPlaneError:  # the server cannot be reached
            return None
        try:
            connection.send_packed_command([b"".join(pack((b"SSUBSCRIBE", self._channel)))], check_health=False)
            connection.read_response(disable_decoding=True)
            return connection
        except (RedisError, OSError, ValueError) as error:  # ValueError: redis-py cannot read a redirection
            connection.disconnect()
            refusal = link.to_error("listen", error)  # it also follows a redirection
            self._refused = _is_final(refusal)
            if self._refused:
                _log.warning("claims and puts that wait are not woken, but ask the store now and then: %s", refusal)
            return None

    def _serve(self, connection: Any) -> None:
        """Takes messages until the connection is lost or must be replaced."""
        with self._lock:
            self._connection = connection
            waiting = list(self._waiting)
        self._tried.set()
        for token in waiting:  # they ask again, so that the server knows them
            self._wake(token)
        self._wake_puts()
        try:
            self._receive(connection)
        except (RedisError, OSError, ValueError, DataPlaneError) as error:  # ValueError: the socket was closed
            _log.debug("the connection on which claims are woken was lost: %s", error)
        finally:
            with self._lock:
                self._connection = None
            connection.disconnect()

    def _receive(self, connection: Any) -> None:
        """Takes messages, and tells the server of claims that ended."""
        link, _ = self._session.connected()
        connection._sock.settimeout(_CALL_S)
        is_asked = False  # whether the server was asked if it still answers
        with _Selector() as selector:
            selector.register(connection._sock, selectors.EVENT_READ)
            selector.register(self._sockets[0], selectors.EVENT_READ)
            while not self._closed and link.leads_to(connection):
                while connection.can_read(timeout=0):
                    is_asked = False
                    kind, *rest = connection.read_response(disable_decoding=True)
                    if kind == b"smessage":
                        self._hear(rest[1])
                    elif kind == b"sunsubscribe":
                        raise LostConnectionError("the slot moved to another node of the cluster")
                self._leave()
                if not selector.select(0 if self._left else _CHECK_S) and not self._left:
                    if is_asked:
                        raise LostConnectionError("the server does not answer")
                    connection.send_packed_command([b"".join(pack((b"PING",)))], check_health=False)
                    is_asked = True
                self._hear_nudges()

    def _hear(self, message: bytes) -> None:
        put = self._puts.get(message)
        if put is not None:
            put.set()
        else:
            self._wake(message.decode("utf-8", "replace"))

    def _leave(self) -> None:
        for _ in range(min(len(self._left), _LEAVE_AT_ONCE)):
            if self._closed:
                return
            question, token = self._left.popleft()
            waiter = self.client + to_bytes(token)
            try:
                with self._session.quietly():
                    until = time.monotonic() + _CALL_S
                    self._session.run("claim_meta", until, "leave", waiter=waiter, **question._asdict())
            except DataPlaneError as error:
                if error.retryable:  # after a pause
                    self._left.appendleft((question, token))
                raise

    def _sleep(self, pause_s: float) -> None:
        """Until the pause is over, or the client closes."""
        until = time.monotonic() + pause_s
        with _Selector() as selector:
            selector.register(self._sockets[0], selectors.EVENT_READ)
            while not self._closed and (left_s := until - time.monotonic()) > 0:
                selector.select(left_s)
                self._hear_nudges()

    def _hear_nudges(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._sockets[0].recv(4096):
                pass

    def _close_in_fork(self) -> None:
        for each in self._sockets:
            each.close()
        if self._connection is not None and self._connection._sock is not None:
            self._connection._sock.close()


def _is_final(error: DataPlaneError) -> bool:
    """Whether the server refuses to let this user listen, or has no such command."""
    return "unknown command" in error.message or (isinstance(error, BackendUnavailableError) and not error.retryable)


_open: weakref.WeakSet[Wakes] = weakref.WeakSet()


def _close_in_fork() -> None:
    for wakes in list(_open):
        wakes._close_in_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    # the server would think that a process listens whose fork lives on
    os.register_at_fork(after_in_child=_close_in_fork)
