"""Snapshots of a journal: the state after some record, so that earlier records can be dropped.

A snapshot is stored as chunks, blobs of limited size. A chunk is a digest of 16 bytes, followed by msgpack maps. The
maps of all chunks are a head, the sections of `dataplane_core.ledger.state`, and at the end the records that were
made while the snapshot was written:

    head        v, store, seq (the state is that before record ``seq``), prev (the digest of the record before it)
    records     records from ``seq`` on, as in the journal

The record that names the snapshot holds the digest over the digests of all chunks, and the last such records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from dataplane_core.errors import CorruptDataError
from dataplane_core.journal.records import DIGEST_BYTES, VERSION, seal, unseal
from dataplane_core.packed import unpack_msgpack_stream

#: The approximate size of a chunk. A single larger section makes a larger chunk.
_CHUNK_BYTES: Final = 1 << 20


class ChunkGoneError(CorruptDataError):
    """A chunk does not exist: a newer snapshot replaced this one, or the chunk was lost."""


def chunk_key(snapshot: str, index: int) -> str:
    """The key of a chunk's blob."""
    return f"snap{snapshot}x{index:x}"


def head(store: str, seq: int, prev: bytes) -> dict[str, Any]:
    """The first section of a snapshot."""
    return {"part": "head", "v": VERSION, "store": store, "seq": seq, "prev": prev}


@dataclass(slots=True)
class Chunks:
    """The chunks of a snapshot written or read so far: their number, their bytes and the digest over them."""

    count: int = 0
    nbytes: int = 0
    _digests: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))

    @property
    def digest(self) -> bytes:
        """The digest of the digests of all chunks so far."""
        digest: bytes = self._digests.digest()
        return digest

    def add(self, chunk: bytes) -> int:
        """Adds a chunk. Returns its index."""
        self._digests.update(chunk[:DIGEST_BYTES])
        self.nbytes += len(chunk)
        self.count += 1
        return self.count - 1


def pack_chunks(sections: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Packs sections into chunks."""
    packer = msgpack.Packer()
    body = bytearray()
    for section in sections:
        body += packer.pack(section)
        if len(body) >= _CHUNK_BYTES:
            yield seal(bytes(body))
            body.clear()
    if body:
        yield seal(bytes(body))


@dataclass(slots=True)
class SnapshotReader:
    """Reads a snapshot chunk by chunk, each one checked before it is used.

    Attributes:
        snapshot: The id of the snapshot.
        count: Its number of chunks.
        digest: The digest over all chunks.
    """

    snapshot: str
    count: int
    digest: bytes
    _read: Chunks = field(default_factory=Chunks)

    @property
    def num_read(self) -> int:
        """How many chunks were read."""
        return self._read.count

    def next_chunk(self, get: Callable[[str], bytes | None]) -> Iterator[dict[str, Any]]:
        """The sections of the next chunk. If it raises, the next call reads the same chunk again.

        Args:
            get: Reads a blob.

        Raises:
            ChunkGoneError: The chunk does not exist.
            CorruptDataError: It is damaged, or belongs to another snapshot.
        """
        key = chunk_key(self.snapshot, self.num_read)
        chunk = get(key)
        if chunk is None:
            raise ChunkGoneError(f"blob {key} of a snapshot of the journal is gone.")
        body = unseal(chunk)
        if body is None:
            raise CorruptDataError(f"blob {key} of a snapshot of the journal does not agree with its digest.")
        self._read.add(chunk)
        if self.num_read == self.count and self._read.digest != self.digest:
            raise CorruptDataError(f"the blobs of snapshot {self.snapshot} are not those that the journal names.")
        return unpack_msgpack_stream(body)
