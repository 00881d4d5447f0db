"""How many of the broken backends (toys) the conformance kit finds out: its score, by the toys as its own mutants.

From the root of a worktree whose packages can be imported, or by ``make toys``:

    python testkit/tests/toys/run.py                  each toy against the test that must fail, e.g. 159 of 159
    python testkit/tests/toys/run.py ClaimsTwice ...  some of them
    python testkit/tests/toys/run.py --machine        how many the state machine of the kit finds out by itself
    python testkit/tests/toys/run.py --whole NAME     the whole kit on a toy: all tests that fail, with their reasons

To measure another kit, put its ``testkit/src`` first in PYTHONPATH: this folder may stay where it is. If a test has
another name there, ``--whole`` shows whether any test finds the toy out. Each toy runs in a fork of this process, which
has the imports behind it: about 0.5 s of CPU. Ends with status 1 if a toy is missed (but not with ``--machine``).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).parent
#: The one test of the kit's state machine.
_MACHINE = "test_random_histories_agree_with_the_ledger"
#: Seconds that one test may take, and one toy.
_TEST_S, _TOY_S = 120, 1200
#: Less than usual: the kit's time limits for calls that must not wait, and how many clients it kills.
_SETTINGS = {"DATAPLANE_CONFORMANCE_PROMPT_S": "4", "DATAPLANE_CONFORMANCE_KILLS": "6"}
_PLUGINS = ("dataplane_testkit.pytest_plugin", "pytest_timeout")


@dataclass(frozen=True)
class Run:
    """Tests of the kit on one backend.

    Attributes:
        name: The name of the backend.
        members: What a class of the kit's tests needs for it: ``backend_class``, ``options`` and so on.
        tests: The tests by name. Empty: as ``chosen`` says.
        chosen: A selection of tests as that of pytest's ``-k``. Empty: all.
    """

    name: str
    members: dict[str, Any]
    tests: tuple[str, ...] = ()
    chosen: str = ""


def outcomes(runs: list[Run], jobs: int = 2) -> dict[str, list[dict[str, Any]]]:
    """Runs the kit's tests in forks of this process, some at a time.

    Returns:
        Name -> the record of each test that was selected (see `dataplane_testkit.report.Result`). Of a run that broke,
        there is one record, with the outcome "broke" and what pytest printed.
    """
    folder = Path(tempfile.mkdtemp(prefix="toys"))
    context = multiprocessing.get_context("fork")
    waiting, going, found = list(reversed(runs)), {}, {}
    try:
        while waiting or going:
            while waiting and len(going) < jobs:
                run = waiting.pop()
                process = context.Process(target=_run, args=(run, folder / run.name))
                process.start()
                going[process.sentinel] = (run, process, time.monotonic() + _TOY_S)
            soonest = min(give_up for _, _, give_up in going.values())
            ended = multiprocessing.connection.wait(list(going), max(0.0, soonest - time.monotonic()))
            late = [each for each, (_, _, give_up) in going.items() if time.monotonic() > give_up]
            for sentinel in {*ended, *late}:
                run, process, _ = going.pop(sentinel)
                with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                found[run.name] = _read(folder / run.name)
    finally:
        for _, process, _ in going.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _read(folder: Path) -> list[dict[str, Any]]:
    try:
        (report,) = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError):
        said = (folder / "said.txt").read_text()[-3000:] if folder.exists() else ""
        return [{"name": "pytest", "outcome": "broke", "reason": said or "it was killed"}]
    return [test for test in report["tests"] if test["reason"] != "not selected"]


def _run(run: Run, folder: Path) -> None:
    os.setpgrp()
    folder.mkdir()
    said = os.open(folder / "said.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(_SETTINGS, TMPDIR=str(folder))
    tempfile.tempdir = None
    pytest.main([*_place(run), *_options(folder), *(["-k", run.chosen] if run.chosen else [])])


def _options(folder: Path) -> list[str]:
    plugins = [word for name in _PLUGINS for word in ("-p", name)]
    usual = ["-q", "--tb=short", "--noconftest", "--import-mode=prepend", "-p", "no:cacheprovider"]
    files = ["--basetemp", str(folder / "t"), "--dataplane-json", str(folder / "report.json")]
    return [*usual, *plugins, *files, "-o", f"timeout={_TEST_S}"]


def _place(run: Run) -> list[str]:
    """Puts a class of tests into the module `case`, and returns what names its tests to pytest."""
    import case

    from dataplane_testkit import BackendConformance

    tests = {test.partition("[")[0] for test in run.tests}
    suites = [suite for suite in BackendConformance.__mro__[1:] if tests & set(vars(suite))]
    bases = tuple(suites) if len(run.tests) == 1 else (BackendConformance,)
    members = {**run.members, "__module__": case.__name__}
    setattr(case, f"Test{run.name}", type(f"Test{run.name}", bases, members))
    name = f"{case.__file__}::Test{run.name}"
    return [f"{name}::{test}" for test in run.tests] or [name]


def warm_up() -> None:
    """Imports what the forks need, as pytest does: the asserts of the kit's modules then tell what they compared."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.insert(0, str(_FOLDER))
    with tempfile.TemporaryDirectory(prefix="toys") as folder, contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main([str(_FOLDER / "case.py"), *_options(Path(folder)), "--collect-only"])
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED, code


def caught(records: list[dict[str, Any]], test: str) -> str:
    """An empty text if the test has failed by the rule that it tests, otherwise what it did."""
    (record,) = [each for each in records if each["name"] == test] or [{"outcome": "not run", "reason": str(records)}]
    if record["outcome"] != "fail" or record["reason"].startswith(("setup", "teardown")):
        return f"{record['outcome']}: {record['reason']}"
    return "" if record["rule"] and record["check_first"] else "the test names no rule"


def _score(toys: list[Run], jobs: int) -> int:
    found = outcomes(toys, jobs)
    misses = {toy.name: [caught(found[toy.name], test) for test in toy.tests] for toy in toys}
    for toy in toys:
        for test, miss in zip(toy.tests, misses[toy.name], strict=True):
            if miss:
                print(f"missed: {toy.name}: {test}: {miss}")
    good = sum(not any(each) for each in misses.values())
    print(f"{good} of {len(toys)}")
    return int(good < len(toys))


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="how many broken backends the conformance kit finds out")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the toys; default: all")
    parser.add_argument("--machine", action="store_true", help="run the kit's state machine only")
    parser.add_argument("--whole", action="store_true", help="run the whole kit, and list all tests that fail")
    parser.add_argument("--jobs", type=int, default=2, help="toys at a time (default: 2)")
    asked = parser.parse_args()
    if asked.machine:
        os.environ.setdefault("DATAPLANE_HYPOTHESIS_PROFILE", "brief")
    warm_up()
    from kit import TOYS

    unknown = set(asked.names) - {toy.name for toy in TOYS}
    if unknown:
        parser.error(f"there is no toy {', '.join(sorted(unknown))}")
    toys = [toy for toy in TOYS if not asked.names or toy.name in asked.names]
    status = 0
    if asked.machine:
        found = outcomes([Run(toy.name, toy.members, (_MACHINE,)) for toy in toys], asked.jobs)
        for toy in toys:
            if miss := caught(found[toy.name], _MACHINE):
                print(f"missed: {toy.name}: {miss}")
        print(f"{sum(not caught(each, _MACHINE) for each in found.values())} of {len(toys)} by {_MACHINE}")
    elif asked.whole:
        for name, tests in outcomes([Run(toy.name, toy.members) for toy in toys], asked.jobs).items():
            failed = [test for test in tests if test["outcome"] in ("fail", "broke")]
            print(f"{name}: {len(failed)} of {len(tests)} tests fail")
            for test in failed:
                print(f"  {test['name']}: {test['reason']}")
    else:
        status = _score(toys, asked.jobs)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU")
    return status


if __name__ == "__main__":
    sys.exit(main())
