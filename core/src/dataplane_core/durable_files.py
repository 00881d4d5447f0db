"""Has the disk keep files: what was written is there when the call returns."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: Errors of the system when a disk, or somebody's share of it, is full.
FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def disk_hint(error: OSError, otherwise: str | None = None) -> str | None:
    """What a user does about a folder that cannot be used."""
    return "Make room on the disk." if error.errno in FULL else otherwise


def write_file(path: Path, parts: Iterable[bytes | bytearray]) -> None:
    """Writes a new file and syncs its content to the disk. Its name is durable only after `sync_path` of its folder.

    The parts are consumed one by one, so that they need not fit in memory.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NONBLOCK", 0), 0o666)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_path(path: Path) -> None:
    """Returns when the disk has a file, or the names in a folder. Raises `OSError`."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders, and keeps names by itself
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
