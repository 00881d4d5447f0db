"""`AsyncDataPlaneClient`: waiting, cancellation, closing, and that its operations are those of `DataPlaneClient`."""

import asyncio
import contextlib
import inspect
import pickle
import re
import threading

import pytest
import torch
from gates import Gate

from dataplane_core import AsyncDataPlaneClient, DataPlaneClient, OperationCancelledError, connect_async
from dataplane_core.errors import ClientClosedError, OperationTimeoutError, RoomTimeoutError, UnknownPartitionError

pytestmark = pytest.mark.anyio


async def _open(gate=None, *, threads=2, **config):
    client = await connect_async(
        {"backend": "noop", "middleware": [] if gate is None else [gate], **config}, threads=threads
    )
    await client.register_partition("p", ["x"], None, ["t"])
    return client


async def _put(client, *sample_ids):
    await client.put_samples(list(sample_ids), "p", {"x": torch.arange(len(sample_ids))})


def test_it_has_every_operation_with_the_same_arguments():
    for name, method in inspect.getmembers(DataPlaneClient, inspect.isfunction):
        if not name.startswith("_"):
            mine = getattr(AsyncDataPlaneClient, name)
            assert inspect.iscoroutinefunction(mine) is (name != "phase"), name
            assert inspect.signature(mine) == inspect.signature(method), name
    for name, _ in inspect.getmembers(DataPlaneClient, lambda each: isinstance(each, property)):
        assert hasattr(AsyncDataPlaneClient, name), name


async def test_claims_that_wait_hold_no_thread_and_each_gets_its_own_sample():
    async with await _open(threads=1) as client:
        claims = [asyncio.create_task(client.claim_meta("p", "t", ["x"], 1)) for _ in range(200)]
        await asyncio.sleep(0)
        num_threads = threading.active_count()
        for i in range(0, 200, 50):
            await _put(client, *(f"s{j}" for j in range(i, i + 50)))
        given = [sample_id for meta in await asyncio.gather(*claims) for sample_id in meta.sample_ids]
        assert sorted(given) == sorted(f"s{i}" for i in range(200))
        assert num_threads <= threading.active_count() + 2


@contextlib.asynccontextmanager
async def _putting(threads=2, before=True):
    """A client, its put of the sample ``a``, and the gate that holds this put back."""
    gate = Gate("put_samples", before=before)
    async with await _open(gate, threads=threads) as client:
        put = asyncio.create_task(_put(client, "a"))
        await gate.is_entered()
        yield client, put, gate


async def _cancelled(task):
    """What became of an operation, which raises as any task that is cancelled."""
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert caught.type is asyncio.CancelledError
    return OperationCancelledError.of(caught.value)


async def test_a_claim_that_is_cancelled_while_it_waits_takes_nothing():
    async with await _open() as client:
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.05):
                await client.claim_meta("p", "t", ["x"], 1)
        assert re.search(r"claim_meta(\('p', 't'\))? was cancelled", str(OperationCancelledError.of(caught.value)))
        await _put(client, "a")
        assert (await client.claim_meta("p", "t", ["x"], 1, timeout_s=5.0)).sample_ids == ["a"]


async def _cancelled_under_way(gate, task):
    """What became of an operation that was cancelled, twice, while the gate held it back."""
    await gate.is_entered()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done()  # its memory is still in use
    gate.opened.set()
    return await _cancelled(task)


@pytest.mark.parametrize(
    ("words", "outcome", "given", "next_one"),
    [
        ({"lease_s": 600.0}, "given back", None, ["a"]),
        ({"lease_s": 600.0, "blocking": False}, "given back", None, ["a"]),
        ({}, "done", ["a"], ["b"]),
        ({"dp_rank": 0}, "not run", None, ["a"]),
    ],
    ids=["leased", "leased, not blocking", "without a lease", "of a rank, whose next claim gets the same"],
)
async def test_a_claim_that_is_cancelled_when_it_was_handed_samples(words, outcome, given, next_one):
    gate = Gate("claim", before=False)
    async with await _open(gate) as client:
        await _put(client, "a", "b")
        claim = asyncio.create_task(client.claim_meta("p", "t", ["x"], 1, **words))
        told = pickle.loads(pickle.dumps(await _cancelled_under_way(gate, claim)))
        assert told.outcome == outcome
        assert told.result == given or told.result.sample_ids == given
        again = await client.claim_meta("p", "t", ["x"], 1, **words, timeout_s=5.0)
        assert again.sample_ids == next_one


@pytest.mark.parametrize("before", [True, False])
async def test_a_put_that_is_cancelled_under_way_is_waited_for_and_says_what_became_of_it(before):
    async with _putting(before=before) as (client, put, gate):
        told = await _cancelled_under_way(gate, put)
        assert (told.outcome, told.result.sample_ids) == ("done", ["a"])
        assert await client.list_sample_ids("p") == ["a"]
    async with _putting() as (client, put, gate):
        await client.clear_samples(None, "p")
        told = await _cancelled_under_way(gate, put)
        assert (told.outcome, type(told.__cause__)) == ("failed", UnknownPartitionError)


async def test_a_put_that_is_cancelled_while_it_waits_for_room_gives_up():
    gate = Gate("put_samples")
    full = {"capacity_bytes": 1000, "on_full": "block"}
    async with await _open(gate, options=full, op_timeout_s=500.0) as client:
        large = client.put_samples(["a"], "p", {"x": torch.zeros(1, 100)})
        gate.opened.set()
        await large
        gate.opened.clear()
        gate.entered.clear()
        put = asyncio.create_task(client.put_samples(["b"], "p", {"x": torch.zeros(1, 200)}))
        told = await _cancelled_under_way(gate, put)
        assert (told.outcome, type(told.__cause__)) == ("failed", RoomTimeoutError)


@pytest.mark.parametrize("how", ["timeout", "wait_for"])
async def test_a_timeout_of_asyncio_is_a_timeout_error_and_knows_what_became_of_the_operation(how):
    async with _putting() as (_, put, gate):

        async def in_time():
            if how == "wait_for":
                await asyncio.wait_for(put, 0.001)
            async with asyncio.timeout(0.001):
                await put

        waiting = asyncio.create_task(in_time())
        while not put.cancelling():
            await asyncio.sleep(0.001)
        gate.opened.set()
        with pytest.raises(TimeoutError) as caught:
            await waiting
        told = OperationCancelledError.of(caught.value)
        assert (told.outcome, told.result.sample_ids) == ("done", ["a"])
        assert OperationCancelledError.of(TimeoutError()) is None


async def test_a_put_that_is_cancelled_before_it_runs_changes_nothing():
    async with _putting(threads=1) as (client, first, gate):
        second = asyncio.create_task(_put(client, "b"))
        await asyncio.sleep(0)
        second.cancel()
        assert (await _cancelled(second)).outcome == "not run"
        gate.opened.set()
        await first
        assert await client.list_sample_ids("p") == ["a"]


async def test_an_operation_that_finds_no_free_thread_times_out_while_they_are_busy():
    async with _putting(threads=1) as (client, first, gate):
        client._client._connection.config = client.config.model_copy(update={"op_timeout_s": 1.0})
        with pytest.raises(OperationTimeoutError, match="all 1 threads of this client were busy") as caught:
            await _put(client, "b")
        assert caught.value.outcome == "not_done"
        gate.opened.set()
        await asyncio.gather(first, return_exceptions=True)


async def test_closing_ends_claims_that_wait_and_then_refuses():
    client = await _open()
    claims = [asyncio.create_task(client.claim_meta("p", "t", ["x"], 1)) for _ in range(5)]
    await asyncio.sleep(0.05)
    await asyncio.gather(client.close(), client.close())
    for claim in [*claims, client.claim_meta("p", "t", ["x"], 1)]:
        with pytest.raises(ClientClosedError):
            await claim
    assert repr(client) == "<async <DataPlaneClient backend='noop' bootstrapped closed>>"
    assert not [each for each in threading.enumerate() if each.name.startswith("dataplane-async")]
