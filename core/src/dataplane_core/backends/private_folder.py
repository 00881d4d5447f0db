"""`PrivateFolder`: a folder for the server process that a backend owns, found by the same user's other processes.

The path is made from the user and a name, so processes with the same options find the same folder. The owner holds a
lock on a file beside it. Systems delete old files of the temporary folder, so a folder whose server listens is owned
even if that file is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError
from dataplane_core.hosting import is_locked

with contextlib.suppress(ImportError):  # Windows has none, and no backend that needs this folder runs there
    import fcntl

_POLL_S: Final = 0.01
#: Seconds that the watcher of a killed owner may take to remove the folder and the lock.
_CLEANUP_S: Final = 2.0
#: The longest path of a unix socket that all systems take.
_MAX_PATH: Final = 100


class PrivateFolder:
    """A folder of mode 700 under the temporary folder.

    Args:
        service: What runs there, such as ``redis``. Part of the path.
        namespace: The name of the instance. Part of the path.
        socket: The file name of the Unix socket in the folder. Its path must be short. Default: there is none.

    Attributes:
        path: The folder.
        socket: The path of the socket.
    """

    def __init__(self, service: str, namespace: str, socket: str = "") -> None:
        name = f"dataplane-{service}-{os.getuid()}"
        path = Path(tempfile.gettempdir()) / name / namespace
        if socket and len(str(path / socket)) >= _MAX_PATH:
            path = Path("/tmp") / name / namespace
        self.path = path
        self.socket = path / socket
        self._lock: int | None = None
        _folders.add(self)

    @property
    def lock(self) -> tuple[int, Path]:
        """The lock file, open and locked, and its path; for `OwnedProcess`."""
        assert self._lock is not None
        return self._lock, self.lock_path

    @property
    def is_claimed(self) -> bool:
        """Whether this process owns the folder."""
        return self._lock is not None

    @property
    def is_owned(self) -> bool:
        """Whether some process owns the folder now."""
        return is_locked(self.lock_path) or self._is_served

    @property
    def _is_served(self) -> bool:
        """Whether a server listens on the socket."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.setblocking(False)
            try:
                channel.connect(str(self.socket))
            except BlockingIOError:  # more connect at once than it takes
                return True
            except OSError:
                return False
        return True

    @property
    def lock_path(self) -> Path:
        """The path of the lock file. Its name is never that of a folder, since no namespace begins with a dot."""
        return self.path.with_name(f".{self.path.name}.lock")

    def check_home(self) -> None:
        """Refuses a folder above this one that others can access: they could have put anything there.

        Raises:
            BackendUnavailableError: They can.
        """
        home = self.path.parent
        status = home.lstat()
        if not home.is_dir() or home.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise BackendUnavailableError(
                f"connect refused: other users can access the folder {home}. Expected this user's folder, mode 700.",
                retryable=False,
            )

    def claim(self, deadline: float) -> None:
        """Locks the folder and makes it new and empty.

        Raises:
            BackendUnavailableError: Other users can access the folder above it.
            AlreadyRunningError: Another process owns the folder. Retryable.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.check_home()
        give_up = min(deadline, time.monotonic() + _CLEANUP_S)
        while True:
            lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # another process may hold it, or have removed it after it was opened here
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_lock(lock) and not self._is_served:
                    self._lock = lock
                    break
            os.close(lock)
            if time.monotonic() >= give_up:
                raise AlreadyRunningError(
                    f"connect(bootstrap=True) refused: another client runs the store of namespace '{self.path.name}'.",
                    retryable=True,
                    hint="Attach with bootstrap=False, or choose another namespace.",
                )
            time.sleep(_POLL_S)
        shutil.rmtree(self.path, ignore_errors=True)  # left by an owner that was killed with its watcher
        self.path.mkdir(mode=0o700)

    def release(self) -> None:
        """Removes the folder and the lock, unless they are another owner's by now. May be called again."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if self._is_lock(lock):
            shutil.rmtree(self.path, ignore_errors=True)
            self.lock_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # the watcher shares the lock: closing the file would not release it
        os.close(lock)

    def _is_lock(self, lock: int) -> bool:
        """Whether this open file is the lock file."""
        try:
            return os.path.samestat(os.fstat(lock), self.lock_path.stat())
        except FileNotFoundError:
            return False

    def _forget_in_fork(self) -> None:
        """Closes the lock that a fork inherited, which would otherwise be held as long as the fork lives."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


_folders: Final[weakref.WeakSet[PrivateFolder]] = weakref.WeakSet()


def _forget_in_fork() -> None:
    for folder in list(_folders):
        folder._forget_in_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_forget_in_fork)
