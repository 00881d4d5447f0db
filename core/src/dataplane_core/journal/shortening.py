"""Keeps a journal short: a process that finds that it has grown writes a snapshot, and trims the earlier records.

1. It appends a ``plan`` record, so that no other process begins too.
2. It packs the state while its own calls wait, and writes it chunk by chunk while they run again.
3. It writes the records that were made since as another chunk. It appends the ``snapshot`` record, with the last ones.
4. It trims the records before that, and then deletes the blobs of the earlier snapshot.

A crash leaves the journal as it was, or a shorter one. A plan that is not finished is ignored after a while, and its
blobs are deleted with a later snapshot. A new snapshot is due when the records since the last one reach a share of its
size. So opening a store reads its state and at most about that share of records, and the work for snapshots is
proportional to the records made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Protocol

from dataplane_core.errors import OperationTimeoutError
from dataplane_core.journal.journal import Journal, JournalStore, Snapshots
from dataplane_core.journal.records import Plan, Snapshot
from dataplane_core.journal.snapshot import Chunks, chunk_key, pack_chunks
from dataplane_core.spec import new_id

_log = logging.getLogger(__name__)

#: A snapshot is due when the records since the last one exceed both some bytes and this share of its size.
_TAIL_SHARE: Final = 0.25
#: The ``snapshot`` record holds up to this many bytes of records that others made while the snapshot was written. More
#: are written as a chunk first. That takes time, in which others take the next number in the journal.
_RECORDS_BYTES: Final = 1 << 16
#: A plan is ignored when the records since then are enough for this many snapshots.
_PATIENCE: Final = 2


class ShorteningStore(JournalStore, Protocol):
    """The methods of a store that shortening needs; see `BlobStore`."""

    def put(self, key: str, data: bytes) -> None: ...
    def delete(self, key: str) -> None: ...
    def trim(self, before_seq: int) -> None: ...


class _GivenUpError(Exception):
    """Another process writes a snapshot, or the state of this process was dropped."""


class Shortener:
    """Shortens a journal, on behalf of one process. Safe for threads.

    Args:
        journal: The journal.
        store: Its store.
        until: Sets the deadline of the store's methods in this thread.
        tail_bytes: The fewest bytes of records that are worth a snapshot.
    """

    def __init__(
        self,
        journal: Journal,
        store: ShorteningStore,
        until: Callable[[float], AbstractContextManager[None]],
        tail_bytes: int,
    ) -> None:
        self._journal = journal
        self._store = store
        self._until = until
        self._busy = threading.Lock()
        self._again_at = 0  # after a failure: the size of the tail at which to try again
        self._failed_behind: tuple[str, int] | None = None  # the newest snapshot then; `_again_at` is for it
        self._tail_bytes = tail_bytes
        self._step = tail_bytes  # tail growth until the next try; doubled after a failure
        self._mine: str | None = None  # a plan of this process that it did not finish

    def run(self, deadline: float) -> None:
        """Shortens the journal if it is due, in at most half of the time left. Logs a failure and tries again later."""
        if not self.is_due() or not self._busy.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            deadline = now + (deadline - now) / 2
            with self._until(deadline):
                self._shorten(deadline)
            self._step = self._tail_bytes
        except _GivenUpError:
            pass
        except Exception as error:  # the operation itself is done, and must not fail
            known = self._journal.snapshots
            self._again_at, self._failed_behind = known.tail_nbytes + self._step, known.current
            self._step *= 2
            _log.warning("the journal could not be shortened, and goes on growing until the next try: %r", error)
        finally:
            self._journal.tail = None
            self._busy.release()

    def is_due(self) -> bool:
        """Whether `run` would do something, unless another thread does it."""
        known = self._journal.snapshots
        worth = max(self._tail_bytes, _TAIL_SHARE * known.nbytes)
        if known.tail_nbytes < max(worth, self._again_at if known.current == self._failed_behind else 0):
            return False
        if known.plan is None or known.plan == self._mine:
            return True
        return known.tail_nbytes - known.planned_nbytes >= _PATIENCE * worth

    def _shorten(self, deadline: float) -> None:
        journal = self._journal
        snapshot = new_id()
        with journal.held(deadline, "snapshot"):
            journal.catch_up(deadline)
            if not self.is_due() or not journal.append(Plan(snapshot)):
                raise _GivenUpError
            self._again_at = 0
            self._mine = snapshot
            known = journal.snapshots
            packed = list(_until_deadline(pack_chunks(journal.sections()), deadline))
            journal.tail = []
        self._clear_away(known)
        chunks = Chunks()
        for chunk in packed:
            self._put(snapshot, chunks, chunk)
        self._record(snapshot, chunks, deadline)
        self._mine = None
        self._clear_away(journal.snapshots)

    def _clear_away(self, known: Snapshots) -> None:
        """Trims the records before the newest snapshot, then deletes earlier snapshots: no record names them now."""
        if not known.garbage:
            return
        self._store.trim(known.seq)
        for earlier, count in known.garbage:
            self._delete(earlier, count)
        known.garbage = []

    def _record(self, snapshot: str, chunks: Chunks, deadline: float) -> None:
        """Appends the ``snapshot`` record, with the records that others appended while it was written."""
        journal = self._journal
        while True:
            with journal.held(deadline, "snapshot"):
                journal.catch_up(deadline)
                known = journal.snapshots
                if known.plan != snapshot or journal.tail is None:
                    break
                if sum(map(len, journal.tail)) > _RECORDS_BYTES:
                    (chunk,) = pack_chunks([{"part": "records", "records": journal.tail}])
                    self._put(snapshot, chunks, chunk)
                    journal.tail = []
                earlier: list[tuple[str, int | None]] = [] if known.current is None else [known.current]
                garbage = [*earlier, *((each, None) for each in known.given_up)]
                record = (chunks.count, chunks.nbytes, chunks.digest, list(journal.tail), garbage)
                if journal.append(Snapshot(journal.store_id, snapshot, *record)):
                    return
            if time.monotonic() >= deadline:
                raise OperationTimeoutError("others took every place in the journal until the deadline")
        self._delete(snapshot, chunks.count)
        raise _GivenUpError

    def _put(self, snapshot: str, chunks: Chunks, chunk: bytes) -> None:
        self._store.put(chunk_key(snapshot, chunks.add(chunk)), chunk)

    def _delete(self, snapshot: str, count: int | None) -> None:
        """Deletes a snapshot's blobs, the last first: after a crash, a later call finds the rest from the first one."""
        if count is None:
            count = 0
            while self._store.get(chunk_key(snapshot, count)) is not None:
                count += 1
        for index in reversed(range(count)):
            self._store.delete(chunk_key(snapshot, index))


def _until_deadline(chunks: Iterator[bytes], deadline: float) -> Iterator[bytes]:
    for chunk in chunks:
        if time.monotonic() >= deadline:
            raise OperationTimeoutError("the state could not be packed in time")
        yield chunk
