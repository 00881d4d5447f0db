"""The process of the ledger: one thread that answers the clients of one store over a Unix socket.

Run as ``python -m dataplane_shm SOCKET ARENA_BYTES CAPACITY_BYTES ON_FULL TOUCH_AHEAD_BYTES`` by the client that owns
the store. It ends when that client ends it, or ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from dataplane_core.host_memory import Arena
from dataplane_core.ledger import LedgerService
from dataplane_shm._messages import (
    VERSION,
    Hello,
    Release,
    StopWaiting,
    Welcome,
    decode_request,
    encode,
    encode_error,
    encode_reply,
)
from dataplane_shm._store import Session, Store

__all__ = ["Server"]

_log = logging.getLogger("dataplane_shm")

_RECEIVE_BYTES: Final = 1 << 18
#: Seconds until clients are accepted again that could not be.
_ACCEPT_AGAIN_S: Final = 1.0
_hello_decoder: Final = msgspec.msgpack.Decoder(Hello)


class _Connection:
    """A connection of a client.

    Attributes:
        session: The session that it belongs to; None before its `Hello`.
        begins: Whether it began the session, which then ends with it.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.session: Session | None = None
        self.begins = False
        self.received = bytearray()
        self.unsent = bytearray()


class Server:
    """Answers clients until the process is ended.

    Args:
        path: Where the socket is made.
        arena: The memory.
        capacity_bytes: Limit for the payload held.
        on_full: What clients do if it is reached.
        touch_ahead_bytes: How much of the arena is made ready before it is used.
    """

    def __init__(self, path: Path, arena: Arena, *, capacity_bytes: int, on_full: str, touch_ahead_bytes: int) -> None:
        self._arena = arena
        self._capacity_bytes = capacity_bytes
        self._on_full = on_full
        self._touch_ahead_bytes = touch_ahead_bytes
        self._touch_until = 0
        self._toucher: threading.Thread | None = None
        self._store = Store(arena, LedgerService(capacity_bytes=capacity_bytes))
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        os.umask(0o177)  # the socket is for this user only
        made = path.with_name(".new")
        self._listener.bind(str(made))
        self._listener.listen(1024)
        made.rename(path)  # who sees the path can connect
        self._accept_at: float | None = 0.0  # when to accept clients again; None: they are accepted

    def run(self) -> None:
        """Answers clients. Never returns."""
        while True:
            self._touch_ahead()
            if self._accept_at is not None and time.monotonic() >= self._accept_at:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._accept_at = None
            for key, events in self._selector.select(None if self._accept_at is None else _ACCEPT_AGAIN_S):
                if key.data is None:
                    self._accept()
                    continue
                try:
                    if events & selectors.EVENT_READ:
                        self._read(key.data)
                    if events & selectors.EVENT_WRITE:
                        self._send(key.data, b"")
                except (OSError, EOFError):  # the client is gone
                    self._drop(key.data)
                except Exception:  # no message of one client may end the store of all
                    _log.exception("a client's connection is closed")
                    self._drop(key.data)

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except BlockingIOError:  # the client is gone again
            return
        except OSError as error:  # most likely too many open files
            _log.warning("no client is accepted for %s s: %s", _ACCEPT_AGAIN_S, error)
            self._selector.unregister(self._listener)
            self._accept_at = time.monotonic() + _ACCEPT_AGAIN_S
            return
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            channel.close()
            return
        channel.setblocking(False)
        self._selector.register(channel, selectors.EVENT_READ, _Connection(channel))

    def _drop(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.channel)
        connection.channel.close()
        if connection.begins and connection.session is not None:
            self._store.end_session(connection.session)
            connection.begins = False

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.channel.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        received = connection.received
        received += data
        while len(received) >= 4:
            end = 4 + int.from_bytes(received[:4], "little")
            if len(received) < end:
                return
            message = bytes(received[4:end])
            del received[:end]
            self._answer(connection, message)

    def _answer(self, connection: _Connection, message: bytes) -> None:
        if connection.session is None:
            self._welcome(connection, _hello_decoder.decode(message))
            return
        if connection.session.ended:
            raise EOFError
        request = decode_request(message)
        try:
            reply = encode_reply(self._store.handle(request, connection.session))
        except Exception as error:  # the client raises it
            reply = encode_error(error)
        if type(request) in (Release, StopWaiting):
            return
        try:
            self._send(connection, reply)
        except OSError:
            self._store.take_back(request, connection.session)
            raise

    def _welcome(self, connection: _Connection, hello: Hello) -> None:
        if hello.key is not None:
            connection.session = self._store.session(hello.key)
            if connection.session is None:
                raise EOFError  # the client has closed, or is one of a store that ended
            return
        session = self._store.begin_session()
        connection.session, connection.begins = session, True
        session.wake = partial(self._wake, connection)
        said = (self._capacity_bytes, self._on_full, self._touch_until, session.key)
        socket.send_fds(connection.channel, [encode(Welcome(VERSION, session.number, *said))], [self._arena.fd])

    def _wake(self, connection: _Connection, token: str) -> bool:
        """Sends a token to the client that waits with it. False if the client is gone."""
        if not connection.begins:
            return False
        try:
            self._send(connection, encode(token))
        except OSError:  # its end is noticed when the connection is read
            return False
        return True

    def _send(self, connection: _Connection, data: bytes) -> None:
        """Sends data, and keeps what the socket does not take yet."""
        unsent = connection.unsent
        had = bool(unsent)
        unsent += data
        with contextlib.suppress(BlockingIOError):
            del unsent[: connection.channel.send(unsent)]
        if bool(unsent) != had:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            self._selector.modify(connection.channel, events, connection)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _touch_ahead(self) -> None:
        """Makes more memory ready if less than half of what lies ahead is left."""
        ahead = self._touch_ahead_bytes
        if self._toucher is not None and self._toucher.is_alive():
            return
        if ahead and self._touch_until < min(self._store.high_water + ahead // 2 + 1, self._arena.size_bytes):
            start, self._touch_until = self._touch_until, min(self._store.high_water + ahead, self._arena.size_bytes)
            with contextlib.suppress(RuntimeError):  # no more threads are allowed: memory is ready when it is used
                self._toucher = self._arena.touch_in_background(start, self._touch_until)


def main(arguments: list[str]) -> None:
    """Runs the server of a store."""
    path, arena_bytes, capacity_bytes, on_full, touch_ahead_bytes = arguments
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each thread of a client is a socket
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error, not a signal, if the arena is too large for ulimit -f
    try:
        arena = Arena.create(int(arena_bytes))
    except OSError as error:
        limit = "-v" if error.errno == errno.ENOMEM else "-f"
        sys.exit(
            f"{arena_bytes} bytes of shared memory cannot be made: {error}. Raise the limit of ulimit {limit}, or "
            "lower capacity_bytes"
        )
    Server(
        Path(path),
        arena,
        capacity_bytes=int(capacity_bytes),
        on_full=on_full,
        touch_ahead_bytes=int(touch_ahead_bytes),
    ).run()
