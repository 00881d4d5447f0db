"""The messages between clients and the process of the ledger, and their form: msgpack, read by type, without pickle.

A message on a socket is its length (4 bytes, little-endian) and its bytes. The first message on a connection is a
`Hello`. A request is one byte, its number in `REQUESTS`, and the request. A reply is one byte, 0 or 1 for an error, and
the reply. `Release` and `StopWaiting` have no reply. On the connection that began a session, which carries no requests,
the ledger's process sends the lease token of a claim, or the ticket of a put, that is to ask again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from dataplane_core import errors
from dataplane_core.errors import BackendError, DataPlaneError
from dataplane_core.ledger import Command, Located, Ref, check_command, commands
from dataplane_core.spec import Claim
from dataplane_shm._layout import Layout

__all__ = [
    "VERSION",
    "Begin",
    "Begun",
    "ClaimOrWait",
    "Drop",
    "Find",
    "Hello",
    "Place",
    "Placed",
    "PutWhole",
    "Release",
    "Request",
    "Statistics",
    "Status",
    "StopWaiting",
    "Welcome",
    "decode_reply",
    "decode_request",
    "decode_welcome",
    "encode",
    "encode_error",
    "encode_reply",
    "encode_request",
]

#: Clients and the ledger's process speak the same version.
VERSION: Final = 4

Reply = TypeVar("Reply", covariant=True)


class Hello(msgspec.Struct, array_like=True):
    """The first message of a connection.

    Attributes:
        version: The version that the client speaks.
        key: The key of the session that the connection belongs to. None: it begins a new one, and ends it when it
            closes. The reply is then a `Welcome`, with the arena's file descriptor.
    """

    version: int
    key: str | None = None


class Welcome(msgspec.Struct, array_like=True):
    """The reply to the `Hello` that begins a session.

    Attributes:
        version: The version that the ledger's process speaks.
        session: The number of the session in this store.
        capacity_bytes: The store's limit.
        on_full: What a put does that does not fit.
        touched_bytes: How much of the arena is ready.
        key: What further connections of the session show. No other store knows it, such as the next at this path.
    """

    version: int
    session: int
    capacity_bytes: int
    on_full: str
    touched_bytes: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class Request(Generic[Reply]):
    """A request that is not a command of the ledger."""


class Place(msgspec.Struct, array_like=True):
    """Where a put lies.

    Attributes:
        offset: Where its extent begins in the arena.
        layout: Where its columns lie in the extent.
        num_rows: How many rows the extent holds.
    """

    offset: int
    layout: Layout
    num_rows: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A put was begun.

    Attributes:
        write_id: Its write id.
        offsets: Where the extents of its writes begin. They are pinned until this session commits or aborts the put.
    """

    write_id: int
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Begin(Request[Begun]):
    """Begins a put, and allocates an extent for each of its writes. Raises as `commands.BeginPut`."""

    put: commands.BeginPut
    layouts: list[Layout]


@dataclass(frozen=True, slots=True)
class PutWhole(Request[None]):
    """A whole put in one request, for few bytes. Raises as `commands.BeginPut` and `commands.CommitPut`.

    Attributes:
        put: The put.
        layout: Where its columns lie.
        data: The bytes of its extent.
    """

    put: commands.BeginPut
    layout: Layout
    data: bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the payload of a read is.

    Attributes:
        located: As the ledger says. Positions are rows of the extents.
        places: Write id -> its place. It is pinned until this session releases it.
        gone: Refs whose payload does not exist.
    """

    located: Located
    places: dict[int, Place]
    gone: list[Ref]


@dataclass(frozen=True, slots=True)
class Find(Request[Placed]):
    """Locates cells, and pins their extents under a number that this session draws. Raises as `commands.Locate`."""

    locate: commands.Locate
    pin: int


@dataclass(frozen=True, slots=True)
class Release(Request[None]):
    """Ends pins. Numbers that hold nothing are ignored. Has no reply."""

    pins: list[int]


@dataclass(frozen=True, slots=True)
class ClaimOrWait(Request[Claim]):
    """A claim whose client waits to be woken if it is handed nothing. Raises as `commands.ClaimSamples`."""

    claim: commands.ClaimSamples


@dataclass(frozen=True, slots=True)
class StopWaiting(Request[None]):
    """A claim no longer waits. Has no reply."""

    token: str


@dataclass(frozen=True, slots=True)
class Drop(Request[None]):
    """Drops the payload of refs, but not what the ledger knows of them."""

    refs: list[Ref]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the ledger's process says about memory.

    Attributes:
        arena_bytes: Size of the arena.
        held_bytes: Bytes of the rows that exist, with their tables. A put can get the rest, but for what is pinned.
        pinned_bytes: Bytes of those that are read, viewed or written now.
        touched_bytes: Memory of the system that the arena uses.
        num_extents: Number of extents.
        num_sessions: Number of connected clients.
    """

    arena_bytes: int
    held_bytes: int
    pinned_bytes: int
    touched_bytes: int
    num_extents: int
    num_sessions: int


@dataclass(frozen=True, slots=True)
class Status(Request[Statistics]):
    """Asks for the statistics."""


def _plain(value: Any) -> object:
    """A value of numpy, or of a subclass, as Python's own.

    Raises:
        NotImplementedError: Neither. That is how msgspec wants to be told.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise NotImplementedError(f"a value of {type(value).__name__} cannot be sent")


class _Failure(msgspec.Struct, array_like=True):
    """An error on its way to the client: its class in `dataplane_core.errors`, its message and its attributes."""

    name: str
    message: str
    attributes: dict[str, Any]


class _Kind(msgspec.Struct):
    """A kind of request, and how it and its reply are read."""

    number: int
    request: Any
    reply: Any


#: All kinds of requests. The first byte of a message is an index into it.
REQUESTS: Final[tuple[type[Any], ...]] = (
    Begin,
    PutWhole,
    Find,
    Release,
    ClaimOrWait,
    StopWaiting,
    Drop,
    Status,
    *commands.COMMANDS,
)


def _reply_type(request: type[Any]) -> Any:
    """The type that a request is answered with: the argument of ``Request[...]`` or ``Command[...]``."""
    for cls in request.__mro__:
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) in (Request, Command):
                return get_args(base)[0]
    raise TypeError(f"{request.__name__} names no reply")


_decoder = msgspec.msgpack.Decoder
_KINDS: Final[Mapping[type[Any], _Kind]] = {
    request: _Kind(number, _decoder(request), _decoder(_reply_type(request))) for number, request in enumerate(REQUESTS)
}
_BY_NUMBER: Final = tuple(_KINDS.values())
_failure_decoder: Final = msgspec.msgpack.Decoder(_Failure)
_welcome_decoder: Final = msgspec.msgpack.Decoder(Welcome)
#: What reading a damaged message may raise.
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, IndexError, RecursionError)
_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: Any, first: bytes = b"") -> bytes:
    """A message as it goes over a socket.

    Raises:
        InvalidRequestError: It holds what msgpack cannot carry, such as invalid Unicode, or is larger than 4 GiB.
    """
    try:
        body = first + _encoder.encode(message)
        return len(body).to_bytes(4, "little") + body
    except (UnicodeEncodeError, OverflowError) as error:
        raise errors.InvalidRequestError(f"the request cannot be sent: {error}") from error


def encode_request(request: Request[Any] | Command[Any]) -> bytes:
    """A request as it goes over a socket."""
    return encode(request, bytes((_KINDS[type(request)].number,)))


def decode_request(message: bytes) -> Any:
    """Reads a request.

    Raises:
        InvalidRequestError: It is no request, or its parts do not fit together.
    """
    try:
        request = _BY_NUMBER[message[0]].request.decode(memoryview(message)[1:])
    except _UNREADABLE as error:
        raise errors.InvalidRequestError(f"a message to the ledger's process is no request: {error}.") from error
    for command in (request, *(getattr(request, name, None) for name in ("put", "locate", "claim"))):
        if isinstance(command, Command):
            check_command(command)
    if isinstance(request, Begin):
        _check_layouts(request.put, request.layouts)
    elif isinstance(request, PutWhole):
        _check_layouts(request.put, [request.layout])
        if len(request.data) != request.layout.size_bytes:
            raise errors.InvalidRequestError(f"a put has {len(request.data)} bytes, not those of its layout.")
    return request


def _check_layouts(put: commands.BeginPut, layouts: list[Layout]) -> None:
    writes = commands.writes_of(0, put.specs, put.row_bytes, put.splits)
    if len(writes) != len(layouts) or not all(
        layout.fits(len(write.fields), len(write.row_bytes)) for write, layout in zip(writes, layouts, strict=True)
    ):
        raise errors.InvalidRequestError("a put has columns that do not lie in its extents.")


def encode_reply(reply: Any) -> bytes:
    """A reply as it goes over a socket."""
    return encode(reply, b"\0")


def encode_error(error: Exception) -> bytes:
    """An error as it goes over a socket. Errors that are not of the data plane become a `BackendError`."""
    if not isinstance(error, DataPlaneError):
        error = BackendError(f"the ledger's process failed: {type(error).__name__}: {error}")
    attributes = {name: value for name, value in vars(error).items() if not name.startswith("__")}
    return encode(_Failure(type(error).__name__, error.message, attributes), b"\1")


def decode_reply(request: Request[Reply] | Command[Reply], message: bytes) -> Reply:
    """Reads the reply to a request.

    Raises:
        BackendError: It is no reply to this request.
        DataPlaneError: The reply is an error.
    """
    try:
        body = memoryview(message)[1:]
        if not message[0]:
            reply: Reply = _KINDS[type(request)].reply.decode(body)
            return reply
        error = _error(_failure_decoder.decode(body))
    except _UNREADABLE as cause:
        raise _unreadable(cause) from cause
    raise error


def decode_welcome(message: bytes) -> Welcome:
    """Reads the reply to the `Hello` that begins a session.

    Raises:
        BackendError: It is none.
    """
    try:
        return _welcome_decoder.decode(message)
    except _UNREADABLE as cause:
        raise _unreadable(cause) from cause


def _unreadable(cause: Exception) -> BackendError:
    return BackendError(f"the ledger's process sent what this client cannot read: {cause}.")


def _error(failure: _Failure) -> DataPlaneError:
    cls = getattr(errors, failure.name, None)
    if not (isinstance(cls, type) and issubclass(cls, DataPlaneError)):
        raise ValueError(f"it names the error {failure.name[:100]!r}")
    # by the constructor, so that each attribute has a value
    error = errors.rebuild_error(cls, failure.message, vars(cls(failure.message)), None)
    for name, default in list(vars(error).items()):
        value = _frozen(failure.attributes.get(name, default))
        if type(value) is not type(default) and not (default is None and type(value) is str):
            raise ValueError(f"an error's {name} is a {type(value).__name__}")
        setattr(error, name, value)
    return error


def _frozen(value: Any) -> Any:
    """Lists as tuples, as errors hold them."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return value
