"""A private `redis-server`: started on a unix socket in a temporary folder, ended by its process id.

The path of the folder is made from the user and the namespace, so other processes of the user on this host find the
socket with the same options. The owner holds a lock on the folder. If the owner is killed, its watcher process removes
the folder and the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

from dataplane_core.backends import OwnedProcess, last_words
from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    DataPlaneError,
    OperationTimeoutError,
)
from dataplane_redis._link import Link
from dataplane_redis.config import RedisConfig

__all__ = ["INSTALL_HINT", "PrivateServer", "private_url"]

#: The hint if redis-server is not installed.
INSTALL_HINT: Final = (
    "Install it: apt-get install redis-server (Debian, Ubuntu), dnf install redis, brew install redis. Or set the "
    "option url to a server that runs."
)

_POLL_S: Final = 0.01
#: Seconds that the server may take to end after SIGTERM; then it is killed.
_END_S: Final = 5.0
#: Seconds that the watcher of a killed owner may take to remove the folder and the lock.
_CLEANUP_S: Final = 0.5
#: The longest path of a unix socket.
_MAX_PATH: Final = 100


def _folder(namespace: str) -> Path:
    name = f"dataplane-redis-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / name / namespace
    return folder if len(str(folder)) < _MAX_PATH - len("/redis.sock") else Path("/tmp") / name / namespace


def private_url(namespace: str) -> str:
    """The URL of the private server of a namespace."""
    return f"unix://{quote(str(_folder(namespace) / 'redis.sock'))}"


class PrivateServer:
    """A `redis-server` that belongs to this process.

    Args:
        config: The options.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._folder = _folder(config.namespace)
        self._process: OwnedProcess | None = None
        self._lock: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server, or None if it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, deadline: float) -> None:
        """Starts the server and waits until it answers.

        Raises:
            BackendUnavailableError: ``redis-server`` is not installed, or does not start.
            AlreadyRunningError: Another process runs the private server of this namespace.
            OperationTimeoutError: It did not answer in time.
        """
        if shutil.which("redis-server") is None:
            raise BackendUnavailableError(
                "connect failed: server is 'private', but there is no redis-server on the PATH.",
                retryable=False,
                hint=INSTALL_HINT,
            )
        self._claim_folder(deadline)
        shutil.rmtree(self._folder, ignore_errors=True)  # left by an owner that was killed with its watcher
        self._folder.mkdir(mode=0o700)
        self.launch(deadline)

    def launch(self, deadline: float) -> None:
        """Starts the server process on the folder as it is, like after a crash. Raises what `start` raises."""
        binary = shutil.which("redis-server")
        assert binary is not None
        self._end_process()
        (self._folder / "redis.sock").unlink(missing_ok=True)
        settings = {
            "port": "0",
            "unixsocket": str(self._folder / "redis.sock"),
            "unixsocketperm": "700",
            "logfile": str(self._folder / "redis.log"),
            "dir": str(self._folder),
            "daemonize": "no",
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if self._config.appendonly else "no",
            "appendfsync": self._config.appendfsync,
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        assert self._lock is not None
        lock = (self._lock, self._lock_path)
        self._process = OwnedProcess([binary, *words], end_s=_END_S, folder=self._folder, lock=lock)
        self._wait(deadline)

    def stop(self) -> None:
        """Ends the server by its process id and removes the folder. May be called again."""
        if self._lock is None:
            return
        self._end_process()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # forks share the lock: closing the file here would not release it
        os.close(self._lock)
        self._lock = None

    @property
    def _lock_path(self) -> Path:
        return self._folder.with_name(f"{self._folder.name}.lock")

    def _claim_folder(self, deadline: float) -> None:
        home = self._folder.parent
        home.mkdir(mode=0o700, exist_ok=True)
        status = home.lstat()
        if not home.is_dir() or home.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise BackendUnavailableError(
                f"connect refused: other users can access the folder {home}. Expected this user's folder, mode 700.",
                retryable=False,
            )
        path = self._lock_path
        give_up = min(deadline, time.monotonic() + _CLEANUP_S)
        while self._lock is None:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):
                    self._lock = lock
            except FileNotFoundError:
                pass  # the owner removed it after it was opened here
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    os.close(lock)
                    raise AlreadyRunningError(
                        f"connect(bootstrap=True) refused: another client runs the private server of namespace "
                        f"'{self._folder.name}'.",
                        retryable=True,
                        hint="Attach with bootstrap=False, or choose another namespace.",
                    ) from None
                time.sleep(_POLL_S)
            if self._lock is None:
                os.close(lock)  # another process holds it, or removed it after it was opened here

    def _wait(self, deadline: float) -> None:
        link = Link(private_url(self._folder.name), "the private server")
        try:
            while True:
                assert self._process is not None
                if (self._folder / "redis.sock").exists():
                    with contextlib.suppress(DataPlaneError):
                        link.command("connect", deadline, b"PING")
                        return
                if self._process.ended:
                    raise BackendUnavailableError(
                        f"connect failed: the private redis-server ended at its start: "
                        f"{last_words(self._folder / 'redis.log')}",
                        retryable=False,
                    )
                if time.monotonic() + _POLL_S >= deadline:
                    raise OperationTimeoutError("connect timed out: the private redis-server does not answer.")
                time.sleep(_POLL_S)
        finally:
            link.close()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()
