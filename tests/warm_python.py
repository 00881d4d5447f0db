"""A Python for programs that only need to be another process: it is forked from one that has imported what takes long.

The fixture `python` of the root's conftest starts this program, with the socket on which it is asked and a pipe whose
other end closes with the tests. Each program gets the streams, the environment and the folder that it is to have, and
ends as any other.
"""

import os
import runpy
import signal
import socket
import sys
import tempfile
import types

from forking_ray import python_path, requests

#: Nothing that reads settings from the environment when it is imported, as Ray and Mooncake do.
PRELOADED = ("torch._dynamo", "dataplane_core.client", "dataplane_core.connecting", "dataplane_core.middleware")


def serve(asked: socket.socket, until: int) -> None:
    """Forks a program for each message, and tells its process id and how it ended. Returns in the programs too."""
    for connection, message, streams in requests(asked, until, PRELOADED):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait below
        waits = os.fork()
        if waits:
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        program = os.fork()
        if not program:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for each in (asked, connection):
                each.close()
            os.closerange(3, max(*streams, until) + 1)
            run(**message)
            return
        for each in (*streams, until):
            os.close(each)
        asked.close()
        connection.send(str(program).encode())
        connection.send(str(os.waitpid(program, 0)[1]).encode())
        os._exit(0)


def run(words: list[str], variables: dict[str, str], folder: str, session: bool) -> None:
    """Does what ``python WORDS`` does, in a session of its own if told."""
    if session:
        os.setsid()
    own_path = python_path()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    first = "" if words[0].startswith("-") else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [first, *python_path(), *(each for each in sys.path[1:] if each not in own_path)]
    sys.argv = words[1:] if words[0] == "-m" else [words[0], *words[2 if words[0] == "-c" else 1 :]]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] != "-c":
        main.__file__ = os.path.abspath(words[0])
        with open(words[0], encoding="utf-8") as file:
            words = [words[0], file.read()]
    exec(compile(words[1], getattr(main, "__file__", "<string>"), "exec"), vars(main))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
