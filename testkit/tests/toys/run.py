"""How many of the broken backends (toys) the conformance kit finds out: its score, with the toys as its mutants.

From the root of a worktree whose packages can be imported, or by ``make toys``:

    python testkit/tests/toys/run.py                  each toy against the tests that must fail
    python testkit/tests/toys/run.py ClaimsTwice ...  some of them
    python testkit/tests/toys/run.py --machine        how many the kit's state machine finds out by itself
    python testkit/tests/toys/run.py --whole NAME     the whole kit on a toy: all tests that fail, and why
    python testkit/tests/toys/run.py --right          right backends of rare sorts, which must pass
    python testkit/tests/toys/run.py --all-but-one    right ones that each declare all operations but one

Each toy runs in a fork of this process. Without ``--machine`` and ``--whole``, status 1 says that a toy was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).parent
#: How long calls may take that must not wait, in seconds, and how many clients are killed. Both are less than usual.
_SETTINGS = {"DATAPLANE_CONFORMANCE_PROMPT_S": "4", "DATAPLANE_CONFORMANCE_KILLS": "6"}
#: How the reason of a failure begins that is not the kit's verdict on a rule.
_NOT_BY_RULE = ("setup", "teardown", "NameError", "AttributeError", "TypeError", "UnboundLocalError", "ImportError")
_OPTIONS = (
    "-q --tb=short --noconftest --import-mode=prepend -p no:cacheprovider -o timeout=300 "
    "-p dataplane_testkit.pytest_plugin -p pytest_timeout"
)


def outcome(run: Any) -> dict[str, dict[str, Any]]:
    """Runs tests of the kit in a fork: test -> its record, see `report.Report`.

    Of a run that broke, one record says what pytest printed.
    """
    # a process of a store may write a moment longer
    with tempfile.TemporaryDirectory(prefix="toy", ignore_cleanup_errors=True) as folder:
        fork = multiprocessing.get_context("fork").Process(target=_run, args=(run, Path(folder)))
        fork.start()
        fork.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(fork.pid or 0, signal.SIGKILL)  # with all that it started
        try:
            (report,) = json.loads(Path(folder, "report.json").read_text())
        except (OSError, ValueError):
            return {"pytest": {"outcome": "broke", "reason": Path(folder, "said.txt").read_text()[-3000:]}}
        return {test["name"]: test for test in report["tests"] if test["reason"] != "not selected"}


def _run(run: Any, folder: Path) -> None:
    """Has `table.TestIt` test the backend."""
    import table

    os.setpgrp()
    said = os.open(folder / "said.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    names = {test.partition("[")[0] for test in run.tests}
    # the suite of the tests is collected faster
    suites = [
        suite for suite in table.BackendConformance.__bases__ if run.selection is None and names <= vars(suite).keys()
    ]
    members = {"backend_class": run.backend, "__module__": "table", **run.members}
    table.TestIt = type("TestIt", (*suites,) or (table.BackendConformance,), members)
    name = f"{table.__file__}::TestIt"
    _pytest(
        folder, *([f"{name}::{test}" for test in run.tests] if run.selection is None else [name, "-k", run.selection])
    )


def _pytest(folder: Path, *arguments: str) -> int:
    files = ["--basetemp", str(folder / "t"), "--dataplane-json", str(folder / "report.json")]
    return pytest.main([*_OPTIONS.split(), *files, *arguments])


def warm_up() -> None:
    """Imports what the forks need, by a test of a right backend: pytest then has the kit's asserts tell more."""
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.update(_SETTINGS, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.path.insert(0, str(_FOLDER))
    with tempfile.TemporaryDirectory(prefix="toys") as folder, contextlib.redirect_stdout(io.StringIO()):
        code = _pytest(Path(folder), f"{_FOLDER / 'table.py'}::TestIt::test_get_keeps_the_order_asked_for")
    assert code == pytest.ExitCode.OK, code
    os.environ["PYTHONPATH"] = f"{_FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    forkserver.set_forkserver_preload(["dataplane_testkit._preloaded", "broken_stores"])
    forkserver.ensure_running()
    # only its parent can ask whether it runs: the toys, which are forks, use it as it is
    forkserver._forkserver.ensure_running = lambda: None
    gc.collect()
    gc.freeze()


def faults(run: Any, records: Mapping[str, Any]) -> list[str]:
    """What the outcomes of tests should not be. Only the rule may make a test fail, not an error of the toy itself."""
    told = [f"{test} did not {run.tests[test]}: {[*records.values()]}" for test in run.tests if test not in records]
    for test, record in records.items():
        may = record["outcome"] not in ("fail", "broke")
        expected = run.tests.get(test, record["outcome"] if may else "pass")
        by_rule = not record["reason"].startswith(_NOT_BY_RULE) and record.get("check_first")
        if record["outcome"] != expected or (expected == "fail" and not by_rule):
            told.append(f"{test}: {record['outcome']}, not {expected} by its rule: {record['reason']}")
    passed = sum(record["outcome"] == "pass" for record in records.values())
    return told if passed >= run.least else [*told, f"{passed} tests pass, not {run.least}"]


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    for option in ("--machine", "--whole", "--right", "--all-but-one"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--jobs", type=int, default=4)  # they mostly wait
    asked = parser.parse_args()
    if asked.machine or asked.right or asked.all_but_one:
        os.environ.setdefault("DATAPLANE_HYPOTHESIS_PROFILE", "brief")
    warm_up()
    import broken
    import broken_stores
    import right

    from dataplane_testkit.suites import concurrency, machine

    machine._MOST_RUNS = 0  # a verdict needs no short history
    runs = {**broken.table, **broken_stores.toys}
    if asked.right or asked.all_but_one:
        runs = {name: run for name, run in right.RUNS.items() if asked.all_but_one == name.startswith("AllBut_")}
    runs = {name: runs[name] for name in asked.names or runs}
    for name, run in runs.items() if asked.machine or asked.whole else ():
        # a store that reads a broken log asks until its deadline
        members = {**run.members, "op_timeout_s": 5.0} if asked.machine else run.members
        tests = {"test_random_histories_agree_with_the_ledger": "fail"} if asked.machine else {}
        runs[name] = run._replace(tests=tests, selection=None if asked.machine else "", members=members)
    with ThreadPool(asked.jobs) as pool:
        told = dict(zip(runs, map(faults, runs.values(), pool.imap(outcome, runs.values())), strict=True))
        # processes are killed at random moments: where that showed nothing, more of them are
        lucky = [name for name, run in runs.items() if "kill" in str(run.tests) and told[name]]
        concurrency._KILLS *= 5
        told |= {name: faults(runs[name], outcome(runs[name])) for name in lucky}
    wrong = {name: lines for name, lines in told.items() if lines}
    for name, lines in wrong.items():
        print(name, *lines, sep="\n    ")
    print(f"{len(runs) - len(wrong)} of {len(runs)}")
    return int(bool(wrong) and not asked.machine and not asked.whole)


if __name__ == "__main__":
    sys.exit(main())
