"""Chaos runs find out broken backends and stores by what their histories show, and pass right ones.

A store behind a shim is held to what it promises, and what else it breaks is shown apart. The stores are that of
docs/writing-a-backend.md, a table in a file of SQLite, and some that are wrong in one way each.
"""

import contextlib
import json
import re
from pathlib import Path

import pytest
from broken import chaos

from dataplane_core.cli import main
from dataplane_core.errors import ConfigError, OperationTimeoutError, printable
from dataplane_noop import NoopBackend
from dataplane_testkit import AuthorsClass, Settings, run_chaos, run_shim
from dataplane_testkit.chaos import judged
from dataplane_testkit.chaos.shim import load_shim

STORES = """
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
ALONE = frozenset()


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The path of the file of the shims."""
    text = Path(__file__).parents[3].joinpath("docs", "writing-a-backend.md").read_text(encoding="utf-8")
    table = re.search(r"```python\n(import sqlite3\n.*?)```", text, re.DOTALL).group(1)
    path = tmp_path_factory.mktemp("shims") / "stores.py"
    path.write_text(table + STORES)
    return path


@pytest.fixture
def run(stores, tmp_path):
    """Runs a backend, or the store of this name, for a while."""

    def run(store, seed=3, schedule_s=1.5, **settings):
        folder = tmp_path / str(schedule_s)
        about = {"folder": folder / "page", "command": "again"}
        if not isinstance(store, str):
            settings = {"capacity_bytes": 96 << 10, "op_timeout_s": 3, "allowance_s": 30, "lease_s": 0.1} | settings
            case = type("Case", (AuthorsClass,), {"backend_class": store, "op_timeout_s": 30.0, **chaos.members})()
            return run_chaos(case, {}, Settings(seed=seed, schedule_s=schedule_s, pause_s=0.005, **settings), **about)
        folder.mkdir()
        settings = {"pause_s": 0.01, "every_s": 0.5, "workers": 2} | settings
        options, settings = {"path": str(folder / "store")}, Settings(seed=seed, schedule_s=schedule_s, **settings)
        return run_shim(f"{stores}:{store}", options, settings, **about)

    return run


@pytest.fixture
def run_until(run):
    """Runs ever longer, until the run is enough for the test: on a busy machine some of it may be left out."""

    def run_until(enough, store, **settings):
        verdict = None
        for seed, schedule_s in ((3, 1.5), (5, 5.0), (7, 15.0)):
            with contextlib.suppress(OperationTimeoutError):  # no worker made a call
                verdict = run(store, seed, schedule_s, **settings)
                if enough(verdict):
                    return verdict
        pytest.fail(str(verdict))

    return run_until


def rules(findings):
    return {finding.rule for finding in findings}


@pytest.mark.parametrize("name", chaos)
def test_a_broken_backend_is_found_out(name, run_until):
    (rule,), size = chaos[name].tests, {"capacity_bytes": 32 << 10} if name == "HoldsTooMuch" else {}
    verdict = run_until(lambda it: rule in rules(it.findings), chaos[name].backend, **size)
    assert name != "IsAlwaysFull" or rules(verdict.findings) == {rule}
    text = verdict.page.read_text(encoding="utf-8")
    assert all(printable(finding.text) in text for finding in verdict.findings)
    assert not verdict.passed
    assert (verdict.page.parent / "w0.0.jsonl").exists()


def test_a_run_in_which_nothing_was_done_does_not_pass(run, monkeypatch):
    monkeypatch.setattr("dataplane_testkit.chaos.run.live", lambda *_: None)
    with pytest.raises(OperationTimeoutError, match="no worker made a call"):
        run(NoopBackend)


def test_a_store_that_keeps_its_promises_passes_while_its_clients_are_killed(run_until):
    operations = {"put", "get", "claim", "list", "clear"}

    def has_all(verdict):
        assert verdict.passed, verdict
        kinds = {event.kind for event in verdict.history.events}
        assert kinds <= {"kill"}
        return kinds and {call.operation for call in verdict.history.calls} == operations

    run_until(has_all, "Table", faults=frozenset({"kill"}))


#: What is done to which store -> a rule that it breaks, whether it promises that, and what the page says of it.
BROKEN = {
    ("Forgets", ALONE): ("committed", True, "The store: a transaction that has returned can be read by all"),
    ("Table", ALONE): ("order", False, "The store does not promise this."),  # claims come by name
    ("Loses", frozenset({"lose all"})): ("committed", False, "takes for granted some of what the store does not"),
    ("Raises", ALONE): ("error", False, "ZeroDivisionError: by hand"),
}


@pytest.mark.parametrize(("cls", "faults"), BROKEN, ids=str)
def test_a_store_is_held_to_its_promises_and_what_else_it_breaks_is_shown_apart(cls, faults, run_until, stores):
    rule, promised, said = BROKEN[cls, faults]

    def is_found(verdict):
        assert promised or verdict.passed, verdict
        return rule in rules(verdict.findings if promised else verdict.seen)

    verdict = run_until(is_found, cls, faults=faults, pause_s=0.003)
    text, mark = verdict.page.read_text(), "FAULT" if promised else "seen, not promised:"
    assert said in text
    assert f". {'' if promised else 'Seen, not promised: '}{rule}\n" in text
    assert f"{mark} {rule}: " in str(verdict)
    assert verdict.summary()["passed"] != promised
    assert rule in {finding["rule"] for finding in verdict.summary()["findings" if promised else "seen"]}
    assert rule not in rules(verdict.seen if promised else verdict.findings)
    assert promised or text.startswith(f"# 0 faults of {cls} under chaos")
    if cls == "Raises":
        assert {call.outcome for call in verdict.history.calls if call.operation == "get"} == {"unknown"}
    if faults:  # counts where it promises to outlive its processes
        durable, _ = judged(verdict.history, load_shim(f"{stores}:Table").promises | {"durable": "here"})
        assert "committed" in {finding.rule for finding, _ in durable}


def test_a_call_that_hangs_is_given_up_and_shown(run, tmp_path):
    times = {"op_timeout_s": 0.3, "allowance_s": 0.3}
    verdict = run("Hangs", schedule_s=1.5, faults=ALONE, steps=frozenset({"put", "list"}), **times)
    (tmp_path / "1.5" / "store.go").touch()  # ends the calls that hang in this process
    assert verdict.passed, verdict
    assert "deadline" in rules(verdict.seen), verdict


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{stores}:Nothing", "is no shim"),
        ("{stores}:Absent", "is no shim"),
        ("{stores}:Promises", "promises 'speed'"),
        ("/absent.py:Table", "cannot be imported"),
        ("absent_module:Table", "cannot be imported"),
    ],
)
def test_what_is_no_shim_is_refused(name, said, stores):
    with pytest.raises(ConfigError, match=said):
        load_shim(name.format(stores=stores))


@pytest.mark.parametrize("settings", [{"faults": frozenset({"flood"})}, {"steps": frozenset({"save"})}])
def test_a_fault_or_step_that_is_not_possible_is_refused(settings, run):
    with pytest.raises(ConfigError, match=r"'(flood|save)' cannot be done to this store"):
        run("Table", **settings)


def test_shims_in_files_of_one_name_are_two(stores, tmp_path):
    (tmp_path / stores.name).write_text(stores.read_text())
    assert load_shim(f"{stores}:Table") is not load_shim(f"{tmp_path / stores.name}:Table")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, capsys):
    """Runs the command for two seconds. Its status, what it printed, and its report."""

    def command(name, *words):
        words = [name, "--chaos", "--minutes", "0.03", "--seed", "7", *words]
        status = main(["conformance", *words, "-o", str(tmp_path / "found"), "--json", str(tmp_path / "r.json")])
        return status, capsys.readouterr(), json.loads((tmp_path / "r.json").read_text())

    return command


def test_the_command_says_what_ran(command, tmp_path):
    status, printed, summary = command("noop")
    assert status == 0, printed.out
    assert printed.out.startswith("chaos on noop: 0.03 min, seed 7\n")
    assert printed.out.endswith("no rule of the contract was broken\n")
    assert printed.err == ""  # no progress line where nobody looks
    assert summary["passed"]
    assert summary["calls"]["put"]["ok"] > 0
    assert not (tmp_path / "found").exists()


def test_the_command_names_the_fault_and_the_page_and_how_to_run_it_again(command, stores, tmp_path):
    options = ["--options", f"{{path: {tmp_path / 'store'}}}"]
    status, printed, summary = command(f"{stores}:Forgets", "--faults", "none", "--steps", "put,get", *options)
    page = tmp_path / "found" / "finding.md"
    assert status == 1
    assert printed.out.startswith(f"chaos on {stores}:Forgets: 0.03 min, seed 7\n")
    assert "FAULT committed: " in printed.out
    assert printed.out.endswith(f"see {page}\n")
    again = f"    dataplane conformance {stores}:Forgets --chaos --minutes 0.03 --seed 7 --options "
    assert again in page.read_text()
    assert "--faults none --steps get,put" in page.read_text()
    assert not summary["passed"]
    assert summary["calls"].keys() <= {"put", "get", "claim", "list", "clear"}


def test_the_kit_itself_does_not_run_on_a_shim(stores, capsys):
    with pytest.raises(SystemExit):
        main(["conformance", f"{stores}:Table"])
    assert "--chaos" in capsys.readouterr().err
