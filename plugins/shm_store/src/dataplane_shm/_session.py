"""`Connection`: a client's session with the process of the ledger, and the memory that it shares with it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_core.host_memory import Arena
from dataplane_core.ledger import Command
from dataplane_shm._messages import (
    VERSION,
    Hello,
    Release,
    Request,
    StopWaiting,
    decode_reply,
    decode_welcome,
    encode,
    encode_request,
)

__all__ = ["Connection", "Pin"]

Reply = TypeVar("Reply")

_RECEIVE_BYTES: Final = 1 << 18
_POLL_S: Final = 0.01
#: Seconds that sending a release may take.
_RELEASE_S: Final = 1.0
_token_decoder: Final = msgspec.msgpack.Decoder(str)


class Pin:
    """A read's hold on the extents that it reads: they keep their place and bytes. It ends with this object."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.number = number
        self.release = weakref.finalize(self, Connection.release, connection, number)
        self.release.atexit = False  # the connection ends then, and with it all pins


class Connection:
    """A session with the ledger's process of one store.

    The session lasts as long as this object, or until `finish`: its first socket closes then. On it, a thread receives
    which of the claims and puts that wait are to ask again. Requests use further sockets, one for each that is under
    way, so threads do not wait for each other. A socket whose request was interrupted is closed.

    Args:
        path: The path of the socket.
        deadline: On `time.monotonic`'s clock, in seconds.

    Attributes:
        arena: The shared memory.
        welcome: What the store says about itself.

    Raises:
        BackendUnavailableError: Nobody listens there. Retryable.
        OperationTimeoutError: No answer in time.
    """

    def __init__(self, path: Path, deadline: float) -> None:
        self._path = path
        self._idle: deque[socket.socket] = deque()
        self._unreleased: set[int] = set()  # pins that ended, until the ledger's process was told
        self._pins = itertools.count(1)
        self._live_pins: set[int] = set()
        self._finished = False
        self._waiting: dict[str, Callable[[], object]] = {}  # token of what waits -> how to wake it
        self._listener: threading.Thread | None = None
        self._listener_lock = threading.Lock()
        self._first = self._open("connect", deadline, Hello(VERSION))
        _open_connections.add(self)
        self._end = weakref.finalize(self, _end_session, self._first, self._idle)
        self._end.atexit = False  # threads may still write into the arena; the kernel closes the sockets after them
        try:
            self._first.settimeout(_left_s(deadline))
            data, descriptors, _, _ = socket.recv_fds(self._first, _RECEIVE_BYTES, 1)
            if not data or not descriptors:
                raise EOFError
        except (OSError, EOFError) as error:
            raise self._failure("connect", error) from error
        os.set_inheritable(descriptors[0], False)  # a program that inherits it would keep the memory
        self.arena = Arena(descriptors[0])
        self.welcome = decode_welcome(data[4:])
        if self.welcome.version != VERSION:
            raise BackendUnavailableError(
                f"connect refused: the store at {path} speaks version {self.welcome.version} of its messages. "
                f"Expected {VERSION}.",
                retryable=False,
                hint="Install the same version of dataplane-shm for all processes.",
            )

    def call(self, what: str, deadline: float, request: Request[Reply] | Command[Reply]) -> Reply:
        """Sends a request and returns the reply.

        Args:
            what: The operation, for messages.
            deadline: On `time.monotonic`'s clock, in seconds.
            request: The request.

        Raises:
            DataPlaneError: The reply is an error.
            BackendUnavailableError: The ledger's process has ended.
            OperationTimeoutError: No reply in time.
        """
        message = encode_request(request)
        released = list(self._unreleased)
        if released:
            message = encode_request(Release(released)) + message
        channel = self._take(what, deadline)
        try:
            channel.settimeout(_left_s(deadline))
            channel.sendall(message)
            self._unreleased.difference_update(released)
            reply = _receive(channel, deadline)
        except BaseException as error:
            channel.close()
            if isinstance(error, (OSError, EOFError)):
                raise self._failure(what, error) from error
            raise
        self._idle.append(channel)
        if self._unreleased:  # pins that ended while all sockets were in use
            self._send_releases()
        return decode_reply(request, reply)

    def call_waiting(
        self,
        what: str,
        deadline: float,
        request: Request[Reply] | Command[Reply],
        token: str,
        wake: Callable[[], object],
    ) -> Reply:
        """As `call`, for what waits: ``wake`` is called in a thread when it is to ask again, until `end_waiting`."""
        with self._listener_lock:
            if self._listener is None:
                listener = threading.Thread(
                    target=_listen, args=(self._first, self._waiting), name="dataplane-shm-wakes", daemon=True
                )
                listener.start()
                self._listener = listener
        self._waiting[token] = wake
        return self.call(what, deadline, request)

    def end_waiting(self, token: str, *, tell: bool = False) -> None:
        """Nothing waits with this token any longer. With ``tell``, the ledger's process does not know that yet."""
        self._waiting.pop(token, None)
        if tell:
            self._tell(StopWaiting(token))

    def new_pin(self) -> Pin:
        """A new pin, to be sent with a request that locates payload."""
        pin = Pin(self, next(self._pins))
        self._live_pins.add(pin.number)
        return pin

    def finish(self) -> None:
        """Ends the session as soon as no pin is left, even if something refers to this object, such as a traceback."""
        self._finished = True
        self._end_if_finished()

    def _end_if_finished(self) -> None:
        if self._finished and not self._live_pins:
            self._end()

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
        except (BackendUnavailableError, OperationTimeoutError):
            return  # the process of the ledger has ended, or hangs
        self._send_on(channel, request)

    def _send_on(self, channel: socket.socket, request: Request[None]) -> bool:
        try:
            channel.settimeout(_RELEASE_S)
            channel.sendall(encode_request(request))
        except BaseException as error:
            channel.close()
            if not isinstance(error, OSError):  # the process of the ledger has ended, or hangs
                raise
            return False
        self._idle.append(channel)
        return True

    def close_in_fork(self) -> None:
        """Closes the sockets that a fork of the process inherited, without ending the session."""
        _close_all(self._first, self._idle)

    # --- sockets ------------------------------------------------------------------------------------------------------

    def _take(self, what: str, deadline: float) -> socket.socket:
        try:
            return self._idle.pop()
        except IndexError:
            return self._open(what, deadline, Hello(VERSION, self.welcome.key))

    def _open(self, what: str, deadline: float, hello: Hello) -> socket.socket:
        try:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise BackendUnavailableError(
                f"{what} failed: this process can open no further socket: {error}.",
                hint="The limit is that of open files (ulimit -n). Each thread that is in an operation has a socket.",
            ) from error
        try:
            channel.settimeout(_left_s(deadline))
            self._reach(channel, deadline)
            _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                raise BackendUnavailableError(f"{what} refused: {self._path} belongs to another user.", retryable=False)
            channel.sendall(encode(hello))
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError) and not isinstance(error, BackendUnavailableError):
                raise self._failure(what, error) from error
            raise
        return channel

    def _reach(self, channel: socket.socket, deadline: float) -> None:
        while True:
            try:
                return channel.connect(str(self._path))
            except BlockingIOError:  # more connect at once than the listening socket takes
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_POLL_S)

    def _failure(self, what: str, error: Exception) -> Exception:
        if isinstance(error, TimeoutError):
            return OperationTimeoutError(f"{what} timed out: the ledger's process of {self._path} does not answer.")
        if what == "connect":
            return BackendUnavailableError(
                f"connect failed: no store runs at {self._path}: {error}.",
                hint="Start its owner, connect(config, bootstrap=True), as the same user on this host and with the "
                "same namespace.",
            )
        return BackendUnavailableError(
            f"{what} failed: the ledger's process of {self._path} has ended, and its data with it.",
            retryable=False,
            hint="It ends with the client that bootstrapped the store. Close this client, start a new owner with "
            "connect(config, bootstrap=True), then register the partitions and produce their samples again.",
        )


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


def _receive(channel: socket.socket, deadline: float) -> bytes:
    received, end = bytearray(), 4
    while len(received) < end:
        channel.settimeout(_left_s(deadline))
        data = channel.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError("the connection was closed")
        received += data
        if len(received) >= 4:
            end = 4 + int.from_bytes(received[:4], "little")
    return bytes(memoryview(received)[4:end])


def _listen(first: socket.socket, waiting: dict[str, Callable[[], object]]) -> None:
    """Wakes what waits, as the ledger's process says. When the connection ends, wakes all, so that they notice."""
    received = bytearray()
    try:
        first.settimeout(None)
        while data := first.recv(_RECEIVE_BYTES):
            received += data
            while len(received) >= 4 and len(received) >= (end := 4 + int.from_bytes(received[:4], "little")):
                wake = waiting.get(_token_decoder.decode(bytes(received[4:end])))
                del received[:end]
                if wake is not None:
                    wake()
    except (OSError, msgspec.MsgspecError):  # the process has ended, or sends what is no token
        pass
    for wake in list(waiting.values()):
        wake()


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_fork() -> None:
    for connection in list(_open_connections):
        connection.close_in_fork()


# a fork that lives on would otherwise keep the sessions of its parent, and their pins
os.register_at_fork(after_in_child=_close_in_fork)
