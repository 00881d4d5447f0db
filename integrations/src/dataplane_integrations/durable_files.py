"""Files that are on the disk when a call returns, as saves need them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["sync_folder", "write_file"]


def write_file(path: Path, parts: Iterable[bytes | bytearray]) -> None:
    """Writes a file anew and brings its content to the disk; its name is there after `sync_folder`.

    Args:
        path: The file.
        parts: Its content; consumed one by one, so they need not be in memory together.

    Raises:
        OSError: The disk refuses; a part of the file may be there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk.

    Raises:
        OSError: The disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
