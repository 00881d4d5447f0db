"""What a client of a store asks beside the commands of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from dataplane_core.errors import DataPlaneError, InvalidRequestError
from dataplane_core.hosting import Layout, Messages, Place, Request
from dataplane_core.ledger import Located, Ref, commands

#: In the folder of a running store: where the ledger's process listens, and why it could not start.
SOCKET: Final = "ledger.sock"
FAILURE: Final = "failure"


class Options(msgspec.Struct):
    """What the owner of a store tells the ledger's process at its start. The others as in `ShmConfig`.

    Attributes:
        folder: The folder in which to listen, and to write why the store cannot start.
    """

    folder: str
    capacity_bytes: int
    on_full: str
    touch_ahead_bytes: int
    durable: str | None
    sync: str


class About(msgspec.Struct, array_like=True):
    """What the store says about itself to a client that connects.

    Attributes:
        capacity_bytes: The store's limit.
        on_full: What a put does that does not fit.
        touched_bytes: How much of the arena is ready.
        sync: When what is put is on a disk.
        folder: The folder in which the store outlives its processes. None: it ends with them.
    """

    capacity_bytes: int
    on_full: str
    touched_bytes: int
    sync: str
    folder: str | None


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

    def check(self) -> None:
        _check_layouts(self.put, self.layouts)


@dataclass(frozen=True, slots=True)
class CommitSynced(Request[list[Ref]]):
    """Commits a put whose bytes this client has synced. Raises as `commands.CommitPut`.

    Attributes:
        commit: The command.
        digests: `digest_of` the extent of each write.
    """

    commit: commands.CommitPut
    digests: list[bytes]


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

    def check(self) -> None:
        _check_layouts(self.put, [self.layout])
        if len(self.data) != self.layout.size_bytes:
            raise InvalidRequestError(f"a put has {len(self.data)} bytes, not those of its layout.")


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
class Drop(Request[None]):
    """Drops the payload of refs, but not what the ledger knows of them."""

    refs: list[Ref]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the ledger's process says about memory.

    Attributes:
        arena_bytes: Size of the arena.
        held_bytes, pinned_bytes, touched_bytes, num_extents: See `ExtentStatistics`.
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


MESSAGES: Final = Messages(Begin, CommitSynced, PutWhole, Find, Drop, Status)
#: The length that a message begins with.
_LENGTH_BYTES: Final = 4


def packed_failure(error: DataPlaneError) -> bytes:
    """Why a store cannot start, for its owner."""
    return MESSAGES.encode_error(error)[_LENGTH_BYTES:]


def raise_failure(packed: bytes) -> None:
    """Raises what `packed_failure` was given."""
    MESSAGES.decode_reply(Status(), packed)


def _check_layouts(put: commands.BeginPut, layouts: list[Layout]) -> None:
    if len(put.writes) != len(layouts) or not all(
        layout.fits(len(write.fields), len(write.row_bytes)) for write, layout in zip(put.writes, layouts, strict=True)
    ):
        raise InvalidRequestError("a put has columns that do not lie in its extents.")
