"""Chaos runs through a shim: a store is held to what it promises, and what else it breaks is shown apart."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from dataplane_core.cli import main
from dataplane_core.errors import ConfigError, OperationTimeoutError
from dataplane_testkit import Settings, run_shim
from dataplane_testkit.chaos import judged
from dataplane_testkit.chaos.shim import load_shim

STORE = Path(__file__).with_name("files_shim.py")
ALONE = frozenset()


def run(cls, folder, **settings):
    folder.mkdir(exist_ok=True)
    settings = {"seed": 3, "schedule_s": 1.5, "pause_s": 0.01, "every_s": 0.5, "workers": 2, **settings}
    options = {"path": str(folder / "store")}
    return run_shim(f"{STORE}:{cls}", options, Settings(**settings), folder=folder / "page", command="again")


def run_until(enough, cls, folder, seconds=(1.5, 5.0, 15.0), **settings):
    """Runs ever longer, until the run is enough for the test: on a busy machine some of it may be left out."""
    verdict = None
    for number, schedule_s in enumerate(seconds):
        with contextlib.suppress(OperationTimeoutError):  # no worker made a call
            verdict = run(cls, folder / str(number), schedule_s=schedule_s, **settings)
            if enough(verdict):
                return verdict
    pytest.fail(str(verdict))


def rules(findings):
    return {each.rule for each in findings}


def test_a_store_that_keeps_its_promises_passes_while_its_clients_are_killed(tmp_path):
    operations = {"put", "get", "claim", "list", "clear"}

    def has_all(verdict):
        assert verdict.passed, verdict
        kinds = {each.kind for each in verdict.history.events}
        assert kinds <= {"kill"}
        return kinds and {call.operation for call in verdict.history.calls} == operations

    run_until(has_all, "Files", tmp_path, faults=frozenset({"kill"}))


#: What is done to which store -> the rule that is seen broken, and what the page says of it.
SEEN = {
    ("Files", ALONE): ("order", "The store does not promise this."),  # claims come by name
    ("Files", frozenset({"lose all"})): ("committed", "This takes for granted some of what the store does not promise"),
    ("Raises", ALONE): ("error", "ZeroDivisionError: by hand"),
}


@pytest.mark.parametrize(("cls", "faults"), SEEN, ids=str)
def test_what_a_store_does_not_promise_is_shown_apart(cls, faults, tmp_path):
    rule, said = SEEN[cls, faults]

    def is_seen(verdict):
        assert verdict.passed, verdict
        return rule in rules(verdict.seen)

    verdict = run_until(is_seen, cls, tmp_path, faults=faults, pause_s=0.003)
    text = verdict.page.read_text()
    assert text.startswith(f"# 0 faults of {cls} under chaos")
    assert f". Seen, not promised: {rule}" in text
    assert said in text
    assert f"seen, not promised: {rule}: " in str(verdict)
    assert verdict.summary()["passed"]
    assert rule in {each["rule"] for each in verdict.summary()["seen"]}
    if cls == "Raises":
        assert {call.outcome for call in verdict.history.calls if call.operation == "get"} == {"unknown"}
    if faults:  # counts where it promises to outlive its processes
        durable, _ = judged(verdict.history, load_shim(f"{STORE}:Files").promises | {"durable": "here"})
        assert "committed" in {each.rule for each, _ in durable}


def test_a_store_that_breaks_a_promise_is_found_out(tmp_path):
    verdict = run_until(lambda it: "committed" in rules(it.findings), "Forgets", tmp_path, faults=ALONE)
    assert "committed" not in rules(verdict.seen)
    assert "The store: here\n" in verdict.page.read_text()


def test_a_call_that_hangs_is_given_up_and_shown(tmp_path):
    times = {"op_timeout_s": 0.3, "allowance_s": 0.3}
    verdict = run("Hangs", tmp_path, faults=ALONE, steps=frozenset({"put", "list"}), **times)
    (tmp_path / "store.go").touch()  # ends the calls that hang in this process
    assert verdict.passed, verdict
    assert "deadline" in rules(verdict.seen), verdict


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{STORE}:Nothing", "is no shim"),
        (f"{STORE}:Absent", "is no shim"),
        (f"{STORE}:Promises", "promises 'speed'"),
        ("/absent.py:Files", "cannot be imported"),
        ("absent_module:Files", "cannot be imported"),
    ],
)
def test_what_is_no_shim_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        load_shim(name)


@pytest.mark.parametrize("settings", [{"faults": frozenset({"flood"})}, {"steps": frozenset({"save"})}])
def test_a_fault_or_step_that_is_not_possible_is_refused(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"'(flood|save)' cannot be done to this store"):
        run("Files", tmp_path, **settings)


def test_shims_in_files_of_one_name_are_two(tmp_path):
    (tmp_path / STORE.name).write_text(STORE.read_text())
    assert load_shim(f"{STORE}:Files") is not load_shim(f"{tmp_path / STORE.name}:Files")


def test_the_command_runs_a_shim_and_says_how_to_run_it_again(tmp_path, capsys):
    words = [f"{STORE}:Forgets", "--chaos", "--minutes", "0.03", "--seed", "7", "--faults", "none"]
    words += ["--steps", "put,get", "--options", f"{{path: {tmp_path / 'store'}}}", "-o", str(tmp_path / "found")]
    assert main(["conformance", *words, "--json", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"chaos on {STORE}:Forgets: 0.03 min, seed 7\n")
    assert "FAULT committed: " in said
    assert "--faults none --steps get,put" in (tmp_path / "found" / "finding.md").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["calls"].keys() <= {"put", "get", "claim", "list"}


def test_the_kit_itself_does_not_run_on_a_shim(capsys):
    with pytest.raises(SystemExit):
        main(["conformance", f"{STORE}:Files"])
    assert "--chaos" in capsys.readouterr().err
