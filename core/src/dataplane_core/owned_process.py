"""A server that a backend starts for itself: ended by process id, and by a watcher where its owner is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["OwnedProcess", "last_words"]

#: Ends the process, and removes the folder and the lock file named, once standard input closes: then the owner is gone.
_WATCHER: Final = 'read line; kill -"$1" "$2"; [ -z "$3" ] || rm -rf "$3"; [ -z "$4" ] || rm -f "$4"'


class OwnedProcess:
    """A process that belongs to this one; constructing it starts it. Needs ``/bin/sh``.

    It runs in a session of its own: an interrupt of the trainer must not reach a store before the store's clients. A
    shell waits for this process's end of a pipe to close, so the process also ends when this one is killed.

    Args:
        command: The program and its arguments.
        log: The file that takes its output; None: nothing does.
        end_s: Seconds that it may take to end when asked, after which it is killed; 0: it is killed at once.
        folder: What the watcher removes after a killed owner, if anything. It then kills the process at once, so that
            this cannot touch what the next owner puts in that place.
        lock: A lock file, open and locked, and its path. The watcher shares the lock, so that it holds until the folder
            is removed, and then removes the file.

    Raises:
        OSError: The program cannot be started.
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
        self._end_s = end_s
        output = subprocess.DEVNULL if log is None else log.open("wb")
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        finally:
            if not isinstance(output, int):
                output.close()
        signal = "TERM" if end_s and folder is None else "KILL"
        paths = ["" if folder is None else str(folder), "" if lock is None else str(lock[1])]
        try:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "sh", signal, str(self.pid), *paths],
                pass_fds=() if lock is None else (lock[0],),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends the watcher, then the process. Blocks until both are gone; may be called again."""
        self._watcher.kill()
        self._watcher.wait()
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        if self._end_s:
            self._process.terminate()
            try:
                self._process.wait(self._end_s)
            except subprocess.TimeoutExpired:
                pass  # killed below
            else:
                return
        self._process.kill()
        self._process.wait()


def last_words(log: Path) -> str:
    """The last lines of a server's log, for the message about its end."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return " / ".join(lines[-3:]) or "it wrote no log"
