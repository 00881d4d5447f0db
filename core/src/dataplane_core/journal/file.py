"""A journal in a folder: what a `RecordedLedger` did, so that it can be started again elsewhere.

One process writes it. The file ``journal`` is a sequence of frames: a length of 4 bytes, the CRC-32 of these 4
bytes, a digest, a msgpack map. A frame holds one of

    head        the first frame, and only it: the version of this format, and what the frames held that were dropped
                when the file was shortened
    record      a record of the journal (`dataplane_core.journal.records`)
    note        a value under a name, which replaces an earlier one
    end         the process ended, and all that it wrote is before this

with its time, with the id of the call that it is of, and with how much of the file the disk had by then. Times are on a
clock of the journal's own. It stands still while no process has the journal open, so what is left of a lease is left of
it after a restart.

Each process that opens the journal has a folder of its own in the folder: 1, 2, 3, ... It first makes its folder. From
then on, the process before it answers nobody: see `JournalFile.commit`. Then it copies what that one wrote. No process
writes into the folder of another, so one that is late destroys nothing. The numbered folders stay, without files.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from dataplane_core.durable_files import disk_hint, sync_path
from dataplane_core.errors import BackendUnavailableError, CorruptDataError
from dataplane_core.hosting import CallId
from dataplane_core.journal.records import DIGEST_BYTES, seal, unseal
from dataplane_core.packed import pack_msgpack, unpack_msgpack
from dataplane_core.regular_files import open_regular, read_regular

_log = logging.getLogger(__name__)

_VERSION: Final = 2
#: The length of what follows, and its CRC-32: a damaged length must not make the frames after it look unfinished.
_LENGTH: Final = struct.Struct(">II")
#: The map of each frame begins with its time, after the byte that says how long the map is.
_FIRST: Final = pack_msgpack("at") + b"\xcb"
_NAME: Final = "journal"
#: How long the journal was when its process ended well. A shorter one was cut.
_ENDED: Final = "ended"
#: The exit status of a process that may answer nobody any more.
_EXIT_STATUS: Final = 70
#: Notes without records are written anew when they take more than this, and twice what was left of them then.
_NOTES_BYTES: Final = 1 << 20
#: So much room is set aside for what makes room on a full disk.
_RESERVE_BYTES: Final = 64 << 10
_DAMAGED_HINT: Final = "Restore a whole copy of it, or move it away to begin without what it holds."
_OTHER_VERSION_HINT: Final = "Another dataplane-core wrote it: use that one, or begin in another folder."


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
        next_is_lazy: Whether `commit` need not wait until the disk has the next record.
        next_frees: Whether the next record makes room, as that of a clear. It may take what is set aside for it.
        next_seq: The number of the next record.
        notes: Name -> the newest value.
        head: What the head holds. Empty if there is none.
        make_head: Gives the head of a shortened file.
        keep: Keeps the outcome of a call whose work was a note, for that head.

    Raises:
        BackendUnavailableError: There is no journal, or the folder cannot be used.
        CorruptDataError: A frame is damaged that is not the last one.
    """

    def __init__(self, folder: Path, *, sync: bool = True, must_exist: bool = False) -> None:
        self._root = folder
        self._sync = sync
        self._lock = threading.Lock()
        self._dirty = False
        self._synced = 0  # how much of the file the disk has
        self._torn = False  # whether a part of a frame may follow the last whole one
        self.next_seq = 0
        self._last = b""
        self._last_entry = Entry(0.0, None)
        self.entry = Entry(0.0, None)
        self.next_call: CallId | None = None
        self.next_is_lazy = False
        self.next_frees = False
        self.notes: dict[str, bytes] = {}
        self.head: dict[str, Any] = {}
        self.make_head: Callable[[], dict[str, Any]] = dict
        self.keep: Callable[[Entry, bytes], None] = lambda entry, outcome: None
        try:
            if must_exist and self._earlier() is None:
                raise BackendUnavailableError(
                    f"there is no journal in {folder}.",
                    retryable=False,
                    hint="Name a folder that every node sees, on which the process may be started again.",
                )
            number = max(self._numbers(), default=0) + 1
            self._folder, self._next = self._root / str(number), self._root / str(number + 1)
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700)  # from now on, the process that had the journal answers nobody
            self._path = self._folder / _NAME
            self._fd, self._end = self._take_over(self._earlier())
            self._synced = self._end
            self._clear_before(number)
            reserve = self._folder / "reserve.new"
            self._reserve = os.open(reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.unlink(reserve)  # its room is kept until this process ends
            self._set_aside()
        except OSError as error:
            raise BackendUnavailableError(
                f"the journal in {folder} cannot be opened: {error}.",
                hint=disk_hint(
                    error, "Every node on which the process may run must see this folder and may write there."
                ),
            ) from error

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._root) if name.isdecimal())
        except FileNotFoundError:
            return []

    def _earlier(self) -> Path | None:
        """The folder with the newest journal. The folder of a process that ended while it opened one has none."""
        folders = [self._root / str(number) for number in self._numbers()]
        return next((each for each in reversed(folders) if (each / _NAME).exists()), None)

    def _take_over(self, earlier: Path | None) -> tuple[int, int]:
        """Copies an earlier journal, or begins one. Returns a file descriptor, and the size."""
        data = _pack({"at": 0.0, "v": _VERSION, "head": {"notes": {}}}) if earlier is None else self._copy(earlier)
        last_at, end = 0.0, 0
        for frame, after in self._frames(data):
            if not end:
                self._check_version(frame)
            last_at, end = frame["at"], after
            if "head" in frame:
                self.head = frame["head"]
                self.notes.update(self.head["notes"])
            elif "note" in frame:
                self._take_note(frame["note"], frame["value"])
            elif "record" in frame:
                self.next_seq, self._last = frame["seq"] + 1, frame["record"]
                self._last_entry = _entry(frame)
        if not end:
            raise CorruptDataError(f"the journal in {self._root} is empty.", hint=_DAMAGED_HINT)
        if earlier is not None and (earlier / _ENDED).exists():
            whole = int(read_regular(earlier / _ENDED))
            if end < whole:
                raise CorruptDataError(
                    f"the journal in {self._root} lacks {whole - end} of the {whole} bytes that it had when it was "
                    "closed.",
                    hint=f"Restore a whole copy of it, or remove {earlier / _ENDED} to go on without what it lacks.",
                )
        self._clock_ahead_s = last_at - time.monotonic()
        fd = self._begin(self._folder / f"{_NAME}.new", data[:end])
        try:
            os.rename(self._folder / f"{_NAME}.new", self._path)
            self._sync_folder()
            self._sync_folder(self._root)
        except BaseException:
            os.close(fd)
            raise
        return fd, end

    def _copy(self, earlier: Path) -> bytes:
        """Copies the blobs of an earlier journal. Returns the journal."""
        while True:  # the process that had it may still be shortening it
            with open_regular(earlier / _NAME) as file:
                data = file.read()
                for name in os.listdir(earlier):
                    if name not in (_NAME, _ENDED) and not name.endswith(".new"):
                        with suppress(FileNotFoundError):
                            self.put(name, read_regular(earlier / name))
                if os.path.samestat(os.fstat(file.fileno()), os.stat(earlier / _NAME)):
                    return data

    def _check_version(self, first: dict[str, Any]) -> None:
        if first.get("v") != _VERSION or "head" not in first:
            raise CorruptDataError(
                f"the journal in {self._root} is of version {first.get('v')}. Expected {_VERSION}.",
                hint=_OTHER_VERSION_HINT,
            )

    def _clear_before(self, number: int) -> None:
        """Deletes the files of earlier processes. Their folders stay: each tells the one before it that it is late."""
        for each in self._numbers():
            if each < number:
                for entry in os.scandir(self._root / str(each)):
                    with suppress(OSError):
                        os.unlink(entry.path)

    # --- time ---------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The time in seconds on the journal's clock."""
        return time.monotonic() + self._clock_ahead_s

    # --- the store of a journal ---------------------------------------------------------------------------------------

    def append(self, seq: int, record: bytes) -> bool:
        """Adds a record, which is of `next_call`. See `BlobStore.append`."""
        call, self.next_call = self.next_call, None
        with self._lock:
            if seq != self.next_seq:
                return False
            self.entry = Entry(self.now(), call)
            was_dirty = self._dirty
            self._write({"seq": seq, "record": record}, self.entry)
            self._dirty, self.next_is_lazy = was_dirty or not self.next_is_lazy, False
            self.next_seq, self._last, self._last_entry = seq + 1, record, self.entry
            return True

    def read(self, from_seq: int) -> Iterator[bytes]:
        """The records from a number on. See `BlobStore.read`."""
        with self._lock:
            if from_seq >= self.next_seq - 1:
                self.entry = self._last_entry
                return iter([self._last] if from_seq < self.next_seq else [])
            data = self._read()
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
            data, start = self._read(), 0
            for frame, end in self._frames(data):
                if frame.get("seq", -1) >= before_seq:
                    kept += data[start:end]
                start = end
            self._refuse_if_taken()
            fd = self._begin(new, bytes(kept))
            try:
                os.rename(new, self._path)
            except BaseException:
                os.close(fd)
                raise
            os.close(self._fd)
            self._fd, self._end, self._torn, self._dirty, self.head = fd, len(kept), False, False, head
            self._synced = self._end
            self._sync_folder()  # before a record is added to the new file

    def put(self, key: str, data: bytes) -> None:
        """Stores a blob of a snapshot, for good."""
        new = self._folder / f"{key}.new"
        os.close(self._begin(new, data))
        os.rename(new, self._folder / key)
        self._sync_folder()

    def get(self, key: str) -> bytes | None:
        """Reads a blob. None if it does not exist."""
        try:
            return read_regular(self._folder / key)
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """Deletes a blob, if it exists."""
        (self._folder / key).unlink(missing_ok=True)

    # --- more than a store --------------------------------------------------------------------------------------------

    def note(self, name: str, value: bytes | None, call: CallId | None = None, outcome: bytes | None = None) -> None:
        """Keeps a value under a name; None: no longer. It may be the work of a call; then with its outcome."""
        with self._lock:  # as in `trim`: a shortened file has the frame, or a head that knows the outcome
            entry = Entry(self.now(), call)
            self._write({"note": name, "value": value, "outcome": outcome}, entry)
            self._take_note(name, value)
            if outcome is not None:
                self.keep(entry, outcome)

    def _take_note(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.notes.pop(name, None)
        else:
            self.notes[name] = value

    def outcomes(self) -> Iterator[tuple[Entry, bytes]]:
        """The calls whose work was a note, with their outcomes, since the head."""
        with self._lock:
            data = self._read()
        for frame, _ in self._frames(data):
            if frame.get("outcome") is not None and frame.get("call") is not None:
                yield _entry(frame), frame["outcome"]

    def commit(self) -> None:
        """Returns when everything written so far is kept, but for lazy records. Call it before anything is answered.

        Raises:
            TakenError: Another process has opened the journal since.
            OSError: The disk failed: what it has is not known.
        """
        with self._lock:
            if self._dirty and self._sync:
                os.fdatasync(self._fd)
                self._synced = self._end
            self._dirty = False
            self._refuse_if_taken()

    def commit_or_end(self) -> None:
        """As `commit`. If what was done cannot be kept, ends the process: nobody gets an answer."""
        try:
            self.commit()
        except (OSError, BackendUnavailableError) as error:
            _log.critical("this process may answer nobody any more, and ends: %s", error)
            os._exit(_EXIT_STATUS)

    def finish(self) -> None:
        """Says that nothing follows. What is damaged or missing later was written whole, so it is no torn record."""
        with suppress(OSError):  # the disk is full, or another process has the journal
            self.commit()
            with self._lock:
                self._write({"end": True}, Entry(self.now(), None))
            self.commit()  # the disk has the end before it has the note
            self.put(_ENDED, b"%d" % self._end)

    def close(self) -> None:
        """Closes the file. The journal stays."""
        with self._lock:
            os.close(self._fd)
            os.close(self._reserve)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _set_aside(self) -> None:
        try:
            os.posix_fallocate(self._reserve, 0, _RESERVE_BYTES)
            self._has_reserve = True
        except OSError:  # there is no room: later
            self._has_reserve = False

    def _write(self, frame: dict[str, Any], entry: Entry) -> None:
        call = {} if entry.call is None else {"call": list(entry.call)}
        synced = {"synced": self._synced} if self._sync else {}
        data = _pack({"at": entry.at, **frame, **call, **synced})
        try:
            try:
                self._write_whole(data)
            except OSError:
                frees = self.next_frees if "record" in frame else frame.get("value", b"") is None
                if not (frees and self._has_reserve):
                    raise
                self._has_reserve = False
                os.truncate(self._reserve, 0)
                self._write_whole(data)
        except OSError as error:
            raise BackendUnavailableError(
                f"the journal in {self._root} cannot be written: {error}. It was not done.",
                outcome="not_done",
                hint="Make room on the disk, or mend the mount.",
            ) from error
        if not self._has_reserve:
            self._set_aside()

    def _write_whole(self, data: bytes) -> None:
        if self._torn:
            os.ftruncate(self._fd, self._end)
            self._torn = False
        self._dirty = True
        self._torn = True
        if os.pwrite(self._fd, data, self._end) != len(data):
            raise OSError("only a part was written, as on a full disk")
        self._torn = False
        self._end += len(data)

    def _read(self) -> bytes:
        """All whole frames."""
        return read_regular(self._path)[: self._end]

    def _refuse_if_taken(self) -> None:
        with suppress(FileNotFoundError):
            os.stat(self._next)
            raise TakenError(f"another process has taken the journal in {self._root}.")

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

    def _sync_folder(self, folder: Path | None = None) -> None:
        if self._sync:
            sync_path(folder or self._folder)

    def _frames(self, data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
        """The frames, each with where it ends. What was not written whole is dropped: nobody got its answer."""
        start = 0
        while start < len(data):
            packed, end = _frame_at(data, start)
            if packed is None:
                if _was_whole(data, start):
                    raise CorruptDataError(
                        f"the journal in {self._root} is damaged at byte {start} of {len(data)}.", hint=_DAMAGED_HINT
                    )
                _log.warning("the last frame of the journal in %s is not whole, and is left out", self._root)
                return
            yield unpack_msgpack(packed), end
            start = end


class NotesFile(JournalFile):
    """Notes without records, which stay short by themselves. One process at a time has them open. Thread-safe.

    Args and raises: as `JournalFile`.
    """

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        super().__init__(folder, sync=sync)
        self._most_bytes = max(_NOTES_BYTES, 2 * self._end)

    def note(self, name: str, value: bytes | None, call: CallId | None = None, outcome: bytes | None = None) -> None:
        super().note(name, value, call, outcome)
        if self._end > self._most_bytes:
            try:
                self.trim(self.next_seq)
            except OSError as error:  # what is noted is noted
                _log.warning("the notes in %s could not be shortened, and go on growing: %s", self._root, error)
            self._most_bytes = max(_NOTES_BYTES, 2 * self._end)


def _entry(frame: dict[str, Any]) -> Entry:
    call = frame.get("call")
    return Entry(frame["at"], None if call is None else CallId(*call))


def _pack(frame: dict[str, Any]) -> bytes:
    body = seal(pack_msgpack(frame))
    return _LENGTH.pack(len(body), _check(len(body))) + body


def _frame_at(data: bytes, start: int) -> tuple[bytes | None, int]:
    """What the frame holds that begins there, None if it is not whole; and where it ends."""
    body = start + _LENGTH.size
    size = _size(data[start:body])
    packed = unseal(data[body : body + size]) if DIGEST_BYTES < size <= len(data) - body else None
    return packed, body + size


def _was_whole(data: bytes, start: int) -> bool:
    """Whether the frame that begins there was whole, and was damaged since: a later one was written after it.

    If the power is cut, the disk may have later parts of the file and not earlier ones. So where the disk is waited
    for, a later frame counts only if the disk had this one by then.
    """
    found = data.find(_FIRST, start)
    while found >= 0:
        at = found - 1 - DIGEST_BYTES - _LENGTH.size
        packed = _frame_at(data, at)[0] if at > start else None
        if packed is not None and unpack_msgpack(packed).get("synced", len(data)) > start:
            return True
        found = data.find(_FIRST, found + 1)
    return False


def _size(head: bytes) -> int:
    """The length that the head of a frame gives; 0 if the head is not whole."""
    if len(head) < _LENGTH.size:
        return 0
    size, check = _LENGTH.unpack(head)
    return int(size) if check == _check(size) else 0


def _check(size: int) -> int:
    return zlib.crc32(size.to_bytes(4, "big"))
