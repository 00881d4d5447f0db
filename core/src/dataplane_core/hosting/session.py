"""`Session`: a client's session with a host, over a Unix socket or over TCP. `LedgerLink`: its way to the host of its
ledger, also when another process takes the place of that one.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import os
import select
import socket
import ssl
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, cast

import msgspec

from dataplane_core.errors import (
    BackendUnavailableError,
    ClientClosedError,
    DataPlaneError,
    LostReplyError,
    OperationTimeoutError,
)
from dataplane_core.hosting.messages import (
    HALF_BYTES,
    RECEIVE_BYTES,
    VERSION,
    WAKE,
    Bytes,
    Hello,
    Messages,
    Release,
    Request,
    StopWaiting,
    Together,
    Welcome,
    advance,
    check_user,
    decode_as,
    encode,
    next_arrays,
    set_tcp_options,
    take_bytes,
    take_message,
)
from dataplane_core.ledger import Command, commands
from dataplane_core.ownership import not_in_forks

Reply = TypeVar("Reply")
_Moved = TypeVar("_Moved")
#: What a backend makes of the failure of a call, in its own words: of the operation (``connect``: the session was not
#: begun yet), and of `TimeoutError`, with what is known about the host, another `OSError`, or `EOFError`.
Failure: TypeAlias = Callable[[str, Exception], DataPlaneError]
#: Called each second while a call waits. Raises `BackendUnavailableError` if the host is dead, else says in a sentence
#: what is known about it. Must not block.
Watch: TypeAlias = Callable[[], str]

_POLL_S: Final = 0.01
#: Seconds that sending a release may take.
_RELEASE_S: Final = 1.0
#: Seconds in which nothing moves, after each of which a call looks whether the host is alive.
_PATIENCE_S: Final = 1.0
#: The most descriptors that a host passes.
_MOST_DESCRIPTORS: Final = 4
#: Seconds before a request is repeated whose host is gone.
_REPEAT_S: Final = 0.02


# --- where a host is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnixAddress:
    """The path of a Unix socket of the same user, or the name of one without a file (`listen_unseen`)."""

    path: Path | str
    token: bytes = b""

    def connect(self, deadline: float) -> socket.socket:
        """A connection to it. Refuses the socket of another user. Raises `OSError`."""
        with _closed_on_error(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as channel:
            channel.settimeout(_left_s(deadline))
            while True:
                try:
                    channel.connect(str(self.path))
                    break
                except BlockingIOError:  # more connect at once than the listening socket takes
                    if time.monotonic() >= deadline:
                        raise TimeoutError from None
                    time.sleep(_POLL_S)
            try:
                check_user(channel)
            except PermissionError as error:
                raise BackendUnavailableError(f"{self.path} belongs to another user.", retryable=False) from error
            return channel


@dataclass(frozen=True)
class TcpAddress:
    """The address and port of a host, its token, and the certificate that it shows, if it uses TLS."""

    ip: str
    port: int
    token: bytes
    certificate: str = ""

    def connect(self, deadline: float) -> socket.socket:
        """A connection to it. Raises `OSError`."""
        family = socket.AF_INET6 if ":" in self.ip else socket.AF_INET
        with _closed_on_error(socket.socket(family)) as channel:
            set_tcp_options(channel)
            channel.settimeout(_left_s(deadline))
            channel.connect((self.ip, self.port))
            if not self.certificate:
                return channel
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False  # the certificate itself is known
            context.load_verify_locations(cadata=self.certificate)
            return context.wrap_socket(channel)


@contextmanager
def _closed_on_error(channel: socket.socket) -> Iterator[socket.socket]:
    try:
        yield channel
    except BaseException:
        channel.close()
        raise


def _left_s(deadline: float) -> float:
    """Seconds that are left; a little more than 0, which would mean not to wait at all."""
    return max(deadline - time.monotonic(), 1e-3)


class HostGoneError(LostReplyError):
    """The host has ended, the connection to it broke, or it is the host no longer."""


def failure_of(host: str, gone: Callable[[str], DataPlaneError] = HostGoneError) -> Failure:
    """What failed calls to a host mean. ``host`` names it, and ``gone`` makes the error if it cannot be reached."""

    def failure(what: str, error: Exception) -> DataPlaneError:
        if isinstance(error, TimeoutError):
            message = f"{what}: no answer in time from {host}. It may have been done or not."
            return OperationTimeoutError(message, hint=str(error) or None)
        return gone(
            f"{what} failed: {host} ended, or the connection to it broke: {error}. It may have been done or not."
        )

    return failure


# --- the session ------------------------------------------------------------------------------------------------------


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

    ``failure`` makes the errors of its calls, and ``watch`` a watch of the host, for calls that wait long. The file
    descriptors that the host passed are the caller's.
    """

    def __init__(
        self,
        address: UnixAddress | TcpAddress,
        messages: Messages,
        deadline: float,
        failure: Failure,
        watch: Callable[[], Watch] | None = None,
    ) -> None:
        self._address = address
        self._messages = messages
        self._fail = failure
        self._new_watch = watch
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
        self._first = self._open("connect", deadline, None)
        not_in_forks(self)
        self._end = weakref.finalize(self, _end_session, self._first, self._idle)
        self._end.atexit = False  # threads may still write to shared memory; the kernel closes the sockets after them
        try:
            line = _Line(self._first, deadline, watch)
            self.welcome = decode_as(line.message(with_descriptors=True), Welcome)
            self.descriptors = line.descriptors
            if not hmac.compare_digest(self.welcome.token, address.token[HALF_BYTES:]):
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

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(
        self,
        what: str,
        deadline: float,
        request: Request[Reply] | Command[Reply],
        wake: Callable[[], object] | None = None,
        *,
        sources: Sequence[Bytes] = (),
        receive: Callable[[Reply, Callable[[Bytes], None]], None] | None = None,
    ) -> Reply:
        """Sends a request and returns the reply, or raises it if it is an error.

        Args:
            what: The operation, for messages.
            deadline: On `time.monotonic`'s clock, in seconds.
            request: The request.
            wake: For a claim that waits, or a put that says that it waits for room. Unless the claim is answered, it is
                called in a thread when that is to ask again, until `stop_waiting`.
            sources: The bytes that follow the request, one array after the other.
            receive: Called with the reply, if bytes follow it, and with a function that fills an array with the next of
                them. It takes all of them.

        Raises:
            DataPlaneError: What ``failure`` makes. If there was no reply, it may have been carried out or not.
            ClientClosedError: The session was closed, or belongs to the process that this one is a fork of.
        """
        if wake is not None:
            return cast("Reply", self._call_waiting(what, deadline, request, wake))
        if time.monotonic() >= deadline:
            raise OperationTimeoutError(f"{what}: the deadline had passed before it began. Nothing was sent.")
        message = self._messages.encode_request(request)
        with self._channel(what, deadline) as channel:
            line = _Line(channel, deadline, self._new_watch)
            line.send([memoryview(message), *(array.data for array in sources if len(array))])
            message = line.message()
            if receive is not None:
                reply = self._messages.decode_reply(request, message)
                receive(reply, line.fill)
        if self._unreleased:  # pins that ended while all sockets were in use
            self._send_releases()
        return self._messages.decode_reply(request, message) if receive is None else reply

    def call_all(self, what: str, deadline: float, requests: Sequence[Request[Any] | Command[Any]]) -> list[Any]:
        """Sends requests that go together, see `Together`, and returns their replies. Raises as `call`."""
        packed = [self._messages.encode_request(request)[4:] for request in requests]
        replies = self.call(what, deadline, Together(packed))
        return [self._messages.decode_reply(request, reply) for request, reply in zip(requests, replies, strict=True)]

    def _call_waiting(self, what: str, deadline: float, command: Any, wake: Callable[[], object]) -> Any:
        token: str = command.token if isinstance(command, commands.ClaimRequest) else command.ticket
        with self._listener_lock:
            if self._listener is None:
                listener = threading.Thread(
                    target=_listen, args=(self._first, self._waiting), name="dataplane-wakes", daemon=True
                )
                listener.start()
                self._listener = listener
        # before it is sent: the wake may arrive before the reply does
        self._waiting[token] = wake
        reply = self.call(what, deadline, command)  # if its reply is lost, it may wait
        if isinstance(command, commands.ClaimRequest) and reply.answered:
            self._waiting.pop(token, None)
        return reply

    def stop_waiting(self, token: str) -> None:
        """As `Backend.stop_waiting`."""
        if self._waiting.pop(token, None) is None:
            return  # nothing of it waits at this host
        try:
            channel = self._take("tell", time.monotonic() + _RELEASE_S)
        except (BackendUnavailableError, OperationTimeoutError, ClientClosedError):
            return  # the host has ended, or hangs
        self._tell(channel, StopWaiting(token))

    def _tell(self, channel: socket.socket, request: Request[None]) -> bool:
        """Sends a request that has no reply. False: the host has ended, or hangs."""
        try:
            channel.settimeout(_RELEASE_S)
            channel.sendall(self._messages.encode_request(request))
        except BaseException as error:
            channel.close()
            if not isinstance(error, OSError):
                raise
            return False
        self._keep(channel)
        return True

    # --- pins and the end ---------------------------------------------------------------------------------------------

    def new_pin(self) -> Pin:
        """A new pin, to be sent with a request that locates payload. Raises as `call` if the session has ended."""
        pin = Pin(self, next(self._pins))
        self._live_pins.add(pin.number)
        if self._finished:  # it may have ended before it knew of this pin
            pin.release()
            raise self._failure("begin", EOFError("the session has ended"))
        return pin

    def release(self, number: int) -> None:
        """Ends a pin. Does not wait for a reply. If that cannot be sent now, the call that ends next sends it."""
        self._unreleased.add(number)
        self._send_releases()
        self._live_pins.discard(number)
        self._end_if_finished()

    def _send_releases(self) -> None:
        with contextlib.suppress(IndexError):  # all sockets are in use
            channel = self._idle.pop()
            numbers = list(self._unreleased)
            if self._tell(channel, Release(numbers)):
                self._unreleased.difference_update(numbers)

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

    # --- sockets ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _channel(self, what: str, deadline: float) -> Iterator[socket.socket]:
        """A socket for one call. It is kept for others only if the call ends without an error."""
        channel = self._take(what, deadline)
        try:
            try:
                self._used.add(channel)
                yield channel
            finally:
                self._used.discard(channel)
        # not kept: the reply that is still to come would be taken for that of the next request
        except BaseException as error:  # an interrupt, too, at any instruction above
            channel.close()
            if isinstance(error, (OSError, EOFError)) and not isinstance(error, DataPlaneError):  # some are both
                raise self._failure(what, error) from error
            raise
        self._keep(channel)

    def _keep(self, channel: socket.socket) -> None:
        """Keeps a socket for further calls, unless the session has ended meanwhile."""
        self._idle.append(channel)
        if not self._end.alive:
            _close_all(self._first, self._idle)

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
            with _closed_on_error(self._reach(deadline)) as channel:
                channel.sendall(encode(Hello(VERSION, key, self._address.token[:HALF_BYTES])))
                return channel
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

    def _reach(self, deadline: float) -> socket.socket:
        """A connection. While there is no answer, the host is watched."""
        watch, says = None, ""
        while True:
            now = time.monotonic()
            try:
                return self._address.connect(deadline if self._new_watch is None else min(deadline, now + _PATIENCE_S))
            except TimeoutError:
                if self._new_watch is None or time.monotonic() >= deadline:
                    raise TimeoutError(says) from None
                watch = watch or self._new_watch()
                says = watch()

    def _failure(self, what: str, error: Exception) -> DataPlaneError:
        if self._closed:
            return ClientClosedError(f"{what}: this client is closed.")
        return self._fail(what, error)

    def forget_in_fork(self) -> None:
        """Closes the sockets that a fork inherited, without ending the session."""
        _close_all(self._first, self._idle)


@dataclass(slots=True, eq=False)
class _Line:
    """What a call sends and receives over its socket. While nothing moves, the host is watched."""

    _channel: socket.socket
    _deadline: float
    _new_watch: Callable[[], Watch] | None
    _watch: Watch | None = None
    _says: str = ""
    _received: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)

    def send(self, arrays: list[memoryview]) -> None:
        """Sends arrays, one after the other."""
        if len(arrays) == 1 and len(arrays[0]) < RECEIVE_BYTES and self._new_watch is None:
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
        while (message := take_message(self._received)) is None:
            if with_descriptors and self._channel.family == socket.AF_UNIX:
                data, self.descriptors, _, _ = self._move(
                    lambda: socket.recv_fds(self._channel, RECEIVE_BYTES, _MOST_DESCRIPTORS)
                )
                with_descriptors = False
            else:
                data = self._move(lambda: self._channel.recv(RECEIVE_BYTES))
            if not data:
                raise EOFError("the connection was closed")
            self._received += data
        return message

    def fill(self, array: Bytes) -> None:
        """Fills an array with the bytes that follow."""
        left = deque([array.data] if len(array) else [])
        take_bytes(self._received, left)
        while left:
            count = self._move(partial(self._channel.recv_into, left[0]))
            if not count:
                raise EOFError("the connection was closed")
            advance(left, count)

    def _move(self, act: Callable[[], _Moved]) -> _Moved:
        while True:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(self._says)
            self._channel.settimeout(left_s if self._new_watch is None else min(left_s, _PATIENCE_S))
            try:
                return act()
            except TimeoutError:
                if self._new_watch is not None:
                    self._watch = self._watch or self._new_watch()
                    self._says = self._watch()


def _end_session(first: socket.socket, idle: deque[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        first.shutdown(socket.SHUT_RDWR)  # it wakes the thread that listens on it
    _close_all(first, idle)


def _close_all(first: socket.socket, idle: deque[socket.socket]) -> None:
    first.close()
    with contextlib.suppress(IndexError):  # another thread may close some of them
        while True:
            idle.pop().close()


def _listen(first: socket.socket, waiting: dict[str, Callable[[], object]]) -> None:
    """Wakes what waits, as the host says. When the connection ends, wakes all, so that they notice."""
    received = bytearray()
    try:
        first.settimeout(None)
        while data := first.recv(RECEIVE_BYTES):
            received += data
            while (message := take_message(received)) is not None:
                wake = waiting.get(WAKE.decode(message))
                if wake is not None:
                    wake()
    except (OSError, msgspec.MsgspecError):  # the host has ended, or sends what is no token
        pass
    for wake in list(waiting.values()):
        wake()


# --- a host that another one may follow -------------------------------------------------------------------------------


class LedgerLink(ABC):
    """A client's way to the process that hosts its ledger, and to the next one. Thread-safe."""

    #: Requests that go on with what only one process may know. They are not repeated to the next one.
    host_knows: ClassVar[tuple[type[Any], ...]] = ()

    def __init__(self) -> None:
        self._session: Session | None = None
        self._lock = threading.RLock()  # which only the thread that holds it can release
        self._closed = False
        self.num_sessions = 0  # how often a host was found

    @abstractmethod
    def connect(self, deadline: float) -> Session:
        """A session with the host of now. One thread at a time looks for it. `HostGoneError`: look again."""

    def call(
        self, deadline: float, request: Request[Reply] | Command[Reply], wake: Callable[[], object] | None = None
    ) -> Reply:
        """As `Session.call`. If the host is gone, it is repeated until the deadline: the ledger does nothing twice.

        Raises:
            HostGoneError: The request was not repeated. It may have been done or not.
        """
        what = str(getattr(request, "op", type(request).__name__))
        while True:
            session = None
            try:
                session = self.session(deadline)
                return session.call(what, deadline, request, wake)
            except HostGoneError:
                if session is not None:
                    # without the lock, which another thread may hold for long; to connect once too often does no harm
                    if self._session is session:
                        self._session = None
                    session.finish()  # other calls over it notice by themselves
                if self._closed:
                    raise ClientClosedError(f"{what}: this client is closed.") from None
                if isinstance(request, self.host_knows) or time.monotonic() + _REPEAT_S >= deadline:
                    raise
                time.sleep(_REPEAT_S)

    def session(self, deadline: float) -> Session:
        """The session with the host. Raises as `connect`, but for a session that there is."""
        if (session := self._session) is not None:
            return session
        try:
            if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise OperationTimeoutError(
                    "the deadline passed while another thread looked for the host of the ledger."
                )
            session = self._session  # which may be gone when it is returned, and then says so
            if session is None:
                session = self.connect(deadline)
                self.num_sessions += 1  # before others use it
                self._session = session
                if self._closed:  # meanwhile
                    session.close()
            return session
        finally:
            try:  # noqa: SIM105  (an interrupt in a call of `suppress` would leave the lock taken)
                self._lock.release()
            except RuntimeError:  # this thread did not get it
                pass

    def stop_waiting(self, token: str) -> None:
        """As `Backend.stop_waiting`."""
        if (session := self._session) is not None:
            session.stop_waiting(token)

    def close(self) -> None:
        """Ends calls that are under way with `ClientClosedError`, and then the session."""
        self._closed = True
        if (session := self._session) is not None:
            session.close()
