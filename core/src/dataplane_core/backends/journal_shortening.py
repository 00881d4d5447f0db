"""Keeps a journal short: whoever notices that it has grown writes a snapshot, and trims what lies before.

1. A ``plan`` record says who begins, so that the others need not.
2. The state is packed while this process's calls wait, and written, chunk by chunk, while they go on.
3. What was recorded meanwhile is written behind it; the ``snapshot`` record takes the next number, and holds the rest.
4. The records before it are trimmed, and then the blobs of the earlier snapshot deleted.

A crash leaves the journal as it was, or a shorter one. A plan of which nothing is heard is given up after a while, and
what it left is deleted with a later snapshot. A new snapshot is due when the records since the last one are worth a
share of it: so opening a store reads its state and that share of records, and the work of snapshots grows with the
records that are made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Protocol

from dataplane_core.backends.journal import Journal, JournalStore, Snapshots
from dataplane_core.backends.journal_records import Plan, Snapshot
from dataplane_core.backends.snapshot import Chunks, chunk_key, pack_chunks
from dataplane_core.errors import OperationTimeoutError
from dataplane_core.spec import new_id

__all__ = ["Shortener", "ShorteningStore"]

_log = logging.getLogger(__name__)

#: A journal is left alone up to this many bytes since its snapshot, and up to this share of the snapshot's size.
_TAIL_BYTES: Final = 1 << 16
_TAIL_SHARE: Final = 0.25
#: What others recorded while a snapshot was written stands in its record, up to this many bytes; more goes into a chunk
#: first. Writing a chunk takes time, in which others take the next place in the journal; writing the record alone does
#: not.
_RECORDS_BYTES: Final = 1 << 16
#: A planned snapshot counts as given up when the records since its plan would be worth this many snapshots.
_PATIENCE: Final = 2


class ShorteningStore(JournalStore, Protocol):
    """What shortening needs of a store; see `BlobStore`."""

    def put(self, key: str, data: bytes) -> None: ...
    def delete(self, key: str) -> None: ...
    def trim(self, before_seq: int) -> None: ...


class _GivenUpError(Exception):
    """Another process took over, or what this process had replayed was dropped."""


class Shortener:
    """Shortens one process's view of a journal; safe for threads.

    Args:
        journal: The journal.
        store: Its store.
        until: Tells the store, for this thread, the deadline of what it is asked inside.
    """

    def __init__(
        self, journal: Journal, store: ShorteningStore, until: Callable[[float], AbstractContextManager[None]]
    ) -> None:
        self._journal = journal
        self._store = store
        self._until = until
        self._busy = threading.Lock()
        self._again_at = 0  # after a failure: the size of the tail at which to try again
        self._failed_behind: tuple[str, int] | None = None  # the newest snapshot then; behind another, that is void
        self._step = _TAIL_BYTES  # what the tail grows by until then: twice as much after each failure
        self._mine: str | None = None  # the plan of this process, which it no longer writes

    def run(self, deadline: float) -> None:
        """Shortens the journal if it is time, in at most half of what is left; a failure is logged and tried again."""
        if not self._is_due() or not self._busy.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            deadline = now + (deadline - now) / 2
            with self._until(deadline):
                self._shorten(deadline)
            self._step = _TAIL_BYTES
        except _GivenUpError:
            pass
        except Exception as error:  # the call that came before is done: its caller gets its answer
            known = self._journal.snapshots
            self._again_at, self._failed_behind = known.tail_nbytes + self._step, known.current
            self._step *= 2
            _log.warning("the journal could not be shortened, and goes on growing until the next try: %r", error)
        finally:
            self._journal.tail = None
            self._busy.release()

    def _is_due(self) -> bool:
        known = self._journal.snapshots
        worth = max(_TAIL_BYTES, _TAIL_SHARE * known.nbytes)
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
            if not self._is_due() or not journal.append(Plan(snapshot)):
                raise _GivenUpError
            self._again_at = 0
            self._mine = snapshot
            known = journal.snapshots
            packed = list(_checked(pack_chunks(journal.sections()), deadline))
            journal.tail = []
        self._clear_away(known)
        chunks = Chunks()
        for chunk in packed:
            self._put(snapshot, chunks, chunk)
        self._record(snapshot, chunks, deadline)
        self._mine = None
        self._clear_away(journal.snapshots)

    def _clear_away(self, known: Snapshots) -> None:
        """Trims what lies before the newest snapshot, and then deletes earlier ones: no record left names them."""
        if not known.garbage:
            return
        self._store.trim(known.seq)
        for earlier, count in known.garbage:
            self._delete(earlier, count)
        known.garbage = []

    def _record(self, snapshot: str, chunks: Chunks, deadline: float) -> None:
        """Appends the record that names the snapshot, with what others appended meanwhile."""
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
        """Deletes a snapshot's blobs, the last first: a crash leaves the first ones, by which the rest is found."""
        if count is None:
            count = 0
            while self._store.get(chunk_key(snapshot, count)) is not None:
                count += 1
        for index in reversed(range(count)):
            self._store.delete(chunk_key(snapshot, index))


def _checked(chunks: Iterator[bytes], deadline: float) -> Iterator[bytes]:
    for chunk in chunks:
        if time.monotonic() >= deadline:
            raise OperationTimeoutError("the state could not be packed in time")
        yield chunk
