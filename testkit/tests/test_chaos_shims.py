"""Chaos runs through a shim: a store is held to what it promises, and what else it breaks is shown apart."""

from __future__ import annotations

import contextlib
import json
import math

import pytest

from dataplane_core.cli import main
from dataplane_core.errors import ConfigError, OperationTimeoutError
from dataplane_testkit import Settings, run_shim
from dataplane_testkit.chaos import Call, Event, History, judged
from dataplane_testkit.chaos.shim import load_shim

#: A store in a folder that keeps all that it promises: a file per sample, a file per sample that a task was given.
STORE = """
import contextlib, fcntl, os, pickle, shutil, time
from pathlib import Path
from dataplane_testkit import Disturbance, Shim


class Files(Shim):
    rules = ("committed", "bits", "written", "latest", "cleared", "half", "mixed", "given once")
    promises = dict.fromkeys(rules, "here")

    def __init__(self, tasks, folder):
        self.folder = Path(folder)

    @contextlib.contextmanager
    def locked(self, partition):
        (self.folder / partition / "rows").mkdir(parents=True, exist_ok=True)
        with open(self.folder / partition / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.folder / partition

    def put(self, partition, rows):
        with self.locked(partition) as folder:
            for sample, cells in rows.items():
                row = self.row(folder, sample) | cells
                (folder / "new").write_bytes(pickle.dumps(row))
                os.replace(folder / "new", folder / "rows" / sample)

    def row(self, folder, sample):
        path = folder / "rows" / sample
        return pickle.loads(path.read_bytes()) if path.exists() else {}

    def get(self, partition, samples, fields):
        with self.locked(partition) as folder:
            return {sample: self.row(folder, sample) for sample in samples}

    def claim(self, partition, task, fields, limit, lease_s):
        given = []
        with self.locked(partition) as folder:
            for sample in self.in_order(folder):
                mark = folder / f"given-{task}-{sample}"
                if len(given) < limit and not mark.exists() and set(fields) <= self.row(folder, sample).keys():
                    mark.touch()
                    given.append(sample)
        return given

    def in_order(self, folder):
        return sorted(os.listdir(folder / "rows"))

    def list(self, partition):
        with self.locked(partition) as folder:
            return self.in_order(folder)

    def clear(self, partition, samples):
        with self.locked(partition) as folder:
            for sample in samples:
                for path in [folder / "rows" / sample, *folder.glob(f"given-*-{sample}")]:
                    path.unlink(missing_ok=True)

    def disturbances(self):
        return {"lose all": Disturbance(lambda: contextlib.nullcontext(self.lose()), lasts=False)}

    def lose(self):
        for partition in os.listdir(self.folder):
            with self.locked(partition) as folder:
                shutil.rmtree(folder / "rows")


class Forgets(Files):
    def put(self, partition, rows):
        super().put(partition, dict(list(rows.items())[:1]))


class Hangs(Files):
    def list(self, partition):
        while not (self.folder / "go").exists():
            time.sleep(0.02)
        return []


class Raises(Files):
    def get(self, partition, samples, fields):
        raise ZeroDivisionError("by hand")


class Promises(Files):
    promises = {"speed": "here"}


class Nothing:
    pass
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The path of the file of the shims."""
    path = tmp_path_factory.mktemp("shims") / "files.py"
    path.write_text(STORE)
    return path


def _run(store, cls, folder, **settings):
    settings = {"seed": 3, "schedule_s": 1.5, "pause_s": 0.01, "every_s": 0.5, "workers": 2, **settings}
    options = {"folder": str(folder / "store")}
    return run_shim(f"{store}:{cls}", options, Settings(**settings), folder=folder / "page", command="again")


def _run_until(enough, store, cls, folder, seconds=(1.5, 5.0, 15.0), **settings):
    """Runs ever longer, until the run is enough for the test: on a busy machine some of it may be left out."""
    verdict = None
    for number, schedule_s in enumerate(seconds):
        with contextlib.suppress(OperationTimeoutError):  # no worker made a call
            verdict = _run(store, cls, folder / str(number), schedule_s=schedule_s, **settings)
            if enough(verdict):
                return verdict
    pytest.fail(str(verdict))


def _rules(findings):
    return {each.rule for each in findings}


def test_a_store_that_keeps_its_promises_passes_while_its_clients_are_killed(store, tmp_path):
    operations = {"put", "get", "claim", "list", "clear"}

    def has_all(verdict):
        assert verdict.passed, verdict
        assert {call.operation for call in verdict.history.calls} <= operations
        kinds = {each.kind for each in verdict.history.events}
        assert kinds <= {"kill"}
        return kinds and {call.operation for call in verdict.history.calls} == operations

    _run_until(has_all, store, "Files", tmp_path, faults=frozenset({"kill"}))


def test_what_a_store_does_not_promise_is_shown_apart(store, tmp_path):
    def is_out_of_order(verdict):
        assert verdict.passed, verdict
        assert _rules(verdict.seen) <= {"order"}, verdict  # claims come by name
        return verdict.seen

    verdict = _run_until(is_out_of_order, store, "Files", tmp_path, faults=frozenset())
    text = verdict.page.read_text()
    assert "The store does not promise this." in text
    assert "seen, not promised: order: " in str(verdict)
    assert verdict.summary()["passed"]
    assert {each["rule"] for each in verdict.summary()["seen"]} == {"order"}


def test_a_store_that_breaks_a_promise_is_found_out(store, tmp_path):
    def is_found_out(verdict):
        return "committed" in _rules(verdict.findings)

    verdict = _run_until(is_found_out, store, "Forgets", tmp_path, faults=frozenset())
    assert "committed" not in _rules(verdict.seen)
    assert "The store: here\n" in verdict.page.read_text()


def test_what_is_lost_with_the_store_counts_only_where_it_promises_to_outlive_its_processes(store, tmp_path):
    def has_lost(verdict):
        assert verdict.passed, verdict
        return "committed" in _rules(verdict.seen)

    verdict = _run_until(has_lost, store, "Files", tmp_path, faults=frozenset({"lose all"}), pause_s=0.003)
    text = verdict.page.read_text()
    assert text.startswith("# 0 faults of Files under chaos")
    assert ". Seen, not promised: committed" in text
    assert "takes for granted some of what the store does not promise: `" in text
    durable, _ = judged(verdict.history, load_shim(f"{store}:Files").promises | {"durable": "here"})
    assert "committed" in {each.rule for each, _ in durable}


def test_a_call_that_hangs_is_given_up_and_shown(store, tmp_path):
    times = {"op_timeout_s": 0.3, "allowance_s": 0.3}
    verdict = _run(store, "Hangs", tmp_path, faults=frozenset(), steps=frozenset({"put", "list"}), **times)
    (tmp_path / "store" / "go").touch()  # ends the calls that hang in this process
    assert verdict.passed, verdict
    assert "deadline" in _rules(verdict.seen), verdict


def test_an_error_of_the_store_is_a_call_of_unknown_outcome(store, tmp_path):
    def gets_of(verdict):
        return [call for call in verdict.history.calls if call.operation == "get"]

    verdict = _run_until(gets_of, store, "Raises", tmp_path, seconds=(0.5, 5.0, 15.0), faults=frozenset())
    gets = gets_of(verdict)
    assert {call.outcome for call in gets} == {"unknown"}
    assert all("ZeroDivisionError: by hand" in call.error for call in gets)
    assert _rules(verdict.seen) >= {"error"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nothing", "is no shim. Expected FILE.py:Class"),
        ("Absent", "is no shim. Expected FILE.py:Class"),
        ("Promises", "promises 'speed', which is no rule. Expected some of: committed"),
    ],
)
def test_what_is_no_shim_is_refused(store, name, said):
    with pytest.raises(ConfigError, match=said):
        load_shim(f"{store}:{name}")


@pytest.mark.parametrize("name", ["/absent.py:Files", "absent_module:Files"])
def test_a_shim_that_cannot_be_imported_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_shim(name)


@pytest.mark.parametrize("settings", [{"faults": frozenset({"flood"})}, {"steps": frozenset({"save"})}])
def test_a_fault_or_step_that_is_not_possible_is_refused(store, settings, tmp_path):
    with pytest.raises(ConfigError, match=r"'(flood|save)' cannot be done to this store. Expected some of \["):
        _run(store, "Files", tmp_path, **settings)


# --- what is taken for granted ----------------------------------------------------------------------------------------


def _call(number, operation, begin_s, end_s, **about):
    about = {"partition": "p", "samples": ("a",), "fields": ("x", "y"), **about}
    about.setdefault("outcome", "unknown" if math.isinf(end_s) else "ok")
    return Call(process="w0.0", number=number, operation=operation, begin_s=begin_s, end_s=end_s, **about)


def _put(number, begin_s, end_s, version, **about):
    return _call(number, "put", begin_s, end_s, version=version, size_bytes=(8,), **about)


CLAIM = {"task": "t", "limit": 4, "samples": ()}

#: Guarantee -> a rule, and a history that breaks it only if the guarantee holds.
GRANTED = {
    "half": (
        "ready",
        [
            _put(1, 0, math.inf, 1),
            _call(2, "get", 1, 2, fields=("x",), seen={"a": {"x": 1}}),
            _call(3, "claim", 3, 4, **CLAIM),
        ],
    ),
    "mixed": (
        "latest",
        [
            _put(1, 0, 1, 1),
            _put(2, 2, math.inf, 2),
            _call(3, "get", 3, 4, fields=("x",), seen={"a": {"x": 2}}),
            _call(4, "get", 5, 6, fields=("y",), seen={"a": {"y": 1}}),
        ],
    ),
    "fenced": (
        "written",
        [_put(1, 0, 2, 1), _call(2, "clear", 1, 1.5), _call(3, "get", 3, 4, seen={"a": {"x": 9, "y": 9}})],
    ),
}


@pytest.mark.parametrize("guarantee", GRANTED)
def test_nothing_is_taken_for_granted_that_a_store_does_not_promise(guarantee):
    rule, calls = GRANTED[guarantee]
    history, promises = History(calls=tuple(calls)), dict.fromkeys(("half", guarantee, rule), "here")
    assert rule in {each.rule for each, _ in judged(history, promises)[0]}
    del promises[guarantee]
    broken, seen = judged(history, promises)
    assert not broken
    assert rule in {each.rule for each, _ in seen}


def test_a_store_without_promises_breaks_none():
    history = History(
        calls=tuple(GRANTED["fenced"][1]), events=(Event(kind="kill", process="w0.0", begin_s=0, end_s=0),)
    )
    assert judged(history, {})[0] == []


def test_a_store_of_which_no_put_succeeds_does_not_pass():
    failed = [_put(number, number, number + 0.5, number, outcome="StoreError", error="no") for number in range(40)]
    assert _rules(each for each, _ in judged(History(calls=tuple(failed)), {})[0]) == {"puts"}


def test_shims_in_files_of_one_name_are_two(store, tmp_path):
    other = tmp_path / "other" / store.name
    other.parent.mkdir()
    other.write_text(store.read_text())
    assert load_shim(f"{store}:Files") is not load_shim(f"{other}:Files")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_runs_a_shim_and_says_how_to_run_it_again(store, tmp_path, capsys):
    words = [
        f"{store}:Forgets",
        "--chaos",
        "--minutes",
        "0.03",
        "--seed",
        "7",
        "--faults",
        "none",
        "--steps",
        "put,get",
    ]
    words += ["--options", f"{{folder: {tmp_path / 'store'}}}", "-o", str(tmp_path / "found")]
    assert main(["conformance", *words, "--json", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"chaos on {store}:Forgets: 0.03 min, seed 7\n")
    assert "FAULT committed: " in said
    assert "--faults none --steps get,put" in (tmp_path / "found" / "finding.md").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["calls"].keys() <= {"put", "get", "claim", "list"}


def test_the_kit_itself_does_not_run_on_a_shim(store, capsys):
    with pytest.raises(SystemExit):
        main(["conformance", f"{store}:Files"])
    assert "--chaos" in capsys.readouterr().err
