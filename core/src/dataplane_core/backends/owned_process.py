"""A server that a backend starts for itself: ended by its id, or by kernel and watcher when its owner is killed."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["OwnedProcess", "last_words"]

#: Ends the process, and removes the folder and the lock file named, once standard input closes: then the owner is gone.
_WATCHER: Final = 'read line; kill -"$1" "$2"; [ -z "$3" ] || rm -rf "$3"; [ -z "$4" ] || rm -f "$4"'

#: Asks the kernel to send a signal once the owner is gone, and becomes the program. Where the owner went before the
#: kernel was asked, there is nothing to do. Python ignores two signals, which a program would inherit.
_BOUND: Final = """
import ctypes, os, signal, sys
owner, ending, *command = sys.argv[1:]
set_parent_death_signal = 1
ctypes.CDLL(None).prctl(set_parent_death_signal, int(ending), 0, 0, 0)
if os.getppid() == int(owner):
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(command[0], command)
"""


class OwnedProcess:
    """A process that belongs to this one; constructing it starts it. Needs ``/bin/sh``.

    It runs in a session of its own: an interrupt of the trainer must not reach a store before the store's clients. It
    ends when this process is killed, in two ways: on Linux the kernel ends it, whatever else is killed at the same
    time; and a shell, the watcher, waits for this process's end of a pipe to close, ends it and removes what it leaves.
    Where the watcher is killed too, the next owner has to remove it.

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
        self._over = threading.Event()
        ending = "TERM" if end_s and folder is None else "KILL"
        self._process = self._start(_bound(command, ending), log)
        paths = ["" if folder is None else str(folder), "" if lock is None else str(lock[1])]
        try:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "sh", ending, str(self.pid), *paths],
                pass_fds=() if lock is None else (lock[0],),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._over.set()
            raise

    def _start(self, command: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
        """Starts it from a thread that stays: to the kernel a process's parent is the thread that started it."""
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

        def run() -> None:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            except OSError as error:
                started.put(error)
                return
            started.put(process)
            self._over.wait()
            process.kill()  # only where the start was interrupted does it still run
            process.wait()

        output = subprocess.DEVNULL if log is None else log.open("wb")
        try:
            threading.Thread(target=run, name=f"owner of {Path(command[0]).name}", daemon=True).start()
            process = started.get()
        except BaseException:
            self._over.set()
            raise
        finally:
            if not isinstance(output, int):
                output.close()
        if isinstance(process, OSError):
            raise process
        return process

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
                self._over.set()
                return
        self._process.kill()
        self._process.wait()
        self._over.set()


def _bound(command: Sequence[str], ending: str) -> list[str]:
    """The command, bound to this process's life where the kernel can do that."""
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]} is not a program that can be started")
    if sys.platform != "linux" or not sys.executable:
        return [program, *command[1:]]
    number = {"TERM": 15, "KILL": 9}[ending]
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), str(number), program, *command[1:]]


def last_words(log: Path) -> str:
    """The last lines of a server's log, for the message about its end."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return " / ".join(lines[-3:]) or "it wrote no log"
