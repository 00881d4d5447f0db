"""How a client announces itself, with its phases. What stores list is tested by the kit."""

import asyncio
import gc
import itertools
import os
import socket
import weakref
from types import SimpleNamespace

import pytest

from dataplane_core import connect
from dataplane_core.client import announcing
from dataplane_core.client.announcing import Phases, WorkLog
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, OperationTimeoutError
from dataplane_core.spec import ClaimRequest
from dataplane_testkit._timing import STARTS_S, Background, eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
def said():
    """What was announced."""
    return []


@pytest.fixture
def client(faults, said):
    """It announces itself only as a test says."""
    config = {"backend": "noop", "announce_s": None, "role": "r", "middleware": [faults]}
    with connect(config) as opened, faults.before("announce", said.append):
        yield opened


def test_the_more_clients_the_less_often(client, faults, said, monkeypatch):
    pauses = []
    announcer = announcing.Announcer(client._connection, 5.0)
    announcer.end()
    stop = SimpleNamespace(wait=lambda pause_s: pauses.append(pause_s) or len(pauses) > 3)
    monkeypatch.setattr(announcer, "_stop", stop)
    with faults.after("announce", lambda request, reply: 3000):
        announcer._run()
    assert pauses == [1.0, 5.0, 30.0, 30.0]  # no pause is longer than the period that was announced before it
    assert [each.ttl_s for each in said] == [17.0, 92.0, 92.0]
    assert [each.client.period_s for each in said] == [5.0, 30.0, 30.0]


def test_work_that_is_under_way_is_not_forgotten():
    log = announcing.WorkLog()
    wide = tuple(f"f{number}" for number in range(200))
    claim = ClaimRequest("p", "t", list(wide), 1, all_or_nothing=True)
    waiting = log.begin_claim(claim)
    for number in range(100):
        log.begin("put_samples", f"p{number}", ["x"])
    announced = log.announced(waiting.began_at + 5.0)
    claims = [work for work in announced if work.operation == "claim_meta"]
    assert [(work.began_s, work.ended_s, work.fields) for work in claims] == [(5.0, None, wide)]
    assert [work.partition_id for work in announced[:2]] == ["p99", "p98"]
    assert len(announced) < 30


def test_how_long_a_task_got_nothing_is_told_over_all_its_claims(opened):
    with opened({"backend": "noop", "announce_s": None}) as client:
        log = client._connection.work

        def last(operation):
            (work,) = (work for work in log.announced(0.0) if work.operation == operation)
            return work

        client.register_partition("p", ["x"], None, ["t"])
        for _ in range(2):  # polls
            client.claim_meta("p", "t", ["x"], 3, blocking=False, tag_filter={"n": (">=", 1)})
        first = last("claim_meta")
        assert (first.batch_size, dict(first.tag_filter), first.served_s) == (3, {"n": (">=", 1)}, None)
        with pytest.raises(OperationTimeoutError):
            client.claim_meta("p", "t", ["x"], 1, timeout_s=0.1)
        assert last("claim_meta").began_s == first.began_s
        client.put_samples(["a"], "p", {"x": [1.0]})
        assert last("put_samples").served_s is not None
        client.claim_meta("p", "t", ["x"], 1)
        served = last("claim_meta")
        assert served.served_s < served.began_s
        assert served.ended_s < served.served_s
        client.claim_meta("p", "t", ["x"], 1, blocking=False)
        again = last("claim_meta")
        assert again.began_s < again.served_s, "it waits since then"


def test_a_failed_announcement_disturbs_nothing(client, faults, said):
    announcer = announcing.Announcer(client._connection, 0.01)
    with faults.error_before("announce", OperationTimeoutError("the store is gone")):
        eventually(lambda: len(said) > 2, within_s=STARTS_S, what="further announcements")
        announcer.stop()
    assert all(each.ttl_s > 0 for each in said)  # nobody lists it, so it does not say that it closes


def test_a_client_that_nobody_uses_any_longer_is_freed():
    client = connect({"backend": "noop", "announce_s": 0.05})
    gone = weakref.ref(client)
    thread = client._connection.to_stop[0]._thread
    del client

    def freed():
        gc.collect()
        return gone() is None and not thread.is_alive()

    eventually(freed, within_s=STARTS_S, what="the end of a client that was not closed")


def test_a_client_announces_its_calls_and_phases(opened):
    with opened({"backend": "noop", "announce_s": 0.05, "role": "r"}) as client:
        client.register_partition("p", ["x"], None, ["t"])

        def told():
            listed = client.list_clients()
            phases = [(each.name, each.partition_id, list(each.groups)) for info in listed for each in info.phases]
            return [call.operation for info in listed for call in info.calls if call.partition_id], phases

        with client.phase("generate", partition_id="p", groups=["q1"]):
            waiting = Background(lambda: client.claim_meta("p", "t", ["x"], 1, timeout_s=600.0))
            eventually(lambda: told() == (["claim_meta"], [("generate", "p", ["q1"])]), STARTS_S, "what is announced")
        eventually(lambda: told() == (["claim_meta"], []), STARTS_S, "the end of a phase")
        (found,) = client.list_clients()
        assert (found.host, found.pid, found.role) == (socket.gethostname(), os.getpid(), "r")
        assert found.num_calls == len(found.calls)
        client.clear_samples(None, "p")
        with pytest.raises(KeyError):
            waiting.result()
        assert client._connection.calls == set()


# --- phases, nested, in threads and tasks -----------------------------------------------------------------------------


def told(phases):
    return [(each.name, list(each.groups)) for each in phases.announced(0.0)]


@pytest.fixture
def phases():
    return Phases()


@pytest.fixture
def within(phases):
    return lambda name, *groups: phases.within(name, "p" if groups else "", list(groups))


def test_a_phase_has_the_groups_of_the_one_around_it_and_none_of_one_that_has_ended(phases, within):
    first, second = within("first", "q1"), within("second", "q2", "q3")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    with within("decode"):
        assert told(phases) == [("decode", ["q2", "q3"])]
        assert [each.partition_id for each in phases.announced(0.0)] == ["p"]
    second.__exit__(None, None, None)
    with within("score"):
        assert told(phases) == [("score", [])]


async def test_each_task_has_its_own_and_none_of_the_groups_of_a_phase_that_it_outlives(phases, within):
    inside, leave = asyncio.Event(), asyncio.Event()

    async def upload():
        with within("upload"):
            assert told(phases) == [("upload", ["q1"])]
            inside.set()
            await leave.wait()
            assert told(phases) == [("upload", [])]
        with within("log"):
            assert told(phases) == [("log", [])]
        assert told(phases) == []

    with within("generate", "q1"):
        task = asyncio.create_task(upload())  # within this phase
        await inside.wait()
        assert told(phases) == [("upload", ["q1"])]
    leave.set()
    await task


def test_a_phase_has_a_name_and_its_groups_a_partition_and_who_does_not_announce_itself_notes_none():
    with connect({"backend": "noop", "announce_s": None}) as client:
        for name, more, error in (
            ("", {}, InvalidRequestError),
            (7, {}, InvalidTypeError),
            ("generate", {"groups": "q1"}, InvalidTypeError),
            ("generate", {"groups": ["q1"]}, InvalidRequestError),
            ("generate", {"groups": ["q1"], "partition_id": ""}, InvalidRequestError),
        ):
            with pytest.raises(error):
                client.phase(name, **more)
        with client.phase("generate"):
            assert told(client._connection.phases) == []


def test_work_begins_while_another_thread_begins_some():
    """The garbage collector may let another thread in wherever an object is made."""
    log, threshold = WorkLog(), gc.get_threshold()
    for number in range(16):
        log.begin("put_samples", f"p{number}")

    names = map(str, itertools.count())

    def let_in(phase, info):
        log._work[next(names), "", "", ()] = next(iter(log._work.values()))

    gc.callbacks.append(let_in)
    gc.set_threshold(1)
    try:
        log.begin("put_samples", "last")
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(let_in)
