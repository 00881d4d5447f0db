"""The kit catches what it says it catches, and lets right backends pass, whatever they declare or carry."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane_core.spec import OPERATIONS
from dataplane_noop import NoopBackend

pytest_plugins = ["pytester"]

_TOYS = Path(__file__).parent / "toys"
_TIMEOUT_S = 900


def _toys(module):
    """A module of the toys."""
    sys.path.insert(0, str(_TOYS))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(_TOYS))


#: Name of a broken backend -> the test that it must fail.
_BROKEN = {cls.__name__: test for cls, test in _toys("kit_of_broken").BROKEN.items()}
_BROKEN_BLOBS = {cls.__name__: test for cls, test in _toys("folder_store").BROKEN.items()}
#: The suite of the kit that holds a test -> the first broken backend that must fail one of it.
_FIRST = {_toys("kit_of_broken").suite_of(test): name for name, test in reversed((_BROKEN | _BROKEN_BLOBS).items())}


def _long(*case):
    """A case that takes long, or repeats another."""
    return pytest.param(*case, marks=pytest.mark.long)


#: Class that holds the whole kit or a suite -> which of its tests run.
_SELECTED = {
    "TestFolderStore": "smoke or blob or many or journal or append or deleting or keys or engine",
    "TestDeclaresClaims": "undeclared or tags or consumed or order or history",
    "TestCarriesRows": "columns_come_back or objects_come_back or joins_across or hook or any_batch or count_once",
    "TestOneCapacity": "clients_with_other_room",
    "TestStandsStill": "acked_samples_never or renew_extends",
    "TestWakesTheDead": "killed_process",
    "TestCarriesBytes": "columns_come_back or objects_come_back or joins_across or hook or any_batch",
    "TestHostStore": "process or attach or bootstrap or fork or elsewhere or holder or kill",
    "TestKeepsCursorsInTheClient": "many_claimers or visible_in",
    "TestLocksTheStore": "serves_others",
    "TestGivesUpAtOnce": "owner_that_is_late",
    "TestBootstrapsOverWhatRuns": "with_auto_one_bootstraps",
    "TestHangsInForks": "a_fork_opens",
    "TestDiesBadly": "kill",
}


def _with_toys():
    """An environment in which the toys can be imported, beside what can be imported here."""
    paths = [str(_TOYS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTEST_ADDOPTS", None)
    return environment


@pytest.fixture(scope="module")
def reports(tmp_path_factory, request):
    """Backend -> its report. Runs in processes of their own, which may hang or break for all we know."""
    folder = tmp_path_factory.mktemp("reports")
    asked = [each for each in request.session.items if each.path == request.path and hasattr(each, "callspec")]
    names = {each.callspec.params.get("name", each.callspec.params.get("backend")) for each in asked}
    names.add("KeepsCursorsInTheClient")
    runs = {  # side by side, since they wait most of the time
        "broken": [
            *(f"kit_of_broken.py::Test{name}::{test}" for name, test in _BROKEN.items() if name in names),
            *(f"kit_of_folder.py::Test{name}::{test}" for name, test in _BROKEN_BLOBS.items() if name in names),
        ],
        "others": [
            "kit_of_folder.py::TestFolderStore",
            "kit_of_folder.py::TestOneCapacity",
            "kit_of_variants.py",
            "kit_of_host.py",
        ],
    }
    environment = {**_with_toys(), "DATAPLANE_CONFORMANCE_PROMPT_S": "4", "DATAPLANE_CONFORMANCE_KILLS": "6"}
    environment.pop("DATAPLANE_HYPOTHESIS_PROFILE", None)
    profiles = {"broken": {}, "others": {"DATAPLANE_HYPOTHESIS_PROFILE": "brief"}}
    selected = [f"({name} and ({tests}))" for name, tests in _SELECTED.items() if name.removeprefix("Test") in names]
    selection = " or ".join([f"not ({' or '.join(_SELECTED)})", *selected])
    started = {}
    for run, arguments in runs.items():
        output = (folder / f"{run}.txt").open("w")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-k", selection]
        command += ["--basetemp", str(folder / run), "--dataplane-json", str(folder / f"{run}.json"), *arguments]
        pipes = {"stdout": output, "stderr": subprocess.STDOUT}
        started[run] = subprocess.Popen(command, cwd=_TOYS, env=environment | profiles[run], **pipes)
        output.close()
    try:
        for process in started.values():
            process.wait(_TIMEOUT_S)
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    found = {}
    for run in runs:
        path = folder / f"{run}.json"
        assert path.exists(), (folder / f"{run}.txt").read_text()[-3000:]
        found |= {report["backend"]: report for report in json.loads(path.read_text())}
    return found


def _outcomes(report):
    return {test["name"]: test for test in report["tests"] if test["reason"] != "not selected"}


@pytest.mark.timeout(_TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("name", "test"),
    [case if case[0] in _FIRST.values() else _long(*case) for case in (_BROKEN | _BROKEN_BLOBS).items()],
)
def test_the_test_that_names_the_rule_fails(reports, name, test):
    found = _outcomes(reports[name])[test]
    assert found["outcome"] == "fail", f"{name} passed {test}"
    assert not found["reason"].startswith(("setup", "teardown")), found["reason"]
    assert found["rule"]
    assert found["check_first"]


@pytest.mark.timeout(_TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("backend", "least"),
    [
        ("DeclaresNothing", 150),
        ("DeclaresClaims", 20),
        _long("CarriesRows", 40),
        _long("CarriesBytes", 40),
        _long("HostStore", 18),
        ("FolderStore", 35),
        ("StandsStill", 2),
        ("OthersCome", 5),
        ("OpensOnce", 8),
    ],
)
def test_right_backends_pass(reports, backend, least):
    report = reports[backend]
    failures = [test["name"] for test in report["tests"] if test["outcome"] == "fail"]
    assert failures == []
    assert report["counts"]["pass"] >= least


@pytest.mark.timeout(_TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("backend", "test"),
    [
        _long("CarriesRows", "test_equal_cells_count_once"),
        ("OneCapacity", "test_a_refused_put_leaves_later_ones_alone_for_clients_with_other_room"),
    ],
)
def test_a_test_that_proves_nothing_of_a_backend_does_not_count_as_passed(reports, backend, test):
    assert _outcomes(reports[backend])[test]["outcome"] == "not declared"


@pytest.mark.timeout(_TIMEOUT_S + 60)
def test_undeclared_capabilities_are_reported_as_such(reports):
    report = reports["DeclaresNothing"]
    rows = {row["name"]: row for row in report["capabilities"]}
    assert rows["core"]["verdict"] == "proven"
    for name in ("claims", "leases", "overwrite", "durable", "fenced", "scope host"):
        assert rows[name]["verdict"] == "not declared"
        assert rows[name]["not declared"] > 0
    refused = {name for name in _outcomes(report) if name.startswith("test_undeclared_operations_are_refused")}
    assert len(refused) == len(OPERATIONS)


@pytest.mark.timeout(_TIMEOUT_S + 60)
def test_a_store_that_is_wrong_across_processes_is_caught(reports):
    outcomes = _outcomes(reports["KeepsCursorsInTheClient"])
    assert outcomes["test_many_claimers_get_each_sample_once[alone]"]["outcome"] == "fail"
    assert outcomes["test_a_put_is_visible_in_other_processes"]["outcome"] == "pass"


@pytest.mark.timeout(_TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("backend", "test", "reason"),
    [
        _long("GivesUpAtOnce", "test_an_attach_waits_for_an_owner_that_is_late", "does not answer"),
        (
            "BootstrapsOverWhatRuns",
            "test_of_processes_that_connect_with_auto_one_bootstraps",
            "3 of 3 processes bootstrapped",
        ),
        ("HangsInForks", "test_a_fork_opens_a_client_of_its_own", "hangs"),
        _long("LocksTheStore", "test_the_store_serves_others_after_every_kill", "the store is locked"),
        ("WakesTheDead", "test_a_claim_of_a_killed_process_does_not_stop_the_next", "hangs"),
        _long("DiesBadly", "test_killed_producers_leave_no_half_rows", "half"),
        _long("DiesBadly", "test_killed_producers_lose_no_committed_sample", "committed"),
        _long("DiesBadly", "test_what_a_killed_producer_was_putting_can_be_put_again", "another client writes"),
        _long("DiesBadly", "test_killed_consumers_get_no_sample_twice", "given once"),
        _long("DiesBadly", "test_killed_consumers_lose_no_leased_sample", "handed out again"),
    ],
)
def test_a_store_that_others_cannot_rely_on_is_caught(reports, backend, test, reason):
    outcome = _outcomes(reports[backend])[test]
    assert outcome["outcome"] == "fail"
    assert reason in outcome["reason"]


@pytest.mark.long
@pytest.mark.parametrize("operation", sorted(OPERATIONS & NoopBackend.capabilities))
def test_a_right_backend_that_declares_all_operations_but_one_passes(pytester, monkeypatch, operation):
    monkeypatch.syspath_prepend(_TOYS)
    pytester.makepyfile(f"from kit_of_fewer import TestAllBut_{operation}")
    # within this process, torch's compiler cannot be imported once more
    done = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-k", "not compile").parseoutcomes()
    assert "failed" not in done
    assert done["passed"] >= 150


def test_there_is_a_broken_backend_for_many_rules():
    assert len(set(_BROKEN.values()) | set(_BROKEN_BLOBS.values())) >= 80


def test_a_store_that_drops_a_tenth_fails_the_first_test_of_all(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.syspath_prepend(_TOYS)
    pytester.makepyfile("from kit_of_folder import TestDropsATenthInTheWholeKit")
    path = pytester.path / "r.json"
    done = pytester.runpytest_inprocess("-q", "-x", "-p", "no:cacheprovider", "--dataplane-json", str(path))
    assert path.exists(), done.outlines
    (report,) = json.loads(path.read_text())
    ran = [test for test in report["tests"] if test["outcome"] != "not run"]
    assert [(test["name"], test["outcome"]) for test in ran] == [("test_smoke_hundreds_of_blobs_come_back", "fail")]
