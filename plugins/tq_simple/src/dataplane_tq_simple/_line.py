"""A plain TCP connection for calls into the controller's service, beside TransferQueue's own socket.

A call through TransferQueue's controller costs that process 200 microseconds of CPU time beside the call itself: ZeroMQ
hands each message from one thread to another and back, and TransferQueue unpacks a request for rows, searches for them
and packs an answer. So the controller's process has one more thread, which answers calls alone.

A client sends the token that the controller told it, and then calls. Each message is its length in bytes (8 bytes,
little-endian) and its data. Replies come in the order of the calls.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["TOKEN_BYTES", "CallServer", "Line"]

_logger = logging.getLogger(__name__)

#: Size of the token of a server.
TOKEN_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<Q")
_RECEIVE_BYTES: Final = 1 << 18
#: A longer message is taken for garbage.
_MOST_BYTES: Final = 1 << 32


class Line:
    """One end of a connection. Never blocks. Not thread-safe.

    Args:
        channel: The socket; it is closed with the line.
        token: What the client sends before its first message.
    """

    def __init__(self, channel: socket.socket, token: bytes = b"") -> None:
        channel.setblocking(False)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.channel = channel
        self._unsent = bytearray(token)
        self._received = bytearray()

    @classmethod
    def connect(cls, ip: str, port: int, token: bytes) -> Line:
        """Begins to connect to a server. An error shows when a message is sent or received."""
        channel = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
        try:
            line = cls(channel, token)
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

    def take(self, num_bytes: int) -> bytes | None:
        """The next bytes that were received, or None if there are not so many yet."""
        if len(self._received) < num_bytes:
            return None
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken

    def message(self) -> bytes | None:
        """The next message that was received as a whole, or None. Raises `OSError` if it is garbage."""
        received = self._received
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
        """Closes the connection."""
        self.channel.close()


class CallServer:
    """Answers the calls of all clients, one after the other, in a thread of its own.

    Args:
        ip: The address at which it listens, on a free port.
        answer: Answers a call. It must not raise or block.

    Attributes:
        port: The port.
        token: What clients must send first.
    """

    def __init__(self, ip: str, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.create_server((ip, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._greeted: set[Line] = set()
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
            for key, events in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                if key.fileobj is self._woken:
                    for each in list(self._selector.get_map().values()):
                        each.fileobj.close()  # type: ignore[union-attr]
                    self._selector.close()
                    return
                line: Line = key.fileobj  # type: ignore[assignment]
                try:
                    self._serve(line, events)
                except OSError:
                    self._drop(line)
                except Exception:  # this thread must survive every client
                    _logger.exception("a connection for calls failed")
                    self._drop(line)

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
            self._selector.register(Line(channel), selectors.EVENT_READ)
        except OSError as error:
            _logger.warning("a connection for calls was not accepted: %s", error)

    def _serve(self, line: Line, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            line.flush()
            if not line.unsent:
                self._selector.modify(line, selectors.EVENT_READ)
                self._answer_all(line)
        if events & selectors.EVENT_READ:
            line.fill()
            if line not in self._greeted:
                token = line.take(TOKEN_BYTES)
                if token is None:
                    return
                if not hmac.compare_digest(token, self.token):
                    raise ConnectionAbortedError("another token")
                self._greeted.add(line)
            self._answer_all(line)

    def _answer_all(self, line: Line) -> None:
        """Answers what has arrived, until the client takes no more replies."""
        while not line.unsent and (call := line.message()) is not None:
            line.send(self._answer(call))
        if line.unsent:
            self._selector.modify(line, selectors.EVENT_WRITE)

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line)
        self._greeted.discard(line)
        line.close()
