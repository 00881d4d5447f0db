"""What all tests of the workspace share: a temporary folder for each process that runs tests, a Ray, and a rule.

The rule: a test file leaves nothing behind. Processes, threads, entries in the temporary folder, variables of the
environment, warnings about what was never closed: the file that caused them is the one that fails. Else they meet a
test of another file, which then fails by chance. What fixtures of the session or of a package start may stay.
"""

from __future__ import annotations

import gc
import glob
import importlib
import inspect
import json
import multiprocessing.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import hypothesis
import pytest

#: Is in the environment of all that this process starts, directly or not.
_RUN = "DATAPLANE_TEST_RUN"
#: Seconds that what is ending may take to be gone.
_GRACE_S = 60.0
#: Processes that serve this one until its end: those of `multiprocessing`.
_SERVERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
#: Folders that pytest, Ray, torch, `multiprocessing` and the private Redis servers keep for their next start.
_FOLDERS = ("pytest-of-", "ray", "torchinductor_", "pymp-", "dataplane-redis-", "dataplane-shm-", "dataplane-ray-")
#: What torch 2.7 writes into a temporary folder when it is imported. A process that is killed leaves it behind.
_OF_TORCH = "_remote_module_non_scriptable.py"
#: Threads that are kept for the process, by class or name: ZeroMQ's frees what it sent without copying, tq_mooncake's
#: wait for its next call.
_THREADS = ("GarbageCollectorThread", "dataplane-mooncake")

#: A kind, and what names a thing of that kind.
Thing = tuple[str, Any]

_lasting: set[Thing] = set()
#: The process that forks the programs of `python`, which may not outlast their file as it does.
_forks: set[int] = set()
_met: dict[Thing, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Keeps test processes side by side apart: private Redis servers and Ray clusters are found by this folder.

    Its name is short, since the paths of Unix sockets below it may have 107 bytes only. A token in the environment
    keeps Ray from making one in the home folder, where the one of another process that starts would replace it.
    """
    # no test asserts on time, as Hypothesis does by a deadline and a health check; and a run is as the one before
    long, slow = os.environ.get("DATAPLANE_HYPOTHESIS_PROFILE") == "long", [hypothesis.HealthCheck.too_slow]
    how: dict[str, Any] = {"derandomize": not long, "max_examples": 100 if long else 30}
    hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=slow, **how)
    hypothesis.settings.load_profile("tests")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for what it starts with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else all that tests start would ignore it too
    os.environ[_RUN] = str(os.getpid())
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("DATAPLANE_CONFORMANCE_PROMPT_S", "20")  # less than a claim that nobody wakes takes
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # it runs no tests, others do for it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # what `tmp_path` gives is kept for a while
    folder = tempfile.mkdtemp(prefix="dp", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # after the folder that `multiprocessing` has in it, which goes with priority -100
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)


@pytest.hookimpl(wrapper=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """With ``--dist loadgroup``, files that share a server run in one process, and first: they take the longest."""
    if config.getoption("loadgroup", False):  # what xdist tells its workers, in place of ``dist``
        servers: dict[Path, str] = {}
        for server in ("clean", "imported_by_ranks", "ray_server"):  # the last that a file uses
            servers |= {item.path: server for item in items if server in getattr(item, "fixturenames", ())}
        for item in items:
            group = servers.get(item.path, str(item.path.relative_to(config.rootpath)))
            item.add_marker(pytest.mark.xdist_group(group))
        items.sort(key=lambda item: item.path not in servers)
    yield


# --- programs ---------------------------------------------------------------------------------------------------------


class _Program(subprocess.Popen[Any]):
    """A process that `tests/warm_python.py` has forked. It tells the process id, and once it has ended the status."""

    def __init__(self, place: str, words: list[str], **kwargs: Any) -> None:
        self._place = place
        super().__init__(words, **kwargs)

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*args).arguments
        ours = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if stream == -1 else stream for number, stream in enumerate(ours)]
        message = {
            "words": [os.fspath(word) for word in given["args"]],
            "variables": dict(os.environ if given["env"] is None else given["env"]),
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "session": given["start_new_session"],
        }
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(self._place)
        socket.send_fds(self._connection, [json.dumps(message).encode()], streams)
        self.pid = int(self._connection.recv(100))
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        status = int(self._connection.recv(100))
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        return super()._internal_poll(_deadstate, lambda _, flags: self._try_wait(flags))


class Python:
    """Runs programs as ``python WORDS`` does, in processes that have the imports behind them.

    Not for a program whose imports or flags matter.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def start(self, *words: object, **kwargs: Any) -> subprocess.Popen[Any]:
        """Starts a program: ``start("-c", code, *arguments)``, or a path or ``-m`` first. The rest is as of `Popen`."""
        return _Program(self._place, [str(word) for word in words], **kwargs)

    def run(
        self, *words: object, timeout: float = 300, check: bool = True, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end, and returns its output."""
        with self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs) as program:
            try:
                said = program.communicate(timeout=timeout)
            except BaseException:
                program.kill()
                raise
        assert not (check and program.returncode), f"status {program.returncode}: {said[1]}"
        return subprocess.CompletedProcess(words, program.returncode, *said)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def warm_python() -> Callable[..., AbstractContextManager[Python]]:
    """``with warm_python(name, executable, env) as python``: a `Python` of another environment."""
    return _warm


@pytest.fixture(scope="session")
def python() -> Iterator[Python]:
    """Runs Python programs, see `Python`."""
    with _warm("python", sys.executable, os.environ) as python:
        yield python


@contextmanager
def _warm(name: str, executable: str, env: Mapping[str, str]) -> Iterator[Python]:
    place = os.path.join(tempfile.gettempdir(), name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.bind(place)
        asked.listen(100)
        until, end = os.pipe()
        words = [str(Path(__file__).parent / "tests" / "warm_python.py"), str(asked.fileno()), str(until)]
        env = {**env, "OMP_NUM_THREADS": "1"}  # it may have no threads: a fork would lack them
        forks = subprocess.Popen(
            [executable, *words], env=env, pass_fds=[asked.fileno(), until], start_new_session=True
        )
    os.close(until)
    _forks.add(forks.pid)
    yield Python(place)
    os.close(end)
    forks.wait()


# --- Ray --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ray_server() -> Iterator[str]:
    """The address of a Ray with 8 logical CPUs that all files share: each connects as a job of its own.

    Its workers are forked, see `tests/forking_ray.py`. They run at nice 1, not at Ray's 15, at which a busy machine may
    leave them no time. They inherit an address for Mooncake that no node has, as they do from a driver elsewhere.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "MC_TCP_BIND_ADDRESS": "169.254.7.7", "RAY_worker_niceness": "1"}
    command = [sys.executable, str(Path(__file__).parent / "tests" / "forking_ray.py")]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        address = keeper.stdout.readline().strip()
        assert address, "Ray did not start: it says why on standard error"
        yield address
        keeper.communicate()  # Ray's exit may hang if it has errors to print, and finds the output closed


@pytest.fixture(scope="module")
def ray_address(ray_server: str) -> Iterator[str]:
    """The address of the shared Ray, to which this process is connected; what the file's job started ends with it."""
    import ray

    variables, handler = set(os.environ), signal.getsignal(signal.SIGTERM)
    ray.init(address=ray_server, log_to_driver=False, logging_level="ERROR")
    give_up = time.monotonic() + _GRACE_S
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < give_up, "what the file before ran on Ray does not end"
        time.sleep(0.05)
    yield ray_server
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)  # Ray leaves both as it set them
    for name in set(os.environ) - variables:
        del os.environ[name]


# --- interrupts -------------------------------------------------------------------------------------------------------


def _interrupted(call: Callable[[], object], at: int, *modules: ModuleType) -> KeyboardInterrupt | None:
    left, files = at, {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    return None


@pytest.fixture(scope="session")
def interrupted() -> Callable[..., KeyboardInterrupt | None]:
    """``interrupted(call, at, *modules)``: calls, and raises KeyboardInterrupt before instruction ``at`` of their code.

    Returns the error, or None where the call has fewer instructions. The error keeps every frame of the call alive, as
    an interactive session does.
    """
    return _interrupted


# --- the rule ---------------------------------------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """Spares later collections of garbage what the imports made, which stays."""
    importlib.import_module("torch._dynamo")  # as connecting does; it sets a variable of the environment
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    """Notes what the fixtures that outlive a file start."""
    if fixturedef.scope not in ("session", "package"):
        return (yield)
    before = _things()
    try:
        return (yield)
    finally:
        _lasting.update(_things() - before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Notes which test started what."""
    try:
        return (yield)
    finally:
        for thing in _things():
            _met.setdefault(thing, item.name)


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Fails the last test of a file that left something behind, with what it is and which test started it."""
    before, settings = _things() | _descendants(), _settings()
    yield
    gc.collect()  # warns of what was forgotten here, not in another file
    give_up = time.monotonic() + _GRACE_S
    while (left := _left(before)) and time.monotonic() < give_up:
        time.sleep(0.02)
    now = _settings()
    found = [_name(thing) for thing in left]
    found += [
        f"{name} is {now.get(name)!r}, was {settings.get(name)!r}"
        for name in now.keys() | settings.keys()
        if now.get(name) != settings.get(name)
    ]
    assert not found, "this file left behind:\n" + "\n".join(sorted(found))


def _left(before: set[Thing]) -> set[Thing]:
    now = {thing for thing in _things() if thing[0] != "process" or not _may_stay(thing[1])}
    return (now | _descendants()) - before - _lasting


def _things() -> set[Thing]:
    """What runs and lies about: own children, threads, entries of the temporary folder."""
    found: set[Thing] = {
        ("thread", thread)
        for thread in threading.enumerate()
        if type(thread).__name__ not in _THREADS
        and thread.name not in _THREADS
        and thread.ident is not None  # CPython lists one whose start was interrupted forever. It never runs
    }
    for children in glob.glob("/proc/self/task/*/children"):
        with suppress(OSError):  # the thread has ended
            found |= {("process", int(pid)) for pid in Path(children).read_text().split()}
    folder = tempfile.gettempdir()
    entries = (name for name in os.listdir(folder) if not name.startswith(_FOLDERS))
    return found | {("entry", name) for name in entries if not os.path.exists(os.path.join(folder, name, _OF_TORCH))}


def _descendants() -> set[Thing]:
    """The processes that this one started, directly or not, but for those of what may stay."""
    mark = f"{_RUN}={os.getpid()}".encode()
    found = set()
    for folder in glob.glob("/proc/[0-9]*"):
        pid = int(folder[6:])
        with suppress(OSError):  # ended, or of another user
            if pid != os.getpid() and mark in Path(folder, "environ").read_bytes().split(b"\0") and not _may_stay(pid):
                found.add(("process", pid))
    return found


def _may_stay(pid: int) -> bool:
    """Whether a process or one that it comes from is a server of `multiprocessing` or was started to last."""
    if pid in _forks:
        return True
    while pid > 1 and pid != os.getpid() and pid not in _forks:
        if ("process", pid) in _lasting or any(server in _command(pid) for server in _SERVERS):
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "(ended, not waited for)"
    return "(gone)"


def _name(thing: Thing) -> str:
    kind, what = thing
    name = f"{what} {_command(what)[:200]}" if kind == "process" else repr(what)
    return f"{kind} {name}, first seen in {_met.get(thing, 'no test')}"


def _settings() -> dict[str, Any]:
    """What is set for the whole process."""
    kept = ("PYTEST_", "RAY_CLIENT_MODE", "TORCHINDUCTOR_")  # Ray's import and torch's compiler set the others
    found: dict[str, Any] = {f"${name}": value for name, value in os.environ.items() if not name.startswith(kept)}
    found["the working directory"] = os.getcwd()
    found |= {f"the handler of {number.name}": signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if torch := sys.modules.get("torch"):
        found["torch's number of threads"] = torch.get_num_threads()
    return found
