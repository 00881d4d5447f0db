"""Runs pytest in processes that are forked from this one, which has imported what takes long."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from places import ROOT
from plugin import Telling

WORK = ROOT / "out" / "mutants"
SOURCES = [*sorted(ROOT.glob("*/src")), *sorted(ROOT.glob("plugins/*/src"))]
#: Not our packages: each process imports them with its fault.
PRELOADED = ("torch._dynamo", "tensordict", "hypothesis", "numpy", "msgpack", "sortedcontainers")
#: The second is of hypothesis, which is imported before pytest can rewrite it.
WORDS = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
_SUBREAPER, _END_WITH_PARENT = 36, 1  # of prctl


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert not any(name.startswith("dataplane_") for name in sys.modules)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(WORK / "lock", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run works in {WORK}")


@dataclass
class Job:
    """pytest over some files or a folder. Its result is the lines that its plugin tells."""

    name: str
    paths: Iterable[str]
    plugin: Callable[[Path], Telling]
    mutated: tuple[str, str] | None = None  #: a file, and its source with a fault
    first_on_path: Path | None = None

    @property
    def lines(self) -> Path:
        return WORK / f"{self.name.replace('/', '_')}.lines"

    @property
    def output(self) -> Path:
        return self.lines.with_suffix(".txt")

    def said(self) -> list[dict[str, Any]]:
        """What was told. The last line is the keeper's: how the process ended and what it and all below it used."""
        return [json.loads(line) for line in self.lines.read_text().splitlines()]

    def start(self) -> int:
        """Forks a keeper, and returns its process id. It has pytest run, and leaves nothing behind."""
        if keeper := os.fork():
            return keeper
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            libc = ctypes.CDLL(None)
            libc.prctl(_END_WITH_PARENT, signal.SIGTERM)
            libc.prctl(_SUBREAPER, 1)  # what its tests leave becomes its child, whatever session it is of
            os.setsid()
            self._keep()
        finally:
            os._exit(0)

    def _keep(self) -> None:
        self.lines.write_text("")
        hung, status = False, None
        pid = os.fork()
        if not pid:
            self._run_pytest()
        try:
            while status is None and not hung:
                ended, code = os.waitpid(-1, os.WNOHANG)  # also what tests leave, which wait to see it gone
                status = code if ended == pid else None
                hung = not ended and self._hangs()
                time.sleep(0.05)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _end_all()
            said = self.said()
            for folder in (each["folder"] for each in said if "folder" in each):
                if Path(folder).name.startswith("dp"):  # as conftest.py names it
                    shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(self.lines.with_suffix(""), ignore_errors=True)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = round(used.ru_utime + used.ru_stime, 1)
            with self.lines.open("a") as file:
                file.write(json.dumps({"status": status, "hung": hung, "cpu_s": cpu_s}) + "\n")

    def _hangs(self) -> bool:
        """Whether the test that started last takes too long. What comes before the first has no limit of its own."""
        age_s = time.time() - self.lines.stat().st_mtime
        if age_s < 30:
            return False
        return bool(age_s > ([300.0] + [said["limit_s"] for said in self.said() if "limit_s" in said])[-1])

    def _run_pytest(self) -> None:
        try:
            os.setpgid(0, 0)
            os.chdir(ROOT)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            null, output = os.open(os.devnull, os.O_RDONLY), os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number, file in enumerate((null, output, output)):
                os.dup2(file, number)
            own = [self.first_on_path] if self.first_on_path else []
            path = [str(each) for each in [*own, *self._copy(), *SOURCES]]
            others = [each for each in sys.path if each != os.path.dirname(__file__)]
            sys.path[:] = [*path, str(ROOT), *others]  # as `python -m pytest` has it: ranks import their test by it
            os.environ["PYTHONPATH"] = os.pathsep.join(path)
            os.environ["DATAPLANE_HYPOTHESIS_PROFILE"] = "brief"
            sys.argv[:] = ["pytest"]
            for name in ("places", "plugin", "forked"):
                sys.modules.pop(name)  # a test may have a module of this name
            sys.modules["__main__"] = types.ModuleType("__main__")  # `multiprocessing` would import ours again
            os._exit(int(pytest.main([*WORDS, *self.paths], plugins=[self.plugin(self.lines)])))
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(99)

    def _copy(self) -> list[Path]:
        """The package with the fault, in a folder of links to the files that it shares with the original."""
        if not self.mutated:
            return []
        file, source = self.mutated
        package, _, inside = file.partition("/src/")
        copy = self.lines.with_suffix("") / "src"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(ROOT / package / "src", copy, copy_function=os.link)
        path = copy / inside
        path.unlink()
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        path.write_text(source)
        return [copy]


def _end_all() -> None:
    """Ends all processes below this one, and waits for them."""
    while left := psutil.Process().children(recursive=True):
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def run(jobs: list[Job], number: int, done: Callable[[Job], None]) -> None:
    """Runs so many jobs at a time, and calls ``done`` after each."""
    gc.freeze()  # a collection in a fork would copy all of it
    todo, running = list(reversed(jobs)), dict[int, Job]()
    try:
        while todo or running:
            while todo and len(running) < number:
                job = todo.pop()
                running[job.start()] = job
            pid, _ = os.wait()
            job = running.pop(pid)
            done(job)
            job.lines.unlink()
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)
        for pid in running:
            os.waitpid(pid, 0)
