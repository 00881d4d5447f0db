"""Measures what the tests can see: runs them against each fault of `mutants.jsonl`, in a process of its own for each.

First it runs the tests once without a fault and notes which functions each test enters (the map, kept under `out/`). A
mutant then gets the tests that enter its function. It is caught by the first that fails, or that never ends. Processes
that tests start run the mutant too: a copy of the package with the fault is first on their path.

The program ends with a control: the tests that failed must pass without a fault. A run that was stopped goes on where
it was, as long as no source and no test has changed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import places
import psutil
import pytest
from places import ROOT, Mutant
from plugin import Control, Mapping, Telling

WORK = ROOT / "out" / "mutants"
PACKAGES = [path.parent for path in sorted(ROOT.glob("*/src")) + sorted(ROOT.glob("plugins/*/src"))]
#: What takes long to import. The packages are not among it: each process imports them with its fault.
PRELOADED = ("torch._dynamo", "tensordict", "hypothesis", "numpy", "msgpack", "sortedcontainers")
#: Their tests need an environment of their own.
APART = {f"tests/{name}" for name in ("verl", "areal", "skyrl")}
SLOWER = {"quick": ("engines", "long"), "engines": ("long",)}
#: hypothesis, which is imported before pytest can rewrite it
_IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
_SUBREAPER, _END_WITH_PARENT = 36, 1  # of prctl
_VERDICTS = ("caught", "hang", "not caught", "not run", "unsure", "equivalent", "gone")


def main() -> None:
    options = arguments()
    if options.redraw:
        print(places.redraw())
        return
    folders = test_folders(options.tests, options.tier)
    state = digest(folders)
    for name in PRELOADED:
        importlib.import_module(name)
    assert not any(name.startswith("dataplane_") for name in sys.modules)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    WORK.mkdir(parents=True, exist_ok=True)
    entered = Map(folders, state, options)
    if options.control:
        print("without a fault these fail:", control(dict(entered.seconds)) or "none")
        return
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    listed = places.load()
    wanted = [each for each in listed if not options.only or each.id in options.only]
    wanted = [each for each in wanted if any(f"{each.room}/".startswith(name and f"{name}/") for name in options.room)]

    def done(mutant: Mutant, result: dict[str, Any]) -> None:
        results[mutant.id] = {"room": mutant.room, **result, "state": state}
        write(options.out, results)
        print(
            f"{mutant.id} {result['verdict']:<10} {result.get('cpu_s', 0):5.1f} s  {result.get('by', '')}", flush=True
        )

    jobs = {}
    for mutant in wanted:
        is_known = results.get(mutant.id, {}).get("state") == state
        if is_known and not options.only and not mutant.equivalent:
            continue
        source = ROOT / mutant.file
        mutated = mutant.apply(source.read_text()) if source.exists() else None
        tests, left_out = entered.tests_of(mutant, options.budget)
        if mutant.equivalent or not mutated or not tests:
            verdict = "equivalent" if mutant.equivalent else "not run" if mutated else "gone"
            done(mutant, {"verdict": verdict})
        else:
            jobs[mutant.id] = Job(mutant.id, tests, lambda lines, tests=tests: Telling(lines, tests))
            jobs[mutant.id].notes = {"tests": len(tests), "left_out": left_out}
            jobs[mutant.id].mutate(mutant.file, mutated)
    by_id = {each.id: each for each in wanted}
    run(list(jobs.values()), options.jobs, lambda job: done(by_id[job.name], {**verdict_of(job), **job.notes}))
    check_catchers(results, state, entered)
    write(options.out, results)
    report(listed, results, options.than)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    parser.add_argument("--tests", nargs="+", default=paths, help="folders of tests (those of pyproject.toml)")
    parser.add_argument("--tier", choices=SLOWER, default="quick", help="also the tests under `engines`")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants, also if they were run before")
    parser.add_argument(
        "--room", nargs="+", default=[""], metavar="NAME", help="only these mutants: core, core/ledger, tools"
    )
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2)
    parser.add_argument("--budget", type=float, default=40, help="seconds of tests for a mutant, the quickest of them")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants.json")
    parser.add_argument("--than", type=Path, help="an earlier result: tells what it caught and this one does not")
    parser.add_argument("--keep-map", action="store_true", help="use the map although sources or tests have changed")
    parser.add_argument("--control", action="store_true", help="only run all tests of the map without a fault")
    parser.add_argument("--redraw", action="store_true", help="replace the mutants whose code is gone by new ones")
    return parser.parse_args()


def test_folders(tests: list[str], tier: str) -> list[Path]:
    """The folders that hold the files of tests."""
    files = [path.relative_to(ROOT) for each in tests for path in (ROOT / each).rglob("test_*.py")]
    folders = {path.parent for path in files if not set(path.parts) & set(SLOWER[tier])}
    return sorted(ROOT / folder for folder in folders if not any(folder.is_relative_to(each) for each in APART))


def digest(folders: list[Path]) -> str:
    """Of all that a result depends on."""
    found = hashlib.sha256()
    for folder in [*(package / "src" for package in PACKAGES), *folders]:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".lua", ".json")):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


# --- processes --------------------------------------------------------------------------------------------------------


class Job:
    """pytest over some tests, in a process that is forked from this one. Its result is the lines that it tells."""

    def __init__(
        self, name: str, tests: Iterable[str], plugin: Callable[[Path], Telling], path: Sequence[Path] = ()
    ) -> None:
        self.name = name
        self.notes: dict[str, Any] = {}
        self._paths = sorted({each.split("::")[0] for each in tests})
        self._plugin = plugin
        self._first = path
        self._mutated: tuple[str, str] | None = None
        self._folder = WORK / name.replace("/", "_")
        self.lines = self._folder.with_suffix(".lines")

    def mutate(self, file: str, source: str) -> None:
        self._mutated = file, source

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.read_text().splitlines()]

    def start(self) -> int:
        """Forks a keeper, and returns its process id. It runs pytest, and leaves nothing behind."""
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
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self.lines.write_text("")
        pid = os.fork()
        if not pid:
            self._run_pytest()
        hung, status = False, None
        try:
            while status is None:
                ended, code = os.waitpid(pid, os.WNOHANG)
                if ended:
                    status = code
                elif self._hangs():
                    hung, status = True, -1
                time.sleep(0.05)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while left := psutil.Process().children(recursive=True):
                for each in left:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
                with suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                time.sleep(0.01)
            for said in self.said():
                if Path(said.get("folder", "/")).name.startswith("dp"):
                    shutil.rmtree(said["folder"], ignore_errors=True)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            with self.lines.open("a") as file:
                cpu_s = round(used.ru_utime + used.ru_stime, 1)
                file.write(json.dumps({"status": status, "hung": hung, "cpu_s": cpu_s}) + "\n")
            if self._mutated:
                shutil.rmtree(self._folder, ignore_errors=True)

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
            output = os.open(self.lines.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            null = os.open(os.devnull, os.O_RDONLY)
            for number, file in enumerate((null, output, output)):
                os.dup2(file, number)
            path = [*self._first, *self._copies(), *(package / "src" for package in PACKAGES)]
            sys.path[:0] = [str(each) for each in path]
            os.environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
            os.environ["DATAPLANE_HYPOTHESIS_PROFILE"] = "brief"
            for name in ("places", "plugin"):
                sys.modules.pop(name)  # a test may have a module of this name
            sys.path.remove(str(Path(__file__).parent))
            sys.argv[:] = ["pytest"]
            words = ["-q", "-p", "no:cacheprovider", "-m", "not long", *_IMPORTED, *self._paths]
            os._exit(int(pytest.main(words, plugins=[self._plugin(self.lines)])))
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(99)

    def _copies(self) -> list[Path]:
        """The package with the fault, in a folder of links to the files that it shares with the original."""
        if not self._mutated:
            return []
        file, source = self._mutated
        package, _, inside = file.partition("/src/")
        copy = self._folder / "src"
        shutil.copytree(ROOT / package / "src", copy, copy_function=os.link)
        path = copy / inside
        path.unlink()
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        path.write_text(source)
        return [copy]


def run(jobs: list[Job], number: int, done: Callable[[Job], None]) -> None:
    """Runs so many jobs at a time."""
    gc.freeze()  # a collection in a fork would copy all of it
    todo, running = list(reversed(jobs)), dict[int, Job]()
    try:
        while todo or running:
            while todo and len(running) < number:
                job = todo.pop()
                running[job.start()] = job
            pid, _ = os.wait()
            done(running.pop(pid))
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)
        for pid in running:
            os.waitpid(pid, 0)


# --- the map ----------------------------------------------------------------------------------------------------------


class Map:
    """Which tests enter a function, and how long they take."""

    def __init__(self, folders: list[Path], state: str, options: argparse.Namespace) -> None:
        self.seconds: dict[str, float] = {}
        self._here: dict[str, list[str]] = {}
        self._elsewhere: dict[str, set[str]] = {}
        self._files: dict[str, list[str]] = {}
        jobs = []
        for folder in folders:
            name = folder.relative_to(ROOT).as_posix()
            cache = self._cache(name)
            if not cache.exists() or not (options.keep_map or json.loads(cache.read_text())["state"] == state):
                job = Job(f"map/{name}", [name], self._plugin(folder), [Path(__file__).parent / "noted"])
                jobs.append(job)
        cpu_s: list[float] = []
        run(jobs, options.jobs, lambda job: cpu_s.append(self._keep(job, state)))
        for folder in folders:
            self._read(json.loads(self._cache(folder.relative_to(ROOT).as_posix()).read_text()))
        print(f"map: {len(self.seconds)} tests, {len(self._here)} functions; made anew in {sum(cpu_s):.0f} s of CPU")

    @staticmethod
    def _plugin(folder: Path) -> Callable[[Path], Telling]:
        return lambda lines: Mapping(lines, folder, lines.with_suffix(".notes"))

    @staticmethod
    def _cache(name: str) -> Path:
        return WORK / f"map_{name.replace('/', '_')}.json"

    def _keep(self, job: Job, state: str) -> float:
        said = job.said()
        ran = [each for each in said if "ran" in each]
        here: dict[str, list[int]] = {}
        elsewhere: dict[str, list[int]] = {}
        for number, each in enumerate(ran):
            for name, to in (("here", here), ("elsewhere", elsewhere)):
                for function in each[name]:
                    to.setdefault(function, []).append(number)
        tests = [(each["ran"], each["s"], each["ok"]) for each in ran]
        name, failed = job.name.removeprefix("map/"), [each["failed"] for each in said if "failed" in each]
        whole = any("ended" in each for each in said)
        write(
            self._cache(name), {"state": state if whole else None, "tests": tests, "here": here, "elsewhere": elsewhere}
        )
        print(f"map of {name}: {len(ran)} tests, {said[-1]['cpu_s']} s of CPU; failed, so not used: {failed or 'none'}")
        if not whole:
            print(f"  it did not end: {job.lines.with_suffix('.txt')}", flush=True)
        job.lines.unlink()
        return float(said[-1]["cpu_s"])

    def _read(self, kept: dict[str, Any]) -> None:
        tests = kept["tests"]
        for test, seconds, ok in tests:
            if ok:
                self.seconds[test] = seconds
                self._files.setdefault(test.split("::")[0], []).append(test)
        for function, numbers in kept["here"].items():
            self._here.setdefault(function, []).extend(tests[number][0] for number in numbers)
        for function, numbers in kept["elsewhere"].items():
            self._elsewhere.setdefault(function, set()).update(tests[number][0].split("::")[0] for number in numbers)

    def tests_of(self, mutant: Mutant, budget_s: float) -> tuple[dict[str, float], int]:
        """The tests that enter the function, then the files that do so in other processes; how many are left out.

        Where none does, the tests of the mutant's room.
        """
        function = f"{mutant.file}::{mutant.function}"
        here = [test for test in self._here.get(function, ()) if test in self.seconds]
        files = self._elsewhere.get(function, set())
        if not here and not files:
            name = mutant.room.removeprefix("core/")
            folder = f"core/tests/{name}/" if mutant.room.startswith("core/") else f"{mutant.room}/tests/"
            files = {file for file in self._files if file.startswith(folder)}
        others = {test for file in files for test in self._files.get(file, ())} - set(here)
        found: dict[str, float] = {}
        left_s = budget_s
        for test in [*sorted(here, key=self._cost), *sorted(others, key=self._cost)]:
            left_s -= self.seconds[test]
            if left_s >= 0 or not found:
                found[test] = self.seconds[test]
        return found, len(here) + len(others) - len(found)

    def _cost(self, test: str) -> float:
        return self.seconds[test]


# --- results ----------------------------------------------------------------------------------------------------------


def verdict_of(job: Job) -> dict[str, Any]:
    said = job.said()
    job.lines.unlink()
    result: dict[str, Any] = {"verdict": "caught", "cpu_s": said[-1]["cpu_s"]}
    running = ([""] + [each["test"] for each in said if "test" in each])[-1]
    if failed := [each for each in said if "failed" in each]:
        return result | {"by": failed[0]["failed"], "why": failed[0]["why"]}
    if said[-1]["hung"]:
        return result | {"verdict": "hang", "by": running}
    if any(each.get("ended") == 0 for each in said):
        return result | {"verdict": "not caught"}
    why = job.lines.with_suffix(".txt").read_text()[-2000:]
    return result | {"by": running, "why": f"the process ended with status {said[-1]['status']}: {why}"}


def control(tests: dict[str, float]) -> list[str]:
    """The tests that fail without a fault."""
    failed: list[str] = []
    files = sorted({test.split("::")[0] for test in tests})
    job = Job("control", files, lambda lines: Control(lines, tests))

    def done(job: Job) -> None:
        failed.extend(each["failed"] for each in job.said() if "failed" in each)
        ended = [each["test"] for each in job.said() if "test" in each]
        failed.extend(ended[-1:] if job.said()[-1]["status"] not in (0, 256) else [])

    run([job], 1, done)
    return failed


def check_catchers(results: dict[str, Any], state: str, entered: Map) -> None:
    """A verdict does not count if its test fails without a fault too."""
    caught = {each["by"]: each for each in results.values() if each["verdict"] == "caught" and each["state"] == state}
    tests = {test: entered.seconds[test] for test in caught if test in entered.seconds}
    failed = control(tests) if tests else []
    print(f"control: {len(tests) - len(failed)} of the {len(tests)} tests that caught a mutant pass without one")
    for each in results.values():
        if each["verdict"] == "caught" and each["by"] in failed:
            each["verdict"] = "unsure"


def report(listed: list[Mutant], results: dict[str, Any], than: Path | None) -> None:
    here = [each for each in listed if each.id in results]
    for each in here:
        result = results[each.id]
        if result["verdict"] in ("not caught", "not run", "unsure"):
            print(f"\n{each.id} {result['verdict']} ({result.get('tests', 0)} tests), {each.file}: {each.function}")
            print(f"  - {each.before}\n  + {each.after}")
    rows = [("room", "mutants", *_VERDICTS)]
    rooms = sorted({each.room for each in here})
    for name, group in [*((room, [each for each in here if each.room == room]) for room in rooms), ("all", here)]:
        counts = Counter(results[each.id]["verdict"] for each in group)
        rows.append((name, *map(str, (len(group), *(counts[verdict] or "" for verdict in _VERDICTS)))))
    print()
    for row in rows:
        print(f"{row[0]:<24}" + "".join(f"{cell:>11}" for cell in row[1:]))
    print(f"{sum(results[each.id].get('cpu_s', 0) for each in here) / 60:.1f} minutes of CPU, without the map")
    if than:
        before = json.loads(than.read_text())
        seen = ("caught", "hang")
        lost = [name for name, each in before.items() if each["verdict"] in seen and name in results]
        lost = [name for name in lost if results[name]["verdict"] not in (*seen, "equivalent", "gone")]
        print(f"caught in {than}, and not now: {' '.join(lost) or 'none'}")


def write(path: Path, value: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(value, indent=None if "map_" in path.name else 1) + "\n")
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
