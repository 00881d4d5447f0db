"""What one process of a host has for itself: folders that it locks, and servers that it starts. They end with it.

Backends use it: a store in a folder (`lock_folder`), a server that others of the same user find by a name
(`PrivateFolder`) and that ends with who started it (`OwnedProcess`). Forks never have what their parent has.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from dataplane_core.durable_files import sync_path
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError

with contextlib.suppress(ImportError):  # Windows has none, and nothing that needs it runs there
    import fcntl

_LOCK: Final = "lock"
_POLL_S: Final = 0.01
#: Seconds that the watcher of a killed owner may take to remove the folder and the lock.
_CLEANUP_S: Final = 2.0
#: The longest path of a unix socket that all systems take.
_MAX_PATH: Final = 100


# --- locks ------------------------------------------------------------------------------------------------------------


def _takes_lock(descriptor: int) -> bool:
    """Locks an open file, unless another process has the lock. The kernel unlocks it when the file is closed by all
    that inherited it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on a file."""
    with contextlib.suppress(OSError):  # there is no such file
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment; an owner that starts tries again
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


# --- folders that outlive their owners --------------------------------------------------------------------------------


class Owner(msgspec.Struct):
    """The process that has a folder open."""

    host: str
    pid: int
    since: float  # on the clock of that host, in seconds since 1970
    name: str = ""  # what the store is called, if it is known


def is_open(folder: Path) -> bool:
    """Whether a process of this host has a folder open."""
    return is_locked(folder / _LOCK)


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
        give_up = time.monotonic() + patience_s
        while not _takes_lock(lock):
            if time.monotonic() >= give_up:
                raise _in_use(folder)
            time.sleep(_POLL_S)
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


def _in_use(folder: Path) -> AlreadyRunningError:
    owner = owner_of(folder)
    who = "another process" if owner is None else f"process {owner.pid} of host {owner.host}"
    which = f"that store, {owner.name}," if owner is not None and owner.name else "that store"
    return AlreadyRunningError(
        f"the folder {folder} is in use by {who}.",
        retryable=True,
        hint=f"Attach to {which} with bootstrap=False, or name another folder.",
    )


# --- folders of servers -----------------------------------------------------------------------------------------------


class PrivateFolder:
    """A folder of mode 700 under the temporary folder, for a server that this process owns.

    The path is made from the user and a name, so processes with the same options find the same folder. The owner holds
    a lock on a file beside it. Systems delete old files of the temporary folder, so a folder whose server listens is
    owned even if that file is gone.

    Args:
        service: What runs there, such as ``redis``. Part of the path.
        namespace: The name of the instance. Part of the path.
        socket: The file name of the Unix socket in the folder, if there is one.
    """

    def __init__(self, service: str, namespace: str, socket: str = "") -> None:
        name = f"dataplane-{service}-{os.getuid()}"
        path = Path(tempfile.gettempdir()) / name / namespace
        if socket and len(str(path / socket)) >= _MAX_PATH:
            path = Path("/tmp") / name / namespace
        self.path = path
        self.socket = path / socket
        # never the name of a folder: no namespace begins with a dot
        self.lock_path = path.with_name(f".{namespace}.lock")
        self._lock: int | None = None
        not_in_forks(self)

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

    def check_home(self) -> None:
        """Refuses a folder above this one that others can access: they could have put anything there."""
        home = self.path.parent
        status = home.lstat()
        if not home.is_dir() or home.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise BackendUnavailableError(
                f"connect refused: other users can access the folder {home}. Expected this user's folder, mode 700.",
                retryable=False,
            )

    def claim(self, deadline: float) -> None:
        """Locks the folder, and makes it new and empty. Raises `AlreadyRunningError`, retryable, if another process
        owns it, and `BackendUnavailableError` if other users can access the folder above it."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.check_home()
        give_up = min(deadline, time.monotonic() + _CLEANUP_S)
        while True:
            lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # another process may hold it, or have removed it after it was opened here
            if _takes_lock(lock) and self._is_lock(lock) and not self._is_served:
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

    def forget_in_fork(self) -> None:
        """Closes the lock that a fork inherited, which would otherwise be held as long as the fork lives."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


# --- processes --------------------------------------------------------------------------------------------------------

#: Waits until standard input closes, which means that the owner is gone. Then ends the process, and removes the folder
#: and the lock file.
_WATCHER: Final = 'read line; kill -KILL "$1"; [ -z "$2" ] || rm -rf "$2"; [ -z "$3" ] || rm -f "$3"'
#: Waits until the watcher runs, then executes the program. If the owner is killed before, it ends.
_GATE: Final = 'read line && exec "$@" </dev/null'


class OwnedProcess(subprocess.Popen[bytes]):
    """A child process that ends with this one. The constructor starts it. Needs ``/bin/sh``.

    It runs in its own session, so that an interrupt of the trainer does not end a store before its clients. If this
    process is killed, a shell (the watcher, in a session of its own) notices that its pipe from this process closed,
    ends the child and removes the files that it left.

    Args:
        command: The program and its arguments.
        log: The file for its output. None: the output is discarded.
        end_s: Seconds that it may take to end when asked, after which it is killed. 0: it is killed at once.
        folder: A folder that the watcher removes if this process is killed. It kills the child before, so that the
            child cannot write to a folder of the same name that the next owner makes.
        lock: A lock file, open and locked, and its path. The watcher shares the lock, so the lock is held until the
            folder is removed. The watcher then removes the file.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        end_s: float = 0.0,
        folder: Path | None = None,
        lock: tuple[int, Path] | None = None,
    ) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"{command[0]} is not a program that can be started")
        self._end_s = end_s
        output = subprocess.DEVNULL if log is None else log.open("wb")
        paths = ["" if folder is None else str(folder), "" if lock is None else str(lock[1])]
        try:
            gate = ["/bin/sh", "-c", _GATE, "sh", *command]
            super().__init__(gate, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
            assert self.stdin is not None
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "sh", str(self.pid), *paths],
                pass_fds=() if lock is None else (lock[0],),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            with self.stdin as line:
                line.write(b"\n")
        except BaseException:  # an interrupt, too, when it runs already
            if getattr(self, "pid", None) is not None:
                self._kill()
            raise
        finally:
            if not isinstance(output, int):
                output.close()
        not_in_forks(self)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.poll() is not None

    def end(self, until: float = math.inf) -> None:
        """Ends the watcher, then the process, which is killed when ``end_s`` is over, or at ``until``. Blocks until
        both have ended. May be called again."""
        self._watcher.kill()
        self._watcher.wait()
        self.forget_in_fork()
        if self._end_s:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                self.wait(min(self._end_s, max(0.0, until - time.monotonic())))
        self._kill()

    def _kill(self) -> None:
        self.kill()
        self.wait()

    def forget_in_fork(self) -> None:
        """Closes the watcher's pipe, which waits until its owner alone is gone."""
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()


def last_words(log: Path) -> str:
    """The last lines of a server's log, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return " / ".join(lines[-3:]) or "it wrote no log"


# --- forks ------------------------------------------------------------------------------------------------------------


class _Owned(Protocol):
    def forget_in_fork(self) -> None: ...


_owned: Final[weakref.WeakSet[_Owned]] = weakref.WeakSet()


def not_in_forks(owned: _Owned) -> None:
    """Has each fork of this process call ``owned.forget_in_fork()``, as long as the object lives."""
    _owned.add(owned)


def _forget_all() -> None:
    for owned in list(_owned):
        owned.forget_in_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_forget_all)
