"""`stream`: each sample is worked on, acked when the next batch is asked for, and given back when the loop is left."""

import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest
import torch

from dataplane_core import connect, connect_async, stream
from dataplane_core.errors import (
    ClaimTimeoutError,
    ClientClosedError,
    InvalidRequestError,
    LeaseExpiredError,
    UnknownPartitionError,
)
from dataplane_core.spec import hookimpl
from dataplane_core.testing._timing import eventually

NUM = 10


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
    assert _num_leased(client) == 0
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


def test_leases_are_renewed_while_a_batch_is_worked_on_and_while_it_is_read_ahead(client):
    with stream(client, "p", "t", ["x"], 4, lease_s=3.0, prefetch=2) as batches:
        seen = []
        for batch in batches:
            time.sleep(1.8)
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
        assert _num_leased(client) == 0
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


def test_collate_makes_what_the_loop_gets(client):
    sums = list(stream(client, "p", "t", ["x"], 5, collate=lambda meta, columns: int(columns["x"].sum())))
    assert sums == [10, 35]


def test_closing_a_stream_or_its_client_ends_a_wait(client):
    client.register_partition("endless", ["x"], None, ["t"])
    for end in ("stream", "client"):
        batches = stream(client, "endless", "t", ["x"], 1)
        errors = []

        def wait(batches=batches, errors=errors):
            try:
                next(batches)
            except (ClientClosedError, StopIteration) as error:
                errors.append(type(error))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        (batches if end == "stream" else client).close()
        thread.join(20)
        assert not thread.is_alive()
        assert errors == [ClientClosedError]


def test_a_program_that_ends_in_the_middle_gives_back_what_it_holds():
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
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_asyncio_client_gives_an_async_iterator_with_the_same_rules(prefetch):
    async def main():
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

    asyncio.run(main())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_cancelled_async_loop_loses_nothing(prefetch):
    async def main():
        async with await connect_async({"backend": "noop"}) as client:
            await client.register_partition("p", ["x"], None, ["t"])
            await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})

            async def work():
                async with stream(client, "p", "t", ["x"], 1, prefetch=prefetch) as batches:
                    async for _ in batches:
                        await asyncio.sleep(0)

            task = asyncio.create_task(work())
            await asyncio.sleep(0.5)  # both were worked on; it waits for a third
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await client.list_consumed("p", "t") == ["a", "b"]
            await client.put_samples(["c"], "p", {"x": torch.arange(1)})
            assert (await client.claim_meta("p", "t", ["x"], 1, timeout_s=20.0)).sample_ids == ["c"]

    asyncio.run(main())
