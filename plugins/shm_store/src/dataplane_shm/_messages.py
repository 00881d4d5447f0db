"""What a store and its clients tell each other beside the messages of `hosting`."""

from __future__ import annotations

from typing import Final

import msgspec

from dataplane_core.errors import DataPlaneError
from dataplane_core.hosting import AboutExtents, ExtentHost, Memory

#: In the folder of a running store: where the ledger's process listens, and why it could not start.
SOCKET: Final = "ledger.sock"
FAILURE: Final = "failure"


class Options(msgspec.Struct):
    """What the owner of a store tells the ledger's process at its start. All but ``folder`` as in `ShmConfig`."""

    folder: str  # in which to listen, and to write why the store cannot start
    capacity_bytes: int
    on_full: str
    touch_ahead_bytes: int
    durable: str | None
    sync: str


class About(AboutExtents):
    """What the store says about itself to a client that connects."""

    capacity_bytes: int
    on_full: str
    folder: str | None  # in which the store outlives its processes; None: it ends with them


#: The length that a message begins with.
_LENGTH_BYTES: Final = 4


def packed_failure(error: DataPlaneError) -> bytes:
    """Why a store cannot start, for its owner."""
    return ExtentHost.messages.encode_error(error)[_LENGTH_BYTES:]


def raise_failure(packed: bytes) -> None:
    """Raises what `packed_failure` was given."""
    ExtentHost.messages.decode_reply(Memory(), packed)
