"""Chaos runs find out broken backends whose fault shows in a history, and pass right ones."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from tiers import in_long

from dataplane_core.cli import main
from dataplane_core.errors import CapacityExceededError, OperationTimeoutError, printable
from dataplane_core.spec import Scope
from dataplane_noop import NoopBackend
from dataplane_testkit import AuthorsClass, Settings, run_chaos

_TOYS = Path(__file__).parents[1] / "toys"


class HoldsTooMuch(NoopBackend):
    """Its capacity is four times the one that it was told."""

    def __init__(self, config):
        super().__init__(config.model_copy(update={"capacity_bytes": 4 * config.capacity_bytes}))


class TimesOutAtOnce(NoopBackend):
    """Each put ends at once, as if its deadline had passed."""

    def put_samples(self, request):
        raise OperationTimeoutError("late")


class IsAlwaysFull(NoopBackend):
    """Refuses each put."""

    def put_samples(self, request):
        raise CapacityExceededError("full")


_OWN = {each.__name__: each for each in (HoldsTooMuch, TimesOutAtOnce, IsAlwaysFull)}
#: A broken backend, of this module or of the toys -> the rules of which one must be found broken.
_BROKEN = {
    "ClaimsTwice": {"given once"},
    "EvictsWhenFull": {"committed"},
    "HoldsTooMuch": {"capacity"},
    "TimesOutAtOnce": {"error"},
    "IsAlwaysFull": {"puts"},
}
_BROKEN_LONG = {
    "ClaimsByName": {"order"},
    "ClaimsWithoutTags": {"half"},
    "LeasesNeverExpire": {"handed out again"},
    "AcceptsExpiredAcks": {"two holders", "refused ack", "given once"},
    "UsesTokensAgain": {"token"},
    "ReportsSuccessTooEarly": {"committed"},
    "CommitsTagsAfterData": {"half"},
    "WritesFieldByField": {"half", "committed", "written", "order"},
    "OverwritesByDeleting": {"given once"},
    "OverwritesFieldByField": {"mixed"},
    "KeepsRowsAcrossRegistrations": {"cleared"},
    "KeepsRowsAfterClear": {"cleared"},
    "ReordersRows": {"bits"},
    "KeepsCursorsInTheClient": {"given once"},
}
#: How the runs on a store of several processes differ.
_PROCESSES = {"every_s": 0.5, "pause_s": 0.02, "lease_s": 0.5}


def _toy(name):
    modules = map(importlib.import_module, ("broken", "broken_stores"))
    return next(getattr(module, name) for module in modules if hasattr(module, name))


@pytest.fixture(scope="module", autouse=True)
def _toys():
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_TOYS))
        patch.setenv("PYTHONPATH", str(_TOYS), prepend=":")  # of the processes of a run
        yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(_TOYS)):
            del sys.modules[name]


def _run(cls, options, folder, **settings):
    case = type("Case", (AuthorsClass,), {"backend_class": cls, "op_timeout_s": 30.0})()
    usual = {"seed": 3, "schedule_s": 2.0, "pause_s": 0.005, "lease_s": 0.1, "capacity_bytes": 96 << 10}
    settings = Settings(op_timeout_s=3, allowance_s=30, **usual | settings)
    return run_chaos(case, options, settings, folder=folder, command="again")


@pytest.mark.parametrize(
    ("name", "rules"),
    [*_BROKEN.items(), *in_long(*_BROKEN_LONG.items())],
)
def test_a_broken_backend_is_found_out(name, rules, tmp_path):
    backend = _OWN.get(name) or _toy(name)
    shared = backend.scope is not Scope.PROCESS
    verdict = None
    for seed, schedule_s in ((3, 1.5), (5, 5.0), (7, 15.0)):  # ever longer: a race may not come about at once
        served = {"path": str(tmp_path / f"s{seed}")} if shared else {}
        with contextlib.suppress(OperationTimeoutError):  # no worker made a call
            times = _PROCESSES | {"schedule_s": 2 * schedule_s} if served else {"schedule_s": schedule_s}
            size = {"capacity_bytes": 32 << 10} if name == "HoldsTooMuch" else {}
            verdict = _run(backend, served, tmp_path / str(seed), seed=seed, **times, **size)
            found = {each.rule for each in verdict.findings}
            if found & rules:
                break
    else:
        pytest.fail(str(verdict))
    assert name != "IsAlwaysFull" or found == rules
    text = verdict.page.read_text(encoding="utf-8")
    assert all(printable(each.text) in text for each in verdict.findings)
    assert not verdict.passed
    assert (verdict.page.parent / "w0.0.jsonl").exists()


def test_a_run_in_which_nothing_was_done_does_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr("dataplane_testkit.chaos.run.live", lambda *_: None)
    with pytest.raises(OperationTimeoutError, match="no worker made a call"):
        _run(NoopBackend, {}, tmp_path)


def test_a_right_backend_passes_and_leaves_no_page(tmp_path):
    verdict = _run(NoopBackend, {}, tmp_path / "none", lease_s=1.0)
    assert verdict.passed, verdict
    assert not (tmp_path / "none").exists()


def test_the_command_names_the_fault_and_the_page_or_what_ran(tmp_path, capsys, monkeypatch):
    def chaos():
        words = ["conformance", "noop", "--chaos", "--minutes", "0.03", "--seed", "7"]
        status = main([*words, "--json", str(tmp_path / "r.json"), "-o", str(tmp_path / "found")])
        return status, capsys.readouterr(), json.loads((tmp_path / "r.json").read_text())

    status, printed, summary = chaos()
    assert status == 0, printed.out
    assert printed.out.startswith("chaos on noop: 0.03 min, seed 7\n")
    assert printed.out.endswith("no rule of the contract was broken\n")
    assert printed.err == ""  # no progress line where nobody looks
    assert summary["passed"]
    assert summary["calls"]["put"]["ok"] > 0
    assert not (tmp_path / "found").exists()

    right = NoopBackend.claim

    def backwards(self, request):
        claim = right(self, request)
        return replace(claim, sample_ids=claim.sample_ids[::-1], tags=claim.tags[::-1])

    monkeypatch.setattr(NoopBackend, "claim", backwards)
    status, printed, summary = chaos()
    assert status == 1
    assert "FAULT order: " in printed.out
    assert printed.out.endswith(f"see {tmp_path / 'found' / 'finding.md'}\n")
    assert "dataplane conformance noop --chaos --minutes 0.03 --seed 7" in (tmp_path / "found/finding.md").read_text()
    assert not summary["passed"]
