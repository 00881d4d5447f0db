"""What the host of a ledger wrote down, so that the next host goes on where it ended.

`FolderLog` is a log in a folder, also of notes alone; the owner of a `RowStoreBackend`'s ledger has one in its engine.
`LoggedLedger` is the ledger that is kept in a log. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from dataplane_core.digests import fast_digest
from dataplane_core.durable_files import disk_hint, sync_path, write_file
from dataplane_core.errors import BackendUnavailableError, CorruptDataError, DataPlaneError, InvalidRequestError
from dataplane_core.hosting.messages import COMMANDS_FORM, Messages
from dataplane_core.ledger import Command, Ledger, LedgerService, Ref, Reply, commands
from dataplane_core.ledger.state import pack_state, unpack_state

__all__ = ["EXIT_STATUS", "FolderLog", "Log", "LoggedLedger", "TakenError"]

_log = logging.getLogger(__name__)

#: The exit status of a process that may answer nobody any more.
EXIT_STATUS: Final = 70
#: A log is long when what follows the state exceeds both some bytes and this share of the state.
TAIL_BYTES: Final = 1 << 20
TAIL_SHARE: Final = 0.25
_MESSAGES: Final = Messages()
#: Which version the state is of, and which the records.
_VERSIONS: Final = (5, COMMANDS_FORM)
_decode_state: Final = msgspec.msgpack.Decoder(tuple[tuple[int, int], msgspec.Raw]).decode
#: Commands that make room, which a full disk must not keep from it.
_FREES: Final = (commands.AbortPut, commands.ClearRequest, commands.Collected)


class TakenError(BackendUnavailableError):
    """Another process has taken the log since. Nothing may be answered any more."""


class Log(ABC):
    """A state, and records of what was done since then. Times are on a clock of the log's own.

    Call `begin` once what it holds is read, and before all else.
    """

    def __init__(self) -> None:
        self._size = self._long_at = 0  # bytes of the log, and how many make it long
        self._ahead_s = 0.0
        self.make_state: Callable[[], bytes] = bytes  # gives the state that the log begins with
        self.state = b""  # what the log of before began with; empty if there was none
        self.records: list[tuple[float, bytes]] = []  # since then, each with its time; empty once it has begun

    def now(self) -> float:
        """The time in seconds on the log's clock, which stands still while no process has the log."""
        return time.monotonic() + self._ahead_s

    @abstractmethod
    def begin(self) -> None:
        """Begins the log of this process with the state, which stands for all that came before; or begins it again.

        Raises `BackendUnavailableError` if it cannot be written, and `TakenError` if another process has the log.
        """

    @abstractmethod
    def append(self, record: bytes, at: float, *, is_lazy: bool = False, frees: bool = False) -> None:
        """Adds a record. Raises `BackendUnavailableError` if it cannot be written: it was not done.

        Args:
            record: The record.
            at: Its time, not before that of the one before.
            is_lazy: Whether `commit` need not wait for it.
            frees: Whether it makes room, as that of a clear. It may take what is set aside for it on a full disk.
        """

    @abstractmethod
    def commit(self) -> None:
        """Returns when everything so far is kept, but for lazy records. Call it before anything is answered.

        Raises `TakenError` if another process has the log, and `OSError` if the disk failed: what is kept is then not
        known.
        """

    def commit_or_end(self) -> None:
        """As `commit`. If what was done cannot be kept, ends the process: nobody gets an answer."""
        try:
            self.commit()
        except Exception as error:  # also one that an engine's author did not foresee
            _log.critical("this process may answer nobody any more, and ends: %s", error)
            os._exit(EXIT_STATUS)

    def _began(self, size: int, state_bytes: int) -> None:
        """The log of this process begins with so many bytes, of a state of so many."""
        self._size, self._long_at = size, size + max(TAIL_BYTES, int(TAIL_SHARE * state_bytes))

    def shorten_if_long(self) -> None:
        """As `begin`, if the log is long. If that fails, it goes on growing until it is twice as long."""
        if self._size <= self._long_at:
            return
        try:
            self.begin()
        except TakenError:
            pass  # as `commit` will say
        except Exception as error:
            self._long_at = 2 * self._size
            _log.warning("the log could not be shortened, and goes on growing until the next try: %s", error)


class LoggedLedger(LedgerService):
    """A ledger that adds each command which changes something to a log, before it runs it. Thread-safe.

    A record is the command as it comes over a socket. The ledger of the next process runs all records at their times,
    and so is where this one was: every put, claim and ack, and what is left of each lease. Raises `CorruptDataError` if
    the log holds what is no ledger, or one of another version.

    Args:
        log: The log. Answer only after its ``commit``.
        capacity_bytes: Limit for the payload bytes held and reserved, or None.
        lazy: Commands for which ``commit`` need not wait: the begin of a put, if no other process numbers writes alike;
            and what may be said again, as that payload was deleted.
        ends_holds: Whether leases and puts under way are ended first: the clients of the process before are gone.
        first_write: No write id that the ledger numbers is smaller.
    """

    def __init__(
        self,
        log: Log,
        capacity_bytes: int | None = None,
        *,
        lazy: tuple[type[Command[Any]], ...] = (),
        ends_holds: bool = False,
        first_write: int = 1,
    ) -> None:
        # a call has one time: what it asks before it is recorded holds when it runs
        super().__init__(clock=self._now, ledger=_unpacked(log.state) if log.state else Ledger())
        self._log = log
        self._lazy = lazy
        self.lock = threading.RLock()  # while another thread holds it, nothing changes the ledger
        self._at: float | None = None  # the time of the call that runs
        for self._at, record in log.records:
            self._run_again(record)
        self._at = log.now()
        if ends_holds:
            self.ledger.end_holds(self._at)
        self.ledger.limit(capacity_bytes, first_write)
        log.make_state = self._state
        log.begin()
        self._at = None

    def _run_again(self, record: bytes) -> None:
        try:
            command = _MESSAGES.decode_request(record)
        except InvalidRequestError as error:
            raise CorruptDataError(f"a record of the log cannot be read: {error}.") from error
        try:
            super().call(command)
        except DataPlaneError:  # it was refused then as well
            pass
        except Exception as error:
            raise CorruptDataError(f"the ledger failed on a record of its log: {error!r}.") from error

    def _now(self) -> float:
        return self._log.now() if self._at is None else self._at

    def _state(self) -> bytes:
        return msgspec.msgpack.encode((_VERSIONS, msgspec.Raw(pack_state(self.ledger))))

    def call(self, command: Command[Reply], wake: Callable[[], bool] | None = None) -> Reply:
        """As `LedgerService.call`, or as `Log.append`. Answer only after the log's ``commit``."""
        with self.lock:
            self._at = at = self._log.now()
            try:
                if not self.changes(command):
                    return super().call(command, wake)
                record, is_lazy = _MESSAGES.encode_request(command)[4:], isinstance(command, self._lazy)
                self._log.append(record, at, is_lazy=is_lazy, frees=isinstance(command, _FREES))
                reply = super().call(command, wake)
                self._log.shorten_if_long()
                return reply
            finally:
                self._at = None

    def stop_waiting(self, token: str) -> None:
        with self.lock:
            super().stop_waiting(token)

    def garbage(self) -> list[Ref]:
        with self.lock:
            return super().garbage()


def _unpacked(state: bytes) -> Ledger:
    try:
        versions, ledger = _decode_state(state)
        if versions != _VERSIONS:
            raise CorruptDataError(
                f"the ledger in the log is of versions {versions}. Expected {_VERSIONS}.",
                hint="Another dataplane-core wrote it: use that one, or begin in another folder.",
            )
        return unpack_state(ledger)
    except CorruptDataError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError) as error:
        raise CorruptDataError(f"the state in the log cannot be read: {type(error).__name__}: {error}.") from error


# --- in a folder ------------------------------------------------------------------------------------------------------
#
# One process writes it. The file ``journal`` is a sequence of frames: the length of a body, a check of these 4
# bytes, a digest of the body, and the body, in msgpack. The first frame is the state and the notes before all others.
# Each later one holds a record or a note.
#
# Each process that opens the log has a folder of its own in the folder: 1, 2, 3, ... It first makes its folder. From
# then on, the process before it answers nobody: see `FolderLog.commit`. Then it reads what that one wrote, and begins
# with a state of its own. No process writes into the folder of another, so one that is late destroys nothing. The
# numbered folders stay, without files.

_VERSION: Final = 4
#: The length of what follows, half of that length's digest, and the digest of what follows. A damaged length must not
#: make the frames after it look unfinished.
_HEAD: Final = struct.Struct("<IIQ")
#: The name that earlier versions gave it, whose folders are not empty ones.
_NAME: Final = "journal"
#: So much room is set aside for what makes room on a full disk.
_RESERVE_BYTES: Final = 64 << 10
_DAMAGED_HINT: Final = "Restore a whole copy of it, or move it away to begin without what it holds."


class _Beginning(msgspec.Struct, array_like=True):
    """The first frame: the version of this format, and the state and the notes at a time."""

    version: int
    at: float
    notes: dict[str, bytes]
    state: bytes


class _Frame(msgspec.Struct, array_like=True, omit_defaults=True):
    """A record, or a note (None: no longer)."""

    at: float
    synced: int | None  # how much of the file the disk had by then; None: the disk is not waited for
    record: bytes | None = None
    name: str | None = None
    value: bytes | None = None


_decode_beginning: Final = msgspec.msgpack.Decoder(_Beginning).decode
_decode_frame: Final = msgspec.msgpack.Decoder(_Frame).decode


class FolderLog(Log):
    """The log of a folder, which it makes. Opening it takes it from the process that had it. Thread-safe.

    With ``sync``, `commit` waits until the disk has all frames. If not, they survive the end of the process, but not
    that of the machine.

    Raises:
        BackendUnavailableError: The folder cannot be used, or there is no log although it ``must_exist``.
        CorruptDataError: A frame is damaged that is not the last one, or the log is of another version.
    """

    def __init__(self, folder: Path, *, sync: bool = True, must_exist: bool = False) -> None:
        super().__init__()
        self._root = folder
        self._sync = sync
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._synced = 0  # how much of the file the disk has
        self._is_dirty = False  # whether `commit` has to wait for the disk
        self._is_torn = False  # whether a part of a frame may follow the last whole one
        self.notes: dict[str, bytes] = {}  # name -> the newest value
        with self._opening():
            self._earlier = self._newest()
            if must_exist and self._earlier is None:
                raise BackendUnavailableError(
                    f"there is no log in {folder}.",
                    retryable=False,
                    hint="Name a folder that every node sees, on which the process may be started again.",
                )
            number = max(self._numbers(), default=0) + 1
            self._folder, self._next = folder / str(number), folder / str(number + 1)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700)  # from now on, the process that had the log answers nobody
            self._ahead_s = (self._read() if self._earlier is not None else 0.0) - time.monotonic()
            reserve = self._folder / "reserve.new"
            self._reserve = os.open(reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.unlink(reserve)  # its room is kept until this process ends
            self._set_aside()

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except BackendUnavailableError:  # it is an OSError too, and says already what is wrong
            raise
        except OSError as error:
            otherwise = "Every node on which the process may run must see this folder and may write there."
            raise BackendUnavailableError(
                f"the log in {self._root} cannot be opened: {error.strerror or error}.",
                hint=disk_hint(error, otherwise),
            ) from error

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._root) if name.isdecimal())
        except FileNotFoundError:
            return []

    def _newest(self) -> Path | None:
        """The folder with the newest log. The folder of a process that ended while it opened one has none."""
        folders = [self._root / str(number) for number in reversed(self._numbers())]
        return next((folder for folder in folders if (folder / _NAME).exists()), None)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self) -> float:
        """Reads the log of before. Returns the time of its last frame."""
        assert self._earlier is not None
        data = (self._earlier / _NAME).read_bytes()
        first = _body_at(data, 0)
        if first is None:
            raise CorruptDataError(
                f"the log in {self._root} is damaged at byte 0 of {len(data)}, or of an earlier version.",
                hint=_DAMAGED_HINT,
            )
        version = msgspec.msgpack.decode(first)[0]
        if version != _VERSION:
            raise CorruptDataError(
                f"the log in {self._root} is of version {version}. Expected {_VERSION}.",
                hint="Another dataplane-core wrote it: use that one, or begin in another folder.",
            )
        beginning = _decode_beginning(first)
        self.state, self.notes = beginning.state, beginning.notes
        last_at = beginning.at
        for body in self._bodies(data, _HEAD.size + len(first)):
            frame = _decode_frame(body)
            last_at = frame.at
            if frame.record is not None:
                self.records.append((frame.at, frame.record))
            elif frame.name is not None:
                self._take_note(frame.name, frame.value)
        return last_at

    def _bodies(self, data: bytes, start: int) -> Iterator[bytes]:
        """What the frames from there on hold. What was not written whole is dropped: nobody got its answer.

        If the power is cut, the disk may have later parts of the file and not earlier ones. So where the disk is waited
        for, a frame was whole only if the disk had it when a later one was written.
        """
        while start < len(data):
            body = _body_at(data, start)
            if body is None:
                bodies = (_body_at(data, at) for at in range(start + 1, len(data)))
                later = (_decode_frame(body) for body in bodies if body)
                if any(frame.synced is None or frame.synced > start for frame in later):
                    raise CorruptDataError(
                        f"the log in {self._root} is damaged at byte {start} of {len(data)}.", hint=_DAMAGED_HINT
                    )
                _log.warning("the last frame of the log in %s is not whole, and is left out", self._root)
                return
            start += _HEAD.size + len(body)
            yield body

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        new = self._folder / f"{_NAME}.new"
        with self._opening(), self._lock:
            at = self.now()
            data = _packed(_Beginning(_VERSION, at, self.notes, self.make_state()))
            write_file(new, [data]) if self._sync else new.write_bytes(data)
            self._refuse_if_taken()
            fd = os.open(new, os.O_WRONLY | os.O_CLOEXEC)
            new.rename(self._folder / _NAME)
            if self._fd is not None:
                os.close(self._fd)
            self._fd, self._synced = fd, len(data)
            self._is_torn = self._is_dirty = False
            self._began(len(data), len(data))
            if self._sync:
                sync_path(self._folder)  # before a frame is added to the new file
                sync_path(self._root)
        self.state, self.records = b"", []
        if self._earlier is not None:
            for number in self._numbers():
                if number < int(self._folder.name):
                    for entry in os.scandir(self._root / str(number)):
                        with suppress(OSError):
                            os.unlink(entry.path)
            self._earlier = None

    def append(self, record: bytes, at: float, *, is_lazy: bool = False, frees: bool = False) -> None:
        with self._lock:
            was_dirty = self._is_dirty
            self._write(_Frame(at, None, record), frees)
            self._is_dirty = was_dirty or not is_lazy

    def note(self, name: str, value: bytes | None) -> None:
        """Keeps a value under a name; None: no longer. Raises as `append`."""
        with self._lock:
            self._write(_Frame(self.now(), None, None, name, value), value is None)
            self._take_note(name, value)
        self.shorten_if_long()

    def _take_note(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.notes.pop(name, None)
        else:
            self.notes[name] = value

    def commit(self) -> None:
        with self._lock:
            if self._is_dirty and self._sync:
                assert self._fd is not None
                os.fdatasync(self._fd)
                self._synced = self._size
            self._is_dirty = False
            self._refuse_if_taken()

    def finish(self) -> None:
        """Has the disk keep all in one frame: if a part of it is missing later, it is no torn record."""
        self._sync = True
        with suppress(BackendUnavailableError):  # the disk is full, or another process has the log
            self.begin()

    def close(self) -> None:
        """Closes the file. The log stays in its folder."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            os.close(self._reserve)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _set_aside(self) -> None:
        try:
            os.posix_fallocate(self._reserve, 0, _RESERVE_BYTES)
            self._has_reserve = True
        except OSError:  # there is no room: later
            self._has_reserve = False

    def _write(self, frame: _Frame, frees: bool) -> None:
        frame.synced = self._synced if self._sync else None
        data = _packed(frame)
        try:
            try:
                self._write_whole(data)
            except OSError:
                if not (frees and self._has_reserve):
                    raise
                self._has_reserve = False
                os.truncate(self._reserve, 0)
                self._write_whole(data)
        except OSError as error:
            raise BackendUnavailableError(
                f"the log in {self._root} cannot be written: {error}. It was not done.",
                outcome="not_done",
                hint="Make room on the disk, or mend the mount.",
            ) from error
        if not self._has_reserve:
            self._set_aside()

    def _write_whole(self, data: bytes) -> None:
        assert self._fd is not None
        if self._is_torn:
            os.ftruncate(self._fd, self._size)
        self._is_dirty = self._is_torn = True
        if os.pwrite(self._fd, data, self._size) != len(data):
            raise OSError("only a part was written, as on a full disk")
        self._is_torn = False
        self._size += len(data)

    def _refuse_if_taken(self) -> None:
        if self._next.exists():
            raise TakenError(f"another process has taken the log in {self._root}.")


def _packed(frame: _Beginning | _Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return _HEAD.pack(len(body), _check(len(body)), fast_digest(body)) + body


def _body_at(data: bytes, start: int) -> bytes | None:
    """What the frame holds that begins there. None: it is not whole."""
    if len(data) - start <= _HEAD.size:
        return None
    size, check, digest = _HEAD.unpack_from(data, start)
    if check != _check(size):
        return None
    body = data[start + _HEAD.size : start + _HEAD.size + size]
    return body if len(body) == size and size and fast_digest(body) == digest else None


def _check(size: int) -> int:
    return fast_digest(size.to_bytes(4, "little")) & 0xFFFFFFFF
