"""Wakes claims that wait: a connection on which the server says which of them can be answered.

The connection is opened when a claim waits for the first time, and a thread reads from it. The server keeps the claims
that wait in its line (lua/wakes.lua), and sends the token of the one to wake. A message may get lost, so claims that
wait also ask by themselves, rarely. While there is no such connection, they ask at the pace of `Claims`.
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
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import RedisError

from dataplane_core.errors import BackendUnavailableError, DataPlaneError
from dataplane_core.spec import ClaimRequest, Wake
from dataplane_redis._link import pack
from dataplane_redis._session import Session
from dataplane_redis._wire import to_bytes

__all__ = ["Question", "Wakes"]

_log = logging.getLogger("dataplane_redis")

#: What a claim asks: partition, task, batch size, required fields (packed), tag filter (packed).
Question = tuple[str, str, int, bytes, bytes]

#: Seconds that one try to listen may take, and that the rest of a message or one call of the thread may take.
_LISTEN_S: Final = 1.0
_CALL_S: Final = 2.0
#: Seconds between two tries to listen: at first, and at most.
_PAUSE_S: Final = 0.1
_PAUSE_MOST_S: Final = 5.0
#: Seconds that `Wakes.close` waits for the thread.
_JOIN_S: Final = 2.0

_Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)


@dataclass(slots=True)
class _Waiting:
    """A claim that waits.

    Attributes:
        wake: Tells it to ask again.
        question: What it asks.
        entered: Whether the server may know that it waits.
        promised: Whether the server said that it will wake it.
        woken: Whether it was told to ask again, and did not yet.
    """

    wake: Wake
    question: Question
    entered: bool = False
    promised: bool = False
    woken: bool = False


class Wakes:
    """The claims of one client that wait. Thread-safe.

    Args:
        session: The session.
        client: The client's id, 8 bytes.
    """

    def __init__(self, session: Session, client: bytes) -> None:
        self._session = session
        self._client = client
        self._channel = b"%s:wake:%s" % (session.base, client.hex().encode())
        self._waiting: dict[str, _Waiting] = {}
        self._left: deque[tuple[Question, str]] = deque()  # claims that ended, while the server thinks that they wait
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tried = threading.Event()  # whether there was a first try to listen
        self._connection: Any = None  # while it listens
        self._sockets: list[socket.socket] = []  # a pair: a byte sent on the second wakes the thread
        self._refused = False
        self._closed = False

    def close(self, *, join: bool = True) -> None:
        """Ends the thread and its connection. May be called again."""
        self._closed = True
        self._nudge()
        if join and self._thread is not None:
            self._thread.join(_JOIN_S)

    # --- claims -------------------------------------------------------------------------------------------------------

    def enter(self, request: ClaimRequest, question: Question) -> bytes:
        """Before a question: returns how the server knows this claim, if it should wake it; else nothing.

        Blocks until this client listens, for a short time at most, when the first claim waits.
        """
        wake, token = request.wake, request.token
        if wake is None or self._refused or self._closed:
            return b""
        self._listen(request.deadline)
        with self._lock:
            waiting = self._waiting.get(token)
            if waiting is None:
                waiting = self._waiting[token] = _Waiting(wake, question)
            waiting.wake, waiting.question = wake, question
            wake.at_end = partial(self._end, token)
            if self._connection is None:
                return b""
            waiting.entered = True
        if not self._session.connected()[0].leads_to(self._connection):
            self._nudge()
        return self._client + to_bytes(token)

    def answer(self, token: str, *, waits: bool, promised: bool = False) -> None:
        """After a question: whether the server keeps the claim in its line, and says that it will wake it."""
        with self._lock:
            if not waits:
                self._waiting.pop(token, None)
            elif token in self._waiting:
                self._waiting[token].promised = promised

    def is_promised(self, token: str) -> bool:
        """Whether the server will wake this claim."""
        waiting = self._waiting.get(token)
        return waiting is not None and waiting.promised and self._connection is not None

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
            waiting = self._waiting.pop(token, None)
            if waiting is None or not waiting.entered:
                return
            self._left.append((waiting.question, token))
        self._nudge()

    def _wake(self, token: str) -> None:
        waiting = self._waiting.get(token)
        if waiting is None:
            return
        waiting.woken = True
        if not waiting.wake():
            self._end(token)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _listen(self, deadline: float) -> None:
        """Starts the thread, and waits for its first try."""
        if self._tried.is_set():
            return
        with self._lock:
            if self._thread is None:
                self._sockets = list(socket.socketpair())
                for each in self._sockets:
                    each.setblocking(False)
                _open.add(self)
                self._thread = threading.Thread(target=self._run, name="dataplane-redis-wakes", daemon=True)
                self._thread.start()
        self._tried.wait(max(0.0, min(_LISTEN_S, deadline - time.monotonic())))

    def _nudge(self) -> None:
        """Wakes the thread."""
        if self._sockets:
            with contextlib.suppress(OSError):  # it has ended, or has enough to read
                self._sockets[1].send(b".")

    def _run(self) -> None:
        pause_s = _PAUSE_S
        try:
            while not (self._closed or self._refused):
                connection = self._subscribe()
                if connection is None:
                    self._tried.set()
                    self._sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_MOST_S)
                    continue
                pause_s = _PAUSE_S
                with self._lock:
                    self._connection = connection
                    waiting = list(self._waiting)
                self._tried.set()
                for token in waiting:  # they ask again, so that the server knows them
                    self._wake(token)
                try:
                    self._receive(connection)
                except (RedisError, OSError, ValueError) as error:  # ValueError: the socket was closed
                    _log.debug("the connection on which claims are woken was lost: %s", error)
                finally:
                    with self._lock:
                        self._connection = None
                    connection.disconnect()
        finally:
            self._tried.set()
            _open.discard(self)
            for each in self._sockets:
                each.close()

    def _subscribe(self) -> Any:
        """A connection that listens, or None. Notes if the server refuses for good."""
        deadline = time.monotonic() + _LISTEN_S
        connection: Any = None
        try:
            link, _ = self._session.connected()
            connection = link.open("listen", deadline)
            connection.send_packed_command([b"".join(pack((b"SSUBSCRIBE", self._channel)))], check_health=False)
            connection.read_response(disable_decoding=True)
            return connection
        except DataPlaneError:  # the server cannot be reached
            return None
        except (RedisError, OSError) as error:
            connection.disconnect()
            refusal = link.to_error("listen", error)  # it also follows a redirection
            self._refused = _is_final(refusal)
            if self._refused:
                _log.info("claims that wait are not woken, and ask at the pace of the store: %s", refusal)
            return None

    def _receive(self, connection: Any) -> None:
        """Takes messages, and tells the server of claims that ended, until the connection must be replaced."""
        link, _ = self._session.connected()
        connection._sock.settimeout(_CALL_S)
        with _Selector() as selector:
            selector.register(connection._sock, selectors.EVENT_READ)
            selector.register(self._sockets[0], selectors.EVENT_READ)
            while not self._closed and link.leads_to(connection):
                while connection.can_read(timeout=0):
                    kind, _, told = connection.read_response(disable_decoding=True)
                    if kind == b"smessage":
                        self._wake(told.decode("utf-8", "replace"))
                    elif kind == b"sunsubscribe":
                        raise LostConnectionError("the slot moved to another node of the cluster")
                self._leave()
                selector.select()
                self._hear_nudges()

    def _leave(self) -> None:
        while self._left and not self._closed:
            question, token = self._left.popleft()
            with contextlib.suppress(DataPlaneError), self._session.quietly():  # the server drops it later anyway
                waiter = self._client + to_bytes(token)
                self._session.run("claim_meta", time.monotonic() + _CALL_S, "leave", *question, waiter)

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
