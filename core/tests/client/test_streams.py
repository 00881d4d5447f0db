"""`stream`: each sample is worked on, acked when the next batch is asked for, and given back when the loop is left."""

import asyncio
import contextlib
import gc
import os
import threading
import time
import weakref
from queue import SimpleQueue

import pytest
import torch

from dataplane_core import connect, connect_async, stream
from dataplane_core.client import feeds
from dataplane_core.client.held import HeldMetas
from dataplane_core.errors import (
    BackendUnavailableError,
    ClaimTimeoutError,
    ClientClosedError,
    InvalidRequestError,
    LeaseExpiredError,
    UnknownPartitionError,
)
from dataplane_core.spec import hookimpl
from dataplane_testkit._timing import STARTS_S, Background, eventually

NUM = 10


class Failing:
    """Middleware whose operations fail as often as ``times`` says."""

    def __init__(self, **times):
        self.times = times

    def _fail(self, operation):
        if self.times.get(operation, 0):
            self.times[operation] -= 1
            raise BackendUnavailableError(f"no {operation} for the moment.")

    @hookimpl(wrapper=True)
    def ack(self, request):
        self._fail("ack")
        return (yield)

    @hookimpl(wrapper=True)
    def renew(self, request):
        self._fail("renew")
        return (yield)


class Gate:
    """Middleware that holds a claim back that was given samples."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    @hookimpl(wrapper=True)
    def claim(self, request):
        reply = yield
        if reply.sample_ids:
            self.entered.set()
            assert self.opened.wait(30)
        return reply


class Expiring:
    """Middleware that renews no lease, like a process that stands still."""

    @hookimpl(wrapper=True)
    def renew(self, request):
        request.lease_s = 0.001
        return (yield)


def _filled(client, num_samples=NUM):
    client.register_partition("p", ["x"], num_samples, ["t"])
    client.put_samples([f"s{i}" for i in range(NUM)], "p", {"x": torch.arange(NUM)})
    return client


@pytest.fixture
def client():
    with connect({"backend": "noop"}) as made:
        yield _filled(made)


def _consumed(client):
    return client.list_consumed("p", "t")


def _num_leased(client):
    return client.describe("p").tasks["t"].num_leased


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_each_sample_comes_once_and_a_batch_is_acked_when_the_next_is_asked_for(client, prefetch):
    seen = []
    for batch in stream(client, "p", "t", ["x"], 4, prefetch=prefetch):
        assert len(_consumed(client)) == len(seen)  # not this one, and none that is read ahead
        assert batch.columns["x"].tolist() == [int(each[1:]) for each in batch.meta.sample_ids]
        seen += batch.meta.sample_ids
    assert seen == [f"s{i}" for i in range(NUM)]
    assert client.check_consumption_status("p", ["t"])
    assert not [each for each in threading.enumerate() if each.name == "dataplane-stream"]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("leave", ["break", "error", "close"])
def test_what_is_not_acked_is_given_back_when_the_loop_is_left(client, prefetch, leave):
    def work():
        batches = stream(client, "p", "t", ["x"], 2, prefetch=prefetch)
        for number, _ in enumerate(batches):
            if number == 2 and leave == "break":
                break
            if number == 2 and leave == "error":
                raise RuntimeError("the step failed")
            if number == 2:
                batches.close()
                batches.close()

    if leave == "error":
        with pytest.raises(RuntimeError):
            work()
    else:
        work()
    gc.collect()
    assert _consumed(client) == ["s0", "s1", "s2", "s3"]
    eventually(lambda: not _num_leased(client), what="the samples are given back")
    rest = [name for batch in stream(client, "p", "t", ["x"], 4) for name in batch.meta.sample_ids]
    assert rest == [f"s{i}" for i in range(4, NUM)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stream_in_a_reference_cycle_is_given_back_by_a_thread_that_has_a_lock_of_the_client(client, prefetch):
    class Holds:
        pass

    gc.collect()
    holds = Holds()
    holds.itself, holds.batches = holds, stream(client, "p", "t", ["x"], 2, prefetch=prefetch)
    next(holds.batches)
    del holds

    def collect():
        with client._state:
            gc.collect()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(30)
    assert not collecting.is_alive()
    eventually(lambda: not _num_leased(client), what="the samples are given back")


def test_a_batch_can_be_acked_by_hand(client):
    with stream(client, "p", "t", ["x"], 4) as batches:
        next(batches)
        batches.ack()
        batches.ack()
        assert len(_consumed(client)) == 4
    assert len(_consumed(client)) == 4


def _oldest_held_s(client):
    """Seconds since the oldest lease was given."""
    lease = client.describe("p").tasks["t"].oldest_lease
    return 0.0 if lease is None else lease.held_s


def test_leases_are_renewed_while_a_batch_is_worked_on_and_while_it_is_read_ahead(client):
    with stream(client, "p", "t", ["x"], 4, lease_s=6.0, prefetch=2) as batches:
        seen = []
        for batch in batches:
            if not seen:
                eventually(lambda: _oldest_held_s(client) > 7.0, within_s=STARTS_S, what="a lease without a renewal")
            seen += batch.meta.sample_ids
    assert seen == [f"s{i}" for i in range(NUM)]
    assert len(_consumed(client)) == NUM


def test_a_lease_that_ended_is_told_at_the_next_batch():
    with connect({"backend": "noop", "middleware": [Expiring()]}) as client:
        _filled(client)
        batches = stream(client, "p", "t", ["x"], 4, lease_s=0.3, prefetch=0)
        next(batches)
        while _num_leased(client):
            time.sleep(0.02)
        with pytest.raises(LeaseExpiredError):
            next(batches)
        assert _consumed(client) == []
        with pytest.raises(StopIteration):
            next(batches)


def test_errors_reach_the_loop_and_end_the_stream(client):
    def fail(meta, columns):
        raise KeyError("collate")

    for prefetch in (0, 1):
        with pytest.raises(KeyError, match="collate"):
            next(stream(client, "p", "t", ["x"], 4, collate=fail, prefetch=prefetch))
        eventually(lambda: not _num_leased(client), what="the samples are given back")
    client.register_partition("endless", ["x"], None, ["t"])
    with pytest.raises(ClaimTimeoutError):
        next(stream(client, "endless", "t", ["x"], 4, timeout_s=0.01))
    with pytest.raises(UnknownPartitionError):
        next(stream(client, "absent", "t", ["x"], 4))
    for wrong in ({"batch_size": 0}, {"batch_size": 1, "lease_s": 0}, {"batch_size": 1, "prefetch": -1}):
        with pytest.raises(InvalidRequestError):
            stream(client, "p", "t", ["x"], **wrong)
    with pytest.raises(InvalidRequestError, match="of claim_meta only"):
        stream(client, "p", "t", ["x"], 1, blocking=False)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("end", ["stream", "client"])
def test_closing_a_stream_or_its_client_ends_a_wait(client, end, prefetch):
    client.register_partition("endless", ["x"], None, ["t"])
    batches = stream(client, "endless", "t", ["x"], 1, prefetch=prefetch)
    waiting = Background(lambda: next(batches))
    eventually(lambda: client._calls, what="the claim waits")
    (batches if end == "stream" else client).close()
    with pytest.raises(ClientClosedError, match="the stream or its client was closed"):
        waiting.result()
    with pytest.raises(StopIteration):
        next(batches)


def test_closing_a_stream_whose_thread_is_between_two_batches_ends_a_wait(client):
    batches = stream(client, "p", "t", ["x"], 1)
    batches._feed._free = SimpleQueue()
    waiting = Background(lambda: next(batches))
    eventually(lambda: len(batches._feed._threads) == 2, what="both threads run")
    batches.close()
    with pytest.raises(ClientClosedError, match="the stream"):
        waiting.result()


def test_what_is_claimed_while_the_stream_is_closed_is_given_back():
    gate = Gate()
    with connect({"backend": "noop", "middleware": [gate]}) as client:
        batches = stream(_filled(client), "p", "t", ["x"], 1, prefetch=0)
        waiting = Background(lambda: next(batches))
        assert gate.entered.wait(30)
        batches.close()
        gate.opened.set()
        with pytest.raises(ClientClosedError, match="the stream"):
            waiting.result()
        assert _num_leased(client) == 0


def test_time_in_which_the_loop_works_does_not_count_for_the_timeout(client):
    client.register_partition("late", ["x"], None, ["t"])
    client.put_samples(["a"], "late", {"x": [1]})
    with stream(client, "late", "t", ["x"], 1, timeout_s=1.0) as batches:
        next(batches)
        time.sleep(1.5)  # longer than the timeout
        client.put_samples(["b"], "late", {"x": [1]})
        assert next(batches).meta.sample_ids == ["b"]
        with pytest.raises(ClaimTimeoutError, match=r"timed out after 1 s: 0 of 1"):
            next(batches)


def test_a_batch_whose_ack_fails_is_given_back():
    with connect({"backend": "noop", "middleware": [Failing(ack=1)]}) as client:
        batches = stream(_filled(client), "p", "t", ["x"], 4)
        next(batches)
        with pytest.raises(BackendUnavailableError, match="no ack"):
            next(batches)
        assert (_consumed(client), _num_leased(client)) == ([], 0)


def test_metas_are_held_until_their_leases_have_ended():
    with connect({"backend": "noop", "middleware": [Failing(renew=1)]}) as client:
        _filled(client)
        held = HeldMetas(client, 60.0)
        metas = [client.claim_meta("p", "t", ["x"], 4, lease_s=60.0) for _ in range(2)]
        for meta in metas:
            held.add(meta)
        assert held.renew()  # one fails
        client.ack(metas[0])
        client.clear_samples(metas[1].sample_ids[:4], "p")
        assert not held.renew()
        over = HeldMetas(client, 60.0, most_held_s=0.0)
        over.add(client.claim_meta("p", "t", ["x"], 1, lease_s=60.0))
        assert not over.renew()
        assert _num_leased(client) == 0


def test_the_rest_of_a_batch_is_held_while_parts_of_it_are_settled(client):
    held = HeldMetas(client, 60.0)
    meta = client.claim_meta("p", "t", ["x"], 5, lease_s=30.0)
    held.add(meta)
    client.ack(meta.subset([1]))
    client.clear_samples([meta.sample_ids[3]], "p")
    assert held.renew()
    client.ack(meta.subset([0]))
    assert held.renew()
    task = client.describe("p").tasks["t"]
    assert (task.num_leased, task.oldest_lease.left_s > 30) == (2, True)
    held.give_back(meta)
    assert (_consumed(client), _num_leased(client)) == (meta.sample_ids[:2], 0)
    assert not held.renew()


def test_a_held_meta_stays_apart_from_those_that_come_after_it(client):
    """They are kept by their ids, and a new object may get the id of one that is gone."""
    held = HeldMetas(client, 60.0)
    meta = client.claim_meta("p", "t", ["x"], 5, lease_s=30.0)
    held.add(meta)
    client.ack(meta.subset([1]))
    held.renew()
    kept = weakref.ref(meta)
    del meta
    gc.collect()
    assert kept() is not None
    held.give_back()
    assert kept() is None


def test_a_stream_is_refused_in_a_fork(client):
    batches = stream(client, "p", "t", ["x"], 2)
    next(batches)
    batches.ack()
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except ClientClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(batches).meta.sample_ids == ["s2", "s3"]


def test_a_thread_that_cannot_be_started_ends_the_stream(client, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        next(stream(client, "p", "t", ["x"], 4))


def test_a_stream_that_waits_is_listed(client):
    client.register_partition("endless", ["x"], None, ["t"])
    with stream(client, "endless", "t", ["x"], 1) as batches:
        waiting = Background(lambda: next(batches))

        def listed():
            return [(call.operation, call.partition_id) for each in client.list_clients() for call in each.calls]

        eventually(lambda: ("claim_meta", "endless") in listed(), within_s=30.0)
        batches.close()
        with pytest.raises(ClientClosedError):
            waiting.result()


def test_a_program_that_ends_in_the_middle_gives_back_what_it_holds(python):
    program = (
        "import atexit\n"
        "atexit.register(lambda: print(client.describe('p').tasks['t'].num_leased))\n"  # the first runs last
        "from dataplane_core import connect, stream\n"
        "client = connect({'backend': 'noop'})\n"
        "client.register_partition('p', ['x'], 4, ['t'])\n"
        "client.put_samples(list('abcd'), 'p', {'x': [1, 2, 3, 4]})\n"
        "batches = stream(client, 'p', 't', ['x'], 1, prefetch=2)\n"
        "next(batches)\nnext(batches)\n"
    )
    run = python.run("-c", program)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_an_asyncio_client_gives_an_async_iterator_with_the_same_rules(prefetch):
    async with await connect_async({"backend": "noop"}) as client:
        await client.register_partition("p", ["x"], NUM, ["t"])
        await client.put_samples([f"s{i}" for i in range(NUM)], "p", {"x": torch.arange(NUM)})
        async with stream(client, "p", "t", ["x"], 2, prefetch=prefetch) as batches:
            num_seen = 0
            async for batch in batches:
                assert len(await client.list_consumed("p", "t")) == num_seen
                num_seen += batch.meta.size
                if num_seen == 6:
                    break
        assert await client.list_consumed("p", "t") == ["s0", "s1", "s2", "s3"]
        assert (await client.describe("p")).tasks["t"].num_leased == 0
        seen = [name async for batch in stream(client, "p", "t", ["x"], 4) for name in batch.meta.sample_ids]
        assert seen == [f"s{i}" for i in range(4, NUM)]
        assert await client.check_consumption_status("p", ["t"])
        with pytest.raises(UnknownPartitionError):
            await anext(stream(client, "absent", "t", ["x"], 4, prefetch=prefetch))


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_a_cancelled_async_loop_loses_nothing(prefetch):
    async with await connect_async({"backend": "noop"}) as client:
        await client.register_partition("p", ["x"], None, ["t"])
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})

        async def work():
            async with stream(client, "p", "t", ["x"], 1, prefetch=prefetch) as batches:
                async for _ in batches:
                    await asyncio.sleep(0)

        task = asyncio.create_task(work())
        async with asyncio.timeout(STARTS_S):
            while await client.list_consumed("p", "t") != ["a", "b"]:  # then it waits for a third
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.list_consumed("p", "t") == ["a", "b"]
        await client.put_samples(["c"], "p", {"x": torch.arange(1)})
        assert (await client.claim_meta("p", "t", ["x"], 1, timeout_s=20.0)).sample_ids == ["c"]


@contextlib.asynccontextmanager
async def _async_client(*middleware):
    async with await connect_async({"backend": "noop", "middleware": list(middleware)}) as client:
        await client.register_partition("p", ["x"], None, ["t"])
        await client.put_samples(["a", "b", "c"], "p", {"x": torch.arange(3)})
        yield client


async def _none_leased(client):
    async with asyncio.timeout(30):
        while (await client.describe("p")).tasks["t"].num_leased:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_an_async_stream_that_nobody_refers_to_gives_back_what_it_holds(prefetch):
    async with _async_client() as client:
        async for _ in stream(client, "p", "t", ["x"], 1, lease_s=600.0, prefetch=prefetch):
            break
        gc.collect()
        await _none_leased(client)


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_closing_an_async_stream_ends_a_wait(prefetch):
    async with _async_client() as client:
        batches = stream(client, "p", "t", ["x"], 4, prefetch=prefetch)
        waiting = asyncio.create_task(anext(batches))
        await asyncio.sleep(0.05)
        await batches.close()
        with pytest.raises(ClientClosedError, match="the stream or its client was closed"):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        assert (await client.claim_meta("p", "t", ["x"], 3, blocking=False)).sample_ids == ["a", "b", "c"]


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_collate_does_not_stop_the_event_loop(prefetch):
    def name_thread(meta, columns):
        return threading.current_thread().name

    async with (
        _async_client() as client,
        stream(client, "p", "t", ["x"], 1, collate=name_thread, prefetch=prefetch) as batches,
    ):
        assert (await anext(batches)).startswith("dataplane-async")


class Counting:
    """Middleware that counts renewals."""

    def __init__(self):
        self.num_renewed = 0

    @hookimpl(wrapper=True)
    def renew(self, request):
        self.num_renewed += 1
        return (yield)


async def test_leases_are_renewed_while_other_calls_take_all_threads(monkeypatch):
    monkeypatch.setattr(feeds, "RENEWED_AFTER", 1 / 60)
    opened, counting = threading.Event(), Counting()

    async with await connect_async({"backend": "noop", "middleware": [counting]}, threads=2) as client:
        await client.register_partition("p", ["x"], None, ["t", "u"])
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        batches = stream(client, "p", "t", ["x"], 1, lease_s=60.0, prefetch=0)
        await anext(batches)
        slow = [stream(client, "p", "u", ["x"], 1, prefetch=0, collate=lambda *_: opened.wait(60)) for _ in range(2)]
        taken = [asyncio.create_task(anext(each)) for each in slow]
        try:
            async with asyncio.timeout(30):
                while counting.num_renewed < 3:
                    await asyncio.sleep(0.01)
        finally:
            opened.set()
            await asyncio.gather(*taken)
            for each in (batches, *slow):
                await each.close()
