"""Why a claim waits: where a client is told, and the table from facts to a verdict."""

import asyncio
import contextlib
import logging
import math
import os
import pickle
import re
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from dataplane_core import connect, connect_async
from dataplane_core.client import async_client, claims, explaining
from dataplane_core.client.announcing import WorkLog
from dataplane_core.client.connection import Waiters
from dataplane_core.client.verdict import Facts, judge
from dataplane_core.errors import ClaimTimeoutError, LeaseHolder, Shortfall
from dataplane_core.middleware import Metrics
from dataplane_core.spec import (
    CallInfo,
    Claim,
    ClaimRequest,
    ClientInfo,
    FieldSpec,
    PartitionDescription,
    PartitionInfo,
    PhaseInfo,
    TaskDescription,
    WorkInfo,
)
from dataplane_core.spec.replies import Answer
from dataplane_core.spec.waking import Bell
from dataplane_testkit._timing import STARTS_S, Background, eventually

pytestmark = pytest.mark.anyio

CLAIM = ("p", "train", ["x", "y"], 2)


def config(*middleware, **more):
    return {"backend": "noop", "warn_after_s": 0.1, "middleware": list(middleware), "role": "driver", **more}


def filled(client):
    client.register_partition("p", ["x", "y"], None, ["train", "score"])
    client.put_samples(["a", "b"], "p", {"x": [1.0, 2.0]})
    return client


@pytest.fixture
def thorough(monkeypatch):
    """A look for the cause may take as long as a busy machine needs."""
    for module in (explaining, async_client):
        monkeypatch.setattr(module, "ADVICE_S", STARTS_S)


@pytest.mark.usefixtures("thorough")
def test_a_claim_that_waits_tells_why_and_again_later(caplog, opened):
    caplog.set_level(logging.INFO)
    events = []

    def told():
        return [each.verdict for each in events if each.verdict is not None]

    with opened(config(Metrics(on_event=events.append), warn_after_s=0.5)) as client:
        filled(client)
        waiting = Background(lambda: client.claim_meta(*CLAIM, timeout_s=600.0))
        eventually(lambda: [each.state for each in told()][2:][-1:] == ["starved"], STARTS_S, "a claim that is starved")
        # which it is after five times as long
        client.put_samples(["a", "b"], "p", {"y": [1.0, 2.0]})
        assert waiting.result().size == 2
    first, second, *_, last = told()
    expected = ("waits", logging.INFO) if first.waited_s < 5 * 0.5 else ("starved", logging.WARNING)  # told very late
    assert (last.state, last.task_name, last.backlog, last.num_ready) == ("starved", "train", 2, 0)
    assert "2 samples lack 'y', the first one is 'a'" in last.text
    assert first.waited_s >= 0.5
    assert second.waited_s >= 2 * 0.5  # each is told some time after it is due
    said = [(each.levelno, each.getMessage()) for each in caplog.records if "p / train" in each.getMessage()]
    assert (first.state, said[0][0]) == expected
    assert said[-1][0] == logging.WARNING
    assert re.match(r"p / train: starved for \d+ s\. It has 0 of 2 samples\. 2 samples lack 'y'", said[-1][1])
    assert {each.op for each in events if each.verdict is not None} == {"why"}


@pytest.mark.usefixtures("thorough")
def test_an_error_has_the_verdict_if_the_claim_had_waited(monkeypatch, opened):
    with opened(config()) as client:
        filled(client)
        with pytest.raises(ClaimTimeoutError, match=r"2 samples lack 'y', the first one is 'a'\. No client") as caught:
            client.claim_meta(*CLAIM, timeout_s=1.1)
        assert (caught.value.verdict.cause, caught.value.verdict.waited_s >= 1.0) == ("unwritten", True)
        assert pickle.loads(pickle.dumps(caught.value)).verdict == caught.value.verdict
        monkeypatch.setattr(explaining, "_EXPLAINED_AFTER_S", 600.0)
        with pytest.raises(ClaimTimeoutError) as caught:
            client.claim_meta(*CLAIM, timeout_s=0.1)
        assert caught.value.verdict is None
        moves = eventually(lambda: [each for each in client.why("p", "train") if each.state == "moves"], STARTS_S)
        assert (moves[0].backlog, moves[0].num_ready) == (2, 0), "nothing waits any longer"


def test_a_client_that_is_late_is_looked_for_among_the_processes_of_its_host():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    late = {"host": socket.gethostname(), "role": "", "open_s": 0.0, "state": "silent", "heard_s": 1e6, "period_s": 1.0}
    own, ended, none = (
        explaining._state_of(ClientInfo(client_id="c", pid=pid, **late)) for pid in (os.getpid(), child, 1 << 30)
    )
    os.waitpid(child, 0)
    assert (own, ended, none) == ("silent", "gone", "gone")


def test_a_claim_that_ends_says_what_holds_the_other_samples_back():
    with connect(config()) as client:
        client.register_partition("p", ["x", "y"], None, ["t"], grpo_group_size=2)
        whole = [f"{name}_g{member}" for name in ("leased", "old", "bare") for member in range(2)]
        tags = [{"v": int(sample_id < "old")} for sample_id in [*whole, "half_g0"]]
        client.put_samples([*whole, "half_g0"], "p", {"x": [1.0] * 7}, tags=tags)
        client.put_samples([*whole[:4], "half_g0"], "p", {"y": [1.0] * 5})
        asked = {"tag_filter": {"v": 1}, "lease_s": 600.0, "timeout_s": 0.1}
        assert client.claim_meta("p", "t", ["x", "y"], 2, **asked).sample_ids == whole[:2]
        with pytest.raises(ClaimTimeoutError) as caught:
            client.claim_meta("p", "t", ["x", "y"], 2, **asked)
    for said in ("2 are leased", "2 are passed over by the tag filter", "1 is in groups", "2 are held back by fields"):
        assert said in str(caught.value)


@pytest.mark.usefixtures("thorough")
def test_a_listener_that_raises_does_not_change_what_the_claim_raises(caplog, opened):
    def fails(event):
        if event.verdict is not None:
            raise ValueError("the listener is broken")

    with opened(config(Metrics(on_event=fails))) as client:
        filled(client)
        for timeout_s in (2.0, 8.0, 32.0):
            with pytest.raises(ClaimTimeoutError):
                client.claim_meta(*CLAIM, timeout_s=timeout_s)
            if caplog.text:  # else this machine stood still until the claim timed out
                break
    assert "the listener is broken" in caplog.text


@pytest.mark.usefixtures("thorough")
def test_a_fault_of_the_look_for_the_cause_does_not_change_the_error_of_a_claim(caplog, monkeypatch):
    def fails(*args):
        raise ValueError("no verdict")

    monkeypatch.setattr("dataplane_core.client.explaining.judge", fails)
    with connect(config(warn_after_s=None)) as client, pytest.raises(ClaimTimeoutError) as caught:
        filled(client).claim_meta(*CLAIM, timeout_s=1.1)
    assert caught.value.verdict is None
    assert "no verdict" in caplog.text


@pytest.mark.usefixtures("thorough")
def test_an_interrupt_while_a_claim_is_explained_is_not_held_back(faults):
    with connect(config(faults)) as client, faults.error_after("inspect_partition", KeyboardInterrupt()):
        filled(client)
        with pytest.raises(KeyboardInterrupt):
            client.claim_meta(*CLAIM, timeout_s=1.1)


def test_a_look_for_the_cause_asks_nothing_beyond_its_deadline_and_counts_rows_only_if_they_are_needed(faults):
    deadlines, counted = [], []
    with connect(config(faults, op_timeout_s=1e6)) as client, contextlib.ExitStack() as noting:
        filled(client)
        for operation in ("list_partitions", "list_clients", "inspect_partition"):
            noting.enter_context(faults.before(operation, lambda request: deadlines.append(request.deadline)))
        deadline = time.monotonic() + 1000.0
        assert explaining.judged(client._connection, None, None, deadline)
        assert len(deadlines) >= 3
        assert all(each <= deadline for each in deadlines)
        noting.enter_context(faults.before("inspect_partition", lambda request: counted.append(request.count_rows)))
        assert client.describe("p").num_rows == {"x": 2}
        assert client.describe("p", count_rows=False).num_samples == 2
        client.why("p")
    assert counted == [True, False, False]


async def test_a_claim_of_the_asyncio_client_is_not_held_up_by_the_look_for_its_cause():
    free, did = threading.Event(), []
    client = await connect_async({**config(), "op_timeout_s": 1e6}, threads=1)
    busy = asyncio.ensure_future(client._run("busy", free.wait))
    await asyncio.sleep(0)
    try:  # all threads are busy
        await asyncio.wait_for(client._advise(lambda: did.append("busy")), STARTS_S)
    finally:
        free.set()
        await busy
    await client.close()
    await client._advise(lambda: did.append("closed"))
    assert did == []


def test_a_claim_that_waits_costs_a_store_with_many_clients_nothing(caplog, faults):
    caplog.set_level(logging.INFO)
    counted = []
    note = faults.before("inspect_partition", lambda request: counted.append(request.count_rows))
    with connect(config(faults)) as client, note:
        filled(client)
        request = ClaimRequest("p", "train", ["x", "y"], 2, all_or_nothing=True, lease_s=None, tag_filter=None)
        client._connection.work.begin_claim(request)
        client._connection.announcer.end()
        client._connection.announcer.num_clients = 1000
        explaining.warn(client._connection, request, 20.0, math.inf)
        assert not counted
        explaining.warn(client._connection, request, 101.0, math.inf)
    assert counted == [True]  # a claim that waits has all samples looked at
    assert "p / train: " in caplog.text


def test_claims_that_began_together_do_not_tell_at_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    config = SimpleNamespace(warn_after_s=100.0)
    connection = SimpleNamespace(config=config, capabilities=set(), work=WorkLog())
    unanswered = Claim()
    waits = []
    for _ in range(200):
        request = ClaimRequest("p", "train", ["x"], 2, all_or_nothing=True, lease_s=None, tag_filter=None)
        waits.append(claims.claiming(connection, request, 900.0, Waiters(), Bell))
        next(waits[-1])
        waits[-1].send(unanswered)
    told = []
    for now[0] in (99.0, 105.0, 110.0, 115.0, 120.0, 125.0, 199.0, 312.5):
        told.append(0)
        for steps in waits:
            if callable(steps.send(None)):  # after its pause
                told[-1] += 1
                steps.send(None)
            steps.send(unanswered)
    assert (told[0], sum(told[1:6]), told[6:]) == (0, 200, [0, 200])
    assert max(told[1:6]) < 100


def test_each_poll_of_a_claim_is_a_request_of_its_own_which_middleware_may_change(faults):
    asked = []

    def change(request):
        asked.append(tuple(request.required_fields))
        request.required_fields.append("z")
        request.wake = None  # so that it asks again by itself

    with connect({"backend": "noop", "middleware": [faults]}) as client, faults.before("claim", change):
        client.register_partition("p", ["x", "z"], None, ["train"])
        waiting = Background(lambda: client.claim_meta("p", "train", ["x"], 1, timeout_s=600.0))
        eventually(lambda: len(asked) >= 3, what="the third request of a claim that waits")
        client.put_samples(["a"], "p", {"x": [1], "z": [1]})
        assert waiting.result(STARTS_S).sample_ids == ["a"]
    assert set(asked) == {("x",)}


# --- from facts to a verdict ------------------------------------------------------------------------------------------


def client(role, *work, state="open", heard_s=0.5, pid=6, calls=()):
    told = ClientInfo(client_id=role, host="h", pid=pid, role=role, open_s=900.0, heard_s=heard_s, calls=calls)
    return replace(told, work=work, state=state, num_calls=len(calls))


def puts(*fields, ended_s=1.0, partition="p"):
    """A put that ended. None: it is the first one, and under way."""
    began_s = 1.0 if ended_s is None else ended_s + 1.0
    ends = {"began_s": began_s, "ended_s": ended_s, "served_s": ended_s}
    return WorkInfo(operation="put_samples", partition_id=partition, fields=fields, **ends)


def asks(task="train", fields=("x",), waits_s=30.0, ended_s=None, **more):
    """A claim that waits, and has ended in vain if it has ended."""
    work = WorkInfo(operation="claim_meta", partition_id="p", task_name=task, fields=fields, batch_size=4)
    return replace(work, began_s=waits_s, ended_s=ended_s, **more)


def served(task="train", ended_s=0.5):
    """A claim that was given samples."""
    return asks(task, waits_s=ended_s + 1.0, ended_s=ended_s, served_s=ended_s)


def call(operation, running_s):
    return CallInfo(operation=operation, partition_id="p", running_s=running_s)


def generates(client, *groups, running_s=13.5, partition="p"):
    phase = PhaseInfo(name="generate", running_s=running_s, partition_id=partition, groups=groups)
    return replace(client, phases=[phase])


def partition(held=4, cleared=0, num_samples=None, fields=("x", "y"), group=None, oldest_s=500.0, tasks=("train",)):
    told = {"fields": fields, "num_samples": num_samples, "consumer_tasks": tasks, "grpo_group_size": group}
    info = PartitionInfo(epoch="e", enums={}, **told)
    return PartitionDescription(
        info=info,
        specs={"x": FieldSpec("tensor", "int64", 1, ())},
        num_samples=held,
        num_cleared=cleared,
        held_bytes=80,
        oldest_s=oldest_s,
        tasks={name: TaskDescription(num_ready=0, num_leased=0, num_consumed=0) for name in tasks},
        num_rows={"x": held},
    )


def verdict(found, *clients, task="train", ready=0, short=None, others=None, full=None, **facts):
    found = replace(found, full=full)
    answers = {("p", name): Answer(num_ready=0, shortfall=each) for name, each in (others or {}).items()}
    answers["p", task] = Answer(num_ready=ready, shortfall=short or Shortfall())
    return judge(Facts(partitions={"p": found}, clients=clients, answers=answers, **facts), [("p", task)])[0]


TRAINER = client("trainer", asks())
ROLLOUT = client("rollout", puts("x"), pid=7)
ENDED = replace(ROLLOUT, state="closed", heard_s=90.0)
LACKING = {"short": Shortfall(num_lacking=4, missing_cells={"a": ("y",)})}
LEASED = {"short": Shortfall(num_leased=4, leased=(LeaseHolder(sample_id="a", holder="process 8 on h", left_s=9.0),))}
SOME_LACK = replace(LACKING["short"], num_lacking=2)
SOME_LEASED = replace(LEASED["short"], num_leased=2)
PASSED = {"short": Shortfall(num_not_matching=4, not_matching=("d",), newest_tags={"v": 6})}
THREE = ("q17_g0", "q17_g1", "q17_g2")
GROUPS = {"short": Shortfall(num_incomplete=3, incomplete_groups={"q17": 3}, members=THREE)}
UNSEALED = {"short": replace(GROUPS["short"], unsealed={"q17_g3": 0})}
LACKS_ROWS = {"short": replace(GROUPS["short"], unsealed={"q17_g3": 2})}
FULL = {"full": (90, 100)}


def writer(**more):
    """Who writes the field ``y``."""
    return client("reward", puts("y"), pid=9, **more)


LATE = client("trainer", asks(waits_s=400.0))
BOTH = client("both", asks(waits_s=400.0), puts("x"))
FILTERS = client("trainer", asks(tag_filter={"v": (">=", 7)}))
WORKS = client("trainer", served(ended_s=20.0), heard_s=0.0)
BLOCKED = client("rollout", puts("x"), calls=[call("put_samples", 9.0)])
FOUR = partition(group=4)
ENDED_SHORT = partition(group=4, num_samples=4)
OF_ROLLOUTS = replace(FOUR, info=replace(FOUR.info, rollouts=True))
SEALED = replace(OF_ROLLOUTS, info=replace(OF_ROLLOUTS.info, grpo_group_size=None))
GIVEN = TaskDescription(num_ready=0, num_leased=0, num_consumed=0, is_consumed=True)
ALL_BUT_FOUR = replace(ENDED_SHORT, tasks={"train": GIVEN})
TWO = partition(tasks=("train", "score"))
OF_TASK = partition(tasks=("train", "trian", "train-1"))
CONSUMED = replace(partition(), tasks={"train": TaskDescription(num_ready=0, num_leased=0, num_consumed=4)})
SCORER = client("reward", puts("y"), asks("score"), pid=9)
DEAD_SCORER = client("reward", asks("score"), pid=9, state="silent")
SCORES = {"others": {"score": Shortfall()}}
#: The trainer waits for 'y', whose writer waits for 'y' itself.
MUTUAL = {"others": {"score": LACKING["short"]}}
#: It puts what it makes of prompts that it claims.
SLOW = client("rollout", puts("x", ended_s=400.0), served("prompts", ended_s=400.0), pid=7)
OF_PROMPTS = partition(tasks=("train", "prompts"))
LOADING = client("new", pid=8)
DRIVER = client("driver", replace(puts(ended_s=400.0), operation="register_partition"), pid=8)
COMPLETE = partition(tasks=("train", "score"), num_samples=4)
EMPTY = partition(held=0)
EMPTY = replace(EMPTY, info=replace(EMPTY.info, registered_by="driver", registered_at=10.0))
HELD_BY_ITSELF = Shortfall(num_leased=4, leased=(LeaseHolder(sample_id="a", holder="process 6 on h", left_s=9.0),))
NAMES = replace(partition(fields=("ref_log_probs",)), specs={"log_probs": FieldSpec("tensor", "int64", 1, ())})
ALMOST = {"short": Shortfall(num_lacking=4, missing_cells={"a": ("ref_log_prob",)})}
GONE = replace(ROLLOUT, state="gone")
MAKER = generates(client("collector", puts("x"), pid=9), "q16", "q17")
GONE_MAKER = replace(MAKER, state="gone", heard_s=20.0)
LOADING_MAKER = generates(client("collector", pid=9), "q17")
AGAIN = replace(MAKER, client_id="3", pid=10)
ELSEWHERE = generates(MAKER, "q17", partition="step-1")
HOLDER = client("old", pid=8, state="closed")
OLD = replace(HOLDER, state="silent")
EXPORT = client("dataplane", asks("export"), asks("export:copy"), state="gone", heard_s=90.0)
EXPORTS = partition(tasks=("export", "export:copy"))
ROLLS, ITSELF = "process 7 on h (rollout)", "of its task 'score' itself."
NO_ROOM = "The store is full (90 of 100 bytes). process 6"


def row(cause, *clients, said="", culprit="", over=None, found=None, **facts):
    """What is told, and what it is told from. None: it is not compared whether all that is waited for has ended."""
    return {"cause": cause, "text": said, "culprit": culprit}, over, found or partition(), clients, facts


def just(each):
    return replace(each, heard_s=0.2)


#: What is at fault.
STARVED = [
    row("silent", TRAINER, writer(state="silent", heard_s=20.0), said="(reward) was last heard of 20 s ago", **LACKING),
    row("gone", TRAINER, writer(state="gone"), said="process 9 on h (reward) is gone", **LACKING),
    row("stopped", TRAINER, writer(state="stopped"), said="(reward) is stopped", **LACKING),
    row("closed", TRAINER, writer(state="closed", heard_s=90.0), said="Nobody writes 'y' now: process 9", **LACKING),
    row("stuck", TRAINER, writer(calls=[call("get_samples", 89.5)]), said="in get_samples for 90 s", **LACKING),
    # it wrote the field in the partition of the step before
    row("silent", TRAINER, client("reward", puts("y", partition="step-1"), state="silent"), said="(reward)", **LACKING),
    row("gone", TRAINER, writer(state="gone"), ROLLOUT, over=True, **LACKING),
    row("leased", TRAINER, OLD, said="'a' to process 8 on h (old)", over=False, **LEASED),  # the lease ends
    row("filter", FILTERS, ENDED, said="(v >= 7). The newest of them, 'd', has v 6.", over=True, **PASSED),
    row("group", TRAINER, ENDED, said="'q17' has 3 of 4. 'q17_g3' was never put. Nobody", found=FOUR, **GROUPS),
    row("group", TRAINER, ENDED, said="was never put, or cleared.", found=replace(FOUR, num_cleared=1), **GROUPS),
    row("short", TRAINER, ENDED, said="510 of 512 samples came", over=True, found=partition(num_samples=512, held=510)),
    row("short", TRAINER, ENDED, said="It did not call finish_partition.", over=True),
    row("short", TRAINER, ENDED, over=True, found=FOUR, short=Shortfall(num_incomplete=3, incomplete_groups={"q1": 4})),
    row("short", TRAINER, ENDED, client("old", pid=8), over=False, short=SOME_LEASED),
    row("full", TRAINER, BLOCKED, said="All tasks have consumed", found=CONSUMED, patience_s=5.0, **FULL),
    # the cause is that of the stage before
    row("short", TRAINER, SCORER, ENDED, culprit=ROLLS, said=ITSELF, over=True, found=TWO, **LACKING, **SCORES),
    row("silent", TRAINER, DEAD_SCORER, said="The task 'score' is starved", found=TWO, **LACKING),
    row("full", TRAINER, DEAD_SCORER, BLOCKED, culprit="process 9 on h (reward)", said=NO_ROOM, found=TWO, **FULL),
    # what might be slow is a fault after a while
    row("filter", LATE, ROLLOUT, over=False, **PASSED),
    row("group", LATE, ROLLOUT, over=False, found=FOUR, **GROUPS),
    row("unwritten", LATE, ROLLOUT, over=True, **LACKING),  # nobody has ever written 'y'
    row("unwritten", LATE, over=True, found=EMPTY),
    row("full", LATE, BLOCKED, over=False, found=CONSUMED, **FULL),
    row("stuck", client("trainer", served(), calls=[call("get_samples", 90.0)])),
    row("stuck", TRAINER, client("rollout", puts("x"), calls=[call("put_samples", 90.0)]), said="in put_samples for"),
    row("gone", EXPORT, said="nobody claims them", found=EXPORTS, task="export"),
    # tasks for which nobody claims
    row("name", TRAINER, found=OF_TASK, task="trian"),
    row("name", TRAINER, found=OF_TASK, task="train-1"),
    row("silent", replace(TRAINER, state="silent"), said="4 samples of it are left", found=OF_TASK),
    row("unclaimed", TRAINER, ROLLOUT, said="Nobody has claimed for it, and all", found=COMPLETE, task="score"),
    row("unclaimed", TRAINER, DRIVER, said="The task 'score' is starved", found=COMPLETE, **LACKING),
    # who registered is no one who writes
    row("unwritten", LATE, DRIVER, said="0 samples came since driver registered it 90 s ago.", found=EMPTY, now=100.0),
    # who ended
    row("short", replace(TRAINER, role="rollout"), ENDED),  # the trainer itself is not another one that puts
    row("closed", client("trainer", served(), state="closed", heard_s=90.0)),
    # all wait for the same
    row("unwritten", LATE, replace(LOADING, state="silent"), found=partition(held=31)),
    row("unwritten", LATE, replace(LATE, client_id="rank 1"), found=partition(held=31), **LACKING),
    row("name", LATE, ROLLOUT, said="Nobody writes it, but 'log_probs' is written", found=NAMES, **ALMOST),
    # claimed again and again: it has waited since the first of the claims that got nothing
    row("gone", client("trainer", asks(waits_s=200.0)), writer(state="gone"), **LACKING),
    row("gone", client("trainer", asks(waits_s=200.0, ended_s=1.0)), writer(state="gone"), **LACKING),
    row("filter", client("trainer", asks(waits_s=400.0, ended_s=1.0)), ROLLOUT, **PASSED),
    row("gone", TRAINER, generates(writer(state="gone", heard_s=20.0)), said="20 s ago, in generate.", **LACKING),
    # who makes a group that is short
    row("group", LATE, ROLLOUT, MAKER, said="It is made by process 9 on h", culprit="process 9", found=FOUR, **GROUPS),
    row("group", LATE, ROLLOUT, GONE_MAKER, said="Its maker ended: process 9 on h (coll", found=FOUR, **GROUPS),
    row("group", TRAINER, GONE_MAKER, said="'q17_g3' was never sealed. It was made", found=OF_ROLLOUTS, **UNSEALED),
    row("group", LATE, ROLLOUT, MAKER, said="'q17' has 3 rollouts. 'q17_g3' lacks 2 of", found=SEALED, **LACKS_ROWS),
    row("group", LATE, ROLLOUT, MAKER, said="'q17' was never sealed. It is made by", found=SEALED, **GROUPS),
    row("group", LATE, ROLLOUT, GONE_MAKER, said="process 7 on h (rollout) puts new samples.", found=FOUR, **GROUPS),
    row("group", TRAINER, GONE_MAKER, said="It was made by process 9 on h (collector). Nobody", found=FOUR, **GROUPS),
    row("group", LATE, GONE_MAKER, AGAIN, culprit="process 10 on h (collector)", found=FOUR, **GROUPS),
    row("group", LATE, ROLLOUT, generates(MAKER, "q18"), culprit="process 7 on h (rollout)", found=FOUR, **GROUPS),
    row("group", LATE, ROLLOUT, ELSEWHERE, culprit="process 7 on h (rollout)", found=FOUR, **GROUPS),
    row("group", TRAINER, GONE, over=True, found=FOUR, **GROUPS),
    # who holds samples and waits for more does not wait for these
    row("short", TRAINER, ENDED, short=HELD_BY_ITSELF),
]
WAITS = [
    row("works", TRAINER, writer(), said="It is alive, and last did so 2 s ago.", **LACKING),
    row("works", TRAINER, client("r", puts("y", ended_s=None)), said="has not done so yet", **LACKING),
    row("works", LATE, client("r", puts("y", ended_s=539.5)), said="540 s ago", **LACKING),
    row("works", TRAINER, writer(), client("r2", puts("y"), state="silent"), said="is alive", **LACKING),
    row("works", TRAINER, writer(state="closed"), client("r2", puts("y")), said="is alive", **LACKING),
    row("", TRAINER, LOADING, said="process 8 on h (new) is alive", **LEASED),
    row("", TRAINER, said="process 8 on h for another 9 s", **LEASED),
    row("unwritten", TRAINER, said="No client that is known writes 'y'.", **LACKING),
    row("", TRAINER, ROLLOUT, said="4 samples do not pass its filter", **PASSED),
    row("", TRAINER, ROLLOUT, said="'q17_g3' was never put. process 7", found=FOUR, **GROUPS),
    # the last claim gets fewer than it asks for
    row(
        "", TRAINER, ENDED, writer(), said="2 samples lack 'y'", found=partition(held=2, num_samples=2), short=SOME_LACK
    ),
    row("", TRAINER, ROLLOUT, said="3 of 4, and no more samples come.", found=ENDED_SHORT, **GROUPS),
    row("", TRAINER, ROLLOUT, said="4 samples came. process 7 on h (rollout) puts new samples."),
    row("", TRAINER, said="No client that is known puts new samples."),
    # two tasks that wait for each other
    row("", TRAINER, SCORER, said="for samples of its task 'score' itself.", found=TWO, **LACKING, **MUTUAL),
    # another thread of it was given samples, or another client
    *(
        row("", client("trainer", asks(waits_s=400.0, served_s=5.0)), ROLLOUT, found=FOUR, **facts)
        for facts in (PASSED, GROUPS, LACKING)
    ),
    *(
        row("", LATE, replace(client("trainer", served()), client_id="1"), ROLLOUT, found=FOUR, **facts)
        for facts in (PASSED, GROUPS, LACKING)
    ),
    *(row("", LATE, ROLLOUT, found=FOUR, patience_s=90.0, **facts) for facts in (PASSED, GROUPS, LACKING)),
    # a full store may be cleared when a step ends, and by who works on what it was given
    row("full", client("trainer", asks(waits_s=90.0)), BLOCKED, found=CONSUMED, **FULL),
    row("full", LATE, BLOCKED, client("o", served("eval", ended_s=80.0)), found=CONSUMED, **FULL),
    # who closed a moment ago may be followed by another
    *(
        row("", TRAINER, just(ENDED), just(HOLDER), just(writer(state="closed")), over=False, **facts)
        for facts in ({}, LACKING, PASSED, LEASED)
    ),
    row("", TRAINER, ENDED, client("rollout", pid=70)),
    # a start may take any time: who has put nothing yet may still do so, and so may who is not listed
    *(row("", LATE, LOADING, over=False, found=EMPTY, **facts) for facts in ({}, LACKING)),
    *(row("", LATE, LOADING, ROLLOUT, found=partition(held=31), **facts) for facts in ({}, LACKING)),
    *(row("", replace(LATE, client_id=""), found=partition(held=31), **facts) for facts in ({}, LACKING)),
    *(row("unwritten", *who, found=NAMES, **ALMOST) for who in ((TRAINER, ROLLOUT), (LATE, ROLLOUT, client("ref")))),
    # its put began when it announced itself, so it need not wait for room
    row("works", TRAINER, client("rollout", puts("x"), calls=[call("put_samples", 0.1)], heard_s=9.0), **FULL),
    # in a phase
    row("works", TRAINER, generates(writer()), said="It is alive in generate for 14 s", **LACKING),
    row("works", TRAINER, generates(client("r", puts("y", ended_s=None))), said="is in generate for", **LACKING),
    row("unwritten", LATE, generates(DRIVER), found=EMPTY),  # what it generates, it may put
    # who puts samples itself
    row("works", BOTH, over=True),
    row("works", client("both", asks(), puts("x")), over=False),
    row("works", generates(BOTH), over=False),
    row("works", BOTH, ROLLOUT, over=False),
    *(row("works", *both, over=False, found=OF_PROMPTS) for both in ((BOTH, SLOW), (SLOW, BOTH))),
    row("works", TRAINER, ENDED, writer(), over=False, found=partition(held=2), short=SOME_LACK),
    # who makes a group may still put it though all others ended
    row("", TRAINER, GONE, LOADING_MAKER, culprit="process 9 on h (collector)", found=FOUR, **GROUPS),
]
MOVES = [
    row("", TRAINER, ready=4),
    row("", WORKS, said="process 6 on h (trainer) works on it, and was last given samples 20 s ago."),
    row("", client("trainer", served()), writer(state="gone"), **LACKING),
    row("", client("trainer", asks(waits_s=400.0, ended_s=90.0)), writer(state="gone"), **LACKING),
]
IDLE = [
    row("", ROLLOUT, found=OF_TASK),
    row("", client("trainer", asks("train-2")), found=OF_TASK, task="train-1"),  # one of a numbered kind
    row("", client("trainer", asks("train_a")), found=partition(tasks=("train_a", "train_b")), task="train_b"),
    row("", TRAINER, found=partition(tasks=("train", "trian"), oldest_s=90.0), task="trian"),
    row("", TRAINER, client("new"), found=OF_TASK, task="trian"),  # it may be the one
    row("unclaimed", TRAINER, LOADING, found=COMPLETE, task="score"),
    row("unclaimed", TRAINER, ROLLOUT, found=replace(COMPLETE, oldest_s=9.0), task="score"),
    row("unclaimed", TRAINER, ROLLOUT, found=TWO, task="score"),  # more samples may come
    row("gone", EXPORT, found=EXPORTS, task="export:copy"),
    row("", client("trainer", served(), state="closed"), found=partition(held=0, cleared=8)),
    row("", client("trainer", served(), state="closed", heard_s=0.2)),
    row("", client("trainer", served(), state="closed", heard_s=90.0), client("trainer", pid=70)),
]
DONE = [
    row("", found=partition(held=0, cleared=8, num_samples=8)),
    row("", TRAINER, ROLLOUT, said="but 4, which are never given", found=ALL_BUT_FOUR),
]
TABLE = {"starved": STARVED, "waits": WAITS, "moves": MOVES, "idle": IDLE, "done": DONE}


@pytest.mark.parametrize(("state", "row"), [(state, row) for state, rows in TABLE.items() for row in rows])
def test_a_fault_names_its_culprit_and_is_called_starved_or_over_only_if_it_is(state, row):
    expected, over, found, clients, facts = row
    told = verdict(found, *clients, **facts)
    assert told.state == state, told
    for name, value in expected.items():
        assert value in (getattr(told, name) or ""), told
    assert over is None or told.is_over is over, told
