"""`BlobStore`: a whole backend on a store of bytes by key.

With only `put`, `get` and `delete`, the store serves one process. With `append` and `read` it serves many processes:
these two keep a journal, a sequence of numbered records. Every process replays it through the same deterministic
ledger, so all agree on what was written, claimed and acked. A process that starts later replays it from the beginning.
With `trim` the journal stays short: it then begins with a snapshot of the state.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from dataplane_core.backends.ledger_backend import LEDGER_CAPABILITIES, RefsGoneError
from dataplane_core.backends.row_store import RowStoreBackend
from dataplane_core.errors import PluginSignatureError, UnsupportedOperationError
from dataplane_core.journal import Journal, Shortener
from dataplane_core.ledger import Command, LedgerThread, Reply, commands
from dataplane_core.spec import Capability, Scope

_CAPABILITIES: Final = LEDGER_CAPABILITIES | {Capability.NO_PICKLE}
#: Commands that end an operation, so the journal may be shortened after them. A claim or a renewal is not one of them:
#: the time would be lost from the lease.
_LAST: Final = (commands.CommitPut, commands.PutTags, commands.AckRequest, commands.NackRequest, commands.Collected)
#: The fewest bytes of records that are worth a snapshot. Each process that opens the store replays them.
_TAIL_BYTES: Final = 1 << 16
#: What `BlobStore.seconds_left` returns outside an operation.
_NO_OPERATION_S: Final = 60.0


class BlobStore(RowStoreBackend):
    """The base class of a backend over plain blobs.

    A subclass overrides `put`, `get` and `delete`, and, to serve several processes, `append` and `read`. It connects in
    `start` and disconnects in `stop`. Its methods may be called from several threads at once, and must end within
    `seconds_left`. An exception other than a `DataPlaneError` reaches the user as a `BackendError`.

    Each process checks its own puts against its own ``capacity_bytes``.
    """

    capabilities: ClassVar[frozenset[Capability]] = _CAPABILITIES
    scope: ClassVar[Scope] = Scope.PROCESS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._journal = Journal(self, self.config.capacity_bytes) if _has_journal(type(self)) else None
        self._shortener: Shortener | None = None
        if self._journal is not None and type(self).trim is not BlobStore.trim:
            self._shortener = Shortener(self._journal, self, self._until, _TAIL_BYTES)
        self._service = None if self._journal is not None else LedgerThread(self.config.capacity_bytes)
        if self._service is not None:
            self._service.start()
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
        """Stores a blob under a key that was never used before. Returns when every process can read it.

        Args:
            key: ASCII letters and digits.
            data: May be empty.
        """

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Reads a blob. None if it does not exist."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Deletes a blob. Ignores a key that does not exist."""

    def append(self, seq: int, record: bytes) -> bool:
        """Adds a record to the journal under ``seq`` (0, 1, 2, ...), atomically; False if ``seq`` is or was taken.

        False means that another process appended a record with that number, which may have been trimmed since. The
        caller then checks its command again, and appends it under the next number. So a store that repeats an append
        after a lost reply must check whether the record under ``seq`` is its own. If the engine can tell that record
        ``seq - 1`` does not exist, it should also return False.
        """
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no journal.")

    def read(self, from_seq: int) -> Iterable[bytes]:
        """The journal's records from ``from_seq`` on, in order. Empty if there are no more.

        If the journal was trimmed beyond ``from_seq``, the records that are kept. None may be missing that was appended
        before the call, also if another process trims at the same time: a read that finds that a record has gone begins
        again. Called before every operation, most often for the newest record only.
        """
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no journal.")

    def trim(self, before_seq: int) -> None:
        """Drops the records below ``before_seq``. Optional.

        Core calls it once a snapshot of their state is stored as blobs. `read` of an earlier number then begins at
        ``before_seq``. A call for records that were already dropped changes nothing. Without this method the journal
        grows as long as the store is used, and opening the store takes longer and longer.
        """
        raise UnsupportedOperationError(f"{type(self).__name__} does not trim its journal.")

    def put_many(self, blobs: Mapping[str, bytes]) -> None:
        """Stores several blobs. Override it if the engine can do this faster than one by one."""
        for key, data in blobs.items():
            self.put(key, data)

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Reads several blobs, in order. Override it if the engine can do this faster than one by one."""
        return [self.get(key) for key in keys]

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes several blobs. Override it if the engine can do this faster than one by one."""
        for key in keys:
            self.delete(key)

    def seconds_left(self) -> float:
        """Seconds until the deadline of the operation that the calling thread runs. Never negative.

        The methods above use it as the timeout of locks, sockets or statements, and raise `OperationTimeoutError` when
        it runs out. Outside an operation, as in a test: 60.
        """
        deadline: float | None = getattr(self._deadlines, "current", None)
        return _NO_OPERATION_S if deadline is None else max(0.0, deadline - time.monotonic())

    # --- how it is done -----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the ledger. That of a class which overrides this ends when the backend is deleted."""
        if self._service is not None:
            self._service.stop()

    def call_ledger(self, deadline: float, command: Command[Reply]) -> Reply:
        if self._service is not None:
            return self._service.call(command)
        assert self._journal is not None
        with self._until(deadline):
            answer = self._journal.call(deadline, command)
        if self._shortener is not None and isinstance(command, _LAST):
            self._shortener.run(deadline)
        return answer

    def put_rows(self, handles: Sequence[int], buffer: memoryview, offsets: Any, deadline: float) -> None:
        bounds = offsets.tolist()
        with self._until(deadline):
            self.put_many({_key(handle): bytes(buffer[bounds[i] : bounds[i + 1]]) for i, handle in enumerate(handles)})

    def get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[bytes]:
        with self._until(deadline):
            found = self.get_many([_key(handle) for handle in handles])
        gone = [handle for handle, row in zip(handles, found, strict=True) if row is None]
        if gone:
            raise RefsGoneError(f"{len(gone)} blobs are gone, {_key(gone[0])} among them", handles=gone)
        return [row for row in found if row is not None]

    def delete_rows(self, handles: Sequence[int], deadline: float) -> None:
        with self._until(deadline):
            self.delete_many([_key(handle) for handle in handles])

    @contextmanager
    def _until(self, deadline: float) -> Iterator[None]:
        """Sets the deadline that `seconds_left` uses in this thread."""
        self._deadlines.current = deadline
        try:
            yield
        finally:
            self._deadlines.current = None


def _has_journal(cls: type[BlobStore]) -> bool:
    own = [name for name in ("append", "read") if getattr(cls, name) is not getattr(BlobStore, name)]
    if len(own) == 1:
        lacking = "read" if own == ["append"] else "append"
        raise PluginSignatureError(
            f"{cls.__name__} overrides '{own[0]}' without '{lacking}'. Expected both, which keep a journal, or neither."
        )
    return bool(own)


def _key(handle: int) -> str:
    return f"row{handle:x}"
