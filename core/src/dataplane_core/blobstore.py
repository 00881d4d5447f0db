"""`BlobStore`: a whole backend from a store of bytes by key.

With `put`, `get` and `delete` alone the store serves one process. With `append` and `read` it serves many: they keep a
journal, a sequence of records in which each number is taken once. Every process replays it through the same
deterministic ledger, so all agree on what was written, claimed and acked; a process that starts later, or again,
replays it from the beginning.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgpack

from dataplane_core.capabilities import Capability, Scope
from dataplane_core.errors import CorruptDataError, DataPlaneError, OperationTimeoutError, UnsupportedOperationError
from dataplane_core.fields import FieldSpec
from dataplane_core.ledger_backend import LEDGER_CAPABILITIES, LedgerService, RefsGoneError
from dataplane_core.row_store import RowStoreBackend

__all__ = ["BlobStore"]

_CAPABILITIES: Final = LEDGER_CAPABILITIES | {Capability.NO_PICKLE}
#: Calls that change nothing, and so are not recorded.
_READS: Final = frozenset({"describe", "locate", "consumed", "list_samples", "held_bytes"})
_SPEC_CODE: Final = 1
_VERSION: Final = 1


class BlobStore(RowStoreBackend):
    """The base class of a backend over plain blobs.

    A subclass overrides `put`, `get` and `delete`, and, to serve several processes, `append` and `read`; it connects in
    `start` and disconnects in `stop`. Its methods may be called from several threads at once. What they raise, other
    than a `DataPlaneError`, reaches the user as a `BackendError`.

    Leases use the wall clock where there is a journal: hosts that share one keep their clocks together to well below
    the shortest lease.
    """

    capabilities: ClassVar[frozenset[Capability]] = _CAPABILITIES
    scope: ClassVar[Scope] = Scope.PROCESS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._journal = _Journal(self, self.config.capacity_bytes) if _has_journal(type(self)) else None
        self._service = LedgerService(self.config.capacity_bytes)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if _has_journal(cls):
            if "scope" not in cls.__dict__ and cls.scope is Scope.PROCESS:
                cls.scope = Scope.HOST
            if "capabilities" not in cls.__dict__ and cls.capabilities == _CAPABILITIES:
                cls.capabilities = _CAPABILITIES | {Capability.DURABLE}

    # --- what a storage author supplies -------------------------------------------------------------------------------

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Stores a blob under a key that was never used before; returns when every process can read it.

        Args:
            key: ASCII letters and digits.
            data: May be empty.
        """

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Reads a blob; None where it is not there."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Deletes a blob; a key that is not there is ignored."""

    def append(self, seq: int, record: bytes) -> bool:
        """Adds a record to the journal under ``seq`` (0, 1, 2, ...), atomically; False if ``seq`` is taken."""
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no journal.")

    def read(self, from_seq: int) -> Iterable[bytes]:
        """The journal's records from ``from_seq`` on, in order; none where there are no more."""
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no journal.")

    def put_many(self, blobs: Mapping[str, bytes]) -> None:
        """Stores several blobs; override it where the engine does better than one at a time."""
        for key, data in blobs.items():
            self.put(key, data)

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Reads several blobs, in order; override it where the engine does better than one at a time."""
        return [self.get(key) for key in keys]

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes several blobs; override it where the engine does better than one at a time."""
        for key in keys:
            self.delete(key)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _ledger(self, deadline: float, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._journal is None:
            return self._service.call(method, *args, **kwargs)
        return self._journal.call(deadline, method, args, kwargs)

    def _put_rows(self, handles: Sequence[int], buffer: bytearray, offsets: Any, deadline: float) -> None:
        bounds = offsets.tolist()
        view = memoryview(buffer)
        self.put_many({_key(handle): bytes(view[bounds[i] : bounds[i + 1]]) for i, handle in enumerate(handles)})

    def _get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[bytes]:
        rows: list[bytes] = []
        for handle, row in zip(handles, self.get_many([_key(handle) for handle in handles]), strict=True):
            if row is None:
                raise RefsGoneError(f"blob {_key(handle)} is gone")
            rows.append(row)
        return rows

    def _delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        self.delete_many([_key(handle) for handle in handles])


class _Journal:
    """Replays the store's journal through a ledger, and appends to it."""

    def __init__(self, store: BlobStore, capacity_bytes: int | None) -> None:
        self._store = store
        self._recorded_at = 0.0  # when the last record was made
        self._now = 0.0
        self._service = LedgerService(capacity_bytes, clock=lambda: self._now)
        self._next_seq = 0
        self._lock = threading.Lock()

    def call(self, deadline: float, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries a call out after all that the journal holds, and records it if it changes anything."""
        with self._lock:
            while True:
                self._catch_up()
                # for the question alone: a replay sees the times of its records and no others, as in every process
                self._now = max(self._recorded_at, time.time())
                if method in _READS or (method == "claim" and not self._may_claim(args, kwargs)):
                    return self._service.call(method, *args, **kwargs)
                record = _pack([_VERSION, self._now, method, list(args), kwargs])
                if self._store.append(self._next_seq, record):
                    # replayed from its recorded form, so that this process sees what the others will
                    return self._apply(record)
                if time.monotonic() >= deadline:
                    raise OperationTimeoutError(
                        f"{method}: other processes took every place in the journal until the deadline. Nothing was "
                        "written."
                    )

    def _may_claim(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        names = ("all_or_nothing", "tag_filter")
        answer: bool = self._service.call("may_claim", *args, **{name: kwargs[name] for name in names})
        return answer

    def _catch_up(self) -> None:
        for record in self._store.read(self._next_seq):
            try:
                self._apply(record)
            except DataPlaneError as error:
                if isinstance(error, CorruptDataError):
                    raise
                # refused, the same way in every process: it changed nothing

    def _apply(self, record: bytes) -> Any:
        try:
            version, now, method, args, kwargs = _unpack(record)
        except ValueError as error:
            raise CorruptDataError(f"journal record {self._next_seq} cannot be read: {error}") from error
        if version != _VERSION:
            raise CorruptDataError(
                f"journal record {self._next_seq} is of version {version}. Expected {_VERSION}.",
                hint="A newer dataplane-core wrote it; upgrade this one.",
            )
        self._next_seq += 1
        self._recorded_at = self._now = max(self._recorded_at, now)
        return self._service.call(method, *args, **kwargs)


def _has_journal(cls: type[BlobStore]) -> bool:
    return cls.append is not BlobStore.append and cls.read is not BlobStore.read


def _key(handle: int) -> str:
    return f"row{handle}"


def _pack(record: list[Any]) -> bytes:
    def spec(value: Any) -> msgpack.ExtType:
        if isinstance(value, FieldSpec):
            return msgpack.ExtType(_SPEC_CODE, value.to_text().encode())
        raise TypeError(f"{type(value).__name__} does not belong in a journal record")

    packed: bytes = msgpack.packb(record, default=spec)
    return packed


def _unpack(record: bytes) -> list[Any]:
    def spec(code: int, data: bytes) -> Any:
        if code != _SPEC_CODE:
            raise ValueError(f"unknown code {code}")
        return FieldSpec.from_text(data.decode())

    unpacked: list[Any] = msgpack.unpackb(record, ext_hook=spec)
    return unpacked
