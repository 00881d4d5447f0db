"""Extents in a folder: who has it open, and what it takes to go on with the rows that an earlier process left there.

A folder has one owner at a time. What is noted of its extents (`KeptExtents`) is in a journal, which this module does
not know: it is given as `Notes`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dataplane_core.durable_files import sync_path
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, CorruptDataError
from dataplane_core.host_memory import Arena
from dataplane_core.hosting.extent_host import ExtentHost
from dataplane_core.hosting.kept_extents import ADDRESSES, KeptExtents, Notes

#: The version of what is noted: where the extents lie, and the memory that they are in.
_VERSION: Final = 1
_ARENA: Final = "arena"
_LOCK: Final = "lock"
_POLL_S: Final = 0.02
#: The memory in which the bytes of the arena are.
_MEMORY_NOTE: Final = "memory"


class Owner(msgspec.Struct):
    """Who has a folder open.

    Attributes:
        host: The name of its host.
        pid: Its process id there.
        since: Since when, on the clock of that host, in seconds since 1970.
        name: What the store is called. Empty: not known.
    """

    host: str
    pid: int
    since: float
    name: str = ""


def is_open(folder: Path) -> bool:
    """Whether a process of this host has a folder open."""
    return is_locked(folder / _LOCK)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on a file."""
    import fcntl  # Windows has none

    with contextlib.suppress(OSError):  # there is no such file
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


def lock_folder(folder: Path, holds: str, patience_s: float, name: str = "") -> int:
    """Makes a folder, and locks it for this process. The kernel unlocks it when the process ends.

    Args:
        folder: The folder.
        holds: The name that is in each folder of this kind that is not empty.
        patience_s: Seconds that an owner which was killed may take to end.
        name: What the store is called, for others that want the folder.

    Returns:
        A file descriptor. The folder is locked until it is closed.

    Raises:
        AlreadyRunningError: Another process has it.
        BackendUnavailableError: It holds something else.
        OSError: It cannot be used.
    """
    _make_folder(folder)
    names = set(os.listdir(folder)) - {_LOCK}
    if names and holds not in names:
        raise BackendUnavailableError(
            f"the folder {folder} holds {sorted(names)[0]!r}, and no store.",
            retryable=False,
            hint="Name an empty folder, or one in which a store was.",
        )
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _wait_for_lock(lock, folder, patience_s)
        os.truncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(Owner(os.uname().nodename, os.getpid(), time.time(), name)), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _make_folder(folder: Path, mode: int = 0o700) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent, 0o777)  # as others make them
        try:
            folder.mkdir(mode=mode, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(f"{folder} is no folder") from None
        with contextlib.suppress(PermissionError):  # a folder may be one that can be written, and not listed
            sync_path(folder.parent)


def _wait_for_lock(lock: int, folder: Path, patience_s: float) -> None:
    import fcntl  # Windows has none

    give_up = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                owner = owner_of(folder)
                who = "another process" if owner is None else f"process {owner.pid} of host {owner.host}"
                which = f"that store, {owner.name}," if owner is not None and owner.name else "that store"
                raise AlreadyRunningError(
                    f"the folder {folder} is in use by {who}.",
                    retryable=True,
                    hint=f"Attach to {which} with bootstrap=False, or name another folder.",
                ) from None
        time.sleep(_POLL_S)


def open_extents(
    folder: Path,
    most_bytes: int | None,
    notes: Notes,
    live: Mapping[int, Sequence[int]] | None,
    *,
    sync: bool = False,
    touch_ahead_bytes: int = 0,
) -> KeptExtents:
    """The extents of the arena in a folder that this process has locked.

    Args:
        folder: The folder.
        most_bytes: The most bytes that all extents may take. None: as many as before.
        notes: What the process before noted.
        live, sync, touch_ahead_bytes: See `KeptExtents`.

    Raises:
        CorruptDataError: What is in the folder is damaged, or of another version.
        OSError: It cannot be used.
    """
    before = check_extents(folder, notes.notes)
    if most_bytes is None:
        most_bytes = before.size_bytes // ADDRESSES
    arena = _open_arena(folder / _ARENA, most_bytes * ADDRESSES)
    now = _memory_of(arena)
    extents = KeptExtents(
        arena,
        most_bytes,
        notes,
        live,
        same_memory=_is_same(before, now),
        sync=sync,
        touch_ahead_bytes=touch_ahead_bytes,
    )
    notes.note(_MEMORY_NOTE, msgspec.msgpack.encode(now))
    return extents


def check_extents(folder: Path, notes: Mapping[str, bytes]) -> _Memory:
    """Checks that the arena in a folder may be the one that was noted, without a look at its rows. Changes nothing.

    Args:
        folder: The folder.
        notes: What the process before noted.

    Returns:
        The memory that it was in.

    Raises:
        CorruptDataError: It is cut or removed, of another version, or nothing is noted of its rows.
        OSError: It cannot be read.
    """
    path, memory = folder / _ARENA, notes.get(_MEMORY_NOTE)
    before = _Memory(_VERSION) if memory is None else msgspec.msgpack.decode(memory, type=_Memory)
    there_bytes = path.stat().st_size if path.exists() else 0
    if before.version != _VERSION:
        raise CorruptDataError(
            f"the folder {folder} is of version {before.version}. Expected {_VERSION}.",
            hint="Another version of dataplane wrote it: use that one, or name an empty folder.",
        )
    if there_bytes < before.size_bytes:
        raise CorruptDataError(
            f"the file {path} has {there_bytes} bytes. Expected {before.size_bytes}: it was cut or removed.",
            hint="Restore a whole copy of the folder.",
        )
    if memory is None and there_bytes and _holds_bytes(path):  # one that was just made when its process ended has none
        raise CorruptDataError(
            f"the folder {folder} holds rows, and nothing that says which: its journal was removed.",
            hint="Restore a whole copy of the folder, or remove it: its rows are lost then.",
        )
    return before


def has_extents(notes: Notes) -> bool:
    """Whether there is an arena of which these are the notes."""
    return _MEMORY_NOTE in notes.notes


class KeptExtentHost(ExtentHost):
    """As `ExtentHost`, of extents that outlive the process.

    Args:
        extents: The extents.
        commit: Returns when all that was noted is kept. Nothing is answered before.
    """

    def __init__(self, extents: KeptExtents, commit: Callable[[], None]) -> None:
        super().__init__(extents)
        self._commit = commit

    def settle(self) -> None:
        self._commit()


def _holds_bytes(path: Path) -> bool:
    """Whether there is anything but zeros in a file, which may be long and empty."""
    with path.open("rb") as file, contextlib.suppress(OSError):  # only holes follow
        at = 0
        while piece := os.pread(file.fileno(), 1 << 20, at := os.lseek(file.fileno(), at, os.SEEK_DATA)):
            if piece.strip(b"\0"):
                return True
            at += len(piece)
    return False


def _open_arena(path: Path, size_bytes: int) -> Arena:
    arena = Arena.open(path, size_bytes)
    for each in (path, path.parent):  # the file must be there after a loss of power, with its size
        sync_path(each)
    return arena


class _Memory(msgspec.Struct, array_like=True):
    """Identifies a file of the arena, and the machine's memory since it was started: unsynced bytes are only there."""

    version: int
    size_bytes: int = 0
    device: int = 0
    inode: int = 0
    boot_id: str = ""


def _is_same(before: _Memory, now: _Memory) -> bool:
    """Whether it is the memory of before, perhaps longer now."""
    return msgspec.structs.replace(before, size_bytes=now.size_bytes) == now


def _memory_of(arena: Arena) -> _Memory:
    status = os.fstat(arena.fd)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _Memory(_VERSION, status.st_size, status.st_dev, status.st_ino, boot_id)
