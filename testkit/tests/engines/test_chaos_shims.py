"""Chaos runs through a shim: a store is held to what it promises, and what else it breaks is shown apart.

The store is the one of docs/writing-a-backend.md, a table in a file of SQLite; and some that are wrong in one way each.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from dataplane_core.cli import main
from dataplane_core.errors import ConfigError, OperationTimeoutError
from dataplane_testkit import Settings, run_shim
from dataplane_testkit.chaos import judged
from dataplane_testkit.chaos.shim import load_shim

ALONE = frozenset()
WRONG = """
import contextlib, time
from pathlib import Path
from dataplane_testkit import Disturbance


class Loses(Table):
    def disturbances(self):
        return {"lose all": Disturbance(self.emptied, lasts=False)}

    @contextlib.contextmanager
    def emptied(self):
        self.db.execute("DELETE FROM cells")
        yield


class Forgets(Table):
    def put(self, partition, rows):
        super().put(partition, dict(list(rows.items())[:1]))


class Hangs(Table):
    def __init__(self, tasks, path):
        super().__init__(tasks, path)
        self.go = Path(f"{path}.go")

    def list(self, partition):
        while not self.go.exists():
            time.sleep(0.02)
        return []


class Raises(Table):
    def get(self, partition, samples, fields):
        raise ZeroDivisionError("by hand")


class Promises(Table):
    promises = {"speed": "here"}


class Nothing:
    pass
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The path of the file of the shims."""
    text = Path(__file__).parents[3].joinpath("docs", "writing-a-backend.md").read_text(encoding="utf-8")
    table = re.search(r"```python\n(import sqlite3\n.*?)```", text, re.DOTALL).group(1)
    path = tmp_path_factory.mktemp("shims") / "stores.py"
    path.write_text(table + WRONG)
    return path


@pytest.fixture
def run(store):
    """Runs a store for a while."""

    def run(cls, folder, **settings):
        folder.mkdir(exist_ok=True)
        settings = {"seed": 3, "schedule_s": 1.5, "pause_s": 0.01, "every_s": 0.5, "workers": 2, **settings}
        options = {"path": str(folder / "store")}
        return run_shim(f"{store}:{cls}", options, Settings(**settings), folder=folder / "page", command="again")

    return run


@pytest.fixture
def run_until(run):
    """Runs ever longer, until the run is enough for the test: on a busy machine some of it may be left out."""

    def run_until(enough, cls, folder, **settings):
        verdict = None
        for schedule_s in (1.5, 5.0, 15.0):
            with contextlib.suppress(OperationTimeoutError):  # no worker made a call
                verdict = run(cls, folder / str(schedule_s), schedule_s=schedule_s, **settings)
                if enough(verdict):
                    return verdict
        pytest.fail(str(verdict))

    return run_until


def rules(findings):
    return {each.rule for each in findings}


def test_a_store_that_keeps_its_promises_passes_while_its_clients_are_killed(run_until, tmp_path):
    operations = {"put", "get", "claim", "list", "clear"}

    def has_all(verdict):
        assert verdict.passed, verdict
        kinds = {each.kind for each in verdict.history.events}
        assert kinds <= {"kill"}
        return kinds and {call.operation for call in verdict.history.calls} == operations

    run_until(has_all, "Table", tmp_path, faults=frozenset({"kill"}))


#: What is done to which store -> the rule that is seen broken, and what the page says of it.
SEEN = {
    ("Table", ALONE): ("order", "The store does not promise this."),  # claims come by name
    ("Loses", frozenset({"lose all"})): ("committed", "This takes for granted some of what the store does not promise"),
    ("Raises", ALONE): ("error", "ZeroDivisionError: by hand"),
}


@pytest.mark.parametrize(("cls", "faults"), SEEN, ids=str)
def test_what_a_store_does_not_promise_is_shown_apart(cls, faults, run_until, store, tmp_path):
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
        durable, _ = judged(verdict.history, load_shim(f"{store}:Table").promises | {"durable": "here"})
        assert "committed" in {each.rule for each, _ in durable}


def test_a_store_that_breaks_a_promise_is_found_out(run_until, tmp_path):
    verdict = run_until(lambda it: "committed" in rules(it.findings), "Forgets", tmp_path, faults=ALONE)
    assert "committed" not in rules(verdict.seen)
    assert "The store: a transaction that has returned can be read by all connections\n" in verdict.page.read_text()


def test_a_call_that_hangs_is_given_up_and_shown(run, tmp_path):
    times = {"op_timeout_s": 0.3, "allowance_s": 0.3}
    verdict = run("Hangs", tmp_path, faults=ALONE, steps=frozenset({"put", "list"}), **times)
    (tmp_path / "store.go").touch()  # ends the calls that hang in this process
    assert verdict.passed, verdict
    assert "deadline" in rules(verdict.seen), verdict


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{store}:Nothing", "is no shim"),
        ("{store}:Absent", "is no shim"),
        ("{store}:Promises", "promises 'speed'"),
        ("/absent.py:Table", "cannot be imported"),
        ("absent_module:Table", "cannot be imported"),
    ],
)
def test_what_is_no_shim_is_refused(name, said, store):
    with pytest.raises(ConfigError, match=said):
        load_shim(name.format(store=store))


@pytest.mark.parametrize("settings", [{"faults": frozenset({"flood"})}, {"steps": frozenset({"save"})}])
def test_a_fault_or_step_that_is_not_possible_is_refused(settings, run, tmp_path):
    with pytest.raises(ConfigError, match=r"'(flood|save)' cannot be done to this store"):
        run("Table", tmp_path, **settings)


def test_shims_in_files_of_one_name_are_two(store, tmp_path):
    (tmp_path / store.name).write_text(store.read_text())
    assert load_shim(f"{store}:Table") is not load_shim(f"{tmp_path / store.name}:Table")


def test_the_command_runs_a_shim_and_says_how_to_run_it_again(store, tmp_path, capsys):
    words = [f"{store}:Forgets", "--chaos", "--minutes", "0.03", "--seed", "7", "--faults", "none"]
    words += ["--steps", "put,get", "--options", f"{{path: {tmp_path / 'store'}}}", "-o", str(tmp_path / "found")]
    assert main(["conformance", *words, "--json", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"chaos on {store}:Forgets: 0.03 min, seed 7\n")
    assert "FAULT committed: " in said
    assert "--faults none --steps get,put" in (tmp_path / "found" / "finding.md").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["calls"].keys() <= {"put", "get", "claim", "list", "clear"}


def test_the_kit_itself_does_not_run_on_a_shim(store, capsys):
    with pytest.raises(SystemExit):
        main(["conformance", f"{store}:Table"])
    assert "--chaos" in capsys.readouterr().err
