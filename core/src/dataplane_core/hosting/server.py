"""`Server`: one thread that answers the clients of a `Host`, over a Unix socket or over TCP, also with TLS.

A request whose client has hung up is not carried out: it was given up, and what the client does next, such as to abort
a put or to end a pin, may have been read already. Over a Unix socket, the server looks for that only if several
connections have something to be read, or if the connection is new.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import ipaddress
import itertools
import logging
import secrets
import selectors
import socket
import ssl
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import msgspec

from dataplane_core.errors import BackendUnavailableError, InvalidRequestError
from dataplane_core.hosting.messages import (
    HALF_BYTES,
    HELLO,
    RECEIVE_BYTES,
    VERSION,
    Bytes,
    Hello,
    Messages,
    StopWaiting,
    Together,
    Welcome,
    advance,
    check_user,
    encode,
    next_arrays,
    set_tcp_options,
    take_bytes,
    take_message,
)
from dataplane_core.ledger import Command, LedgerService, commands
from dataplane_core.spec import Claim, new_id

_log = logging.getLogger(__name__)

#: About how many bytes beside messages one connection moves before the others get their turn.
_TURN_BYTES: Final = 4 << 20
#: Seconds until clients are accepted again that could not be, and between two looks for those that say nothing.
_LOOK_S: Final = 1.0
#: Seconds in which who connects must say who it is, and the bytes that it may take for that.
_GREETING_S: Final = 30.0
_GREETING_BYTES: Final = 1 << 12
#: Nothing can be read, or sent, now.
_LATER: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
#: For how many days a certificate is valid.
_DAYS: Final = 3650


# --- what is served ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Client:
    """A client, as its host sees it: from the begin of its session to the end, however it ends."""

    number: int  # never used again by this host
    key: str = field(default_factory=new_id)  # identifies it among the sessions of all hosts
    waits: set[str] = field(default_factory=set)  # tokens of its claims that wait
    tickets: set[str] = field(default_factory=set)  # those of its puts that wait for room
    ended: bool = False
    #: Tells it that what has this token or ticket is to ask again. False if it is gone. Never blocks.
    wake: Callable[[str], bool] = lambda token: False


@dataclass(slots=True)
class Transfer:
    """What a host answers if bytes follow the request or its reply. They go into these arrays, or come out of them, one
    after the other. The host keeps their memory until ``end``, the end of the client's session, or ``cancelled``.
    """

    arrays: Sequence[Bytes]
    end: Callable[[bool], Any]  # called when all have moved (True), or the connection has ended before (False)
    reply: Any = None  # that bytes follow; to bytes that come, it is what ``end`` returns
    comes: bool = False  # whether they follow the request
    cancelled: bool = False  # set by the host: no more bytes may move, and the connection ends


class Host:
    """What a server serves. The server's thread calls it, one call after the other.

    ``settle`` is called before replies are sent, once for all requests that had arrived together. It must not raise.
    Without it they are sent at once.
    """

    messages: Messages
    descriptors: Sequence[int] = ()  # what each client gets that connects over a Unix socket
    handlers: ClassVar[Mapping[type[Any], Callable[[Any, Any, Any], Any]]] = {}

    def __init__(self, settle: Callable[[], object] | None = None) -> None:
        self.settle = settle
        self._clients: dict[str, Client] = {}  # by key
        self._numbers = itertools.count(1)

    def begin_session(self) -> Client:
        """A client connects."""
        client = self._new_client(next(self._numbers))
        self._clients[client.key] = client
        return client

    def _new_client(self, number: int) -> Client:
        return Client(number)

    def client(self, key: str) -> Client | None:
        """The client with that key, or None if its session has ended, or is one of another host."""
        return self._clients.get(key)

    def end_session(self, client: Client) -> None:
        """A client is gone. A subclass gives up what it held."""
        client.ended = True
        del self._clients[client.key]

    def about(self) -> Any:
        """What clients are told when they connect."""
        return None

    def answer(self, request: Any, client: Client) -> Any:
        """The reply to a request or a command, or a `Transfer`, by its handler. Must not block all other clients. What
        it raises, the client raises."""
        if isinstance(request, Together):
            return [self._answer_part(part, client) for part in request.requests]
        handler = self.handlers.get(type(request))
        if handler is None:
            raise InvalidRequestError(f"this host knows no {type(request).__name__}.")
        return handler(self, request, client)

    def _answer_part(self, message: bytes, client: Client) -> bytes:
        """The reply to one of several requests, without its length."""
        request = self.messages.decode_request(message)
        if isinstance(request, Together) or getattr(request, "followed", False):
            raise InvalidRequestError(f"a {type(request).__name__} comes alone.")
        reply = self.answer(request, client)
        if isinstance(reply, Transfer):
            reply.end(False)
            raise InvalidRequestError(f"a {type(request).__name__} comes alone.")
        return self.messages.encode_reply(reply)[4:]

    def work_aside(self) -> bool:
        """If it has ``settle``: does a part of its work while there are no requests. False: nothing is left."""
        return False


class LedgerHost(Host):
    """A host of a ledger. Clients that wait are woken, and a client that is gone keeps nobody waiting.

    If the ledger has a log, ``settle`` is the log's ``commit_or_end``.
    """

    messages = Messages()

    def __init__(self, service: LedgerService, settle: Callable[[], object] | None = None) -> None:
        Host.__init__(self, settle)
        self._service = service

    def answer(self, request: Any, client: Client) -> Any:
        """As `Host.answer`. What has no handler is a command, which goes to the ledger as it is."""
        if isinstance(request, Command) and type(request) not in self.handlers:
            return self._service.call(request)
        return super().answer(request, client)

    def end_session(self, client: Client) -> None:
        """Gives up what the client waited for: others get the samples, and the room."""
        super().end_session(client)
        for token in client.waits:
            self._service.stop_waiting(token)
        for ticket in client.tickets:
            self._service.call(commands.WaitForRoom(ticket, 0, wait_s=0.0))

    def _claim(self, request: commands.ClaimRequest, client: Client) -> Claim:
        client.waits.discard(request.token)
        claim = self._service.call(request, partial(client.wake, request.token))
        if request.all_or_nothing and not (claim.answered or request.explain):
            client.waits.add(request.token)
        return claim

    def _stop_waiting(self, request: StopWaiting, client: Client) -> None:
        client.waits.discard(request.token)
        self._service.stop_waiting(request.token)

    def _wait_for_room(self, request: commands.WaitForRoom, client: Client) -> None:
        (client.tickets.add if request.wait_s > 0 else client.tickets.discard)(request.ticket)
        self._service.call(request, partial(client.wake, request.ticket))


LedgerHost.handlers = {
    commands.ClaimRequest: LedgerHost._claim,
    StopWaiting: LedgerHost._stop_waiting,
    commands.WaitForRoom: LedgerHost._wait_for_room,
}


# --- where it listens -------------------------------------------------------------------------------------------------


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


def listen_unseen() -> tuple[str, socket.socket]:
    """A Unix socket without a file (Linux), of which nothing is left when the process ends, and its name, for
    `UnixAddress`. It reaches this user's processes in the same network namespace."""
    name = f"\0dataplane-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(1024)
    return name, listener


def listen_on(ip: str) -> socket.socket:
    """A TCP socket at this address, on a free port."""
    return socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=1024)


def new_token() -> bytes:
    """A token for a server that is reached over TCP."""
    return secrets.token_bytes(2 * HALF_BYTES)


def new_tls(ip: str) -> tuple[ssl.SSLContext, str]:
    """What a server at this address needs for TLS, and the certificate that its clients must know. Raises
    `BackendUnavailableError` without the package cryptography."""
    certificate, key = _new_certificate(ip)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate


def _new_certificate(ip: str) -> tuple[str, str]:
    """A certificate for this address that signs itself, and its key, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise BackendUnavailableError(
            "the process of the ledger cannot use TLS: the package cryptography is not installed.",
            retryable=False,
            hint="pip install cryptography",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dataplane")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ip))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    secret = key.private_bytes(serialization.Encoding.PEM, *form)
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), secret.decode()


# --- the loop ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Connection:
    channel: socket.socket
    client: Client | None = None  # whose it is; None before its `Hello`
    begins: bool = False  # the session, which then ends with it
    until: float = field(default_factory=lambda: time.monotonic() + _GREETING_S)  # when it must have said who it is
    is_new: bool = True  # it has asked nothing yet, and may have waited to be accepted
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    transfer: Transfer | None = None  # of bytes that follow its request, or what is unsent
    arrays: deque[memoryview] = field(default_factory=deque)  # what is left of these bytes
    events: int = selectors.EVENT_READ  # that the server waits for

    @property
    def sends(self) -> Transfer | None:
        return None if self.transfer is None or self.transfer.comes else self.transfer


class Server:
    """Answers the clients of a host, one request after the other. Over a Unix socket, it refuses those of other users.

    Args:
        host: The host.
        *listeners: Where clients connect.
        token: What clients must know. Without one, everybody who can connect is served.
        tls: From `new_tls`: all that goes over TCP is encrypted. Then no host may answer with bytes beside messages.
    """

    def __init__(
        self, host: Host, *listeners: socket.socket, token: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> None:
        self._host = host
        self._messages = host.messages
        self._token = token
        self._tls = tls
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
        self._is_unix = all(listener.family == socket.AF_UNIX for listener in listeners)
        self._may_be_late = True  # whether what came now may have been given up, and something after it been read
        self._has_work = self._works_aside = type(host).work_aside is not Host.work_aside and host.settle is not None
        self._selector = selectors.DefaultSelector()
        self._accept_at: float | None = 0.0  # when to accept clients again; None: they are accepted
        self._strangers: set[_Connection] = set()
        self._sessions: set[_Connection] = set()  # those that began one
        self._replies: list[tuple[_Connection, bytes]] = []  # that are sent once they are settled
        self._close, self._closed = socket.socketpair()
        self._selector.register(self._closed, selectors.EVENT_READ)

    def run(self) -> None:
        """Answers clients until `close`."""
        while True:
            now = time.monotonic()
            if self._accept_at is not None and now >= self._accept_at:
                for listener in self._listeners:
                    self._selector.register(listener, selectors.EVENT_READ)
                self._accept_at = None
            for stranger in [stranger for stranger in self._strangers if now >= stranger.until]:
                self._drop(stranger)
            looks = self._strangers or self._accept_at is not None
            ready = self._selector.select(0 if self._has_work else _LOOK_S if looks else None)
            if not ready and self._has_work:
                self._has_work = self._host.work_aside()
                continue
            self._has_work = self._works_aside
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
                self._send_settled()

    def has_clients(self) -> bool:
        """Whether a session is open at both ends. Also from another thread, and while the host settles."""
        return any(not _hung_up(connection.channel) for connection in list(self._sessions))

    def close(self) -> None:
        """Ends all connections and `run`. From another thread."""
        self._close.close()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        if self._accept_at is not None:  # another listener could not accept in this turn
            return
        try:
            channel, _ = listener.accept()
        except BlockingIOError:  # the client is gone again
            return
        except OSError as error:  # most likely too many open files
            _log.warning("no client is accepted for %s s: %s", _LOOK_S, error)
            for listener in self._listeners:
                self._selector.unregister(listener)
            self._accept_at = time.monotonic() + _LOOK_S
            return
        try:
            channel.setblocking(False)
            if channel.family == socket.AF_UNIX:
                check_user(channel)
            else:
                set_tcp_options(channel)
                if self._tls is not None:  # what is read and sent does the handshake too
                    channel = self._tls.wrap_socket(channel, server_side=True, do_handshake_on_connect=False)
            connection = _Connection(channel)
            self._selector.register(channel, selectors.EVENT_READ, connection)
        except OSError:  # it has gone already, or is refused
            channel.close()
            return
        self._strangers.add(connection)

    def _fail(self, connection: _Connection, error: Exception) -> None:
        """Ends a connection. No message of one client may end the service of all."""
        if not isinstance(error, (OSError, EOFError, msgspec.MsgspecError)):  # else the client is gone, or none of ours
            _log.error("a client's connection is closed", exc_info=error)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._strangers.discard(connection)
        self._sessions.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.channel)
        connection.channel.close()
        if connection.transfer is not None:
            connection.transfer.end(False)
            connection.transfer = None
        if connection.begins and connection.client is not None:
            connection.begins = False
            try:
                self._host.end_session(connection.client)
            except Exception as error:  # as on a full disk: what it held ends by its time
                _log.error("what a client held that is gone could not be given up: %s", error)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        if connection.transfer is not None and connection.sends is None:
            self._move(connection, connection.transfer)
            return
        try:
            data = connection.channel.recv(RECEIVE_BYTES)
        except _LATER:
            return
        if not data:
            raise EOFError
        received = connection.received
        received += data
        while (message := take_message(received)) is not None:
            if connection.client is None:
                self._welcome(connection, HELLO.decode(message))
            else:
                self._answer(connection, connection.client, message)
        # who is not known may not make this process keep a message of 4 GiB
        if connection.client is None and int.from_bytes(received[:4], "little") > _GREETING_BYTES:
            raise EOFError

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
        if self._host.descriptors and connection.channel.family == socket.AF_UNIX:
            socket.send_fds(connection.channel, [welcome], list(self._host.descriptors))
        else:
            self._send(connection, welcome)

    def _answer(self, connection: _Connection, client: Client, message: bytes) -> None:
        if client.ended or connection.transfer is not None:  # it asks before it has taken the bytes of a reply
            raise EOFError
        request = self._messages.decode_request(message)
        answered = getattr(request, "answered", True)
        if answered and (self._may_be_late or connection.is_new) and _hung_up(connection.channel):
            raise EOFError
        connection.is_new = False
        result: Any = None
        try:
            result = self._host.answer(request, client)
            if isinstance(result, Transfer) and result.comes:
                self._begin(connection, result)
                return
            reply = self._messages.encode_reply(result.reply if isinstance(result, Transfer) else result)
        except Exception as error:  # the client raises it
            if getattr(request, "followed", False):  # what follows is no request
                raise EOFError from error
            reply = self._messages.encode_error(error)
            if isinstance(result, Transfer):
                result.end(False)
                result = None
        if isinstance(result, Transfer):
            connection.transfer, connection.arrays = result, _views(result.arrays)
        if answered:
            self._reply(connection, reply)

    def _reply(self, connection: _Connection, reply: bytes) -> None:
        if self._host.settle is not None:
            self._replies.append((connection, reply))
        else:
            self._send(connection, reply)

    def _send_settled(self) -> None:
        """Sends the replies to all requests that had arrived together."""
        assert self._host.settle is not None
        self._host.settle()  # once for all of them: with a log on a disk it is one fdatasync
        replies, self._replies = self._replies, []
        for connection, reply in replies:
            if connection.channel.fileno() >= 0:  # else it was dropped
                try:
                    self._send(connection, reply)
                except Exception as error:
                    self._fail(connection, error)

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
            with contextlib.suppress(*_LATER):
                del unsent[: connection.channel.send(unsent)]
        if not unsent and (sends := connection.sends) is not None:
            self._move(connection, sends)
        waits = unsent or connection.sends is not None
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.channel, events, connection)

    # --- bytes beside messages ----------------------------------------------------------------------------------------

    def _begin(self, connection: _Connection, transfer: Transfer) -> None:
        """Begins to receive the bytes that follow a request. Some may have come with it."""
        connection.transfer, connection.arrays = transfer, _views(transfer.arrays)
        take_bytes(connection.received, connection.arrays)
        if connection.received:  # more than the request says
            raise EOFError
        self._end_if_moved(connection, transfer)

    def _move(self, connection: _Connection, transfer: Transfer) -> None:
        """Moves bytes, as long as the socket takes or has some and it is this connection's turn."""
        client, channel = connection.client, connection.channel
        if client is None or client.ended or transfer.cancelled:  # the memory is no longer the client's
            raise EOFError
        left = _TURN_BYTES
        with contextlib.suppress(BlockingIOError):
            while connection.arrays and left > 0:
                arrays = next_arrays(connection.arrays)
                count = channel.recvmsg_into(arrays)[0] if transfer.comes else channel.sendmsg(arrays)
                if not count:
                    raise EOFError
                advance(connection.arrays, count)
                left -= count
        self._end_if_moved(connection, transfer)

    def _end_if_moved(self, connection: _Connection, transfer: Transfer) -> None:
        if connection.arrays:
            return
        connection.transfer = None
        if not transfer.comes:
            transfer.end(True)
            return
        try:
            reply = self._messages.encode_reply(transfer.end(True))
        except Exception as error:  # the client raises it
            reply = self._messages.encode_error(error)
        self._reply(connection, reply)


def _hung_up(channel: socket.socket) -> bool:
    """Whether a client that has asked something does not wait for the reply any more."""
    try:  # also under TLS
        return not socket.socket.recv(channel, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # it was killed, or its host is gone
        return True


def _views(arrays: Sequence[Bytes]) -> deque[memoryview]:
    return deque(array.data for array in arrays if len(array))
