"""`Session`: a client's session with a host, over a Unix socket or over TCP."""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from dataplane_core.errors import BackendUnavailableError, ClientClosedError, DataPlaneError, OperationTimeoutError
from dataplane_core.hosting.layout import Bytes
from dataplane_core.hosting.messages import (
    VERSION,
    ClaimOrWait,
    Hello,
    Messages,
    Release,
    Request,
    StopWaiting,
    Together,
    Welcome,
    decode_wake,
    decode_welcome,
    encode,
)
from dataplane_core.hosting.server import HALF_BYTES, advance, next_arrays, set_tcp_options
from dataplane_core.hosting.tls import connect_tls
from dataplane_core.ledger import Command, commands

Reply = TypeVar("Reply")
_Moved = TypeVar("_Moved")

_RECEIVE_BYTES: Final = 1 << 18
_POLL_S: Final = 0.01
#: Seconds that sending a release may take.
_RELEASE_S: Final = 1.0
#: Seconds without an answer after which a call begins to watch the host, and between two looks.
_PATIENCE_S: Final = 1.0
_LOOK_S: Final = 0.1
#: The most descriptors that a host passes.
_MOST_DESCRIPTORS: Final = 4


class Watch(Protocol):
    """Checks whether a host is alive whose answer a call waits for."""

    def check(self) -> None:
        """Called several times a second. Must not block. Raises `BackendUnavailableError` if it is dead."""

    def describe(self) -> str:
        """What is known about it, as a sentence for the timeout's error."""


class Address(ABC):
    """Where a host is. A backend derives from it to say, in its own words, that a call failed.

    Attributes:
        token: What the host's clients must know.
    """

    token: bytes = b""

    @abstractmethod
    def connect(self, deadline: float) -> socket.socket:
        """A connection to it. Raises `OSError`."""

    @abstractmethod
    def failure(self, what: str, error: Exception, *, connecting: bool) -> DataPlaneError:
        """The error of a call.

        Args:
            what: The operation.
            error: `TimeoutError`, with what is known about the host, another `OSError`, or `EOFError`.
            connecting: Whether the session was not begun yet.
        """


@dataclass(frozen=True)
class UnixAddress(Address):
    """The path of a Unix socket of the same user, or the name of one without a file (`listen_as`)."""

    path: Path | str

    def connect(self, deadline: float) -> socket.socket:
        """As `Address.connect`. Refuses the socket of another user."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.settimeout(_left_s(deadline))
            self._reach(channel, deadline)
            _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                raise BackendUnavailableError(f"{self.path} belongs to another user.", retryable=False)
        except BaseException:
            channel.close()
            raise
        return channel

    def _reach(self, channel: socket.socket, deadline: float) -> None:
        while True:
            try:
                return channel.connect(str(self.path))
            except BlockingIOError:  # more connect at once than the listening socket takes
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_POLL_S)


@dataclass(frozen=True)
class TcpAddress(Address):
    """The address and port of a host, its token, and the certificate that it shows, if it uses TLS."""

    ip: str
    port: int
    token: bytes
    certificate: str = ""

    def connect(self, deadline: float) -> socket.socket:
        channel = socket.socket(socket.AF_INET6 if ":" in self.ip else socket.AF_INET)
        try:
            set_tcp_options(channel)
            channel.settimeout(_left_s(deadline))
            channel.connect((self.ip, self.port))
            return connect_tls(channel, self.certificate) if self.certificate else channel
        except BaseException:
            channel.close()
            raise


class Pin:
    """A read's hold on what it reads: it keeps its place and bytes. It ends with this object."""

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        self.release = weakref.finalize(self, Session.release, session, number)
        self.release.atexit = False  # the session ends then, and with it all pins


class Session:
    """A session with a host. Thread-safe; not usable after a fork.

    The session lasts as long as this object, or until `finish` or `close`: its first socket closes then. On it, a
    thread receives which of the claims and puts that wait are to ask again. Requests use further sockets, one for each
    that is under way, so threads do not wait for each other. A socket whose request was interrupted is closed, which
    tells the host that nobody waits for the reply.

    Args:
        address: Where the host is.
        messages: The requests that it knows.
        deadline: On `time.monotonic`'s clock, in seconds.
        watch: Makes a watch of the host, for calls that wait long.

    Attributes:
        welcome: What the host says about itself.
        descriptors: The file descriptors that it passed. They are the caller's.

    Raises:
        DataPlaneError: What the address makes of a failure.
    """

    def __init__(
        self, address: Address, messages: Messages, deadline: float, watch: Callable[[], Watch] | None = None
    ) -> None:
        self._address = address
        self._messages = messages
        self._make_watch = watch
        self._pid = os.getpid()
        self._idle: deque[socket.socket] = deque()
        self._used: set[socket.socket] = set()
        self._unreleased: set[int] = set()  # pins that ended, until the host was told
        self._pins = itertools.count(1)
        self._live_pins: set[int] = set()
        self._finished = self._closed = False
        self._waiting: dict[str, Callable[[], object]] = {}  # token of what waits -> how to wake it
        self._listener: threading.Thread | None = None
        self._listener_lock = threading.Lock()
        self._connected = False
        self._first = self._open("connect", deadline, None)
        _open_sessions.add(self)
        self._end = weakref.finalize(self, _end_session, self._first, self._idle)
        self._end.atexit = False  # threads may still write to shared memory; the kernel closes the sockets after them
        try:
            line = _Line(self._first, deadline, watch)
            self.welcome: Welcome = decode_welcome(line.message(with_descriptors=True))
            self.descriptors = line.descriptors
            mine = address.token[HALF_BYTES:]
            if not hmac.compare_digest(self.welcome.token, mine):
                raise ConnectionAbortedError("the other side does not know the token")
        except (OSError, EOFError) as error:
            self._end()
            raise self._failure("connect", error) from error
        if self.welcome.version != VERSION:
            self._end()
            raise BackendUnavailableError(
                f"connect refused: the other side speaks version {self.welcome.version} of the messages. "
                f"Expected {VERSION}.",
                retryable=False,
                hint="Install the same version of dataplane-core for all processes.",
            )
        self._connected = True

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(
        self,
        what: str,
        deadline: float,
        request: Request[Reply] | Command[Reply],
        *,
        sources: Sequence[Bytes] = (),
        receive: Callable[[Reply, Callable[[Bytes], None]], None] | None = None,
    ) -> Reply:
        """Sends a request and returns the reply.

        Args:
            what: The operation, for messages.
            deadline: On `time.monotonic`'s clock, in seconds.
            request: The request.
            sources: The bytes that follow the request, one array after the other.
            receive: Called with the reply, if bytes follow it, and with a function that fills an array with the next of
                them. It takes all of them.

        Raises:
            DataPlaneError: The reply is an error, or what the address makes of a failure.
            OperationTimeoutError: No reply in time. It may have been carried out or not.
            ClientClosedError: The session was closed, or belongs to the process that this one is a fork of.
        """
        if time.monotonic() >= deadline:
            raise OperationTimeoutError(f"{what}: the deadline had passed before it began. Nothing was sent.")
        message = self._messages.encode_request(request)
        # in front of the request, which may need the room that these pins keep
        released = list(self._unreleased)
        if released:
            message = self._messages.encode_request(Release(released)) + message
        with self._channel(what, deadline) as channel:
            line = _Line(channel, deadline, self._make_watch)
            line.send([memoryview(message), *(each.data for each in sources if len(each))])
            self._unreleased.difference_update(released)
            message = line.message()
            if receive is not None:
                reply = self._messages.decode_reply(request, message)
                receive(reply, line.fill)
        if self._unreleased:  # pins that ended while all sockets were in use
            self._send_releases()
        return self._messages.decode_reply(request, message) if receive is None else reply

    def call_all(self, what: str, deadline: float, requests: Sequence[Request[Any] | Command[Any]]) -> list[Any]:
        """Sends requests that go together, and returns their replies. The host answers them one after the other.

        If it refuses one, it does not carry out those after it. Raises as `call`, for the one that it refused.
        """
        packed = [self._messages.encode_request(each)[4:] for each in requests]
        replies = self.call(what, deadline, Together(packed))
        return [self._messages.decode_reply(*each) for each in zip(requests, replies, strict=True)]

    def call_waiting(
        self,
        what: str,
        deadline: float,
        command: Command[Reply],
        wake: Callable[[], object],
    ) -> Reply:
        """As `call`, for a claim that waits, or a put that says that it waits for room.

        Unless the claim is answered, ``wake`` is called in a thread when it is to ask again, until `end_waiting`.
        """
        request: Any = command
        if isinstance(command, commands.ClaimRequest):
            token, request = command.token, ClaimOrWait(command)
        else:
            assert isinstance(command, commands.WaitForRoom)
            token = command.ticket
        with self._listener_lock:
            if self._listener is None:
                listener = threading.Thread(
                    target=_listen, args=(self._first, self._waiting), name="dataplane-wakes", daemon=True
                )
                listener.start()
                self._listener = listener
        # before it is sent: the wake may arrive before the reply does
        self._waiting[token] = wake
        waits = False
        try:
            reply: Any = self.call(what, deadline, request)
            waits = not (isinstance(command, commands.ClaimRequest) and (reply.answered or command.explain))
            return cast("Reply", reply)
        finally:
            if not waits:
                self.end_waiting(token)

    def end_waiting(self, token: str, *, tell: bool = False) -> None:
        """Nothing waits with this token any longer. With ``tell``, the host does not know that yet."""
        self._waiting.pop(token, None)
        if tell:
            self._tell(StopWaiting(token))

    # --- pins and the end ---------------------------------------------------------------------------------------------

    def new_pin(self) -> Pin:
        """A new pin, to be sent with a request that locates payload. Raises as `call` if the session has ended."""
        pin = Pin(self, next(self._pins))
        self._live_pins.add(pin.number)
        if self._finished:  # it may have ended before it knew of this pin
            pin.release()
            raise self._failure("begin", EOFError("the session has ended"))
        return pin

    def check(self, what: str) -> None:
        """Raises as `call` if the host has ended: pins of this session hold nothing any more."""
        ended = select.poll()
        try:
            ended.register(self._first, select.POLLRDHUP)
            has_ended = bool(ended.poll(0))
        except ValueError:  # the session has ended here
            has_ended = True
        if has_ended:
            raise self._failure(what, EOFError("the host has ended"))

    def finish(self) -> None:
        """Ends the session as soon as no pin is left, even if something refers to this object, such as a traceback."""
        self._finished = True
        self._end_if_finished()

    def _end_if_finished(self) -> None:
        if self._finished and not self._live_pins:
            self._end()

    def close(self) -> None:
        """Ends calls that are under way with `ClientClosedError`, and then the session, as `finish`. Not in a fork."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        # a shutdown, since a close would not wake the thread that waits on the socket
        for channel in list(self._used):
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        self.finish()

    def release(self, number: int) -> None:
        """Ends a pin. Does not wait for a reply. If it cannot be sent now, the next request sends it too."""
        self._unreleased.add(number)
        self._send_releases()
        self._live_pins.discard(number)
        self._end_if_finished()

    def _send_releases(self) -> None:
        try:
            channel = self._idle.pop()
        except IndexError:
            return  # all sockets are in use: the request that ends next sends it
        numbers = list(self._unreleased)
        if self._send_on(channel, Release(numbers)):
            self._unreleased.difference_update(numbers)

    def _tell(self, request: Request[None]) -> None:
        """Sends a request that has no reply."""
        try:
            channel = self._take("tell", time.monotonic() + _RELEASE_S)
        except (BackendUnavailableError, OperationTimeoutError, ClientClosedError):
            return  # the host has ended, or hangs
        self._send_on(channel, request)

    def _send_on(self, channel: socket.socket, request: Request[None]) -> bool:
        try:
            channel.settimeout(_RELEASE_S)
            channel.sendall(self._messages.encode_request(request))
        except BaseException as error:
            channel.close()
            if not isinstance(error, OSError):  # the host has ended, or hangs
                raise
            return False
        self._idle.append(channel)
        return True

    def close_in_fork(self) -> None:
        """Closes the sockets that a fork of the process inherited, without ending the session."""
        _close_all(self._first, self._idle)

    # --- sockets ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _channel(self, what: str, deadline: float) -> Iterator[socket.socket]:
        """A socket for one call. It is kept for others only if the call ends without an error."""
        channel = self._take(what, deadline)
        self._used.add(channel)
        try:
            yield channel
        # not kept: the reply that is still to come would be taken for that of the next request
        except BaseException as error:
            channel.close()
            if isinstance(error, DataPlaneError):  # some are an `OSError`
                raise
            if isinstance(error, (OSError, EOFError)):
                raise self._failure(what, error) from error
            raise
        finally:
            self._used.discard(channel)
        self._idle.append(channel)

    def _take(self, what: str, deadline: float) -> socket.socket:
        if os.getpid() != self._pid:
            raise ClientClosedError(
                f"this client was opened by process {self._pid} and is used by its fork {os.getpid()}. Expected the "
                "process that opened it.",
                hint="Start such processes by spawn, not by fork, and attach a client of its own in each.",
            )
        if self._closed:
            raise ClientClosedError(f"{what}: this client is closed.")
        try:
            return self._idle.pop()
        except IndexError:
            return self._open(what, deadline, self.welcome.key)

    def _open(self, what: str, deadline: float, key: str | None) -> socket.socket:
        try:
            channel = self._reach(deadline)
        except DataPlaneError:
            raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise BackendUnavailableError(
                    f"{what} failed: this process can open no further socket: {error}.",
                    hint="The limit is that of open files (ulimit -n). Each thread that is in an operation has a "
                    "socket.",
                ) from error
            raise self._failure(what, error) from error
        try:
            channel.sendall(encode(Hello(VERSION, key, self._address.token[:HALF_BYTES])))
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError):
                raise self._failure(what, error) from error
            raise
        return channel

    def _reach(self, deadline: float) -> socket.socket:
        """A connection. While there is no answer, the host is watched."""
        watch: Watch | None = None
        while True:
            now = time.monotonic()
            try:
                return self._address.connect(deadline if self._make_watch is None else min(deadline, now + _PATIENCE_S))
            except TimeoutError:
                if self._make_watch is None or time.monotonic() >= deadline:
                    raise TimeoutError("" if watch is None else watch.describe()) from None
                watch = watch or self._make_watch()
                watch.check()

    def _failure(self, what: str, error: Exception) -> DataPlaneError:
        if self._closed:
            return ClientClosedError(f"{what}: this client is closed.")
        return self._address.failure(what, error, connecting=not self._connected)


class _Line:
    """What a call sends and receives over its socket. While nothing moves, the host is watched.

    Args:
        channel: The socket.
        deadline: On `time.monotonic`'s clock, in seconds.
        make_watch: Makes the watch, if there is one.
    """

    def __init__(self, channel: socket.socket, deadline: float, make_watch: Callable[[], Watch] | None) -> None:
        self._channel = channel
        self._deadline = deadline
        self._make_watch = make_watch
        self._watch: Watch | None = None
        self._moved_at = time.monotonic()
        self._ahead = bytearray()  # what was received after a message
        self.descriptors: list[int] = []

    def send(self, arrays: list[memoryview]) -> None:
        """Sends arrays, one after the other."""
        if len(arrays) == 1 and len(arrays[0]) < _RECEIVE_BYTES and self._make_watch is None:
            self._channel.settimeout(_left_s(self._deadline))
            self._channel.sendall(arrays[0])
            return
        left = deque(arrays)
        while left:
            if isinstance(self._channel, ssl.SSLSocket):  # it sends one array at a time
                advance(left, self._move(partial(self._channel.send, left[0])))
            else:
                advance(left, self._move(lambda: self._channel.sendmsg(next_arrays(left))))

    def message(self, *, with_descriptors: bool = False) -> bytes:
        """The next message."""
        received, end = self._ahead, 4
        while len(received) < end:
            if with_descriptors and self._channel.family == socket.AF_UNIX:
                data, self.descriptors, _, _ = self._move(
                    lambda: socket.recv_fds(self._channel, _RECEIVE_BYTES, _MOST_DESCRIPTORS)
                )
                with_descriptors = False
            else:
                data = self._move(lambda: self._channel.recv(_RECEIVE_BYTES))
            if not data:
                raise EOFError("the connection was closed")
            received += data
            if len(received) >= 4:
                end = 4 + int.from_bytes(received[:4], "little")
        self._ahead = received[end:]
        return bytes(memoryview(received)[4:end])

    def fill(self, array: Bytes) -> None:
        """Fills an array with the bytes that follow."""
        target = array.data
        count = min(len(target), len(self._ahead))
        if count:
            target[:count] = self._ahead[:count]
            del self._ahead[:count]
            target = target[count:]
        while target:
            count = self._move(partial(self._channel.recv_into, target))
            if not count:
                raise EOFError("the connection was closed")
            target = target[count:]

    def _move(self, act: Callable[[], _Moved]) -> _Moved:
        while True:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("" if self._watch is None else self._watch.describe())
            self._channel.settimeout(left_s if self._make_watch is None else min(left_s, _LOOK_S))
            try:
                moved = act()
            except TimeoutError:
                if self._make_watch is not None and time.monotonic() - self._moved_at >= _PATIENCE_S:
                    self._watch = self._watch or self._make_watch()
                    self._watch.check()
                continue
            self._moved_at, self._watch = time.monotonic(), None
            return moved


def _end_session(first: socket.socket, idle: deque[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        first.shutdown(socket.SHUT_RDWR)  # it wakes the thread that listens on it
    _close_all(first, idle)


def _close_all(first: socket.socket, idle: deque[socket.socket]) -> None:
    first.close()
    while idle:
        idle.pop().close()


def _left_s(deadline: float) -> float:
    """Seconds that are left; a little more than 0, which would mean not to wait at all."""
    return max(deadline - time.monotonic(), 1e-3)


def _listen(first: socket.socket, waiting: dict[str, Callable[[], object]]) -> None:
    """Wakes what waits, as the host says. When the connection ends, wakes all, so that they notice."""
    received = bytearray()
    try:
        first.settimeout(None)
        while data := first.recv(_RECEIVE_BYTES):
            received += data
            while len(received) >= 4 and len(received) >= (end := 4 + int.from_bytes(received[:4], "little")):
                wake = waiting.get(decode_wake(bytes(received[4:end])))
                del received[:end]
                if wake is not None:
                    wake()
    except (OSError, msgspec.MsgspecError):  # the host has ended, or sends what is no token
        pass
    for wake in list(waiting.values()):
        wake()


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_in_fork() -> None:
    for session in list(_open_sessions):
        session.close_in_fork()


if hasattr(os, "register_at_fork"):
    # a fork that lives on would otherwise keep the sessions of its parent, and their pins
    os.register_at_fork(after_in_child=_close_in_fork)
