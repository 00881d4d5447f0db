"""A journal in a folder: what a `RecordedLedger` did, so that it can be started again elsewhere.

One process writes it. The file ``journal`` is a sequence of frames: a length of 4 bytes, a digest, a msgpack map. A frame
holds one of

    head        in the first frame only: what the frames held that were dropped when the file was shortened
    record      a record of the journal (`dataplane_core.backends.journal_records`)
    note        a value under a name, which replaces an earlier one

with its time, and with the id of the call that it is of. Times are on a clock of the journal's own. It stands still while
no process has the journal open, so what is left of a lease is left of it after a restart.

A process that opens the journal first takes it away from the one that had it, and then copies it. The other one finds
that out before it answers anyone: see `JournalFile.commit`.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack

from dataplane_core.backends.journal_records import DIGEST_BYTES, seal, unseal
from dataplane_core.codec import unpack_msgpack
from dataplane_core.errors import BackendUnavailableError, CorruptDataError

__all__ = ["CallId", "Entry", "JournalFile", "TakenError"]

_log = logging.getLogger(__name__)

_VERSION: Final = 1
_LENGTH: Final = struct.Struct(">I")
_NAME: Final = "journal"


class CallId(NamedTuple):
    """Identifies a call of a client, so that it is done once however often the client repeats it.

    Attributes:
        client: Random bits.
        lane: Of the calls that the client has under way at a time, which one.
        serial: Grows from call to call of the lane.
        kept_s: For how many seconds the client may repeat it.
    """

    client: str
    lane: int
    serial: int
    kept_s: float


class Entry(NamedTuple):
    """What a frame says besides its content: its time, and the call that it is of."""

    at: float
    call: CallId | None


class TakenError(BackendUnavailableError):
    """Another process has opened the journal since. Nothing may be answered any more."""


class JournalFile:
    """The journal of a folder: a `JournalStore` that can be shortened. Thread-safe.

    Args:
        folder: The folder. It is created.
        sync: Whether `commit` waits until the disk has all frames. If not, they survive the end of the process, but not
            that of the machine.
        must_exist: Whether there must be a journal.

    Attributes:
        entry: Of the record that was read or appended last.
        next_call: The call that the next record is of.
        notes: Name -> the newest value.
        head: What the head holds. Empty if there is none.
        make_head: Gives the head of a shortened file.

    Raises:
        BackendUnavailableError: There is no journal, or the folder cannot be used.
        CorruptDataError: A frame is damaged that is not the last one.
    """

    def __init__(self, folder: Path, *, sync: bool = True, must_exist: bool = False) -> None:
        self._folder = folder
        self._path = folder / _NAME
        self._sync = sync
        self._lock = threading.Lock()
        self._dirty = False
        self._next_seq = 0
        self._last = b""
        self._last_entry = Entry(0.0, None)
        self.entry = Entry(0.0, None)
        self.next_call: CallId | None = None
        self.notes: dict[str, bytes] = {}
        self.head: dict[str, Any] = {}
        self.make_head: Callable[[], dict[str, Any]] = dict
        try:
            self._fd = self._take_over(must_exist)
        except OSError as error:
            raise BackendUnavailableError(
                f"the journal in {folder} cannot be opened: {error}.",
                hint="Every node on which the process may run must see this folder and may write there.",
            ) from error

    def _take_over(self, must_exist: bool) -> int:
        taken, new = self._folder / f"{_NAME}.taken", self._folder / f"{_NAME}.new"
        self._folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            os.rename(self._path, taken)  # from now on, the process that had it answers nobody
        data = taken.read_bytes() if taken.exists() else b""
        if not data and must_exist:
            raise BackendUnavailableError(
                f"there is no journal in {self._folder}.",
                retryable=False,
                hint="Name a folder that every node sees, on which the process may be started again.",
            )
        last_at, end = 0.0, 0
        for frame, after in self._frames(data):
            last_at, end = frame["at"], after
            if "head" in frame:
                self.head = frame["head"]
                self.notes.update(self.head["notes"])
            elif "note" in frame:
                self.notes[frame["note"]] = frame["value"]
            else:
                self._next_seq, self._last = frame["seq"] + 1, frame["record"]
                self._last_entry = _entry(frame)
        self._clock_ahead_s = last_at - time.monotonic()
        fd = self._begin(new, data[:end])
        os.rename(new, self._path)
        self._sync_folder()
        taken.unlink(missing_ok=True)
        return fd

    # --- time ---------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The time in seconds on the journal's clock."""
        return time.monotonic() + self._clock_ahead_s

    # --- the store of a journal ---------------------------------------------------------------------------------------

    def append(self, seq: int, record: bytes) -> bool:
        """Adds a record, which is of `next_call`. See `BlobStore.append`."""
        call, self.next_call = self.next_call, None
        with self._lock:
            if seq != self._next_seq:
                return False
            self.entry = Entry(self.now(), call)
            self._write({"seq": seq, "record": record}, self.entry)
            self._next_seq, self._last, self._last_entry = seq + 1, record, self.entry
            return True

    def read(self, from_seq: int) -> Iterator[bytes]:
        """The records from a number on. See `BlobStore.read`."""
        with self._lock:
            if from_seq >= self._next_seq - 1:
                self.entry = self._last_entry
                return iter([self._last] if from_seq < self._next_seq else [])
            data = self._path.read_bytes()
        return self._records(data, from_seq)

    def _records(self, data: bytes, from_seq: int) -> Iterator[bytes]:
        for frame, _ in self._frames(data):
            if "record" in frame and frame["seq"] >= from_seq:
                self.entry = _entry(frame)
                yield frame["record"]

    def trim(self, before_seq: int) -> None:
        """Drops the records below a number. See `BlobStore.trim`."""
        new = self._folder / f"{_NAME}.new"
        with self._lock:
            head = {**self.make_head(), "notes": self.notes}
            kept = bytearray(_pack({"at": self.now(), "v": _VERSION, "head": head}))
            data, start = self._path.read_bytes(), 0
            for frame, end in self._frames(data):
                if frame.get("seq", -1) >= before_seq:
                    kept += data[start:end]
                start = end
            self._refuse_if_taken()
            fd = self._begin(new, bytes(kept))
            os.rename(new, self._path)
            os.close(self._fd)
            self._fd, self._dirty, self.head = fd, False, head
        self._sync_folder()

    def put(self, key: str, data: bytes) -> None:
        """Stores a blob of a snapshot, for good."""
        new = self._folder / f"{key}.new"
        os.close(self._begin(new, data))
        os.rename(new, self._folder / key)
        self._sync_folder()

    def get(self, key: str) -> bytes | None:
        """Reads a blob. None if it does not exist."""
        try:
            return (self._folder / key).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """Deletes a blob, if it exists."""
        (self._folder / key).unlink(missing_ok=True)

    # --- more than a store --------------------------------------------------------------------------------------------

    def note(self, name: str, value: bytes, call: CallId | None = None, outcome: bytes | None = None) -> None:
        """Keeps a value under a name. It may be the work of a call; then with its outcome."""
        with self._lock:
            self._write({"note": name, "value": value, "outcome": outcome}, Entry(self.now(), call))
            self.notes[name] = value

    def outcomes(self) -> Iterator[tuple[Entry, bytes]]:
        """The calls whose work was a note, with their outcomes, since the head."""
        with self._lock:
            data = self._path.read_bytes()
        for frame, _ in self._frames(data):
            if frame.get("outcome") is not None and frame.get("call") is not None:
                yield _entry(frame), frame["outcome"]

    def commit(self) -> None:
        """Returns when everything written so far is kept. Call it before anything of it is answered.

        Raises:
            TakenError: Another process has opened the journal since.
            OSError: The disk failed: what it has is not known.
        """
        with self._lock:
            if self._dirty and self._sync:
                os.fdatasync(self._fd)
            self._dirty = False
            self._refuse_if_taken()

    def close(self) -> None:
        """Closes the file. The journal stays."""
        with self._lock:
            os.close(self._fd)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _write(self, frame: dict[str, Any], entry: Entry) -> None:
        call = {} if entry.call is None else {"call": list(entry.call)}
        data = _pack({"at": entry.at, **frame, **call})
        end = os.lseek(self._fd, 0, os.SEEK_END)
        self._dirty = True
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError("only a part was written")
        except OSError as error:
            os.ftruncate(self._fd, end)
            raise BackendUnavailableError(
                f"the journal in {self._folder} cannot be written: {error}. Nothing was done.",
                hint="Make room on the disk, or mend the mount.",
            ) from error

    def _refuse_if_taken(self) -> None:
        try:
            mine = os.stat(self._path).st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            mine = False
        if not mine:
            raise TakenError(f"another process has taken the journal in {self._folder}.")

    def _begin(self, path: Path, data: bytes) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if self._sync:
                os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _sync_folder(self) -> None:
        if self._sync:
            fd = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _frames(self, data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
        """The frames, each with where it ends. The last one is dropped if it is not whole: nobody got its answer."""
        start = 0
        while start < len(data):
            body = start + _LENGTH.size
            size = _LENGTH.unpack_from(data, start)[0] if body <= len(data) else 0
            end = body + size
            packed = unseal(data[body:end]) if DIGEST_BYTES < size <= len(data) - body else None
            if packed is None:
                if end < len(data) and any(data[start:]):
                    raise CorruptDataError(
                        f"the journal in {self._folder} is damaged at byte {start} of {len(data)}.",
                        hint="Bootstrap the instance again.",
                    )
                _log.warning("the last frame of the journal in %s is not whole, and is left out", self._folder)
                return
            yield unpack_msgpack(packed), end
            start = end


def _entry(frame: dict[str, Any]) -> Entry:
    call = frame.get("call")
    return Entry(frame["at"], None if call is None else CallId(*call))


def _pack(frame: dict[str, Any]) -> bytes:
    body = seal(msgpack.packb(frame))
    return _LENGTH.pack(len(body)) + body
