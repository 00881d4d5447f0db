"""What a backend can carry (`WireFormat`) and what it promises (`Capability`, `Scope`).

Both are class attributes of a backend, readable without connecting.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal


class Capability(StrEnum):
    """An operation or guarantee that a backend may declare.

    The first eleven are operations. If a backend does not declare one, the client refuses it with
    `UnsupportedOperationError`. The rest are guarantees. The conformance kit tests what is declared, and that the
    client refuses the operations that are not.
    """

    CLAIMS = "claims"
    """`claim_meta` and `check_consumption_status`."""
    GROUPS = "groups"
    """Claims hand out whole GRPO groups."""
    LEASES = "leases"
    """Claims with ``lease_s``; `ack`, `nack`, `renew`."""
    TAG_FILTERS = "tag_filters"
    """Claims and listings take a ``tag_filter``."""
    CAPACITY = "capacity"
    """The options ``capacity_bytes`` and ``on_full`` limit the payload that the store holds."""
    LISTING = "listing"
    """`list_samples`, `list_partitions`, `describe`, and reads of all fields."""
    CURSORS = "cursors"
    """`list_consumed`, `reset_consumption`, `save` and `load`."""
    SAMPLERS = "samplers"
    """Claims with a ``sampler`` and ``dp_rank``."""
    CLIENTS = "clients"
    """`list_clients`. Clients announce themselves."""
    UNITS = "units"
    """`list_units`: processes that hold the payload, which may change during a run."""
    OVERWRITE = "overwrite"
    """A put may replace cells that are already produced."""

    DURABLE = "durable"
    """A committed put survives the death of the store's processes."""
    FENCED = "fenced"
    """A put that overlaps a clear or a re-registration either commits wholly before it or fails."""
    ATOMIC_OVERWRITE = "atomic_overwrite"
    """A read that overlaps an overwrite sees, per sample, all old or all new cells."""
    WAKES = "wakes"
    """A claim that waits, and a put that waits for room, is woken when it may go on."""
    REPEATABLE = "repeatable"
    """A put, ack, nack or renew repeated with the same ``request_id`` is carried out once, and gives the first outcome,
    until at least 60 s after its deadline."""
    NO_PICKLE = "no_pickle"
    """Neither core nor the engine unpickles bytes from outside the process."""


GUARANTEES: Final[frozenset[Capability]] = frozenset(
    {
        Capability.DURABLE,
        Capability.FENCED,
        Capability.ATOMIC_OVERWRITE,
        Capability.WAKES,
        Capability.REPEATABLE,
        Capability.NO_PICKLE,
    }
)


class Scope(StrEnum):
    """How far apart two clients of one store may be."""

    PROCESS = "process"
    """In one process. Attaching is refused."""
    HOST = "host"
    """On one host."""
    CLUSTER = "cluster"
    """On any hosts that can reach each other."""


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """The form in which a backend's hooks take cells. Core's codec encodes every batch in it.

    Attributes:
        bytes: The backend takes each cell, tensor or object, as one frame (`codec.cells`). Of the other attributes,
            only ``shared_rows`` and ``by_content`` then apply.
        ragged: The form of a tensor column whose rows differ in their first dim. ``jagged``, the only one: a `Ragged`,
            with the rows end to end and their offsets. If all rows are equally long, the column is a dense tensor.
        promote_1d: The engine cannot carry ``(N,)``, so scalar cells are sent as ``(N, 1)``.
        objects: Whether object columns arrive as a list of items (``native``) or of encoded bytes, as one uint8 row
            per item (``encoded``).
        shared_rows: Whether equal large cells of a column are sent once, as `SharedRows`, and may be returned so.
        by_content: Whether these cells come with their digests, and the store keeps equal ones once, whichever puts
            wrote them. It needs ``shared_rows``, and a store that knows which of its rows are lost.
        by_probe: Whether these are digests of a few bytes of each cell, and the client compares those that agree with
            what the store has: `LedgerBackend.kept_digests`. Then a put of new cells does not read them twice. It needs
            ``by_content``, on a wire of tensors.
        narrow: Whether integers may be sent in a narrower dtype than that of their spec, which differs from put to put.
            The backend returns each column in the dtype that it was sent in, or in that of its spec. Frames are always
            sent so: they say their dtype.
    """

    bytes: bool = False
    ragged: Literal["jagged"] = "jagged"
    promote_1d: bool = False
    objects: Literal["native", "encoded"] = "encoded"
    shared_rows: bool = False
    by_content: bool = False
    by_probe: bool = False
    narrow: bool = False

    def __post_init__(self) -> None:
        if self.ragged != "jagged":
            raise ValueError(f"WireFormat: ragged must be 'jagged', got {self.ragged!r}.")
        if self.objects not in ("native", "encoded"):
            raise ValueError(f"WireFormat: objects must be 'native' or 'encoded', got {self.objects!r}.")
        if self.by_probe and (self.bytes or not self.by_content):
            raise ValueError("WireFormat: by_probe needs by_content, and a wire of tensors.")

    def describe(self) -> str:
        """One line for people, such as ``jagged, (N,) promoted, objects encoded``."""
        if self.bytes:
            return "cells as framed bytes"
        promoted = ", (N,) promoted" if self.promote_1d else ""
        narrow = ", narrow integers" if self.narrow else ""
        return f"{self.ragged}{promoted}, objects {self.objects}{narrow}"
