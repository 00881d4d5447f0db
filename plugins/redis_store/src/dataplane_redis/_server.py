"""A private `redis-server`: started on a unix socket in a `PrivateFolder`, ended by its process id.

If the owner is killed, its watcher process removes the folder and the lock.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

from dataplane_core.backends import OwnedProcess, PrivateFolder, last_words
from dataplane_core.errors import (
    BackendUnavailableError,
    DataPlaneError,
    OperationTimeoutError,
)
from dataplane_redis._link import Link
from dataplane_redis.config import RedisConfig

__all__ = ["INSTALL_HINT", "PrivateServer", "has_ended", "private_url"]

#: The hint if redis-server is not installed.
INSTALL_HINT: Final = (
    "Install it: apt-get install redis-server (Debian, Ubuntu), dnf install redis, brew install redis. Or set the "
    "option url to a server that runs."
)

_POLL_S: Final = 0.01
#: Seconds that the server may take to end after SIGTERM; then it is killed.
_END_S: Final = 5.0


def _folder(namespace: str) -> PrivateFolder:
    return PrivateFolder("redis", namespace, "redis.sock")


def private_url(namespace: str) -> str:
    """The URL of the private server of a namespace."""
    return f"unix://{quote(str(_folder(namespace).socket))}"


def has_ended(namespace: str) -> bool:
    """Whether no private server of this namespace runs. One that is busy or stopped still takes connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(_folder(namespace).socket))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:  # too many wait to be connected
            return False
    return False


class PrivateServer:
    """A `redis-server` that belongs to this process.

    Args:
        config: The options.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._folder = _folder(config.namespace)
        self._process: OwnedProcess | None = None

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
        self._folder.claim(deadline)
        self.launch(deadline)

    def launch(self, deadline: float) -> None:
        """Starts the server process on the folder as it is, like after a crash. Raises what `start` raises."""
        binary = shutil.which("redis-server")
        assert binary is not None
        self._end_process()
        self._folder.socket.unlink(missing_ok=True)
        settings = {
            "port": "0",
            "unixsocket": str(self._folder.socket),
            "unixsocketperm": "700",
            "logfile": str(self._log),
            "dir": str(self._folder.path),
            "daemonize": "no",
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if self._config.appendonly else "no",
            "appendfsync": self._config.appendfsync,
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        folder = self._folder
        self._process = OwnedProcess([binary, *words], end_s=_END_S, folder=folder.path, lock=folder.lock)
        self._wait(deadline)

    def stop(self, until: float = math.inf) -> None:
        """Ends the server by its process id, which is killed then at the latest, and removes the folder. May be called
        again."""
        if self._folder.is_claimed:
            self._end_process(until)
            self._folder.release()

    @property
    def _log(self) -> Path:
        return self._folder.path / "redis.log"

    def _wait(self, deadline: float) -> None:
        link = Link(private_url(self._config.namespace), "the private server")
        try:
            while True:
                assert self._process is not None
                if self._folder.socket.exists():
                    with contextlib.suppress(DataPlaneError):
                        link.command("connect", deadline, b"PING")
                        return
                if self._process.ended:
                    raise BackendUnavailableError(
                        f"connect failed: the private redis-server ended at its start: {last_words(self._log)}",
                        retryable=False,
                    )
                if time.monotonic() + _POLL_S >= deadline:
                    raise OperationTimeoutError("connect timed out: the private redis-server does not answer.")
                time.sleep(_POLL_S)
        finally:
            link.close()

    def _end_process(self, until: float = math.inf) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(until)
