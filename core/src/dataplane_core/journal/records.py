"""The records of a `BlobStore`'s journal, and their format.

A record is a digest of 16 bytes, followed by a msgpack map. Every map holds

    v       the version of this format
    seq     the record's number: 0, 1, 2, ...
    prev    the digest of the record before it; empty in record 0
    op      what was done: a command of the ledger, or of the journal itself (`OPS`), with its fields

So the records are a chain: a record that is damaged, missing, swapped or from another journal is detected. No record
holds a time: an ``expire`` record ends a lease (see `dataplane_core.journal.journal`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec

from dataplane_core.errors import CorruptDataError
from dataplane_core.ledger import (
    Command,
    Ref,
    check_command,
    commands,
    pack_refs,
    pack_write_id,
    pack_writes,
    unpack_refs,
    unpack_write_id,
    unpack_writes,
)
from dataplane_core.packed import pack_msgpack, unpack_msgpack
from dataplane_core.spec import FieldSpec

#: The version of the format.
VERSION: Final = 11
#: Length of a digest.
DIGEST_BYTES: Final = 16
_OTHER_VERSION_HINT: Final = "Another dataplane-core wrote it: use that one, or begin a new store."


@dataclass(frozen=True, slots=True)
class Begin(Command[None]):
    """Record 0: the id of this store, drawn at random."""

    op = "begin"
    store: str


@dataclass(frozen=True, slots=True)
class Plan(Command[None]):
    """A process begins to write this snapshot, or keeps others from writing one."""

    op = "plan"
    snapshot: str


@dataclass(frozen=True, slots=True)
class Snapshot(Command[None]):
    """A process has written a snapshot: the state after all records before this one.

    Attributes:
        store: The id of this store.
        snapshot: The id of the snapshot.
        chunks: Its number of chunks.
        nbytes: Its size.
        digest: The digest over its chunks.
        records: The last of the records that were made while it was written.
        garbage: Earlier snapshots, each with its number of chunks, or None if unknown.
    """

    op = "snapshot"
    store: str
    snapshot: str
    chunks: int
    nbytes: int
    digest: bytes
    records: Sequence[bytes]
    garbage: Sequence[tuple[str, int | None]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The type of a field on disk, and its conversion to msgpack's types and back."""

    form: Any
    pack: Callable[[Any], Any] = lambda value: value
    unpack: Callable[[Any], Any] = lambda value: value


#: Type of a field -> its form on disk. A type that is not listed is stored as it is.
_KINDS: Final[Mapping[Any, _Kind]] = {
    # a journal always draws write ids, so they are never None
    **dict.fromkeys((commands.WriteId, commands.WriteId | None), _Kind(bytes, pack_write_id, unpack_write_id)),
    Sequence[commands.WriteId]: _Kind(
        Sequence[bytes], lambda ids: list(map(pack_write_id, ids)), lambda data: list(map(unpack_write_id, data))
    ),
    Sequence[Ref]: _Kind(Sequence[tuple[bytes, Sequence[int]]], pack_refs, unpack_refs),
    Sequence[commands.Write]: _Kind(
        Sequence[tuple[Sequence[str], Sequence[int], Sequence[int] | None]], pack_writes, unpack_writes
    ),
    Mapping[str, FieldSpec]: _Kind(
        Mapping[str, str],
        lambda specs: {name: spec.to_text() for name, spec in specs.items()},
        lambda packed: {name: FieldSpec.from_text(text) for name, text in packed.items()},
    ),
}
#: How a type that is not listed becomes one of msgpack's.
_PACK: Final[Mapping[Any, Callable[[Any], Any]]] = {Sequence: list, Mapping: dict}


def _kind(hint: Any) -> _Kind:
    if hint in _KINDS:
        return _KINDS[hint]
    if get_origin(hint) in (Union, UnionType):
        some = _kind(get_args(hint)[0])
        return _Kind(hint, lambda value: None if value is None else some.pack(value))
    return _Kind(hint, _PACK.get(get_origin(hint), lambda value: value))


def _kinds(command: Any) -> Mapping[str, _Kind]:
    hints = get_type_hints(command, include_extras=True)
    return {each.name: _kind(hints[each.name]) for each in fields(command) if each.name not in command.not_recorded}


_ALL: Final[tuple[type[Command[Any]], ...]] = (Begin, Plan, Snapshot, *commands.COMMANDS)
_CLASSES: Final = {each.op: each for each in _ALL if not each.reads}
#: Op -> the fields that a record of it holds, in order.
OPS: Final[Mapping[str, Mapping[str, _Kind]]] = {op: _kinds(each) for op, each in _CLASSES.items()}
#: Op -> the form of a whole record of it.
_FORMS: Final[Mapping[str, Any]] = {
    op: msgspec.defstruct(
        op,
        [("v", int), ("seq", int), ("prev", bytes), ("op", str), *((name, kind.form) for name, kind in kinds.items())],
        forbid_unknown_fields=True,
    )
    for op, kinds in OPS.items()
}


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Attributes:
        seq: Its number.
        prev: The digest of the record before it.
        command: What was done.
    """

    seq: int
    prev: bytes
    command: Command[Any]

    def to_bytes(self) -> bytes:
        """The record as it is stored. Its first `DIGEST_BYTES` are its digest."""
        op = self.command.op
        packed = {name: kind.pack(getattr(self.command, name)) for name, kind in OPS[op].items()}
        return seal(pack_msgpack({"v": VERSION, "seq": self.seq, "prev": self.prev, "op": op, **packed}))

    @classmethod
    def from_bytes(cls, data: bytes, seq: int) -> Record:
        """Reads a record.

        Args:
            data: Its bytes.
            seq: Its expected number, for the message.

        Raises:
            CorruptDataError: The bytes are damaged, of another version, or no record.
        """
        body = unseal(data)
        if body is None:
            raise CorruptDataError(
                f"journal record {seq} cannot be read: its {len(data)} bytes do not agree with their digest."
            )
        try:
            held = unpack_msgpack(body)
            version = held["v"]
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(seq, error) from error
        if version != VERSION:
            raise CorruptDataError(
                f"journal record {seq} is of version {version}. Expected {VERSION}.", hint=_OTHER_VERSION_HINT
            )
        try:
            form = msgspec.convert(held, _FORMS[held["op"]], builtin_types=(bytes,))
            known = {name: kind.unpack(getattr(form, name)) for name, kind in OPS[held["op"]].items()}
            command = _CLASSES[held["op"]](**known)
            check_command(command)
            return cls(form.seq, form.prev, command)
        except (msgspec.ValidationError, ValueError, TypeError, KeyError) as error:
            raise _unreadable(seq, error) from error


def _unreadable(seq: int, error: Exception) -> CorruptDataError:
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return CorruptDataError(f"journal record {seq} cannot be read: {reason}. Expected the fields of its op.")


def seal(body: bytes) -> bytes:
    """The digest of some bytes, followed by the bytes."""
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() + body


def unseal(data: bytes) -> bytes | None:
    """The bytes that `seal` was given, or None if they do not agree with the digest."""
    body = data[DIGEST_BYTES:]
    return body if body and seal(body) == data else None
