"""What a backend can carry (`WireFormat`) and what it promises (`Capability`, `Scope`).

Both are class attributes of a backend, readable without connecting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

import torch

__all__ = ["ALL_DTYPES", "GUARANTEES", "OPERATIONS", "Capability", "Scope", "WireFormat"]

#: Every dtype that the contract promises to carry bit for bit.
ALL_DTYPES: Final[frozenset[torch.dtype]] = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)


class Capability(StrEnum):
    """What a backend may declare; the conformance kit tests declared ones and that the others are refused.

    The first seven are operations: the client refuses them with `UnsupportedOperationError` where undeclared. The rest
    are guarantees.
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
    """The options ``capacity_bytes`` and ``on_full`` bound what is held."""
    LISTING = "listing"
    """`list_samples`."""
    OVERWRITE = "overwrite"
    """A put may replace cells already produced."""

    DURABLE = "durable"
    """A committed put survives the death of the store's processes."""
    FENCED = "fenced"
    """A put that overlaps a clear or a re-registration either commits wholly before it or fails."""
    ATOMIC_OVERWRITE = "atomic_overwrite"
    """A read that overlaps an overwrite sees, per sample, all old or all new cells."""
    NO_PICKLE = "no_pickle"
    """Nothing on the way unpickles bytes from outside the process."""


OPERATIONS: Final[frozenset[Capability]] = frozenset(
    {
        Capability.CLAIMS,
        Capability.GROUPS,
        Capability.LEASES,
        Capability.TAG_FILTERS,
        Capability.CAPACITY,
        Capability.LISTING,
        Capability.OVERWRITE,
    }
)
GUARANTEES: Final[frozenset[Capability]] = frozenset(Capability) - OPERATIONS


class Scope(StrEnum):
    """How far apart two clients of one store may be."""

    PROCESS = "process"
    """In one process; attaching is refused."""
    HOST = "host"
    """On one host."""
    CLUSTER = "cluster"
    """On any hosts that reach each other."""


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """What the cells handed to a backend's hooks may be; core's codec encodes every batch in it.

    Attributes:
        bytes: The backend wants each cell as one framed byte string (`codec.frames`), whatever its kind; the other
            attributes then do not apply.
        ragged: How a tensor column whose rows may differ in their first dim arrives: one ``jagged`` nested tensor
            (dense where all rows are equal), or a list of ``rows``.
        promote_1d: The engine cannot carry ``(N,)``; scalar cells travel as ``(N, 1)``.
        objects: Whether object columns arrive as a list of items (``native``) or of encoded bytes, as one uint8 row
            per item (``encoded``).
        dtypes: The dtypes the engine carries; others travel bit-cast to uint8, so that must be among them.
        zero_length_rows: Whether rows of length 0 survive; if not, every row travels with one extra element.
    """

    bytes: bool = False
    ragged: Literal["jagged", "rows"] = "jagged"
    promote_1d: bool = False
    objects: Literal["native", "encoded"] = "encoded"
    dtypes: frozenset[torch.dtype] = ALL_DTYPES
    zero_length_rows: bool = True

    def __post_init__(self) -> None:
        if self.ragged not in ("jagged", "rows"):
            raise ValueError(f"WireFormat: ragged must be 'jagged' or 'rows', got {self.ragged!r}.")
        if self.objects not in ("native", "encoded"):
            raise ValueError(f"WireFormat: objects must be 'native' or 'encoded', got {self.objects!r}.")
        if torch.uint8 not in self.dtypes:
            raise ValueError("WireFormat: dtypes must hold torch.uint8, which carries the dtypes that are not listed.")

    def describe(self) -> str:
        """One line for people, such as ``jagged, (N,) promoted, objects encoded, all dtypes``."""
        if self.bytes:
            return "cells as framed bytes"
        missing = ALL_DTYPES - self.dtypes
        words: list[str] = [self.ragged]
        if self.promote_1d:
            words.append("(N,) promoted")
        words.append(f"objects {self.objects}")
        words.append(f"{len(missing)} dtypes bit-cast" if missing else "all dtypes")
        if not self.zero_length_rows:
            words.append("empty rows padded")
        return ", ".join(words)


def as_capabilities(names: Iterable[str]) -> frozenset[Capability]:
    """Reads capability names.

    Raises:
        ValueError: A name is not a capability.
    """
    return frozenset(Capability(name) for name in names)
