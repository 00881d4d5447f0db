"""Reads files that somebody may have replaced: a named pipe in the place of a file would never end, nor a device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Never waits for a writer.

    Raises:
        OSError: There is no such file, it cannot be read, or it is a pipe, a socket, a device or a folder.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 # the caller closes it
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, f"'{path.name}' is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no pipes among its files
