"""Starts processes fast: it forks them from a process that has already imported what clients need.

To start Python and import torch takes seconds. To fork a process that has done so takes milliseconds. The process that
is forked never had a client, so its forks inherit no connection, lock or thread of one. It serves one store under test
after the other, as long as their classes are of one module. Each fork gets the environment and the search path of its
time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Final

#: Seconds that a process may take to start, import torch and attach, or to reply, on a loaded machine.
START_S: Final = 120.0
#: Seconds that it may take to end after it was killed or asked to.
END_S: Final = 10.0

#: The function that a fork runs. It gets the fork's end of a pipe.
Body = Callable[[Connection], None]


#: Module -> the process whose forks use a class of it.
kept: dict[str, Nursery] = {}


class Nursery:
    """A process from which others are forked. Forks that end when their pipe is closed also end with it.

    Only one thread at a time may use it. ``prepare`` is called in the process before the first fork, and imports what
    all forks need. It must be importable by name. ``users`` is how many stores under test use the process.
    """

    def __init__(self, prepare: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_tend, args=(theirs, prepare), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False
        self.users = 0

    @classmethod
    def of(cls, module: str, prepare: Callable[[], Any]) -> Nursery:
        """The one that is kept for a module, or a new one. Call `release` afterwards.

        It stays for the next store under test of that module. The first one of another module ends it.
        """
        for other in [name for name, each in kept.items() if name != module and not each.users]:
            kept.pop(other).close()
        if module not in kept:
            kept[module] = cls(prepare)
        kept[module].users += 1
        return kept[module]

    def release(self) -> None:
        """Says that a user needs it no more."""
        self.users -= 1

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    def fork(self, body: Body) -> tuple[int, Connection]:
        """Starts a process that runs ``body`` and then ends. Returns its process id, and our end of the pipe to it.

        ``body`` is pickled, so it must be importable by name or be a `functools.partial` of such a function.
        """
        if not self._ready:
            self._answer()
            self._ready = True
        mine, theirs = multiprocessing.Pipe()
        # what changed since it was started
        setting = (dict(os.environ), list(sys.path), os.getcwd())
        self._connection.send(("fork", (pickle.dumps(body), setting)))
        reduction.send_handle(self._connection, theirs.fileno(), self._process.pid)
        theirs.close()
        pid: int = self._answer()
        return pid, mine

    def exit_status(self, pid: int) -> int | None:
        """A fork's exit status as `os.waitstatus_to_exitcode` returns it (-9: killed). None while it runs."""
        self._connection.send(("status", pid))
        status: int | None = self._answer()
        return status

    def kill(self, pid: int) -> None:
        """Kills a fork with SIGKILL, and returns when it is gone. Does nothing if it has already ended."""
        self._connection.send(("kill", pid))
        self._answer()

    def close(self) -> None:
        """Kills the process. It holds nothing that it would have to release."""
        self._connection.close()
        self._process.kill()
        self._process.join(END_S)

    def _answer(self) -> Any:
        return answer(self._connection, START_S, "the process that forks the test processes")


def answer(connection: Connection, within_s: float, who: str) -> Any:
    """What a child replies: it returns the result, or raises the error.

    Raises:
        AssertionError: It did not reply in time, or it died.
    """
    assert connection.poll(within_s), f"{who} did not reply within {within_s:g} s"
    try:
        succeeded, reply = connection.recv()  # from our own child
    except (EOFError, ConnectionResetError) as error:
        raise AssertionError(f"{who} died") from error
    if not succeeded:
        raise reply
    return reply


def _tend(connection: Connection, prepare: Callable[[], Any]) -> None:
    try:
        prepare()
    except Exception as error:
        connection.send((False, error))
        return
    connection.send((True, os.getpid()))
    ended: dict[int, int] = {}
    while True:
        try:
            what, argument = connection.recv()  # from our own parent
        except (EOFError, ConnectionResetError):
            return
        if what == "fork":
            connection.send((True, _fork(connection, argument)))
            continue
        if what == "kill" and argument not in ended:
            os.kill(argument, signal.SIGKILL)
        if argument not in ended:
            pid, status = os.waitpid(argument, 0 if what == "kill" else os.WNOHANG)
            if pid:
                ended[argument] = os.waitstatus_to_exitcode(status)
        connection.send((True, ended.get(argument)))


def _fork(connection: Connection, asked: tuple[bytes, tuple[dict[str, str], list[str], str]]) -> int:
    theirs = Connection(reduction.recv_handle(connection))
    pid = os.fork()
    if pid:
        theirs.close()
        return pid
    status = 1
    try:
        connection.close()  # otherwise the fork would keep its parent's pipe open, and nobody would see the parent end
        body, (environment, sys.path[:], folder) = asked
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        tempfile.tempdir = None
        pickle.loads(body)(theirs)  # from our own parent
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
