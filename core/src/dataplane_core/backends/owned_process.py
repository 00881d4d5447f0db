"""A server process that a backend starts and ends. It also ends if the backend's own process is killed."""

from __future__ import annotations

import math
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: Waits until standard input closes, which means that the owner is gone. Then ends the process, and removes the folder
#: and the lock file.
_WATCHER: Final = 'read line; kill -"$1" "$2"; [ -z "$3" ] || rm -rf "$3"; [ -z "$4" ] || rm -f "$4"'

#: Asks the kernel to send a signal when the owner ends, then executes the program. If the owner ended before that, it
#: exits instead. Python ignores two signals, and the program would inherit that.
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
    """A child process that ends with this one. The constructor starts it. Needs ``/bin/sh``.

    It runs in its own session, so that an interrupt of the trainer does not end a store before its clients. If this
    process is killed, the child ends in two ways. On Linux, the kernel ends it. On all systems, a shell (the watcher)
    notices that its pipe from this process closed, ends the child and removes the files that it left. If the watcher is
    killed too, these files stay, and the next owner must remove them.

    Args:
        command: The program and its arguments.
        log: The file for its output. None: the output is discarded.
        end_s: Seconds that it may take to end when asked, after which it is killed. 0: it is killed at once.
        folder: A folder that the watcher removes if this process is killed, or None. The watcher then kills the child
            at once, so that the child cannot write to a folder of the same name that the next owner makes.
        lock: A lock file, open and locked, and its path, or None. The watcher shares the lock, so the lock is held
            until the folder is removed. The watcher then removes the file.

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
        _owned.add(self)

    def _start(self, command: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
        """Starts it from a thread that stays alive: for the kernel, the parent is the thread that started it."""
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
            process.kill()  # it still runs only if the start was interrupted
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

    def end(self, until: float = math.inf) -> None:
        """Ends the watcher, then the process. Blocks until both have ended. May be called again.

        Args:
            until: When to kill a process that does not end by itself, on `time.monotonic`'s clock, if that is before
                ``end_s`` is over.
        """
        self._watcher.kill()
        self._watcher.wait()
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        if self._end_s:
            self._process.terminate()
            try:
                self._process.wait(min(self._end_s, max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                pass  # killed below
            else:
                self._over.set()
                return
        self._process.kill()
        self._process.wait()
        self._over.set()


_owned: Final[weakref.WeakSet[OwnedProcess]] = weakref.WeakSet()


def _forget_in_fork() -> None:
    """Closes the watchers' pipes that a fork inherited: a watcher waits until its owner alone is gone."""
    for owned in list(_owned):
        if owned._watcher.stdin is not None:
            owned._watcher.stdin.close()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_forget_in_fork)


def _bound(command: Sequence[str], ending: str) -> list[str]:
    """The command, started so that the kernel ends it with this process, if the kernel can do that."""
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]} is not a program that can be started")
    if sys.platform != "linux" or not sys.executable:
        return [program, *command[1:]]
    number = {"TERM": 15, "KILL": 9}[ending]
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), str(number), program, *command[1:]]


def last_words(log: Path) -> str:
    """The last lines of a server's log, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return " / ".join(lines[-3:]) or "it wrote no log"
