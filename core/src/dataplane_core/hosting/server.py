"""`Server`: one thread that answers the clients of a host, over a Unix socket or over TCP.

A request whose client has hung up is not carried out: it was given up, and what the client does next, such as to abort
a put or to end a pin, may have been read already. Over a Unix socket, that is so only if several connections have
something to be read, or if the connection is new, and only then the server looks.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from dataplane_core.hosting.host import Client, Host, Receiving, Sending
from dataplane_core.hosting.layout import Bytes
from dataplane_core.hosting.messages import VERSION, Hello, Welcome, decode_hello, encode

_log = logging.getLogger(__name__)

#: Size of each half of a token. A client shows the first half, and the server answers with the second.
HALF_BYTES: Final = 32
_RECEIVE_BYTES: Final = 1 << 18
#: About how many bytes beside messages one connection moves before the others get their turn.
_TURN_BYTES: Final = 4 << 20
#: The most arrays that one call of the system takes.
_MOST_ARRAYS: Final = 512
#: Seconds until clients are accepted again that could not be, and between two looks for those that say nothing.
_LOOK_S: Final = 1.0
#: Seconds in which who connects must say who it is, and the bytes that it may take for that.
_GREETING_S: Final = 30.0
_GREETING_BYTES: Final = 1 << 12


def listen_at(path: Path) -> socket.socket:
    """A Unix socket for this user only. Who sees the path can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made = path.with_name(".new")
    listener.bind(str(made))
    made.chmod(0o600)
    listener.listen(1024)
    # who sees the name can connect: a socket that does not listen yet would refuse
    made.rename(path)
    return listener


def listen_as(name: str) -> socket.socket:
    """A Unix socket without a file (Linux), for this user's processes in the same network namespace.

    Nothing of it is left when the process ends. ``UnixAddress(name)`` reaches it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(1024)
    return listener


def new_socket_name() -> str:
    """A name for `listen_as` that no other socket has."""
    return f"\0dataplane-{secrets.token_hex(16)}"


def listen_on(ip: str) -> socket.socket:
    """A TCP socket at this address, on a free port."""
    return socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=1024)


def set_tcp_options(channel: socket.socket) -> None:
    """Sends at once what is written, and notices within two minutes that the other side's node is gone."""
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not everywhere
            channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def new_token() -> bytes:
    """A token for a server that is reached over TCP."""
    return secrets.token_bytes(2 * HALF_BYTES)


class _Connection:
    """A connection.

    Attributes:
        client: Whose it is; None before its `Hello`.
        begins: Whether it began the session, which then ends with it.
        until: When it must have said who it is.
        is_new: Whether it has asked nothing yet. It may have waited to be accepted.
        is_unix: Whether it is a Unix socket.
        receiving: Where the bytes go that follow its request.
        sending: The reply whose bytes follow what is unsent.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.is_unix = channel.family == socket.AF_UNIX
        self.client: Client | None = None
        self.receiving: Receiving | None = None
        self.sending: Sending | None = None
        self.arrays: deque[memoryview] = deque()  # what is left of these bytes
        self.begins = False
        self.until = time.monotonic() + _GREETING_S
        self.is_new = True
        self.events = selectors.EVENT_READ  # that the server waits for
        self.received = bytearray()
        self.unsent = bytearray()


class Server:
    """Answers the clients of a host, one request after the other.

    Args:
        host: The host.
        *listeners: Where clients connect. Over a Unix socket, those of another user are refused.
        token: What clients must know. Without one, everybody who can connect is served.
        between: Called before the server waits for requests.
        aside: Work for the time in which there are no requests. It is called until it returns False, and again when
            requests were answered.
    """

    def __init__(
        self,
        host: Host,
        *listeners: socket.socket,
        token: bytes = b"",
        between: Callable[[], None] = lambda: None,
        aside: Callable[[], bool] | None = None,
    ) -> None:
        self._host = host
        self._messages = host.messages
        self._token = token
        self._between = between
        self._aside = aside
        self._has_work = True  # perhaps
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
        self._is_unix = all(listener.family == socket.AF_UNIX for listener in listeners)
        self._may_be_late = True  # whether what came now may have been given up, and something after it been read
        self._selector = selectors.DefaultSelector()
        self._accept_at: float | None = 0.0  # when to accept clients again; None: they are accepted
        self._strangers: set[_Connection] = set()
        self._sessions: set[_Connection] = set()  # those that began one
        self._settles = type(host).settle is not Host.settle
        self._replies: list[tuple[_Connection, bytes]] = []  # that are sent once they are settled
        self._close, self._closed = socket.socketpair()
        self._selector.register(self._closed, selectors.EVENT_READ)

    def run(self) -> None:
        """Answers clients until `close`."""
        while True:
            self._between()
            now = time.monotonic()
            if self._accept_at is not None and now >= self._accept_at:
                for listener in self._listeners:
                    self._selector.register(listener, selectors.EVENT_READ)
                self._accept_at = None
            if self._strangers:
                for stranger in [each for each in self._strangers if now >= each.until]:
                    self._drop(stranger)
            looks = self._strangers or self._accept_at is not None
            works_aside = self._aside is not None and self._has_work
            ready = self._selector.select(0 if works_aside else _LOOK_S if looks else None)
            if not ready and self._aside is not None and works_aside:
                self._has_work = self._aside()
                continue
            self._has_work = True
            self._may_be_late = len(ready) > 1 or not self._is_unix
            for key, events in ready:
                connection: _Connection | None = key.data
                if connection is None:
                    if key.fileobj is self._closed:
                        self._end()
                        return
                    self._accept(cast("socket.socket", key.fileobj))
                    continue
                try:
                    if events & selectors.EVENT_READ:
                        self._read(connection)
                    if events & selectors.EVENT_WRITE:
                        self._send(connection, b"")
                except Exception as error:
                    self._fail(connection, error)
            if self._replies:
                self._reply()

    def has_clients(self) -> bool:
        """Whether a session is open at both ends. Also from another thread, and while the host settles."""
        return any(not _hung_up(each.channel) for each in list(self._sessions))

    def close(self) -> None:
        """Ends all connections and `run`. From another thread."""
        self._close.close()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def _fail(self, connection: _Connection, error: Exception) -> None:
        """Ends a connection. No message of one client may end the service of all."""
        if not isinstance(error, (OSError, EOFError, msgspec.MsgspecError)):  # else the client is gone, or none of ours
            _log.error("a client's connection is closed", exc_info=error)
        self._drop(connection)

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        if self._accept_at is not None:  # another listener could not accept in this turn
            return
        try:
            channel, _ = listener.accept()
        except BlockingIOError:  # the client is gone again
            return
        except OSError as error:  # most likely too many open files
            _log.warning("no client is accepted for %s s: %s", _LOOK_S, error)
            for each in self._listeners:
                self._selector.unregister(each)
            self._accept_at = time.monotonic() + _LOOK_S
            return
        try:
            channel.setblocking(False)
            if channel.family == socket.AF_UNIX:
                credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                _, user, _ = struct.unpack("3i", credentials)
                if user != os.getuid():
                    raise PermissionError(f"user {user} is another one")
            else:
                set_tcp_options(channel)
            connection = _Connection(channel)
            self._selector.register(channel, selectors.EVENT_READ, connection)
        except OSError:  # it has gone already, or is refused
            channel.close()
            return
        self._strangers.add(connection)

    def _drop(self, connection: _Connection) -> None:
        self._strangers.discard(connection)
        self._sessions.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.channel)
        connection.channel.close()
        if connection.sending is not None:
            connection.sending.finish()
        if connection.receiving is not None:
            connection.receiving.lost()
        connection.sending = connection.receiving = None
        if connection.begins and connection.client is not None:
            connection.begins = False
            try:
                self._host.end_session(connection.client)
            except Exception as error:  # as on a full disk: what it held ends by its time
                _log.error("what a client held that is gone could not be given up: %s", error)

    def _read(self, connection: _Connection) -> None:
        if connection.receiving is not None:
            self._receive(connection, connection.receiving)
            return
        try:
            data = connection.channel.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        received = connection.received
        received += data
        while len(received) >= 4 and connection.receiving is None:
            # who is not known may not make this process keep a message of 4 GiB
            end = 4 + int.from_bytes(received[:4], "little")
            if connection.client is None and end > _GREETING_BYTES:
                raise EOFError
            if len(received) < end:
                return
            message = bytes(received[4:end])
            del received[:end]
            if connection.client is None:
                self._welcome(connection, decode_hello(message))
            else:
                self._answer(connection, connection.client, message)

    def _answer(self, connection: _Connection, client: Client, message: bytes) -> None:
        if client.ended:
            raise EOFError
        request = self._messages.decode_request(message)
        answered = getattr(request, "answered", True)
        if answered and (self._may_be_late or connection.is_new) and _hung_up(connection.channel):
            raise EOFError
        connection.is_new = False
        result: Any = None
        try:
            result = self._host.answer(request, client)
            sent = result.reply if isinstance(result, Sending) else result
            reply = b"" if isinstance(result, Receiving) else self._messages.encode_reply(sent)
        except Exception as error:  # the client raises it
            if getattr(request, "followed", False):  # what follows is no request
                raise EOFError from error
            reply = self._messages.encode_error(error)
            if isinstance(result, Sending):
                result.finish()
                result = None
        if isinstance(result, Receiving):
            self._begin_receiving(connection, result)
            return
        if not answered:
            return
        if isinstance(result, Sending):
            connection.sending, connection.arrays = result, _arrays(result.sources)
        if self._settles:
            self._replies.append((connection, reply))
        else:
            self._send(connection, reply)

    # --- bytes beside messages ----------------------------------------------------------------------------------------

    def _begin_receiving(self, connection: _Connection, receiving: Receiving) -> None:
        connection.receiving = receiving
        connection.arrays = _arrays(receiving.into)
        came = memoryview(bytes(connection.received))  # with the request
        connection.received.clear()
        while came and connection.arrays:
            target = connection.arrays[0]
            count = min(len(came), len(target))
            target[:count] = came[:count]
            came = came[count:]
            advance(connection.arrays, count)
        if came:
            raise EOFError
        self._end_receiving(connection, receiving)

    def _receive(self, connection: _Connection, receiving: Receiving) -> None:
        """Receives what has come of the bytes that follow a request."""
        client = connection.client
        if client is None or client.ended or receiving.cancelled:  # the memory is no longer the client's
            raise EOFError
        left = _TURN_BYTES
        with contextlib.suppress(BlockingIOError):
            while connection.arrays and left > 0:
                count = connection.channel.recvmsg_into(next_arrays(connection.arrays))[0]
                if not count:
                    raise EOFError
                advance(connection.arrays, count)
                left -= count
        self._end_receiving(connection, receiving)

    def _end_receiving(self, connection: _Connection, receiving: Receiving) -> None:
        if connection.arrays:
            return
        connection.receiving = None
        try:
            reply = self._messages.encode_reply(receiving.finish())
        except Exception as error:  # the client raises it
            reply = self._messages.encode_error(error)
        if self._settles:
            self._replies.append((connection, reply))
        else:
            self._send(connection, reply)

    def _send_arrays(self, connection: _Connection, sending: Sending) -> None:
        client = connection.client
        if client is None or client.ended:  # the memory is no longer kept for it
            raise EOFError
        left = _TURN_BYTES
        with contextlib.suppress(BlockingIOError):
            while connection.arrays and left > 0:
                count = connection.channel.sendmsg(next_arrays(connection.arrays))
                advance(connection.arrays, count)
                left -= count
        if not connection.arrays:
            connection.sending = None
            sending.finish()

    def _reply(self) -> None:
        """Sends the replies to all requests that had arrived together."""
        # one settle for all of them: with a journal on a disk it is one fdatasync
        self._host.settle()
        replies, self._replies = self._replies, []
        for connection, reply in replies:
            if connection.channel.fileno() >= 0:  # else it was dropped
                try:
                    self._send(connection, reply)
                except Exception as error:
                    self._fail(connection, error)

    def _welcome(self, connection: _Connection, hello: Hello) -> None:
        mine, theirs = self._token[:HALF_BYTES], self._token[HALF_BYTES:]
        if not hmac.compare_digest(hello.token, mine):
            raise EOFError
        self._strangers.discard(connection)
        if hello.key is not None:
            connection.client = self._host.client(hello.key)
            if connection.client is None:
                raise EOFError  # the session has ended, or is one of a host that has
            return
        client = connection.client = self._host.begin_session()
        connection.begins = True
        self._sessions.add(connection)
        client.wake = partial(self._wake, connection)
        about = msgspec.Raw(msgspec.msgpack.encode(self._host.about()))
        welcome = encode(Welcome(VERSION, client.number, client.key, theirs, about))
        if self._host.descriptors and connection.is_unix:
            socket.send_fds(connection.channel, [welcome], list(self._host.descriptors))
        else:
            self._send(connection, welcome)

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
        unsent += data
        if unsent:
            with contextlib.suppress(BlockingIOError):
                del unsent[: connection.channel.send(unsent)]
        if connection.sending is not None and not unsent:
            self._send_arrays(connection, connection.sending)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent or connection.sending is not None else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.channel, events, connection)


def _hung_up(channel: socket.socket) -> bool:
    """Whether a client that has asked something does not wait for the reply any more."""
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # it was killed, or its host is gone
        return True


def _arrays(arrays: Sequence[Bytes]) -> deque[memoryview]:
    return deque(each.data for each in arrays if len(each))


def next_arrays(arrays: deque[memoryview]) -> list[memoryview]:
    """The first arrays, as many as one call of the system takes."""
    return list(islice(arrays, _MOST_ARRAYS))


def advance(arrays: deque[memoryview], count: int) -> None:
    """Drops the first ``count`` bytes."""
    while count:
        first = arrays.popleft()
        if len(first) > count:
            arrays.appendleft(first[count:])
            return
        count -= len(first)
