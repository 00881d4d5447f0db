"""Where a client is told why its claim waits: the error, the log, middleware; and `why` over a store of one process."""

import asyncio
import contextlib
import logging
import math
import pickle
import re
import threading
import time
from types import SimpleNamespace

import pytest

from dataplane_core import connect, connect_async
from dataplane_core.client import async_client, claims, explaining
from dataplane_core.client.announcing import WorkLog
from dataplane_core.client.connection import Waiters
from dataplane_core.errors import ClaimTimeoutError
from dataplane_core.middleware import Metrics
from dataplane_core.spec import Claim, ClaimRequest
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


def test_no_claim_tells_it_if_nobody_wants_to_know(caplog):
    events = []
    silent = config(Metrics(on_event=events.append), warn_after_s=None)
    with connect(silent) as client, pytest.raises(ClaimTimeoutError):
        filled(client).claim_meta(*CLAIM, timeout_s=0.5)
    assert not [each for each in events if each.verdict is not None]
    assert not caplog.records


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


def test_ready_counts_what_the_task_claims():
    with connect(config()) as client:
        filled(client)
        assert [each.num_ready for each in client.why("p")] == [0, 0]  # all registered fields
        assert client.claim_meta("p", "score", ["x"], 1).size == 1
        score = client.why("p", "score")[0]
        assert (score.state, score.backlog, score.num_ready) == ("moves", 1, 1)


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
