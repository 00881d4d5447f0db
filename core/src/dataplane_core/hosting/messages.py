"""The messages between clients and a host (msgpack, read by type, without pickle), and their way through a socket.

A message on a socket is its length (4 bytes, little-endian) and its bytes. The first message on a connection is a
`Hello`. A request is one byte, its number, and the request. A reply is one byte, 0 or 1 for an error, and the reply. On
the connection that began a session, which carries no requests, the host sends the lease token of a claim, or the ticket
of a put, that is to ask again.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from dataplane_core import errors
from dataplane_core.arguments import as_plain
from dataplane_core.errors import BackendError, DataPlaneError
from dataplane_core.ledger import commands
from dataplane_core.spec.requests import Command

#: Clients and hosts speak the same version. It changes with the form of any message.
VERSION: Final = 21
#: The version of the ledger's commands as messages, which logs keep.
COMMANDS_FORM: Final = 19

Reply = TypeVar("Reply", covariant=True)
_T = TypeVar("_T")
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: Size of each half of a token. A client shows the first half, and the host answers with the second.
HALF_BYTES: Final = 32
RECEIVE_BYTES: Final = 1 << 18
#: The most arrays that one call of the system takes.
_MOST_ARRAYS: Final = 512


class Hello(msgspec.Struct, array_like=True):
    """The first message of a connection.

    Without the key of a session, it begins one, and ends it when it closes. The reply is then a `Welcome`, with the
    host's file descriptors.
    """

    version: int
    key: str | None = None
    token: bytes = b""  # the first half of the host's token, if it has one


class Welcome(msgspec.Struct, array_like=True):
    """The reply to the `Hello` that begins a session."""

    version: int
    session: int  # its number at this host
    key: str = ""  # which no other host knows, such as the next at this address
    token: bytes = b""  # the second half of the host's token: it is the one that the client means
    about: msgspec.Raw = msgspec.Raw(b"\xc0")  # what the host says about itself; see `decode_about`


class Request(msgspec.Struct, Generic[Reply], frozen=True, omit_defaults=True):
    """A request that is not a command of the ledger."""

    answered: ClassVar[bool] = True  # whether it has a reply
    followed: ClassVar[bool] = False  # whether bytes follow it, so that a host which refuses it ends the connection

    def check(self) -> None:
        """Raises `InvalidRequestError` if its parts do not fit together. Called for what came over a socket."""


class StopWaiting(Request[None], frozen=True):
    """A claim, or a put that waits for room, no longer waits."""

    answered = False
    token: str


class Release(Request[None], frozen=True):
    """Ends pins. Numbers that hold nothing are ignored."""

    answered = False
    pins: list[int]


class Together(Request[list[bytes]], frozen=True):
    """Requests that are carried out one after the other, and none after one that is refused: its error is the reply.

    They are without their lengths, and no bytes follow them or their replies.
    """

    requests: list[bytes]


def _plain(value: Any) -> object:
    """A value of numpy, or of a subclass, as Python's own."""
    return value.item() if isinstance(value, np.generic) else as_plain(value)


class _Failure(msgspec.Struct, array_like=True):
    """An error on its way to the client: its class in `dataplane_core.errors`, its message and its attributes."""

    name: str
    message: str
    attributes: dict[str, Any]


def _reply_type(request: type[Any]) -> Any:
    """The type that a request is answered with: the argument of ``Request[...]`` or ``Command[...]``."""
    for cls in request.__mro__:
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) in (Request, Command):
                return get_args(base)[0]
    raise TypeError(f"{request.__name__} names no reply")


_decoder = msgspec.msgpack.Decoder
_failure_decoder: Final = _decoder(_Failure)
#: Reads the first message of a connection; and the token or ticket of what is to ask again.
HELLO: Final = _decoder(Hello)
WAKE: Final = _decoder(str)
#: What reading a damaged message may raise.
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, IndexError, RecursionError)
_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
#: The first byte of a request of this wing, of a command, and of a request of a host.
_WING, _COMMANDS, _OWN = 0, 16, 128


def encode(message: Any, first: bytes = b"") -> bytes:
    """A message as it goes over a socket. Raises `InvalidRequestError` for invalid Unicode, or more than 4 GiB."""
    try:
        body = first + _encoder.encode(message)
        return len(body).to_bytes(4, "little") + body
    except (UnicodeEncodeError, OverflowError) as error:
        raise errors.InvalidRequestError(f"the request cannot be sent: {error}") from error


class Messages:
    """The requests that a host and its clients know: the ledger's commands, those of this wing, and the host's own.

    Args:
        *own: Classes of the host's own requests. Their order is part of the form of messages.
        errors: Further errors that may travel, beside those of `dataplane_core.errors`.
    """

    def __init__(self, *own: type[Request[Any]], errors: Iterable[type[DataPlaneError]] = ()) -> None:
        self._numbers: dict[type[Any], int] = {}
        self._requests: dict[int, Any] = {}  # number -> what reads the request
        self._replies: dict[type[Any], Any] = {}  # request -> what reads its reply
        for first, kinds in ((_WING, _OF_THE_WING), (_COMMANDS, commands.COMMANDS), (_OWN, own)):
            for number, request in enumerate(kinds, first):
                self._numbers[request] = number
                self._requests[number] = _decoder(request)
                self._replies[request] = _decoder(_reply_type(request))
        self._errors = {error.__name__: error for error in errors}

    def encode_request(self, request: Request[Any] | Command[Any]) -> bytes:
        """A request as it goes over a socket."""
        return encode(request, bytes((self._numbers[type(request)],)))

    def decode_request(self, message: bytes) -> Any:
        """Reads a request. Raises `InvalidRequestError` if it is none, or its parts do not fit together."""
        try:
            request = self._requests[message[0]].decode(memoryview(message)[1:])
        except (*_UNREADABLE, KeyError) as error:
            raise errors.InvalidRequestError(f"a message is no request: {error}.") from error
        request.check()
        return request

    def encode_reply(self, reply: Any) -> bytes:
        """A reply as it goes over a socket."""
        return encode(reply, b"\0")

    def encode_error(self, error: BaseException) -> bytes:
        """An error as it goes over a socket. Errors that are not of the data plane become a `BackendError`."""
        if not isinstance(error, DataPlaneError) or self._class_of(type(error).__name__) is not type(error):
            error = BackendError(f"the other side failed: {type(error).__name__}: {error}")
        attributes = {name: value for name, value in vars(error).items() if not name.startswith("__")}
        return encode(_Failure(type(error).__name__, error.message, attributes), b"\1")

    def decode_reply(self, request: Request[Reply] | Command[Reply], message: bytes) -> Reply:
        """Reads the reply to a request. Raises it if it is an error, and `BackendError` if it is no reply to this."""
        try:
            body = memoryview(message)[1:]
            if not message[0]:
                reply: Reply = self._replies[type(request)].decode(body)
                return reply
            error = self._error(_failure_decoder.decode(body))
        except _UNREADABLE as cause:
            raise _unreadable(cause) from cause
        raise error

    def _class_of(self, name: str) -> type[DataPlaneError] | None:
        error = self._errors.get(name) or getattr(errors, name, None)
        return error if isinstance(error, type) and issubclass(error, DataPlaneError) else None

    def _error(self, failure: _Failure) -> DataPlaneError:
        cls = self._class_of(failure.name)
        if cls is None:
            raise ValueError(f"it names the error {failure.name[:100]!r}")
        # by the constructor, so that each attribute has a value
        error = errors.rebuild_error(cls, failure.message, vars(cls(failure.message)), None)
        for name, default in list(vars(error).items()):
            value = _frozen(failure.attributes.get(name, default))
            if type(value) is not type(default) and not (default is None and type(value) is str):
                raise ValueError(f"an error's {name} is a {type(value).__name__}")
            setattr(error, name, value)
        return error


_OF_THE_WING: Final[tuple[type[Request[Any]], ...]] = (StopWaiting, Release, Together)


def decode_about(welcome: Welcome, form: type[_T]) -> _T:
    """Reads what a host says about itself. Raises as `decode_as`."""
    return decode_as(welcome.about, form)


def decode_as(data: bytes | msgspec.Raw, form: type[_T]) -> _T:
    """Reads what a host sent. Raises `BackendError` if it is something else."""
    try:
        return msgspec.msgpack.decode(data, type=form)
    except _UNREADABLE as cause:
        raise _unreadable(cause) from cause


def _unreadable(cause: Exception) -> BackendError:
    return BackendError(f"the other side sent what this client cannot read: {cause}.")


def _frozen(value: Any) -> Any:
    """Lists as tuples, as errors hold them."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value


# --- both ends of a connection ----------------------------------------------------------------------------------------


def take_message(received: bytearray) -> bytes | None:
    """Takes the first message out of what was received, without its length. None: it has not come whole."""
    end = 4 + int.from_bytes(received[:4], "little")
    if len(received) < max(end, 4):
        return None
    message = bytes(memoryview(received)[4:end])
    del received[:end]
    return message


def next_arrays(arrays: deque[memoryview]) -> list[memoryview]:
    """The first arrays, as many as one call of the system takes."""
    return list(itertools.islice(arrays, _MOST_ARRAYS))


def advance(arrays: deque[memoryview], count: int) -> None:
    """Drops the first ``count`` bytes."""
    while count:
        first = arrays.popleft()
        if len(first) > count:
            arrays.appendleft(first[count:])
            return
        count -= len(first)


def take_bytes(received: bytearray, arrays: deque[memoryview]) -> None:
    """Moves what came with a message into the arrays that follow it."""
    while received and arrays:
        count = min(len(received), len(arrays[0]))
        arrays[0][:count] = received[:count]
        del received[:count]
        advance(arrays, count)


def check_user(channel: socket.socket) -> None:
    """Raises `PermissionError` if at the other end of a Unix socket is a process of another user."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise PermissionError(f"user {user} is another one")


def set_tcp_options(channel: socket.socket) -> None:
    """Sends at once what is written, and notices within two minutes that the other side's node is gone."""
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not everywhere
            channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
