"""Helpers for the tests of a `BlobStore`'s own methods: new keys, the keys that a put used, what its journal holds."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dataplane_core.backends import Backend, BlobStore
from dataplane_core.errors import preview
from dataplane_core.journal import Record


def new_keys(count: int) -> list[str]:
    """Keys that nobody has used, of ASCII letters and digits like core's own keys."""
    prefix = f"kit{uuid.uuid4().hex}k"
    return [f"{prefix}{number}" for number in range(count)]


def of_all(some: Sequence[str], everything: Collection[str]) -> str:
    """Text such as "3 of 10 blobs", with the first few names."""
    return f"{len(some)} of {len(everything)} blobs ({preview(some)})"


@contextmanager
def recorded_keys(backend: BlobStore) -> Iterator[set[str]]:
    """Yields the set of keys that ``put`` or ``put_many`` stores in the block."""
    keys: set[str] = set()
    put, put_many = backend.put, backend.put_many

    def recording_put(key: str, data: bytes) -> None:
        keys.add(key)
        put(key, data)

    def recording_put_many(blobs: Mapping[str, bytes]) -> None:
        keys.update(blobs)
        put_many(blobs)

    own = vars(backend)
    own["put"], own["put_many"] = recording_put, recording_put_many
    try:
        yield keys
    finally:
        del own["put"], own["put_many"]


def journal_state(backend: Backend) -> str:
    """A paragraph that says what ``read`` of a `BlobStore` returns now; empty for a backend without a journal."""
    if not isinstance(backend, BlobStore) or type(backend).read is BlobStore.read:
        return ""
    try:
        records = [Record.from_bytes(bytes(data), 0) for data in backend.read(0)]
    except Exception as error:
        return f"\n\nThe journal cannot be read: {type(error).__name__}: {error}"
    if not records:
        return "\n\nThe journal: read(0) returns no records."
    first, last = (f"{each.seq} ({each.command.op})" for each in (records[0], records[-1]))
    return (
        f"\n\nThe journal: read(0) returns {len(records)} records now, from {first} to {last}. A client that found no "
        "partition, or took the store for another one, got other records from read."
    )
