"""A plain TCP connection for calls into the controller's service, beside TransferQueue's own socket.

A call through TransferQueue's controller costs that process 200 microseconds of CPU time beside the call itself: ZeroMQ
hands each message from one thread to another and back, and TransferQueue unpacks a request for rows, searches for them
and packs an answer. So the controller's process has one more thread, which answers calls alone.

Calls and replies are pickles, so each side first proves that it belongs to the instance. The server draws a token,
which clients get through Ray. A client sends the token's first half, and the server answers with the second half.
Before that, no side reads anything else of the other. Then each message is its length in bytes (8 bytes, little-endian)
and its data. Replies come in the order of the calls.
"""

from __future__ import annotations

import functools
import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["HALF_BYTES", "CallServer", "Line"]

_logger = logging.getLogger(__name__)

#: Size of each half of the token of a server.
HALF_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<Q")
_RECEIVE_BYTES: Final = 1 << 18
#: A longer message is taken for garbage.
_MOST_BYTES: Final = 1 << 32
#: Seconds in which a client must prove that it knows the token, and between two looks for those that did not.
_GREETING_S: Final = 30.0
_LOOK_S: Final = 1.0


class Line:
    """One end of a connection. Never blocks. Not thread-safe.

    Args:
        channel: The socket; it is closed with the line.
        greeting: What is sent first.
        expected: What the other side must send first.
    """

    def __init__(self, channel: socket.socket, greeting: bytes, expected: bytes) -> None:
        channel.setblocking(False)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.channel = channel
        self._unsent = bytearray(greeting)
        self._expected = expected
        self._received = bytearray()

    @classmethod
    def connect(cls, ip: str, port: int, token: bytes) -> Line:
        """Begins to connect to a server. An error shows when a message is sent or received."""
        channel = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
        try:
            line = cls(channel, token[:HALF_BYTES], token[HALF_BYTES:])
            channel.connect_ex((ip, port))
        except BaseException:
            channel.close()
            raise
        return line

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self.channel.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits to be sent: call `flush` when the socket can take it."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Sends a message, or keeps what the socket does not take now. Raises `OSError` if the connection is broken."""
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it. Raises `OSError` if the connection is broken."""
        while self._unsent:
            try:
                num_sent = self.channel.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:num_sent]

    def fill(self) -> None:
        """Receives what has arrived. Raises `OSError` if the connection is broken or was closed."""
        try:
            data = self.channel.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self._received += data

    def greet(self, greeting: bytes) -> None:
        """Sends this before the next message. Raises `OSError` if the connection is broken."""
        self._unsent += greeting
        self.flush()

    def proved(self) -> bool:
        """Whether the other side has sent what it must send first. Raises `OSError` if it sent something else."""
        size = len(self._expected)
        if len(self._received) < size:
            return False
        if size:
            if not hmac.compare_digest(bytes(self._received[:size]), self._expected):
                raise ConnectionAbortedError("the other side does not know the token")
            del self._received[:size]
            self._expected = b""
        return True

    def message(self) -> bytes | None:
        """The next message that was received as a whole, or None.

        Raises `OSError` if it is garbage, or if the other side does not know the token.
        """
        received = self._received
        if not self.proved():
            return None
        if len(received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(received)
        if length > _MOST_BYTES:
            raise ConnectionAbortedError(f"a message of {length} bytes was announced")
        end = _LENGTH.size + length
        if len(received) < end:
            return None
        found = bytes(memoryview(received)[_LENGTH.size : end])
        del received[:end]
        return found

    @property
    def idle(self) -> bool:
        """Whether the connection stands and nothing has arrived that nobody asked for."""
        try:
            self.channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._received and not self._unsent
        except OSError:
            return False
        return False

    def close(self, linger: int = 0) -> None:
        """Closes the connection. What waits to be sent is not sent."""
        self.channel.close()


class CallServer:
    """Answers the calls of all clients, one after the other, in a thread of its own.

    Args:
        ip: The address at which it listens, on a free port.
        answer: Answers a call. It must not raise or block.
        settle: Called before replies are sent, once for all calls that had arrived together. It must not raise.

    Attributes:
        port: The port.
        token: What clients must know.
    """

    def __init__(self, ip: str, answer: Callable[[bytes], bytes], settle: Callable[[], None] = lambda: None) -> None:
        self._answer = answer
        self._settle = settle
        self._replies: list[tuple[Line, bytes]] = []  # that are not sent yet
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.create_server((ip, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_bytes(2 * HALF_BYTES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: dict[Line, float] = {}  # until when each must have proved that it knows the token
        self._accept_at: float | None = None  # when to accept connections again, if not now
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="dataplane-calls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections, the thread and the port."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            wait_s = _LOOK_S if self._strangers or self._accept_at is not None else None
            for key, events in self._selector.select(wait_s):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                if key.fileobj is self._woken:
                    for each in list(self._selector.get_map().values()):
                        each.fileobj.close()  # type: ignore[union-attr]
                    self._selector.close()
                    return
                line: Line = key.fileobj  # type: ignore[assignment]
                self._try(line, functools.partial(self._serve, line, events))
            self._reply()
            if wait_s is not None:
                self._look()

    def _try(self, line: Line, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError:
            self._drop(line)
        except Exception:  # this thread must survive every client
            _logger.exception("a connection for calls failed")
            self._drop(line)

    def _reply(self) -> None:
        """Sends the replies to all calls that had arrived together."""
        if not self._replies:
            return
        self._settle()
        replies, self._replies = self._replies, []
        for line, reply in replies:
            if line.fileno() >= 0:  # else it was dropped
                self._try(line, functools.partial(self._send, line, reply))

    def _send(self, line: Line, reply: bytes) -> None:
        line.send(reply)
        if line.unsent:
            self._selector.modify(line, selectors.EVENT_WRITE)

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except OSError as error:  # most likely too many open files
            _logger.warning("connections for calls are not accepted for %s s: %s", _LOOK_S, error)
            self._selector.unregister(self._listener)
            self._accept_at = time.monotonic() + _LOOK_S
            return
        try:
            line = Line(channel, b"", self.token[:HALF_BYTES])
            self._selector.register(line, selectors.EVENT_READ)
        except OSError:  # it has gone already
            channel.close()
            return
        self._strangers[line] = time.monotonic() + _GREETING_S

    def _look(self) -> None:
        """Drops those that did not prove in time that they know the token, and accepts connections again."""
        now = time.monotonic()
        for line in [line for line, until in self._strangers.items() if now > until]:
            self._drop(line)
        if self._accept_at is not None and now > self._accept_at:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accept_at = None

    def _serve(self, line: Line, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            line.flush()
            if not line.unsent:
                self._selector.modify(line, selectors.EVENT_READ)
                self._answer_all(line)
        if events & selectors.EVENT_READ:
            line.fill()
            if line in self._strangers:
                if not line.proved():
                    return
                del self._strangers[line]
                line.greet(self.token[HALF_BYTES:])
            self._answer_all(line)

    def _answer_all(self, line: Line) -> None:
        """Answers what has arrived, until the client takes no more replies."""
        while not line.unsent and (call := line.message()) is not None:
            self._replies.append((line, self._answer(call)))

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line)
        self._strangers.pop(line, None)
        line.close()
