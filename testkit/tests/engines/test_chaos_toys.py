"""Chaos runs find out broken backends whose fault shows in a history, and pass right ones."""

from __future__ import annotations

import contextlib
import json

import pytest
from msgspec.structs import replace

from dataplane_core.cli import main
from dataplane_core.errors import CapacityExceededError, OperationTimeoutError, printable
from dataplane_noop import NoopBackend
from dataplane_testkit import AuthorsClass, Settings, run_chaos


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


class KeepsWhatIsCleared(NoopBackend):
    """Deletes no payload."""

    def held_bytes(self):
        return len(self._segments)

    def delete_refs(self, refs, deadline):
        return None


class ForgetsOthers(NoopBackend):
    """With a sample, it drops what it keeps by content, also if others have the same."""

    def clear_samples(self, request):
        content = self._service.ledger.content_refs()
        count = super().clear_samples(request)
        self.delete_refs(content, request.deadline)
        return count


class GivesPartsOfGroups(NoopBackend):
    """Of a claim that gives several rows, the last is left out."""

    def claim(self, request):
        claim, last = super().claim(request), slice(None, -1)
        if len(claim.sample_ids) < 2:
            return claim
        tokens = claim.lease_tokens and claim.lease_tokens[last]
        return replace(claim, sample_ids=claim.sample_ids[last], tags=claim.tags[last], lease_tokens=tokens)


#: The rules of which one must be found broken.
_BROKEN = {
    HoldsTooMuch: {"capacity"},
    TimesOutAtOnce: {"error"},
    IsAlwaysFull: {"puts"},
    KeepsWhatIsCleared: {"leaked"},
    ForgetsOthers: {"lost"},
    GivesPartsOfGroups: {"groups"},
}


def _run(cls, folder, **settings):
    case = type("Case", (AuthorsClass,), {"backend_class": cls, "op_timeout_s": 30.0})()
    usual = {"seed": 3, "schedule_s": 2.0, "pause_s": 0.005, "lease_s": 0.1, "capacity_bytes": 96 << 10}
    settings = Settings(op_timeout_s=3, allowance_s=30, **usual | settings)
    return run_chaos(case, {}, settings, folder=folder, command="again")


@pytest.mark.parametrize("backend", _BROKEN)
def test_a_broken_backend_is_found_out(backend, tmp_path):
    verdict = None
    size = {"capacity_bytes": 32 << 10} if backend is HoldsTooMuch else {}
    for seed, schedule_s in ((3, 1.5), (5, 5.0), (7, 15.0)):  # ever longer: on a busy machine there are few calls
        with contextlib.suppress(OperationTimeoutError):  # no worker made a call
            verdict = _run(backend, tmp_path / str(seed), seed=seed, schedule_s=schedule_s, **size)
            rules = {found.rule for found in verdict.findings}
            if rules & _BROKEN[backend]:
                break
    else:
        pytest.fail(str(verdict))
    assert backend is not IsAlwaysFull or rules == {"puts"}
    text = verdict.page.read_text(encoding="utf-8")
    assert all(printable(found.text) in text for found in verdict.findings)
    assert not verdict.passed
    assert (verdict.page.parent / "w0.0.jsonl").exists()


def test_a_run_in_which_nothing_was_done_does_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr("dataplane_testkit.chaos.run.live", lambda *_: None)
    with pytest.raises(OperationTimeoutError, match="no worker made a call"):
        _run(NoopBackend, tmp_path)


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
