"""The checker of chaos runs: one bad history per rule is found out, and its good neighbours are not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    ClaimTimeoutError,
    OperationTimeoutError,
)
from dataplane_testkit.chaos import RULES, Call, Event, History, check, schedule, shrunk
from dataplane_testkit.chaos.history import Recorder, outcome_of, read_calls, to_json
from dataplane_testkit.chaos.page import page
from dataplane_testkit.chaos.schedule import DISRUPTIONS, Plan, disruptions, steps

BASE = ("x", "y")
_COUNT = iter(range(1_000_000))


def call(operation, begin_s, end_s=None, *samples, process="w0.0", **about):
    about.setdefault("outcome", "ok" if end_s is not None else "unknown")
    end_s = math.inf if end_s is None else end_s
    about = {"partition": "p", "samples": samples} | about
    return Call(process=process, number=next(_COUNT), operation=operation, begin_s=begin_s, end_s=end_s, **about)


def put(version, begin_s, end_s=None, *samples, fields=BASE, size_bytes=10, **about):
    sizes = (size_bytes,) * len(samples)
    tag = "#v" if "x" in fields else "#z"
    return call("put", begin_s, end_s, *samples, version=version, fields=(*fields, tag), size_bytes=sizes, **about)


def get(version, begin_s, end_s, *samples, fields=BASE, **about):
    seen = {sample: dict.fromkeys(fields, version) for sample in samples}
    return call("get", begin_s, end_s, *samples, **({"fields": fields, "seen": seen} | about))


def missing(begin_s, end_s, *samples, fields=BASE, error="MissingDataError: no a"):
    return call("get", begin_s, end_s, *samples, fields=fields, outcome="refused", error=error)


def claim(begin_s, end_s, *samples, token="", lease_s=None, task="t", limit=4, version=1, **about):
    seen = {sample: {"#v": version} for sample in samples} if version else {sample: {} for sample in samples}
    if token:
        lease_s = lease_s or 10.0
        about["tokens"] = (token,) * len(samples)
    about = {"seen": seen, "fields": ("x",), "lease_s": lease_s, "task": task, "limit": limit} | about
    return call("claim", begin_s, end_s, *samples, **about)


def settle(operation, begin_s, end_s, *samples, token="A", task="t", **about):
    return call(operation, begin_s, end_s, *samples, tokens=(token,) * len(samples), task=task, **about)


def refused(operation, begin_s, end_s, *samples, token="A"):
    return settle(operation, begin_s, end_s, *samples, token=token, outcome="refused", error="LeaseExpiredError: late")


def clear(begin_s, end_s=None, *samples, **about):
    return call("clear", begin_s, end_s, *samples, whole=not samples, **about)


def listing(begin_s, end_s, **versions):
    seen = {sample: {"#v": version} if version else {} for sample, version in versions.items()}
    return call("list", begin_s, end_s, *versions, seen=seen)


A = put(1, 0, 1, "a")
B = put(2, 2, 3, "b")

#: Name -> the rule, a history that breaks it (calls, or a whole history), and histories that do not.
CASES = {
    "a read finds nothing of a put that returned": (
        "committed",
        [A, missing(2, 3, "a")],
        [A, missing(0.5, 3, "a")],
        [A, clear(1.5, None, "a"), missing(2, 3, "a")],
        [put(1, 0, None, "a"), missing(2, 3, "a")],
    ),
    "a listing leaves out a sample": (
        "committed",
        [A, listing(2, 3)],
        [A, listing(2, 3, a=1)],
        [A, listing(0.5, 3)],
        [A, clear(2.5, 4), listing(2, 3)],
    ),
    "payload is lost": (
        "lost",
        [A, missing(2, 3, "a", error="LostSamplesError: gone")],
        History(
            calls=(A, missing(2, 3, "a", error="LostSamplesError: gone")),
            events=(Event(kind="the server restarts", process="", begin_s=1, end_s=2, loses_data=True),),
        ),
    ),
    "a cell differs": (
        "bits",
        [A, get("expected 1, read 2", 2, 3, "a")],
        [A, get(1, 2, 3, "a")],
    ),
    "a read shows what nobody wrote": ("written", [A, get(7, 2, 3, "a")], [A, put(7, 1, None, "a"), get(7, 2, 3, "a")]),
    "a read shows what was refused": (
        "written",
        [A, put(7, 1, 2, "a", outcome="refused", error="CapacityExceededError: full"), get(7, 3, 4, "a")],
    ),
    "a read shows what was written later": ("written", [put(1, 5, 6, "a"), get(1, 2, 3, "a")]),
    "a read shows what was replaced": (
        "latest",
        [A, put(2, 2, 3, "a"), get(1, 4, 5, "a")],
        [A, put(2, 2, 3, "a"), get(2, 4, 5, "a")],
        [A, put(2, 2, 4.5, "a"), get(1, 4, 5, "a")],
        [put(1, 0, None, "a"), put(2, 2, 3, "a"), get(1, 4, 5, "a")],
    ),
    "a read shows what was cleared": (
        "cleared",
        [A, clear(2, 3, "a"), get(1, 4, 5, "a")],
        [A, clear(2, 4.5, "a"), get(1, 4, 5, "a")],
        [A, clear(2, None, "a"), get(1, 4, 5, "a")],
        [A, clear(2, 3, "b"), get(1, 4, 5, "a")],
    ),
    "a read shows what was there before a registration": ("cleared", [A, call("register", 2, 3), get(1, 4, 5, "a")]),
    "half of a put is seen": (
        "half",
        [put(1, 0, None, "a"), get(1, 1, 2, "a", fields=("x",)), missing(3, 4, "a", fields=("y",))],
        [put(1, 0, None, "a"), missing(1, 2, "a", fields=("y",)), get(1, 3, 4, "a", fields=("x",))],
    ),
    "a claim brings no tags": ("half", [A, claim(2, 3, "a", version=None)], [A, claim(2, 3, "a")]),
    "a read mixes two versions": (
        "mixed",
        [A, put(2, 2, 9, "a"), get(1, 3, 4, "a", seen={"a": {"x": 1, "y": 2}})],
        [A, put(2, 2, 9, "a", fields=("y",)), get(1, 3, 4, "a", seen={"a": {"x": 1, "y": 2}})],
        History(calls=(A, put(2, 2, 9, "a"), get(1, 3, 4, "a", seen={"a": {"x": 1, "y": 2}})), atomic_overwrite=False),
    ),
    "a sample is given twice without a lease": (
        "given once",
        [A, claim(2, 3, "a"), claim(4, 5, "a")],
        [A, claim(2, 3, "a"), claim(4, 5, "a", task="u")],
        [A, claim(2, 3, "a"), clear(3, 4, "a"), put(2, 4, 4.5, "a"), claim(5, 6, "a", version=2)],
        [A, claim(2, None, "a"), claim(4, 5, "a")],
    ),
    "an acked sample is given again": (
        "given once",
        [A, claim(2, 3, "a", token="A"), settle("ack", 4, 5, "a"), claim(20, 21, "a", token="B")],
        [A, claim(2, 3, "a", token="A"), refused("ack", 14, 15, "a"), claim(20, 21, "a", token="B")],
    ),
    "two holders both ack": (
        "two holders",
        [
            *(A, claim(2, 3, "a", token="A", lease_s=1), claim(5, 6, "a", token="B", lease_s=1)),
            *(settle("ack", 7, 8, "a"), settle("ack", 7, 8, "a", token="B")),
        ],
        [
            *(A, claim(2, 3, "a", token="A", lease_s=1), claim(5, 6, "a", token="B", lease_s=1)),
            *(refused("ack", 7, 8, "a"), settle("ack", 7, 8, "a", token="B")),
        ],
        [A, claim(2, 3, "a", token="A"), settle("ack", 4, 5, "a"), settle("ack", 6, 7, "a")],
    ),
    "a lease that was handed out again can be acked": (
        "refused ack",
        [A, claim(2, 3, "a", token="A", lease_s=1), claim(5, 6, "a", token="B"), settle("ack", 7, 8, "a")],
    ),
    "a leased sample is given to another": (
        "lease",
        [A, claim(2, 3, "a", token="A"), claim(5, 6, "a", token="B")],
        [A, claim(2, 3, "a", token="A", lease_s=4), claim(5, 6.1, "a", token="B")],
        [A, claim(2, 3, "a", token="A"), settle("nack", 4, None, "a"), claim(5, 6, "a", token="B")],
    ),
    "a renewed lease ends early": (
        "lease",
        [
            *(A, claim(2, 3, "a", token="A", lease_s=4), settle("renew", 5, 5.5, "a", lease_s=4)),
            claim(7, 8, "a", token="B"),
        ],
    ),
    "an ack in time is refused": (
        "lease",
        [A, claim(2, 3, "a", token="A"), refused("ack", 4, 5, "a")],
        [A, claim(2, 3, "a", token="A", lease_s=2), refused("ack", 4, 5, "a")],
        [A, claim(2, 3, "a", token="A"), clear(3, 4), refused("ack", 4, 5, "a")],
        [A, claim(2, 3, "a", token="A"), settle("nack", 3, 4, "a"), refused("ack", 4, 5, "a")],
    ),
    "a token is used again": (
        "token",
        [A, B, claim(4, 5, "a", token="A", limit=1), claim(6, 7, "b", token="A", version=2)],
        [A, B, claim(4, 5, "a", token="A", limit=1), claim(6, 7, "b", token="B", version=2)],
    ),
    "a reply is out of order": (
        "order",
        [A, B, claim(4, 5, "b", "a", seen={"a": {"#v": 1}, "b": {"#v": 2}})],
        [A, B, claim(4, 5, "a", "b", seen={"a": {"#v": 1}, "b": {"#v": 2}})],
        [A, put(2, 0.5, 3, "b"), claim(4, 5, "b", "a", seen={"a": {"#v": 1}, "b": {"#v": 2}})],
        [
            *(A, B, clear(3.1, 3.2, "a"), put(3, 3.3, 3.4, "a")),
            claim(4, 5, "b", "a", seen={"a": {"#v": 3}, "b": {"#v": 2}}),
        ],
    ),
    "a later sample is given first": (
        "order",
        [A, B, claim(4, 5, "b", limit=1, version=2)],
        [A, B, claim(4, 5, "a", limit=1)],
        [A, B, claim(3.5, None, "a"), claim(4, 5, "b", limit=1, version=2)],
        [put(1, 0, 1, "a", fields=("y",)), B, claim(4, 5, "b", limit=1, version=2)],
    ),
    "a ready sample is not given": (
        "ready",
        [A, claim(4, 5, limit=1)],
        [A, claim(0.5, 5, limit=1)],
        [A, claim(2, 3, "a", token="A"), claim(40, 41, limit=1)],
        [A, claim(2, None, limit=1), claim(4, 5, limit=1)],
    ),
    "a nacked sample is not given": (
        "ready",
        [A, claim(2, 3, "a", token="A"), settle("nack", 4, 5, "a"), claim(6, 7, lease_s=1)],
    ),
    "a blocking claim waits in vain": (
        "waiting",
        [
            *(A, B),
            claim(4, 9, limit=2, blocking=True, timeout_s=5, outcome="refused", error="ClaimTimeoutError: 2 are ready"),
        ],
        [
            *(A, B),
            claim(4, 9, limit=3, blocking=True, timeout_s=5, outcome="refused", error="ClaimTimeoutError: 2 are ready"),
        ],
    ),
    "a lease never ends": (
        "handed out again",
        History(calls=(A, claim(2, 3, "a", token="A"), claim(40, 41, lease_s=10)), audited_s=39),
        History(
            calls=(A, claim(2, 3, "a", token="A"), settle("ack", 4, None, "a"), claim(40, 41, lease_s=10)), audited_s=39
        ),
    ),
    "more samples are lost than lost replies account for": (
        "at most one claim",
        History(calls=(A, B, claim(3.5, None, limit=1), claim(40, 41)), audited_s=39),
        History(calls=(A, B, claim(3.5, None, limit=2), claim(40, 41)), audited_s=39),
    ),
    "a task is done too early": (
        "consumed",
        [A, call("consumed", 2, 3, flag=True, task="t"), claim(9, 10, "a")],
        [A, claim(1.5, 1.8, "a"), call("consumed", 2, 3, flag=True, task="t")],
        [A, call("consumed", 2, 3, flag=False, task="t"), claim(9, 10, "a")],
    ),
    "a task is done before the ack": (
        "consumed",
        [A, claim(1.5, 1.8, "a", token="A"), call("consumed", 2, 3, flag=True, task="t")],
        [
            *(A, claim(1.5, 1.8, "a", token="A"), settle("ack", 2.5, 4, "a")),
            call("consumed", 2, 3, flag=True, task="t"),
        ],
    ),
    "the store holds too much": (
        "capacity",
        History(calls=(put(1, 0, 1, "a", size_bytes=60), put(2, 2, 3, "b", size_bytes=60)), capacity_bytes=100),
        History(
            calls=(
                *(put(1, 0, 1, "a", size_bytes=60), clear(2, 9, "a")),
                put(2, 2, 3, "b", size_bytes=60),
            ),
            capacity_bytes=100,
        ),
        History(calls=(put(1, 0, 1, "a", size_bytes=60), put(2, 2, 3, "a", size_bytes=60)), capacity_bytes=100),
    ),
    "a call ends long after its deadline": (
        "deadline",
        History(calls=(put(1, 0, 40, "a", timeout_s=5),), allowance_s=10),
        History(calls=(put(1, 0, 14, "a", timeout_s=5),), allowance_s=10),
        History(
            calls=(put(1, 0, 40, "a", timeout_s=5),),
            events=(Event(kind="stop", process="w0.0", begin_s=3, end_s=35),),
            allowance_s=10,
        ),
    ),
    "a call never ends": (
        "deadline",
        History(calls=(put(1, 0, None, "a", timeout_s=5),), end_s=60, allowance_s=10),
        History(
            calls=(put(1, 0, None, "a", timeout_s=5),),
            events=(Event(kind="kill", process="w0.0", begin_s=3, end_s=4),),
            end_s=60,
            allowance_s=10,
        ),
    ),
    "a call fails for no reason": (
        "error",
        [put(1, 0, 1, "a", outcome="unknown", error="BackendUnavailableError: no reply")],
        [put(1, 0, 60, "a", outcome="unknown", error="OperationTimeoutError: no reply")],
        History(
            calls=(put(1, 0, 1, "a", outcome="unknown", error="BackendUnavailableError: no reply"),),
            events=(Event(kind="the server stops", process="", begin_s=0.5, end_s=2),),
        ),
    ),
    "a put times out at once": (
        "error",
        [put(1, 0, 1, "a", outcome="unknown", error="OperationTimeoutError: no reply")],
        History(
            calls=(put(1, 0, 1, "a", outcome="unknown", error="OperationTimeoutError: no reply"),),
            events=(Event(kind="the server stops", process="", begin_s=0.5, end_s=2),),
        ),
    ),
    "a claim times out at once": (
        "error",
        [claim(4, 5, limit=1, blocking=True, timeout_s=5, outcome="refused", error="ClaimTimeoutError: 0 are ready")],
    ),
    "no put succeeds": (
        "puts",
        [
            put(each, each, each + 0.1, "a", outcome="refused", error="CapacityExceededError: full")
            for each in range(20)
        ],
        [put(each, each, each + 0.1, "a", outcome="refused", error="CapacityExceededError: full") for each in range(5)],
    ),
    "an error is not of the data plane": (
        "error",
        [put(1, 0, 1, "a", outcome="unknown", error="!ZeroDivisionError: division by zero")],
    ),
    "a partition is not known": (
        "registered",
        [call("register", 0, 1), put(1, 2, 3, "a", outcome="refused", error="UnknownPartitionError: p")],
        [
            *(call("register", 0, 1), clear(2, 3)),
            put(1, 2, 3, "a", outcome="refused", error="UnknownPartitionError: p"),
        ],
    ),
    "a save leaves out a sample": (
        "save",
        [A, call("saved", 2, 3)],
        [A, call("saved", 2, 3, "a", seen={"a": {"x": 1, "#v": 1}})],
    ),
    "a save cannot be loaded": ("save", [A, call("saved", 2, None, error="CorruptDataError: cut")]),
}


def _history(made):
    return made if isinstance(made, History) else History(calls=tuple(made))


@pytest.mark.parametrize("name", CASES)
def test_the_rule_is_found_broken(name):
    rule, bad, *_ = CASES[name]
    assert {found.rule for found in check(_history(bad))} == {rule}


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name, case in CASES.items() for place in range(len(case) - 2)]
)
def test_a_history_that_may_be_right_is_not_held_against_the_store(name, place):
    assert check(_history(CASES[name][2 + place])) == []


def test_there_is_a_bad_history_for_every_rule_and_each_rule_quotes_the_contract():
    assert {case[0] for case in CASES.values()} == set(RULES)
    contract = " ".join((Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8").split())
    assert [rule for rule, quote in RULES.items() if quote not in contract] == []


def test_nothing_is_promised_about_puts_that_overlap_clears_unless_the_store_is_fenced():
    calls = (put(1, 0, 4, "a"), clear(2, 3, "a"), missing(5, 6, "a", fields=("y",)), get(1, 5, 6, "a", fields=("x",)))
    more = (*calls, missing(7, 8, "a"))
    assert check(History(calls=more, fenced=False)) == []
    assert check(History(calls=more, fenced=True)) != []


# --- shrinking and the page -------------------------------------------------------------------------------------------


def _long():
    """Many calls that do not matter, and a double claim among them."""
    calls = []
    for number in range(40):
        at = 10 * number
        calls += [
            put(10 + number, at, at + 1, f"s{number}", f"t{number}", process="w1.0"),
            claim(at + 2, at + 3, f"s{number}", f"t{number}", version=10 + number),
        ]
    again = claim(300, 301, "s7", version=17, limit=1, process="w2.0")
    return History(
        calls=(*calls, again), events=(Event(kind="kill", process="w2.0", begin_s=300.5, end_s=300.6),)
    ), again


def test_a_history_is_shortened_to_what_matters():
    history, again = _long()
    (found,) = [each for each in check(history) if each.rule == "given once"]
    short = shrunk(history, found)
    assert again.name in {each.name for each in short.calls}
    assert len(short.calls) <= 3
    assert {sample for each in short.calls for sample in each.samples} == {"s7"}
    assert found.key in {each.key for each in check(short)}


def test_the_page_tells_the_calls_that_prove_the_fault_in_order():
    history, again = _long()
    (found,) = [each for each in check(history) if each.rule == "given once"]
    text = page("toy", "dataplane conformance toy --chaos --seed 7", [(found, shrunk(history, found))], "Seed 7.")
    assert RULES["given once"] in text
    assert "dataplane conformance toy --chaos --seed 7" in text
    assert text.index(f"**{found.calls[0].name}**") < text.index(f"**{again.name}**")
    assert "| 300.000 | 301.000 |" in text
    assert "kill -9" in text


# --- the files --------------------------------------------------------------------------------------------------------


def test_a_kill_loses_the_end_of_the_call_under_way_at_most(tmp_path):
    recorder = Recorder(tmp_path / "w0.0", "w0.0", 0.0)
    assert recorder.call("clear", "p", lambda: None, samples=["a"])
    assert recorder.call("list", "p", lambda: {"samples": ["a"], "seen": {"a": {"#v": 3}}})
    recorder.close()
    whole = (tmp_path / "w0.0").read_bytes()
    for size in range(len(whole) + 1):
        (tmp_path / "w0.0").write_bytes(whole[:size])
        calls = read_calls(tmp_path / "w0.0", "w0.0")
        assert [each.outcome for each in calls].count("unknown") <= 1
    assert [(each.operation, each.outcome, each.samples) for each in calls] == [
        ("clear", "ok", ("a",)),
        ("list", "ok", ("a",)),
    ]
    assert calls[1].seen == {"a": {"#v": 3}}


def test_a_history_is_written_whole():
    history, _ = _long()
    written = json.loads(to_json(history))
    assert [each["number"] for each in written["calls"]] == [each.number for each in history.calls]
    assert written["events"][0]["kind"] == "kill"
    json.loads(to_json(History(calls=(put(1, 0, None, "a"),))))


@pytest.mark.parametrize(
    ("operation", "error", "outcome"),
    [
        ("put", OperationTimeoutError("late"), "unknown"),
        ("put", OperationTimeoutError("late", outcome="not_done"), "refused"),
        ("put", OperationTimeoutError("late", outcome="done"), "ok"),
        ("ack", BackendUnavailableError("gone", outcome="done"), "ok"),
        ("claim", OperationTimeoutError("late", outcome="done"), "unknown"),
        ("claim", ClaimTimeoutError("none is ready"), "refused"),
        ("put", CapacityExceededError("full"), "refused"),
        ("put", BackendError("odd"), "unknown"),
        ("put", ValueError("odd"), "unknown"),
    ],
)
def test_an_error_says_whether_the_call_changed_anything(operation, error, outcome):
    assert outcome_of(operation, error) == outcome


# --- schedules --------------------------------------------------------------------------------------------------------


def _first(made, count=200):
    return [each for each, _ in zip(made, range(count), strict=False)]


def test_the_same_seed_gives_the_same_schedule_and_another_one_does_not():
    plan, other = (Plan(seed, 0.05, 1.0) for seed in (1, 2))
    assert _first(steps(plan, 1, 0)) == _first(steps(plan, 1, 0))
    assert _first(steps(plan, 1, 0)) != _first(steps(other, 1, 0))
    assert _first(steps(plan, 1, 0)) != _first(steps(plan, 1, 1))
    many = {each.kind for worker in range(3) for each in _first(steps(plan, worker, 0), 2000)}
    assert many == plan.steps
    assert _first(disruptions(plan, 3, 2.0, list(DISRUPTIONS))) == _first(disruptions(plan, 3, 2.0, list(DISRUPTIONS)))
    assert {each.kind for each in _first(disruptions(plan, 3, 2.0, ["kill", "stop"]))} == {"kill", "stop"}


def test_a_step_that_the_backend_cannot_take_is_not_in_the_schedule():
    plan = Plan(1, 0.05, 1.0, steps=frozenset({"put", "get"}))
    assert {each.kind for each in _first(steps(plan, 0, 0))} == {"put", "get"}


def test_a_choice_is_always_of_something_that_is_there(monkeypatch):
    highest = random.Random()
    monkeypatch.setattr(highest, "random", lambda: math.nextafter(1, 0))
    monkeypatch.setattr(schedule.random, "Random", lambda *_: highest)
    assert all(each.choice < 1 for each in _first(steps(Plan(1, 0.05, 1.0), 0, 0), 3))
