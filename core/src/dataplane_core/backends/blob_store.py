"""`BlobStore`: a whole backend from a store of bytes by key.

With `put`, `get` and `delete` alone the store serves one process. With `append` and `read` it serves many: they keep a
journal, a sequence of records in which each number is taken once. Every process replays it through the same
deterministic ledger, so all agree on what was written, claimed and acked; a process that starts later, or again,
replays it from the beginning. With `trim` the journal stays short: it then begins with a snapshot of the state.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from dataplane_core.backends.journal import Journal
from dataplane_core.backends.journal_shortening import Shortener
from dataplane_core.backends.ledger_backend import LEDGER_CAPABILITIES, RefsGoneError
from dataplane_core.backends.row_store import RowStoreBackend
from dataplane_core.errors import PluginSignatureError, UnsupportedOperationError
from dataplane_core.ledger import Command, LedgerService, Reply, commands
from dataplane_core.spec import Capability, Scope

__all__ = ["BlobStore"]

_CAPABILITIES: Final = LEDGER_CAPABILITIES | {Capability.NO_PICKLE}
#: The last commands of operations: what is done after one takes no time from the rest of its operation. Not a claim or
#: a renewal, where it would take from the lease.
_LAST: Final = (commands.CommitPut, commands.PutTags, commands.Ack, commands.Nack, commands.Collected)
#: What `BlobStore.seconds_left` says outside an operation.
_NO_OPERATION_S: Final = 60.0


class BlobStore(RowStoreBackend):
    """The base class of a backend over plain blobs.

    A subclass overrides `put`, `get` and `delete`, and, to serve several processes, `append` and `read`; it connects in
    `start` and disconnects in `stop`. Its methods may be called from several threads at once, and end within
    `seconds_left`. What they raise, other than a `DataPlaneError`, reaches the user as a `BackendError`.

    Each process bounds its own puts by its own ``capacity_bytes``.
    """

    capabilities: ClassVar[frozenset[Capability]] = _CAPABILITIES
    scope: ClassVar[Scope] = Scope.PROCESS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._journal = Journal(self, self.config.capacity_bytes) if _has_journal(type(self)) else None
        self._shortener: Shortener | None = None
        if self._journal is not None and type(self).trim is not BlobStore.trim:
            self._shortener = Shortener(self._journal, self, self._until)
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
        """Adds a record to the journal under ``seq`` (0, 1, 2, ...), atomically; False if ``seq`` is or was taken.

        False is another's record under that number, perhaps one that was trimmed since: the call is then judged anew
        and appended again. So a store that tries again by itself, after a reply was lost, looks whether the record that
        stands there is this one. An engine that can tell also says False where record ``seq - 1`` is not there.
        """
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no journal.")

    def read(self, from_seq: int) -> Iterable[bytes]:
        """The journal's records from ``from_seq`` on, in order; none where there are no more.

        Of a journal that was trimmed beyond ``from_seq``: those that are kept. Called before every operation, most
        often for the newest record alone.
        """
        raise UnsupportedOperationError(f"{type(self).__name__} keeps no journal.")

    def trim(self, before_seq: int) -> None:
        """Drops the records below ``before_seq``; optional, with `append` and `read`.

        A snapshot of what they led to was stored, as blobs; `read` of an earlier number then begins at ``before_seq``.
        Asked again, or for a number below which the journal was trimmed already, it changes nothing.
        Without this method the journal grows for as long as the store is used, and opening it takes longer and longer.
        """
        raise UnsupportedOperationError(f"{type(self).__name__} does not trim its journal.")

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

    def _ledger(self, deadline: float, command: Command[Reply]) -> Reply:
        if self._journal is None:
            return self._service.call(command)
        with self._until(deadline):
            answer = self._journal.call(deadline, command)
        if self._shortener is not None and isinstance(command, _LAST):
            self._shortener.run(deadline)
        return answer

    def _put_rows(self, handles: Sequence[int], buffer: bytearray, offsets: Any, deadline: float) -> None:
        bounds = offsets.tolist()
        view = memoryview(buffer)
        with self._until(deadline):
            self.put_many({_key(handle): bytes(view[bounds[i] : bounds[i + 1]]) for i, handle in enumerate(handles)})

    def _get_rows(self, handles: Sequence[int], deadline: float) -> Sequence[bytes]:
        with self._until(deadline):
            found = self.get_many([_key(handle) for handle in handles])
        gone = [handle for handle, row in zip(handles, found, strict=True) if row is None]
        if gone:
            raise RefsGoneError(f"{len(gone)} blobs are gone, {_key(gone[0])} among them", handles=gone)
        return [row for row in found if row is not None]

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
