"""A store in a folder: its arena is a file, and its ledger keeps a journal. It outlives its processes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, CorruptDataError
from dataplane_core.host_memory import Arena, arena_bytes_for
from dataplane_core.hosting import ADDRESSES, Client, KeptExtents
from dataplane_core.journal import RecordedLedger
from dataplane_core.ledger import commands
from dataplane_shm._store import Store

#: The version of what is noted beside the ledger: where the extents lie, and the notes below.
_VERSION: Final = 1
_ARENA: Final = "arena"
_JOURNAL: Final = "journal"
_LOCK: Final = "lock"
#: Seconds that an owner which was killed may take to end.
_ENDING_S: Final = 2.0
_POLL_S: Final = 0.02
#: The memory in which the bytes of the arena are.
_MEMORY_NOTE: Final = "memory"
#: The numbers of sessions below this one were used. They are part of write ids, which are never used again.
_SESSIONS_NOTE: Final = "sessions"
_SESSIONS_TOGETHER: Final = 64


class Owner(msgspec.Struct):
    """Who has a folder open: a process of a host, since when on the clock of that host, in seconds since 1970."""

    host: str
    pid: int
    since: float


class DurableStore(Store):
    """As `Store`, of what lies in a folder.

    Args:
        folder: The folder. It is made.
        capacity_bytes: Limit for the payload held.
        on_full: What clients do if it is reached.
        sync: Whether a put and all else that is answered survives the end of the machine.
        touch_ahead_bytes: How much memory is made ready before it is used.

    Raises:
        AlreadyRunningError: Another process has the folder open.
        BackendUnavailableError: The folder cannot be used.
        CorruptDataError: What is in it is damaged, or of another version.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, on_full: str, *, sync: bool, touch_ahead_bytes: int = 0
    ) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(folder)
            names = set(os.listdir(folder)) - {_LOCK}
            if names and _JOURNAL not in names:
                raise BackendUnavailableError(
                    f"the folder {folder} holds {sorted(names)[0]!r}, and no store.",
                    retryable=False,
                    hint="Name an empty folder, or one in which a store was.",
                )
            recorded = RecordedLedger(folder / _JOURNAL, capacity_bytes, sync=sync)
            memory = recorded.notes.get(_MEMORY_NOTE)
            most_bytes = arena_bytes_for(capacity_bytes)
            arena = _open_arena(folder / _ARENA, most_bytes * ADDRESSES, memory)
        except OSError as error:
            raise BackendUnavailableError(f"the folder {folder} cannot be used: {error}.", retryable=False) from error
        self._recorded = recorded
        self.sync = "commit" if sync else "none"
        recorded.end_holds()
        live = {write_id: positions for write_id, (_, positions) in recorded.payload().items()}
        now = _memory_of(arena)
        self._kept = KeptExtents(
            arena,
            most_bytes,
            recorded,
            live,
            same_memory=memory == now,
            sync=sync,
            touch_ahead_bytes=touch_ahead_bytes,
        )
        super().__init__(self._kept, recorded, capacity_bytes, on_full)
        recorded.note(_MEMORY_NOTE, now)
        first = int(recorded.notes.get(_SESSIONS_NOTE, b"1"))
        self._numbers = itertools.count(first)
        self._sweep()
        recorded.commit()

    def settle(self) -> None:
        """As `Host.settle`."""
        self._recorded.commit_or_end()

    def touch_ahead(self) -> None:
        """See `ExtentService.touch_ahead`."""
        self._kept.touch_ahead()

    def work_aside(self) -> bool:
        """See `Server`."""
        return self._kept.work_aside()

    def close(self) -> None:
        """Ends the store, whose folder can then be moved."""
        self._kept.finish()
        self._recorded.close()
        os.close(self._lock)

    def _new_client(self, number: int) -> Client:
        if number >= int(self._recorded.notes.get(_SESSIONS_NOTE, b"1")):
            self._recorded.note(_SESSIONS_NOTE, b"%d" % (number + _SESSIONS_TOGETHER))
            self._recorded.commit_or_end()  # before any write id has that number
        return super()._new_client(number)


def is_open(folder: Path) -> bool:
    """Whether a process of this host has a folder open."""
    with contextlib.suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment; an owner that starts tries again
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def owner_of(folder: Path) -> Owner | None:
    """Who has a folder open now, or had it last. None: nobody ever had."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _LOCK).read_bytes(), type=Owner)
    return None


@dataclass(frozen=True)
class Contents:
    """What a folder holds that nobody has open.

    Attributes:
        partitions: Name -> how many samples are there.
        size_bytes: The size of their rows.
    """

    partitions: dict[str, int]
    size_bytes: int


def contents_of(folder: Path) -> Contents:
    """Looks into a folder, and changes nothing. Raises as `DurableStore`."""
    with tempfile.TemporaryDirectory() as copy:
        journal = Path(copy) / _JOURNAL
        shutil.copytree(folder / _JOURNAL, journal)
        ledger = RecordedLedger(journal, sync=False)
        try:
            names = ledger.call(commands.ListPartitionsRequest()).partition_ids
            counts = {name: len(ledger.call(commands.ListRequest(name)).sample_ids) for name in names}
            held = sum(
                row_bytes[each]
                for row_bytes, positions in ledger.payload().values()
                if row_bytes is not None
                for each in positions
            )
            return Contents(counts, held)
        finally:
            ledger.close()


def _lock(folder: Path) -> int:
    """Locks a folder for this process. The kernel unlocks it when the process ends."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    give_up = time.monotonic() + _ENDING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= give_up:
                os.close(lock)
                owner = owner_of(folder)
                who = "another process" if owner is None else f"process {owner.pid} of host {owner.host}"
                raise AlreadyRunningError(
                    f"the folder {folder} is in use by {who}.",
                    retryable=True,
                    hint="Attach to that store with bootstrap=False, or name another folder.",
                ) from None
            time.sleep(_POLL_S)
    os.truncate(lock, 0)
    os.pwrite(lock, msgspec.json.encode(Owner(os.uname().nodename, os.getpid(), time.time())), 0)
    return lock


def _open_arena(path: Path, size_bytes: int, memory: bytes | None) -> Arena:
    before = _Memory(_VERSION) if memory is None else msgspec.msgpack.decode(memory, type=_Memory)
    if before.version != _VERSION:
        raise CorruptDataError(
            f"the folder {path.parent} is of version {before.version}. Expected {_VERSION}.",
            hint="Another dataplane-shm wrote it: use that one, or name an empty folder.",
        )
    there_bytes = path.stat().st_size if path.exists() else 0
    if there_bytes < before.size_bytes:
        raise CorruptDataError(
            f"the file {path} has {there_bytes} bytes. Expected {before.size_bytes}: it was cut or removed.",
            hint="Restore a whole copy of the folder.",
        )
    arena = Arena.open(path, size_bytes)
    for each in (path, path.parent):  # the file must be there after a loss of power, with its size
        fd = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return arena


class _Memory(msgspec.Struct, array_like=True):
    """Identifies a file of the arena, and the machine's memory since it was started: unsynced bytes are only there."""

    version: int
    size_bytes: int = 0
    device: int = 0
    inode: int = 0
    boot_id: str = ""


def _memory_of(arena: Arena) -> bytes:
    status = os.fstat(arena.fd)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return msgspec.msgpack.encode(_Memory(_VERSION, status.st_size, status.st_dev, status.st_ino, boot_id))
