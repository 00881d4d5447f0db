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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import msgpack

from dataplane_core.capabilities import Capability, Scope
from dataplane_core.errors import (
    CorruptDataError,
    DataPlaneError,
    OperationTimeoutError,
    PluginSignatureError,
    UnsupportedOperationError,
)
from dataplane_core.fields import FieldSpec
from dataplane_core.ledger_backend import LEDGER_CAPABILITIES, LedgerService, RefsGoneError
from dataplane_core.row_store import RowStoreBackend

__all__ = ["BlobStore"]

_CAPABILITIES: Final = LEDGER_CAPABILITIES | {Capability.NO_PICKLE}
#: Calls that change nothing, and so are not recorded.
_READS: Final = frozenset({"describe", "locate", "consumed", "list_samples", "held_bytes"})
_SPEC_CODE: Final = 1
#: 2: a put that is refused is not recorded.
_VERSION: Final = 2
#: What `BlobStore.seconds_left` says outside an operation.
_NO_OPERATION_S: Final = 60.0


class BlobStore(RowStoreBackend):
    """The base class of a backend over plain blobs.

    A subclass overrides `put`, `get` and `delete`, and, to serve several processes, `append` and `read`; it connects in
    `start` and disconnects in `stop`. Its methods may be called from several threads at once, and end within
    `seconds_left`. What they raise, other than a `DataPlaneError`, reaches the user as a `BackendError`.

    Each process bounds its own puts by its own ``capacity_bytes``. Leases use the wall clock where there is a journal:
    hosts that share one keep their clocks together to well below the shortest lease.
    """

    capabilities: ClassVar[frozenset[Capability]] = _CAPABILITIES
    scope: ClassVar[Scope] = Scope.PROCESS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._journal = _Journal(self, self.config.capacity_bytes) if _has_journal(type(self)) else None
        self._service = LedgerService(self.config.capacity_bytes)
        self._deadlines = threading.local()

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
        """Adds a record to the journal under ``seq`` (0, 1, 2, ...), atomically; False if ``seq`` is taken.

        False is another's record under that number: the call is then judged anew and appended again. So a store that
        tries again by itself, after a reply was lost, looks whether the record that stands there is this one.
        """
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

    def seconds_left(self) -> float:
        """Seconds until the deadline of the operation that the calling thread carries out; never negative.

        For the methods above: a lock, a socket or a statement that they wait for gets this as its timeout, and where it
        runs out they raise `OperationTimeoutError`. Called outside an operation, as a test may call them: 60.
        """
        deadline: float | None = getattr(self._deadlines, "current", None)
        return _NO_OPERATION_S if deadline is None else max(0.0, deadline - time.monotonic())

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _ledger(self, deadline: float, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._journal is None:
            return self._service.call(method, *args, **kwargs)
        with self._until(deadline):
            return self._journal.call(deadline, method, args, kwargs)

    def _put_rows(self, handles: Sequence[int], buffer: bytearray, offsets: Any, deadline: float) -> None:
        bounds = offsets.tolist()
        view = memoryview(buffer)
        with self._until(deadline):
            self.put_many({_key(handle): bytes(view[bounds[i] : bounds[i + 1]]) for i, handle in enumerate(handles)})

    def _get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[bytes]:
        with self._until(deadline):
            found = self.get_many([_key(handle) for handle in handles])
        rows: list[bytes] = []
        for handle, row in zip(handles, found, strict=True):
            if row is None:
                raise RefsGoneError(f"blob {_key(handle)} is gone")
            rows.append(row)
        return rows

    def _delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        with self._until(deadline):
            self.delete_many([_key(handle) for handle in handles])

    @contextmanager
    def _until(self, deadline: float) -> Iterator[None]:
        """Says to the store's methods, in this thread, when the operation ends."""
        self._deadlines.current = deadline
        try:
            yield
        finally:
            self._deadlines.current = None


class _Journal:
    """Replays the store's journal through a ledger, and appends to it.

    What a process is set to, such as its bound on bytes, decides before a record is made; a replay knows nothing of it,
    so that every process comes to one state.
    """

    def __init__(self, store: BlobStore, capacity_bytes: int | None) -> None:
        self._store = store
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Nothing is replayed yet."""
        self._recorded_at = 0.0  # when the last record was made
        self._now = 0.0
        self._service = LedgerService(clock=lambda: self._now)
        self._next_seq = 0

    def call(self, deadline: float, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries a call out after all that the journal holds, and records it if it changes anything."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise OperationTimeoutError(
                f"{method}: other threads of this client waited for the store until the deadline. Nothing was written."
            )
        try:
            while True:
                self._catch_up()
                # for the question alone: a replay sees the times of its records and no others, as in every process
                self._now = max(self._recorded_at, time.time())
                if self._is_question(method, args, kwargs):
                    return self._ask(method, args, kwargs)
                record = _pack([_VERSION, self._now, method, list(args), kwargs])
                if self._store.append(self._next_seq, record):
                    # replayed from its recorded form, so that this process sees what the others will
                    return self._apply(record)
                if time.monotonic() >= deadline:
                    raise OperationTimeoutError(
                        f"{method}: other processes took every place in the journal until the deadline. Nothing was "
                        "written."
                    )
        finally:
            self._lock.release()

    def _is_question(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call changes nothing, and so is not recorded; a put that is refused is not recorded either."""
        if method == "claim":
            names = ("all_or_nothing", "tag_filter")
            return not self._ask("may_claim", args, {name: kwargs[name] for name in names})
        if method == "begin_put":
            partition_id, sample_ids, specs, row_bytes, _, epoch = args
            judged = (partition_id, sample_ids, specs, row_bytes, epoch)
            self._ask("check_put", judged, {"capacity_bytes": self._capacity_bytes})
        return method in _READS

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
                hint="Another dataplane-core wrote it: use that one, or begin a new store.",
            )
        with self._or_begin():
            self._next_seq += 1
            self._recorded_at = self._now = max(self._recorded_at, now)
            return self._service.call(method, *args, **kwargs)

    def _ask(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._or_begin():
            return self._service.call(method, *args, **kwargs)

    @contextmanager
    def _or_begin(self) -> Iterator[None]:
        """Where a call of the ledger breaks off in the middle, what it left is dropped: the next call replays anew."""
        try:
            yield
        except DataPlaneError:  # an answer: it changed nothing, or the same in every process
            raise
        except BaseException:
            self._begin()
            raise


def _has_journal(cls: type[BlobStore]) -> bool:
    own = [name for name in ("append", "read") if getattr(cls, name) is not getattr(BlobStore, name)]
    if len(own) == 1:
        lacking = "read" if own == ["append"] else "append"
        raise PluginSignatureError(
            f"{cls.__name__} overrides '{own[0]}' without '{lacking}'. Expected both, which keep a journal, or neither."
        )
    return bool(own)


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
