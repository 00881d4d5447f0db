"""Files of sealed JSON lines: how a recorder writes them, and how a reader finds damage and who still writes."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from dataplane_core.digests import fast_hash

with suppress(ImportError):  # Windows has none
    import fcntl

_SUM: Final = b',"sum":"'
#: How often, and after how many seconds each, a writer asks for the lock of a file that another has for a moment: one
#: that writes a line of the same file, or that is in `is_held`.
_LOCK_TRIES: Final = 50
_LOCK_PAUSE_S: Final = 0.002


class LineFile:
    """Appends JSON lines to a file by one write each. A line begins with its time ``at``, in seconds since 1970, and
    ends with ``sum``, the XXH3-64 of what is before it. Until it is closed, the file is held, as far as it can be.
    ``shared``: other processes append to it too.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self._file = path.open("a+b", buffering=0)
        self._shared = shared
        self._holder = 0  # the process that got the lock
        self.size_bytes = 0  # of what was written here
        for _ in range(_LOCK_TRIES):  # not for ever: a process may be stopped while it has the lock
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._holder = os.getpid()
                break
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
            except (OSError, NameError):  # a file system without locks, or Windows
                break

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line. If that fails, a part of it may be left in a shared file that is not locked."""
        data = sealed(_json({"at": round(time.time(), 6), **line})) + b"\n"
        descriptor = self._file.fileno()
        end = os.fstat(descriptor).st_size
        if end and os.pread(descriptor, 1, end - 1) != b"\n":  # half a line
            data = b"\n" + data
        if self._file.write(data) != len(data):
            if not self._shared or self._holder == os.getpid():  # else it might cut off a line of another
                os.ftruncate(descriptor, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size_bytes += len(data)

    def close(self) -> None:
        if self._holder == os.getpid():  # a process that was forked off may keep the descriptor, and the lock with it
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
            self._holder = 0
        self._file.close()


def is_held(path: Path) -> bool:
    """Whether a `LineFile` of any process of the host writes a file. True if that cannot be known."""
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


def texts_of(data: bytes) -> Iterator[tuple[int, bytes | None, bool]]:
    """Of each line its number; what was sealed, or None: it is damaged; and whether it may just be cut off."""
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        is_last = number == len(lines)
        if line or not is_last:
            yield number, unsealed(line), is_last
