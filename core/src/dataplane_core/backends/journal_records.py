"""The records of a `BlobStore`'s journal: which there are, what each holds, and their bytes.

A record is 16 bytes, the digest of what follows, and a msgpack map. Every map holds

    v       the version of this form
    seq     the record's number: 0, 1, 2, ...
    prev    the digest of the record before it; empty in record 0
    op      what was done, with the fields that `OPS` lists for it

So the records are a chain: one that is damaged, missing, swapped or of another journal does not fit, and is found. No
record holds a time: a lease ends by a record that says so (see `dataplane_core.backends.journal`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from dataplane_core.errors import CorruptDataError
from dataplane_core.ledger import pack_refs, pack_write_id, unpack_refs, unpack_write_id
from dataplane_core.spec import FieldSpec

__all__ = [
    "DIGEST_BYTES",
    "OPS",
    "VERSION",
    "Record",
    "seal",
    "unseal",
]

#: The form that this module reads and writes.
VERSION: Final = 3
#: Length of a digest.
DIGEST_BYTES: Final = 16
_OTHER_VERSION_HINT: Final = "Another dataplane-core wrote it: use that one, or begin a new store."


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a field may hold, and how it is turned into msgpack's types and back."""

    types: tuple[type, ...]
    pack: Callable[[Any], Any] = lambda value: value
    unpack: Callable[[Any], Any] = lambda value: value


def _pack_specs(specs: Mapping[str, FieldSpec]) -> dict[str, str]:
    return {name: spec.to_text() for name, spec in specs.items()}


def _unpack_specs(packed: Mapping[str, str]) -> dict[str, FieldSpec]:
    return {name: FieldSpec.from_text(text) for name, text in packed.items()}


_TEXT: Final = _Kind((str,))
_TEXT_OR_NONE: Final = _Kind((str, type(None)))
_LIST: Final = _Kind((list,), list)
_LIST_OR_NONE: Final = _Kind((list, type(None)), lambda value: None if value is None else list(value))
_MAP: Final = _Kind((dict,), dict)
_MAP_OR_NONE: Final = _Kind((dict, type(None)), lambda value: None if value is None else dict(value))
_INT: Final = _Kind((int,))
_INT_OR_NONE: Final = _Kind((int, type(None)))
_FLAG: Final = _Kind((bool,))
_SECONDS: Final = _Kind((int, float))
_SECONDS_OR_NONE: Final = _Kind((int, float, type(None)))
_BYTES: Final = _Kind((bytes,))
_WRITE: Final = _Kind((bytes,), pack_write_id, unpack_write_id)
_WRITES: Final = _Kind(
    (list,), lambda ids: list(map(pack_write_id, ids)), lambda data: list(map(unpack_write_id, data))
)
_REFS: Final = _Kind((list,), pack_refs, unpack_refs)
_SPECS: Final = _Kind((dict,), _pack_specs, _unpack_specs)

#: Op -> its fields, in the order of the arguments of the ledger's call of that name.
OPS: Final[Mapping[str, Mapping[str, _Kind]]] = {
    # --- of the journal itself
    "begin": {"store": _TEXT},  # record 0: who this store is, at random
    "expire": {"leases": _LIST, "writes": _WRITES},  # leases and unfinished puts whose time is over
    "plan": {"snapshot": _TEXT},  # somebody begins to write this snapshot, or keeps others from it
    "snapshot": {  # and has written it: the state after all records before this one
        "store": _TEXT,
        "snapshot": _TEXT,
        "chunks": _INT,
        "nbytes": _INT,
        "digest": _BYTES,
        "records": _LIST,  # the last of the records that were made while it was written
        "garbage": _LIST,  # earlier snapshots
    },
    # --- of the ledger
    "register": {
        "partition_id": _TEXT,
        "fields": _LIST,
        "num_samples": _INT_OR_NONE,
        "consumer_tasks": _LIST,
        "grpo_group_size": _INT_OR_NONE,
        "enums": _MAP,
        "epoch": _TEXT,
    },
    "begin_put": {
        "partition_id": _TEXT,
        "sample_ids": _LIST,
        "specs": _SPECS,
        "row_bytes": _LIST,
        "tags": _LIST_OR_NONE,
        "epoch": _TEXT_OR_NONE,
        "write_id": _WRITE,
        "ticket": _TEXT_OR_NONE,
        "ttl_s": _SECONDS,
    },
    "wait_for_room": {"ticket": _TEXT, "size_bytes": _INT, "wait_s": _SECONDS},  # a put waits, or still does
    "commit_put": {"write_id": _WRITE},
    "abort_put": {"write_id": _WRITE},
    "put_tags": {"partition_id": _TEXT, "sample_ids": _LIST, "tags": _LIST, "epoch": _TEXT_OR_NONE},
    "claim": {
        "partition_id": _TEXT,
        "task_name": _TEXT,
        "required_fields": _LIST,
        "batch_size": _INT,
        "all_or_nothing": _FLAG,
        "lease_s": _SECONDS_OR_NONE,
        "tag_filter": _MAP_OR_NONE,
        "token": _TEXT,
        "holder": _TEXT,
    },
    "ack": {"partition_id": _TEXT, "task_name": _TEXT, "sample_ids": _LIST, "tokens": _LIST},
    "nack": {"partition_id": _TEXT, "task_name": _TEXT, "sample_ids": _LIST, "tokens": _LIST},
    "renew": {"partition_id": _TEXT, "task_name": _TEXT, "sample_ids": _LIST, "tokens": _LIST, "lease_s": _SECONDS},
    "clear": {"partition_id": _TEXT, "sample_ids": _LIST_OR_NONE},
    "collected": {"refs": _REFS},
}


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Attributes:
        seq: Its number.
        prev: The digest of the record before it.
        op: A key of `OPS`.
        fields: What `OPS` lists for it.
    """

    seq: int
    prev: bytes
    op: str
    fields: dict[str, Any]

    def to_bytes(self) -> bytes:
        """The record as it is stored; its first `DIGEST_BYTES` are its digest."""
        if self.fields.keys() != OPS[self.op].keys():
            raise TypeError(f"journal op '{self.op}' has the fields {list(OPS[self.op])}, not {list(self.fields)}")
        packed = {name: kind.pack(self.fields[name]) for name, kind in OPS[self.op].items()}
        return seal(msgpack.packb({"v": VERSION, "seq": self.seq, "prev": self.prev, "op": self.op, **packed}))

    @classmethod
    def from_bytes(cls, data: bytes, seq: int) -> Record:
        """Reads a record.

        Args:
            data: Its bytes.
            seq: Which it was expected to be, for the message.

        Raises:
            CorruptDataError: Damaged, of another version, or no record.
        """
        body = unseal(data)
        if body is None:
            _refuse_other_version(data, seq)
            raise CorruptDataError(
                f"journal record {seq} cannot be read: its {len(data)} bytes do not agree with their digest."
            )
        try:
            held = msgpack.unpackb(body)
            if held["v"] != VERSION:
                _refuse_version(held["v"], seq)
            kinds = OPS[held["op"]]
            fields = {name: kind.unpack(_typed(held[name], kind)) for name, kind in kinds.items()}
            unknown = held.keys() - fields.keys() - {"v", "seq", "prev", "op"}
            if unknown:
                raise ValueError(f"it holds {min(unknown)!r}")
            return cls(held["seq"], held["prev"], held["op"], fields)
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, CorruptDataError):
                raise
            raise CorruptDataError(
                f"journal record {seq} cannot be read: {type(error).__name__}: {error}. Expected the fields of its op."
            ) from error


def seal(body: bytes) -> bytes:
    """Bytes behind their digest."""
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() + body


def unseal(data: bytes) -> bytes | None:
    """What `seal` was given, or None where the digest says that these are other bytes."""
    body = data[DIGEST_BYTES:]
    return body if body and seal(body) == data else None


def _typed(value: Any, kind: _Kind) -> Any:
    if not isinstance(value, kind.types):
        raise TypeError(f"a field is a {type(value).__name__}")
    return value


def _refuse_other_version(data: bytes, seq: int) -> None:
    """Versions before 3 began with a list whose first item is the version."""
    try:
        held = msgpack.unpackb(data, ext_hook=lambda code, content: content)
    except ValueError:
        return
    if isinstance(held, list) and held and isinstance(held[0], int):
        _refuse_version(held[0], seq)


def _refuse_version(version: Any, seq: int) -> None:
    raise CorruptDataError(
        f"journal record {seq} is of version {version}. Expected {VERSION}.", hint=_OTHER_VERSION_HINT
    )
