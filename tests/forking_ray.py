"""A Ray whose workers are forked from one process, which has imported what each would import for seconds of CPU.

Without arguments this program is the Ray: it prints its address and ends when its standard input does. With arguments
it is what Ray runs in place of its own `setup_worker.py`. A worker whose runtime environment is more than variables
starts as Ray has it.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator

#: Nothing that reads settings from the environment when it is imported, as Ray and Mooncake do, but what
#: these import.
OTHERS = ("jsonschema", "requests", "google.protobuf.message", "tensordict", "psutil")
OURS = ("client", "connecting", "backends", "hosting", "host_memory")
PRELOADED = ("torch._dynamo", *OTHERS, *(f"dataplane_core.{wing}" for wing in OURS))
#: The variable that names the socket of the process that forks.
SOCKET = "DATAPLANE_TEST_FORKS"
_CONTEXT = "--serialized-runtime-env-context="


def keep() -> None:
    """Keeps a Ray until nobody holds the standard input any more. The helpers that it ends only cost time here."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.environ[SOCKET] = os.path.join(tempfile.gettempdir(), f"ray-workers-{os.getpid()}")
    server.bind(os.environ[SOCKET])
    server.listen(100)
    until, end = os.pipe()
    if os.fork() == 0:
        os.close(end)
        fork_workers(server, until)
        return
    import ray
    from ray._private import ray_constants, worker

    ray_constants.SETUP_WORKER_FILENAME = os.path.abspath(__file__)
    options = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 1 << 27, "logging_level": "ERROR"}
    for tries_left in reversed(range(5)):
        try:
            ray.init(address="local", **options)
            break
        except Exception:  # Ray gives its processes 30 s to start, which a busy machine may not have for them
            if not tries_left:
                raise
            ray.shutdown()
    node = worker._global_node
    node.kill_log_monitor()
    node.kill_monitor()
    node.kill_dashboard()
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown(wait_for_processes=True)
    os.remove(os.environ[SOCKET])


def requests(asked: socket.socket, until: int, preloaded: Iterable[str]) -> Iterator[tuple[socket.socket, dict, list]]:
    """Imports some modules. Then yields what each connection brings, until the other end of a pipe is closed.

    That is the connection, its message, and three streams. Who forks a process for it ends the loop in that process.
    """
    for name in preloaded:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not come along"
    gc.freeze()  # else each collection in a fork, and the one at its end, looks at all of that: a second of CPU
    while until not in select.select([asked, until], [], [])[0]:
        connection, _ = asked.accept()
        message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        yield connection, json.loads(message), streams
        connection.close()
        for stream in streams:
            os.close(stream)


def fork_workers(server: socket.socket, until: int) -> None:
    """Forks a worker for each connection. Returns in the workers too."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for connection, message, streams in requests(server, until, PRELOADED):
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (server, connection):
                each.close()
            os.close(until)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            be_a_worker(**message)
            return


def be_a_worker(words: list[str], variables: dict[str, str], folder: str) -> None:
    """Does what Ray's `setup_worker.py` does with these arguments, and what the program does that it would start."""
    os.setpgid(0, 0)
    os.chdir(folder)
    own_path = python_path()
    os.environ.clear()
    os.environ.update(variables)
    for name, value in (_context(words).get("env_vars") or {}).items():
        os.environ[name] = os.path.expandvars(value)
    sys.argv = [word for word in words if not word.startswith((_CONTEXT, "--language="))]
    rest = [each for each in sys.path[1:] if each not in own_path]
    sys.path[:] = [os.path.dirname(sys.argv[0]), *python_path(), *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


def ask_for_a_worker(words: list[str]) -> None:
    """Has a worker forked that takes the place of this process."""
    context = _context(words)
    context.pop("env_vars", None)
    python = context.pop("py_executable", None) or sys.executable
    if python != sys.executable or any(context.values()):
        setup = os.path.join(os.path.dirname(words[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup, *words])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[SOCKET])
        message = {"words": words, "variables": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(connection, [json.dumps(message).encode()], [0, 1, 2])


def python_path() -> list[str]:
    """What the environment has Python put on its path."""
    return [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def _context(words: list[str]) -> dict:
    """The runtime environment among the arguments of a worker."""
    return next((json.loads(word[len(_CONTEXT) :]) for word in words if word.startswith(_CONTEXT)), {})


if __name__ == "__main__":
    if sys.argv[1:]:
        ask_for_a_worker(sys.argv[1:])
    else:
        keep()
