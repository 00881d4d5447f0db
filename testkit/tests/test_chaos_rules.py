"""The checker of chaos runs: each rule has a history that breaks it, and the nearest ones that do not.

A history is a text of calls: ``2-3 get a -> 1`` began at 2 s, ended at 3 s and showed version 1 of sample a. An end of
``?`` was never seen: the outcome is unknown. After ``->`` comes what the reply showed, or an error; ``? Error`` leaves
open whether the call changed anything.
"""

import contextlib
import json
import math
import time
from dataclasses import asdict

import pytest

from dataplane_core import connect
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    ClaimTimeoutError,
    OperationTimeoutError,
)
from dataplane_testkit import Faults
from dataplane_testkit.chaos import RULES, Call, Event, History, Settings, check, judged, shrunk
from dataplane_testkit.chaos.history import Recorder, outcome_of, read_calls
from dataplane_testkit.chaos.run import page
from dataplane_testkit.chaos.worker import BASE, MEDIA, ROLLOUTS, SHARE_ABOVE, Hands, Plan

#: The numbers of a call in a text, such as ``lease=4``.
_NUMBERS = {"v": "version", "lease": "lease_s", "limit": "limit", "timeout": "timeout_s"}


def call_of(number, text):
    """The call, or the event, of a part of a text."""
    asked, _, reply = text.partition("->")
    (times, operation, *words), reply = asked.split(), reply.split()
    begin_s, end_s = (math.inf if each == "?" else float(each) for each in times.split("-"))
    if operation in ("kill", "stop", "disturb", "lose"):
        process = "w0.0" if operation in ("kill", "stop") else ""
        return Event(kind=operation, process=process, begin_s=begin_s, end_s=end_s, loses_data=operation == "lose")
    samples = tuple(words.pop(0).split(",")) if words and "=" not in words[0] and words[0] != "wait" else ()
    options = dict(word.partition("=")[::2] for word in words)
    about = {full: float(options[short]) for short, full in _NUMBERS.items() if short in options}
    fields = tuple(options.get("fields", "x" if operation == "claim" else "x,y").split(","))
    about |= {"samples": samples, "fields": fields, "task": options.get("task", "t")}
    about |= {"tokens": (options["token"],) * len(samples)} if "token" in options else {}
    about |= {"outcome": "unknown" if math.isinf(end_s) else "ok"}
    if operation == "put":
        tag = "#v" if "x" in fields else "#z"
        about |= {"fields": (*fields, tag), "size_bytes": (int(options.get("bytes", 10)),) * len(samples)}
    if operation == "claim":
        about |= {"limit": int(options.get("limit", 4)), "blocking": "wait" in options}
    if operation == "clear":
        about["whole"] = not samples
    if reply and reply[0] == "?":
        about |= {"outcome": "unknown", "error": f"{reply[1]}: said"}
    elif reply and "Error" in reply[0]:
        about |= {"outcome": "refused", "error": f"{reply[0]}: said"}
    elif operation == "consumed":
        about["flag"] = reply == ["yes"]
    elif operation == "get":
        shown = dict(zip(fields, reply * len(fields), strict=False))
        cells = {field: int(version) if version.isdigit() else version for field, version in shown.items()}
        about["seen"] = {sample: cells for sample in samples if reply}
    elif reply:  # samples with the versions in their tags: a=1
        given = dict(each.partition("=")[::2] for each in reply)
        versions = {sample: int(version) if version.isdigit() else version for sample, version in given.items()}
        tags = {sample: {"#v": version} if version else {} for sample, version in versions.items()}
        about |= {"samples": tuple(given), "seen": tags}
        about |= {"tokens": (options["token"],) * len(given)} if "token" in options else {}
    if "token" in options and operation == "claim":
        about.setdefault("lease_s", 10.0)
    about["version"] = int(about.get("version", 0))
    return Call(
        process="w0.0", number=number, operation=operation, partition="p", begin_s=begin_s, end_s=end_s, **about
    )


def history(text, **settings):
    """The history of a text. What comes before a colon are settings of the history."""
    settings_text, _, calls = text.rpartition(": ")
    for word in settings_text.split():
        name, _, value = word.partition("=")
        settings[name] = value != "no" and float(value)
    texts = "; ".join(SHORT.get(part, part) for part in calls.split("; ")).split("; ")
    parts = [call_of(number, part) for number, part in enumerate(texts)]
    events = tuple(each for each in parts if isinstance(each, Event))
    return History(calls=tuple(each for each in parts if isinstance(each, Call)), events=events, **settings)


FULL = [f"{at}-{at}.5 put a v={at} -> CapacityExceededError" for at in range(20)]
#: Short for calls of a history.
SHORT = {
    "A": "0-1 put a v=1",
    "B": "2-3 put b v=2",
    "HELD": "0-1 put a v=1; 2-3 claim token=A -> a=1",
    "HELD_2": "0-1 put a v=1; 2-3 claim token=A lease=2 -> a=1",
    "HELD_4": "0-1 put a v=1; 2-3 claim token=A lease=4 -> a=1",
    "BRIEF": "0-1 put a v=1; 2-3 claim token=A lease=1 -> a=1; 5-6 claim token=B lease=1 -> a=1",
    "FULL_5": "; ".join(FULL[:5]),
    "FULL_20": "; ".join(FULL),
}

#: A rule, and what breaks it: a history that breaks it and no other, and the nearest ones that break none.
CASES = """
committed: a read finds nothing of a put that returned
  broken  A; 2-3 get a -> MissingDataError
  fine    A; 0.5-3 get a -> MissingDataError
  fine    A; 1.5-? clear a; 2-3 get a -> MissingDataError
  fine    0-? put a v=1; 2-3 get a -> MissingDataError
  fine    A; 2-3 get a,b -> MissingDataError
half: a read finds nothing of a put that another process went on with
  broken  0-? put a v=1; 2-3 put a v=1; 4-5 get a -> MissingDataError
  fine    0-? put a v=1; 4.5-6 put a v=1; 4-5 get a -> MissingDataError
committed: a listing leaves out a sample
  broken  A; 2-3 list
  fine    A; 2-3 list -> a=1
  fine    A; 0.5-3 list
  fine    A; 2.5-4 clear a; 2-3 list
lost: payload is lost
  broken  A; 2-3 get a -> LostSamplesError
  fine    A; 1-2 lose; 2-3 get a -> LostSamplesError
bits: a cell differs
  broken  A; 2-3 get a -> differs
  fine    A; 2-3 get a -> 1
written: a read shows what nobody wrote
  broken  A; 2-3 get a -> 7
  fine    A; 1-? put a v=7; 2-3 get a -> 7
written: a read shows what was refused
  broken  A; 1-2 put a v=7 -> CapacityExceededError; 3-4 get a -> 7
  fine    A; 1-2 put a v=7 timeout=1 -> ? OperationTimeoutError; 3-4 get a -> 7
written: a read shows what was written later
  broken  5-6 put a v=1; 1-2 get a -> 1
  fine    1.5-6 put a v=1; 1-2 get a -> 1
written: a listing shows a sample that nobody wrote
  broken  1-2 list -> a
  fine    0-? put a v=1; 1-2 list -> a=1
latest: a read shows what was replaced
  broken  A; 2-3 put a v=2; 4-5 get a -> 1
  fine    A; 2-3 put a v=2; 4-5 get a -> 2
  fine    A; 2-4.5 put a v=2; 4-5 get a -> 1
  fine    0-? put a v=1; 2-3 put a v=2; 4-5 get a -> 1
  fine    0-? put a v=1; 1-2 get a -> 1; 3-4 put a v=1; 5-6 get a -> 1
cleared: a read shows what was cleared
  broken  A; 2-3 clear a; 4-5 get a -> 1
  fine    A; 2-4.5 clear a; 4-5 get a -> 1
  fine    A; 2-? clear a; 4-5 get a -> 1
  fine    A; 2-3 clear b; 4-5 get a -> 1
cleared: a read shows what was there before a registration
  broken  A; 2-3 register; 4-5 get a -> 1
  fine    A; 2-3 keep; 4-5 get a -> 1
half: half of a put is seen
  broken  0-? put a v=1; 1-2 get a fields=x -> 1; 3-4 get a fields=y -> MissingDataError
  fine    0-? put a v=1; 1-2 get a fields=y -> MissingDataError; 3-4 get a fields=x -> 1
  fine    whole_puts=no: 0-? put a v=1; 1-2 get a fields=x -> 1; 3-4 get a fields=y -> MissingDataError
half: a claim brings no tags
  broken  A; 2-3 claim -> a
  fine    A; 2-3 claim -> a=1
mixed: a read mixes two versions
  broken  A; 2-9 put a v=2; 3-4 get a -> 1 2
  fine    A; 2-9 put a v=2 fields=y; 3-4 get a -> 1 2
  fine    atomic_overwrite=no: A; 2-9 put a v=2; 3-4 get a -> 1 2
groups: a claim gives a part of a group
  broken  A; 2-3 claim -> a=half
  fine    A; 2-3 claim -> a=1
latest: one field of an overwrite was seen
  broken  A; 2-? put a v=2; 3-4 get a fields=x -> 2; 5-6 get a fields=y -> 1
  fine    atomic_overwrite=no: A; 2-? put a v=2; 3-4 get a fields=x -> 2; 5-6 get a fields=y -> 1
given once: a sample is given twice without a lease
  broken  A; 2-3 claim -> a=1; 4-5 claim -> a=1
  fine    A; 2-3 claim -> a=1; 4-5 claim task=u -> a=1
  fine    A; 2-3 claim -> a=1; 3-4 clear a; 4-4.5 put a v=2; 5-6 claim -> a=2
  fine    A; 2-? claim; 4-5 claim -> a=1
given once: an acked sample is given again
  broken  HELD; 4-5 ack a token=A; 20-21 claim token=B -> a=1
  fine    HELD; 14-15 ack a token=A -> LeaseExpiredError; 20-21 claim token=B -> a=1
two holders: two holders both ack
  broken  BRIEF; 7-8 ack a token=A; 7-8 ack a token=B
  fine    BRIEF; 7-8 ack a token=A -> LeaseExpiredError; 7-8 ack a token=B
  fine    HELD; 4-5 ack a token=A; 6-7 ack a token=A
refused ack: a lease that was handed out again can be acked
  broken  BRIEF; 7-8 ack a token=A
  fine    BRIEF; 7-8 ack a token=B
  fine    BRIEF; 7-8 ack a token=A -> LeaseExpiredError
lease: a leased sample is given to another
  broken  HELD; 5-6 claim token=B -> a=1
  fine    HELD_4; 5-6.1 claim token=B -> a=1
  fine    HELD; 4-? nack a token=A; 5-6 claim token=B -> a=1
lease: a renewed lease ends early
  broken  HELD_4; 5-5.5 renew a token=A lease=4; 7-8 claim token=B -> a=1
  fine    HELD_4; 5-5.5 renew a token=A lease=4; 7-9.1 claim token=B -> a=1
  fine    HELD_4; 5-? renew a token=A lease=4; 7-8 claim token=B -> a=1
lease: an ack in time is refused
  broken  HELD; 4-5 ack a token=A -> LeaseExpiredError
  fine    HELD_2; 4-5 ack a token=A -> LeaseExpiredError
  fine    HELD; 3-4 clear; 4-5 ack a token=A -> LeaseExpiredError
  fine    HELD; 3-4 nack a token=A; 4-5 ack a token=A -> LeaseExpiredError
token: a token is used again
  broken  A; B; 4-5 claim token=A limit=1 -> a=1; 6-7 claim token=A limit=1 -> b=2
  fine    A; B; 4-5 claim token=A limit=1 -> a=1; 6-7 claim token=B limit=1 -> b=2
order: a reply is out of order
  broken  A; B; 4-5 claim -> b=2 a=1
  fine    A; B; 4-5 claim -> a=1 b=2
  fine    A; 0.5-3 put b v=2; 4-5 claim -> b=2 a=1
  fine    A; B; 3.1-3.2 clear a; 3.3-3.4 put a v=3; 4-5 claim -> b=2 a=3
order: a sample that was cleared and put again comes first
  broken  A; B; 3.1-3.2 clear a; 3.3-3.4 put a v=3; 4-5 claim -> a=3 b=2
  fine    A; B; 3.1-? clear a; 3.3-3.4 put a v=3; 4-5 claim -> a=3 b=2
order: a later sample is given first
  broken  A; B; 4-5 claim limit=1 -> b=2
  fine    A; B; 4-5 claim limit=1 -> a=1
  fine    A; B; 3.5-? claim; 4-5 claim limit=1 -> b=2
  fine    0-1 put a v=1 fields=y; B; 4-5 claim limit=1 -> b=2
ready: a ready sample is not given
  broken  A; 4-5 claim
  fine    A; 0.5-5 claim
  fine    HELD; 40-41 claim
  fine    A; 2-? claim limit=1; 4-5 claim
  fine    A; 2-3 clear a; 4-5 claim
  fine    0-1 put a v=1 fields=y; 4-5 claim
ready: a nacked sample is not given
  broken  HELD; 4-5 nack a token=A; 6-7 claim lease=1
  fine    HELD; 4-6.5 nack a token=A; 6-7 claim lease=1
waiting: a blocking claim waits in vain
  broken  A; B; 4-9 claim wait timeout=5 limit=2 -> ClaimTimeoutError
  fine    A; B; 4-9 claim wait timeout=5 limit=3 -> ClaimTimeoutError
  fine    A; B; 5-6 stop; 4-9 claim wait timeout=5 limit=2 -> ClaimTimeoutError
handed out again: a lease never ends
  broken  audited_s=39: HELD; 40-41 claim lease=10
  fine    audited_s=39: HELD; 4-? ack a token=A; 40-41 claim lease=10
at most one claim: more samples are lost than lost replies account for
  broken  audited_s=39: A; B; 3.5-? claim limit=1; 40-41 claim
  fine    audited_s=39: A; B; 3.5-? claim limit=2; 40-41 claim
consumed: a task is done too early
  broken  A; 2-3 consumed -> yes; 9-10 claim -> a=1
  fine    A; 1.5-1.8 claim -> a=1; 2-3 consumed -> yes
  fine    A; 1.5-? claim; 2-3 consumed -> yes
  fine    A; 2-3 consumed -> no; 9-10 claim -> a=1
consumed: a task is done before the ack
  broken  A; 1.5-1.8 claim token=A -> a=1; 2-3 consumed -> yes
  fine    A; 1.5-1.8 claim token=A -> a=1; 2.5-4 ack a token=A; 2-3 consumed -> yes
capacity: the store holds too much
  broken  capacity_bytes=100: 0-1 put a v=1 bytes=60; 2-3 put b v=2 bytes=60
  fine    capacity_bytes=100: 0-1 put a v=1 bytes=60; 2-9 clear a; 2-3 put b v=2 bytes=60
  fine    capacity_bytes=100: 0-1 put a v=1 bytes=60; 2-3 put a v=2 bytes=60
capacity: what was dropped while it was put does not count, not even as room
  broken  capacity_bytes=99: 0-3 put a v=1; 1-2 clear a; 0-1.5 put b v=2 bytes=60; 0-1.6 put c v=3 bytes=45; 2-3 clear b
  fine    capacity_bytes=100: 0-3 put a v=1 bytes=60; 1-2 clear a; 4-5 put b v=2 bytes=60
leaked: bytes are left when all is cleared
  broken  left_bytes=8: A; 2-3 clear
  fine    left_bytes=0: A; 2-3 clear
  fine    left_bytes=8: A; 1-2 lose; 2-3 clear
deadline: a call ends long after its deadline
  broken  end_s=60: 0-40 put a v=1 timeout=5
  fine    end_s=60: 0-14 put a v=1 timeout=5
  fine    end_s=60: 0-40 put a v=1 timeout=5; 3-35 stop
deadline: a call never ends
  broken  end_s=60: 0-? put a v=1 timeout=5
  fine    end_s=60: 0-? put a v=1 timeout=5; 3-4 kill
error: a call fails for no reason
  broken  0-1 put a v=1 -> ? BackendUnavailableError
  fine    0-1 put a v=1 -> ? BackendUnavailableError; 0.5-2 disturb
error: a put times out at once
  broken  0-1 put a v=1 -> ? OperationTimeoutError
  fine    0-60 put a v=1 -> ? OperationTimeoutError
  fine    0-1 put a v=1 -> ? OperationTimeoutError; 0.5-2 disturb
error: a claim times out at once
  broken  4-5 claim wait timeout=5 limit=1 -> ClaimTimeoutError
  fine    4-9 claim wait timeout=5 limit=1 -> ClaimTimeoutError
error: an error is not of the data plane
  broken  0-1 put a v=1 -> ? !ZeroDivisionError
puts: no put succeeds
  broken  FULL_20
  fine    FULL_5
  fine    FULL_20; 30-31 put a v=30
registered: a partition is not known
  broken  0-1 register; 2-3 put a v=1 -> UnknownPartitionError
  fine    0-1 register; 2-3 clear; 2-3 put a v=1 -> UnknownPartitionError
save: a save leaves out a sample
  broken  A; 2-3 saved
  fine    A; 2-3 saved -> a=1
save: a save cannot be loaded
  broken  A; 2-3 saved -> ? CorruptDataError
"""


def cases():
    """Name -> the rule, and the lines of its histories."""
    found, name = {}, ""
    for line in CASES.strip().splitlines():
        kind, _, text = line.strip().partition("  ")
        if text:
            found[name][1].append((kind, text.strip()))
        else:
            rule, _, name = line.partition(": ")
            found[name] = rule, []
    return found


def rules(text, **settings):
    return {found.rule for found in check(history(text, **settings))}


@pytest.mark.parametrize(("rule", "lines"), cases().values(), ids=cases())
def test_a_history_breaks_its_rule_and_its_neighbours_break_none(rule, lines):
    assert [(text, rules(text)) for _, text in lines] == [
        (text, {rule} if kind == "broken" else set()) for kind, text in lines
    ]


def test_each_rule_is_broken_by_a_history():
    assert {rule for rule, _ in cases().values()} == set(RULES)


#: What a store may not promise -> a rule, and a history that breaks it only if that is taken for granted.
GRANTED = {
    "half": ("ready", "0-? put a v=1; 1-2 get a fields=x -> 1; 3-4 claim fields=x,y"),
    "mixed": ("latest", "A; 2-? put a v=2; 3-4 get a fields=x -> 2; 5-6 get a fields=y -> 1"),
    "fenced": ("written", "0-2 put a v=1; 1-1.5 clear a; 3-4 get a -> 9"),
    "durable": ("committed", "A; 2-3 disturb; 4-5 get a -> MissingDataError"),
}


@pytest.mark.parametrize("guarantee", GRANTED)
def test_nothing_is_taken_for_granted_that_a_store_does_not_promise(guarantee):
    rule, text = GRANTED[guarantee]
    promises = dict.fromkeys(("half", guarantee, rule), "here")
    assert rule in {found.rule for found, _ in judged(history(text), promises)[0]}
    del promises[guarantee]
    broken, seen = judged(history(text), promises)
    assert not broken
    assert rule in {found.rule for found, _ in seen}


def test_a_store_without_promises_breaks_none_but_its_puts_must_succeed():
    assert judged(history(GRANTED["fenced"][1]), {})[0] == []
    assert {found.rule for found, _ in judged(history("FULL_20"), {})[0]} == {"puts"}


# --- shrinking and the page -------------------------------------------------------------------------------------------


@pytest.fixture
def long():
    """Many calls that do not matter, a double claim among them, and its finding."""
    parts = [f"{t}-{t}.5 put s{t},t{t} v={t}; {t}.6-{t}.9 claim -> s{t}={t} t{t}={t}" for t in range(10, 50)]
    made = history("; ".join([*parts, "60-61 claim -> s17=17", "60.5-60.6 kill"]))
    (found,) = check(made)
    return made, found


def test_a_history_is_shortened_to_the_calls_and_samples_that_prove_the_finding(long):
    made, found = long
    short = shrunk(made, found)
    assert [call.operation for call in short.calls] == ["claim", "claim"]
    assert {sample for call in short.calls for sample in call.samples} == {"s17"}
    assert found.key in {each.key for each in check(short)}


def test_the_page_tells_the_calls_that_prove_the_fault_in_order(long):
    made, found = long
    text = page("toy", "dataplane conformance toy --chaos --seed 7", [(found, shrunk(made, found))], "Seed 7.")
    assert RULES["given once"] in text
    assert "dataplane conformance toy --chaos --seed 7" in text
    first, second = (call.name for call in found.calls)
    assert text.index(f"17.600   17.900 * {first}") < text.index(f"60.000   61.000 * {second}") < text.index("kill -9")


# --- what the processes write down ------------------------------------------------------------------------------------


def test_a_kill_loses_the_end_of_the_call_under_way_at_most(tmp_path):
    path = tmp_path / "w0.0"
    recorder = Recorder(path, 0.0)
    assert recorder.call(lambda: None, operation="clear", partition="p", samples=["a"])
    shows = lambda reply: {"samples": ["a"], "seen": {"a": {"#v": reply}}}  # noqa: E731
    assert recorder.call(lambda: 3, shows, operation="list", partition="p") == 3
    recorder.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        calls = read_calls(path, "w0.0")
        assert [each.outcome for each in calls].count("unknown") <= 1
    assert [(each.operation, each.outcome, each.samples) for each in calls] == [
        ("clear", "ok", ("a",)),
        ("list", "ok", ("a",)),
    ]
    assert calls[1].seen == {"a": {"#v": 3}}
    assert json.loads(json.dumps(asdict(calls[1])))["seen"] == calls[1].seen


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


# --- groups of rollouts -----------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def test_a_group_of_a_killed_process_ends_with_its_whole_rollouts_or_begins_anew(tmp_path):
    """It is killed after each number of the puts and seals of a group: of two rollouts, of two rows and of three."""
    group, given = "w0.0-7", []
    with connect({"backend": "noop", "share_above": SHARE_ABOVE, "middleware": [Faults()]}) as client:
        for num_calls in range(8):
            left, settings = [None] * num_calls, Settings(seed=0, schedule_s=0.0)
            plan = Plan(settings=settings, folder=tmp_path, epoch_s=time.monotonic(), base=(*BASE, MEDIA))
            names = [f"{name}{num_calls}" for name in ("dies", "heir", "audit")]
            dies, heir, audit = (Hands(client, plan, name, 100) for name in names)
            dies.register(ROLLOUTS, "register")

            def may_die(request, left=left):
                if not left:
                    raise Killed
                left.pop()

            with Faults.of(client).before("put_samples", may_die), contextlib.suppress(Killed):
                dies.roll(group)
            heir.end_group(group)
            begin_s = time.monotonic() - plan.epoch_s
            meta = audit.claim(ROLLOUTS, "once", 9)
            audit.read(ROLLOUTS, meta.sample_ids, plan.base)
            given.append([name.removeprefix(f"{group}_") for name in meta.sample_ids])
            calls = [call for name in names for call in read_calls(plan.file_of(name), name)]
            assert check(History(calls=tuple(calls), audited_s=begin_s - 1e-6)) == []
    whole = ["g0/0", "g0/1", "g1/0", "g1/1", "g1/2"]
    assert given == [[], whole, whole, *[whole[:2]] * 4, whole]
