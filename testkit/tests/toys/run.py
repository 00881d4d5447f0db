"""How many of the broken backends (toys) the conformance kit finds out: its score, with the toys as its mutants.

From the root of a worktree whose packages can be imported, or by ``make toys``:

    python testkit/tests/toys/run.py                  each toy against the tests that must fail: 164 of 164
    python testkit/tests/toys/run.py ClaimsTwice ...  some of them
    python testkit/tests/toys/run.py --machine        how many the kit's state machine finds out by itself
    python testkit/tests/toys/run.py --whole NAME     the whole kit on a toy: all tests that fail, and why
    python testkit/tests/toys/run.py --right          right backends of rare sorts, which must pass
    python testkit/tests/toys/run.py --all-but-one    right ones that each declare all operations but one

To measure another kit, put its ``testkit/src`` first in PYTHONPATH. If its tests have other names, ``--whole`` shows
whether any of them finds the toy out. Each toy runs in a fork of this process, which has the imports behind it. Ends
with status 1 if a toy is missed, but not with ``--machine``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

import pytest

_FOLDER = Path(__file__).parent
#: The kit's limit for calls that must not wait, in seconds, and how many clients it kills. Both are less than usual.
_SETTINGS = {"DATAPLANE_CONFORMANCE_PROMPT_S": "4", "DATAPLANE_CONFORMANCE_KILLS": "6"}
_MORE_KILLS: Final = 5
#: How the reason of a failure begins that is not the kit's verdict on a rule.
_NOT_BY_RULE = ("setup", "teardown", "NameError", "AttributeError", "TypeError", "UnboundLocalError", "ImportError")
_OPTIONS = "-q --tb=short --noconftest --import-mode=prepend -p no:cacheprovider -o timeout=300"
_PLUGINS = "-p dataplane_testkit.pytest_plugin -p pytest_timeout"


def outcomes(runs: Mapping[str, Any], jobs: int = 2) -> dict[str, dict[str, dict[str, Any]]]:
    """Runs tests of the kit in forks of this process, some at a time.

    Args:
        runs: Name -> `table.Run`.
        jobs: How many at a time.

    Returns:
        Name -> test -> its record, see `dataplane_testkit.report.Result`. Of a run that broke, one record says what
        pytest printed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="toys") as folder:
        waiting = [context.Process(target=_run, args=(run, Path(folder, name))) for name, run in runs.items()]
        going: list[Any] = []
        try:
            while waiting or going:
                while waiting and len(going) < jobs:
                    going.append(waiting.pop(0))
                    going[-1].start()
                wait([each.sentinel for each in going])
                for ended in [each for each in going if not each.is_alive()]:
                    going.remove(ended)
                    _end(ended)
        finally:
            for each in going:
                _end(each)
        return {name: _read(Path(folder, name)) for name in runs}


def _end(fork: Any) -> None:
    """Ends a fork with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(fork.pid, signal.SIGKILL)
    fork.join()


def _run(run: Any, folder: Path) -> None:
    os.setpgrp()
    folder.mkdir()
    said = os.open(folder / "said.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    _pytest(folder, *_tests_of(run))


def _pytest(folder: Path, *arguments: str) -> int:
    files = ["--basetemp", str(folder / "t"), "--dataplane-json", str(folder / "report.json")]
    return pytest.main([*_OPTIONS.split(), *_PLUGINS.split(), *files, *arguments])


def _tests_of(run: Any) -> list[str]:
    """Puts a class of tests into the module `case`. Returns what names its tests to pytest."""
    import case

    from dataplane_testkit import BackendConformance

    bases: tuple[type, ...] = (BackendConformance,)
    if run.selection is None:  # the suite of the tests is collected faster
        names = {test.partition("[")[0] for test in run.tests}
        bases = tuple(suite for suite in BackendConformance.__bases__ if names <= set(vars(suite))) or bases
    members = {"backend_class": run.backend, "__module__": "case", **run.members}
    case.TestIt = type("TestIt", bases, members)  # type: ignore[misc]
    name = f"{case.__file__}::TestIt"
    return [f"{name}::{test}" for test in run.tests] if run.selection is None else [name, "-k", run.selection]


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        (report,) = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError):
        said = (folder / "said.txt").read_text()[-3000:] if folder.exists() else "it did not start"
        return {"pytest": {"outcome": "broke", "reason": said}}
    return {test["name"]: test for test in report["tests"] if test["reason"] != "not selected"}


def warm_up() -> None:
    """Imports what the forks need, by a test of a right backend: pytest then has the kit's asserts tell more."""
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.update(_SETTINGS, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.path.insert(0, str(_FOLDER))
    with tempfile.TemporaryDirectory(prefix="toys") as folder, contextlib.redirect_stdout(io.StringIO()):
        code = _pytest(Path(folder), f"{_FOLDER / 'case.py'}::TestIt::test_get_keeps_the_order_asked_for")
    assert code == pytest.ExitCode.OK, code
    gc.collect()
    gc.freeze()


def faults(run: Any, found: Mapping[str, Any]) -> list[str]:
    """What the outcomes of tests should not be. Only the rule may make a test fail, not an error of the toy itself."""
    said = [f"{test}: {each['outcome']}: {each['reason']}" for test, each in found.items()]
    wrong = [test for test, outcome in run.tests.items() if found.get(test, {"outcome": ""})["outcome"] != outcome]
    told = [f"{test} did not {run.tests[test]}: {found.get(test, {}).get('reason', said)}" for test in wrong]
    for test, each in found.items():
        if each["outcome"] in ("fail", "broke") and run.tests.get(test) != "fail":
            told.append(f"{test} fails: {each['reason']}")
        elif each["outcome"] == "fail" and (each["reason"].startswith(_NOT_BY_RULE) or not each["check_first"]):
            told.append(f"{test} fails not by its rule: {each['reason']}")
    passed = sum(each["outcome"] == "pass" for each in found.values())
    return told if passed >= run.least else [*told, f"{passed} tests pass, not {run.least}"]


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="how many broken backends the conformance kit finds out")
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of them; default: all")
    parser.add_argument("--machine", action="store_true", help="run the kit's state machine only")
    parser.add_argument("--whole", action="store_true", help="run the whole kit, and list all tests that fail")
    parser.add_argument("--right", action="store_true", help="run right backends, which must pass")
    parser.add_argument("--all-but-one", action="store_true", help="run right ones that declare less")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    asked = parser.parse_args()
    if asked.machine or asked.right or asked.all_but_one:
        os.environ.setdefault("DATAPLANE_HYPOTHESIS_PROFILE", "brief")
    warm_up()
    import broken
    import broken_stores
    import right
    from table import HISTORY

    from dataplane_testkit.suites import machine, processes

    machine._MOST_RUNS = 0  # a verdict needs no short history
    runs = {**broken.toy, **broken_stores.toy}
    if asked.right or asked.all_but_one:
        runs = right.RIGHT if asked.right else right.ALL_BUT_ONE
    runs = {name: runs[name] for name in asked.names or runs}
    if asked.machine:
        # a store that reads a broken journal asks until its deadline
        for name, run in runs.items():
            runs[name] = run._replace(tests={HISTORY: "fail"}, members={**run.members, "op_timeout_s": 5.0})
    if asked.whole:
        runs = {name: run._replace(tests={}, selection="") for name, run in runs.items()}
    found = outcomes(runs, asked.jobs)
    # processes are killed at random moments: where that showed nothing, more of them are
    lucky = {name: run for name, run in runs.items() if "kill" in str(run.tests) and faults(run, found[name])}
    processes._KILLS *= _MORE_KILLS
    found |= outcomes(lucky, asked.jobs)
    wrong = {name: told for name, run in runs.items() if (told := faults(run, found[name]))}
    for name, told in wrong.items():
        print(f"{name}: {runs[name].backend.__doc__}", *told, sep="\n    ")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(runs) - len(wrong)} of {len(runs)}, with {used.ru_utime + used.ru_stime:.0f} s of CPU in the forks")
    return int(bool(wrong) and not asked.machine and not asked.whole)


if __name__ == "__main__":
    sys.exit(main())
