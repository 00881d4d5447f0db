"""Files of sealed JSON lines: how a recorder writes them, and how a reader finds damage and who still writes."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from dataplane_core.digests import fast_hash

with suppress(ImportError):  # Windows has none
    import fcntl

_SUM: Final = b',"sum":"'
#: How often, and after how many seconds each, a writer asks for the lock of a file that another has for a moment.
_LOCK_TRIES: Final = 50
_LOCK_PAUSE_S: Final = 0.002


class LineFile:
    """Appends JSON lines to a file by one write each. A line begins with its time ``at``, in seconds since 1970, and
    ends with ``sum``, the XXH3-64 of what is before it.

    Args:
        path: The file. Its folder is there.
        shared: Whether other processes append to it too.

    Attributes:
        size_bytes: Of what was written here.
    """

    def __init__(self, path: Path, *, shared: bool) -> None:
        self._file = path.open("a+b", buffering=0)
        self._shared = shared
        self._lock = threading.RLock()  # a signal handler may write in the middle of a line
        self.size_bytes = 0

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line.

        Raises:
            OSError: It is not written. A part of it may be, in a file that is shared.
            ValueError: The file is closed.
        """
        data = sealed(_json({"at": round(time.time(), 6), **line})) + b"\n"
        descriptor = self._file.fileno()
        with self._alone():
            end = os.fstat(descriptor).st_size
            if end and os.pread(descriptor, 1, end - 1) != b"\n":  # half a line
                data = b"\n" + data
            if self._file.write(data) != len(data):
                if not self._shared:
                    os.ftruncate(descriptor, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size_bytes += len(data)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While the ``with`` lasts, no other process and no other thread writes a line of a shared file."""
        if not self._shared:
            yield
            return
        with self._lock:
            is_locked = self._try_to_lock()  # not for ever: a process may be stopped while it has the lock
            try:
                yield
            finally:
                if is_locked:
                    fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)

    def hold(self) -> None:
        """From now on `is_held` tells every process of the host that this one writes the file, until its end."""
        self._try_to_lock()  # a process in `is_held` has the lock for a moment

    def _try_to_lock(self) -> bool:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
            except (OSError, NameError):  # a file system without locks, or Windows
                return False
            else:
                return True
        return False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def is_held(path: Path) -> bool:
    """Whether a process writes a file, by `LineFile.hold`. True if that cannot be known."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)  # which several may have at once
    except FileNotFoundError:
        return False
    except (OSError, NameError):
        return True
    return False


def _json(line: Mapping[str, Any]) -> bytes:
    """A JSON object. Numbers that JSON lacks are as `json` writes them."""
    text = msgspec.json.encode(line, enc_hook=_plain)  # many times as fast as `json`
    return text if b"null" not in text else json.dumps(line, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    """What a request or reply has as a string, sequence or mapping of another class than JSON knows."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be recorded")


def sealed(text: bytes) -> bytes:
    """A JSON object with a last member ``sum``."""
    return b"".join((text[:-1], _SUM, fast_hash(text).hexdigest().encode(), b'"}'))


def unsealed(line: bytes) -> bytes | None:
    """What `sealed` was given. None: the line is damaged."""
    text, found, rest = line.rpartition(_SUM)
    text += b"}"
    return text if found and rest == fast_hash(text).hexdigest().encode() + b'"}' else None
