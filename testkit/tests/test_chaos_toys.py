"""Chaos runs find out broken backends whose fault shows in a history, and pass right ones."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path

import pytest

from dataplane_core.errors import CapacityExceededError, OperationTimeoutError, printable
from dataplane_noop import NoopBackend
from dataplane_testkit import AuthorsClass, Settings, run_chaos

_TOYS = Path(__file__).parent / "toys"

#: Broken backend -> the rules of which one must be found broken.
_BROKEN = {
    "ClaimsTwice": {"given once"},
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
    "EvictsWhenFull": {"committed"},
    "ReordersRows": {"bits"},
}
#: One that gives twice and one that forgets.
_FEW = ("ClaimsTwice", "EvictsWhenFull")


@pytest.fixture(scope="module", autouse=True)
def _toys():
    before = set(sys.modules)
    sys.path.insert(0, str(_TOYS))
    yield
    sys.path.remove(str(_TOYS))
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(_TOYS)):
            del sys.modules[name]


def _run(cls, options, folder, **settings):
    case = type("Case", (AuthorsClass,), {"backend_class": cls, "op_timeout_s": 30.0})()
    usual = {"seed": 3, "schedule_s": 2.0, "pause_s": 0.005, "lease_s": 0.1, "capacity_bytes": 96 << 10}
    settings = usual | settings
    return run_chaos(
        case, options, Settings(op_timeout_s=3, allowance_s=30, **settings), folder=folder, command="again"
    )


def _rules(verdict):
    return {found.rule for found in verdict.findings}


def _found_out(cls, rules, folder, shared=False, seconds=(1.5, 5.0, 15.0), **settings):
    """Runs ever longer, since a race may not come about at once.

    Returns:
        The first verdict that found one of `rules` broken.
    """
    verdict = None
    for seed, schedule_s in zip((3, 5, 7), seconds, strict=True):
        own = {"path": str(folder / f"s{seed}")} if shared else {}
        with contextlib.suppress(OperationTimeoutError):  # no worker made a call
            verdict = _run(cls, own, folder / str(seed), seed=seed, schedule_s=schedule_s, **settings)
            if _rules(verdict) & rules:
                return verdict
    pytest.fail(str(verdict))


@pytest.mark.parametrize(
    "name", [name if name in _FEW else pytest.param(name, marks=pytest.mark.long) for name in _BROKEN]
)
def test_a_broken_backend_is_found_out(name, tmp_path):
    broken = importlib.import_module("broken").toy[name].backend
    verdict = _found_out(broken, _BROKEN[name], tmp_path)
    text = verdict.page.read_text(encoding="utf-8")
    assert all(f"**{printable(found.text)}**" in text for found in verdict.findings)
    assert (verdict.page.parent / "w0.0.schedule.txt").exists()


class HoldsTooMuch(NoopBackend):
    """Its capacity is four times the one that it was told."""

    def __init__(self, config):
        super().__init__(config.model_copy(update={"capacity_bytes": 4 * config.capacity_bytes}))


def test_a_store_that_holds_too_much_is_found_out(tmp_path):
    _found_out(HoldsTooMuch, {"capacity"}, tmp_path, seconds=(2.0, 6.0, 20.0), capacity_bytes=32 << 10)


class TimesOutAtOnce(NoopBackend):
    """Each put ends at once, as if its deadline had passed."""

    def put_samples(self, request):
        raise OperationTimeoutError("late")


class IsAlwaysFull(NoopBackend):
    """Refuses each put."""

    def put_samples(self, request):
        raise CapacityExceededError("full")


@pytest.mark.parametrize(("cls", "rules"), [(TimesOutAtOnce, {"error", "puts"}), (IsAlwaysFull, {"puts"})])
def test_a_store_that_does_nothing_is_found_out(cls, rules, tmp_path):
    verdict = _found_out(cls, {"puts"}, tmp_path, seconds=(2.0, 6.0, 20.0))
    assert _rules(verdict) == rules, verdict
    assert not verdict.passed


def test_a_run_in_which_nothing_was_done_does_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr("dataplane_testkit.chaos.run.live", lambda *_: 0)
    with pytest.raises(OperationTimeoutError, match="no worker made a call"):
        _run(NoopBackend, {}, tmp_path)


def test_a_right_backend_passes_and_leaves_no_page(tmp_path):
    verdict = _run(NoopBackend, {}, tmp_path / "none", lease_s=1.0)
    assert verdict.passed, verdict
    assert not (tmp_path / "none").exists()


_PROCESSES = {"every_s": 0.5, "pause_s": 0.02, "lease_s": 0.5}


@pytest.mark.long
def test_a_broken_store_of_several_processes_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(_TOYS), prepend=":")
    broken = importlib.import_module("broken_stores").toy["KeepsCursorsInTheClient"].backend
    _found_out(broken, {"given once"}, tmp_path, shared=True, seconds=(4.0, 10.0, 30.0), **_PROCESSES)
