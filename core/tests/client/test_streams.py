"""`stream`: each sample is worked on, acked when the next batch is asked for, and given back when the loop is left."""

import asyncio
import contextlib
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from gates import Gate

from dataplane_core import connect, connect_async, stream
from dataplane_core.client import Feed, Terms, async_client, explaining, streams
from dataplane_core.client.leases import HeldMetas
from dataplane_core.errors import (
    BackendUnavailableError,
    ClaimTimeoutError,
    ClientClosedError,
    InvalidRequestError,
    LeaseExpiredError,
    OperationTimeoutError,
    UnknownPartitionError,
)
from dataplane_core.middleware import Metrics
from dataplane_testkit._timing import STARTS_S, Background, eventually, in_threads

pytestmark = pytest.mark.anyio

NUM = 10
IDS = [f"s{i}" for i in range(NUM)]
ONLY_SYNC = pytest.mark.parametrize("opened", ["sync"], indirect=True)
PREFETCH = pytest.mark.parametrize("prefetch", [0, 2])


@pytest.fixture
def client(faults, opened):
    """Partition ``p`` has ten samples, ``endless`` and ``replay`` wait for their first."""
    with opened({"backend": "noop", "middleware": [faults]}) as made:
        made.register_partition("p", ["x"], NUM, ["t"])
        made.register_partition("endless", ["x"], None, ["t"])
        made.register_partition("replay", ["x"], 12, ["train"])
        made.put_samples(IDS, "p", {"x": torch.arange(NUM)})
        yield made


def _consumed(client):
    return client.list_consumed("p", "t")


def _num_leased(client):
    return client.describe("p").tasks["t"].num_leased


def _all_given_back(client):
    eventually(lambda: not _num_leased(client), what="the samples are given back")


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "dataplane-stream"]


def test_a_step_that_is_marked_has_what_streams_gave_before(client):
    with client.stream("p", "t", ["x"], 4) as batches:
        next(batches)
        client.mark_step(1)
        assert _consumed(client) == IDS[:4]
        next(batches)
        assert _consumed(client) == IDS[:4]
    client.mark_step(2)
    assert _consumed(client) == IDS[:4]


def test_what_rollouts_that_died_have_left_is_cleared_with_their_group(client):
    client.register_partition("agents", ["x"], None, ["t"], grpo_group_size=2, rollouts=True)
    rows = ["a_g0/0", "a_g1/0", "a_g1/1", "b_g0/0", "b_g1/0", "a_g2/0"]
    client.put_samples(rows, "agents", {"x": torch.arange(6)})
    client.seal({"a_g0": 1}, "agents", ends_groups=True)
    with client.stream("agents", "t", ["x"], 1, clear=True, prefetch=0) as batches:
        assert next(batches).meta.sample_ids == ["a_g0/0"]
        client.seal({"b_g0": 1, "b_g1": 1}, "agents")
        assert next(batches).meta.sample_ids == ["b_g0/0", "b_g1/0"]
        assert client.list_sample_ids("agents") == ["b_g0/0", "b_g1/0"]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_each_sample_comes_once_and_a_batch_is_acked_when_the_next_is_asked_for(client, prefetch):
    seen = []
    for batch in client.stream("p", "t", ["x"], 4, prefetch=prefetch):
        assert len(_consumed(client)) == len(seen)  # not this one, and none that is read ahead
        assert batch.columns["x"].tolist() == [int(each[1:]) for each in batch.meta.sample_ids]
        seen += batch.meta.sample_ids
    assert seen == IDS
    assert client.check_consumption_status("p", ["t"])
    assert not _threads()


@PREFETCH
@pytest.mark.parametrize("end", ["died", "nack", "ack"])
def test_at_the_end_a_stream_waits_for_what_others_hold_and_takes_it_over(client, monkeypatch, prefetch, end):
    monkeypatch.setattr(streams, "_PAUSE_S", 0.01)
    held = client.claim_meta("p", "t", ["x"], 4, lease_s=0.2 if end == "died" else 600.0)
    batches = client.stream("p", "t", ["x"], 4, prefetch=prefetch)
    rest = Background(lambda: [name for batch in batches for name in batch.meta.sample_ids])
    eventually(lambda: len(_consumed(client)) >= NUM - 4, what="the others are worked on")
    if end != "died":
        assert rest.running
        (client.nack if end == "nack" else client.ack)(held)
    assert sorted(rest.result(STARTS_S)) == (IDS[4:] if end == "ack" else IDS)
    assert client.check_consumption_status("p", ["t"])


@PREFETCH
@pytest.mark.parametrize("leave", ["break", "error", "close"])
def test_what_is_not_acked_is_given_back_when_the_loop_is_left(client, prefetch, leave):
    def work():
        batches = client.stream("p", "t", ["x"], 2, prefetch=prefetch)
        for number, _ in enumerate(batches):
            if number == 2 and leave == "break":
                break
            if number == 2 and leave == "error":
                raise RuntimeError("the step failed")
            if number == 2:
                batches.close()
                batches.close()

    with pytest.raises(RuntimeError) if leave == "error" else contextlib.nullcontext():
        work()
    gc.collect()
    assert _consumed(client) == IDS[:4]
    _all_given_back(client)
    assert [name for batch in client.stream("p", "t", ["x"], 4) for name in batch.meta.sample_ids] == IDS[4:]


def test_a_lease_that_ended_is_told_at_the_next_batch(client, faults):
    batches = client.stream("p", "t", ["x"], 4, lease_s=0.3, prefetch=0)
    with faults.before("renew", lambda request: setattr(request, "lease_s", 0.001)):  # as if the process stood still
        next(batches)
        _all_given_back(client)
        with pytest.raises(LeaseExpiredError):
            next(batches)
    assert _consumed(client) == []
    with pytest.raises(StopIteration):
        next(batches)


@PREFETCH
def test_errors_reach_the_loop_and_end_the_stream(client, faults, prefetch):
    def fail(meta, columns):
        raise KeyError("collate")

    for error, arguments, words in (
        (KeyError, ("p", "t", ["x"], 4), {"collate": fail}),
        (ClaimTimeoutError, ("endless", "t", ["x"], 4), {"timeout_s": 0.01}),
        (UnknownPartitionError, ("absent", "t", ["x"], 4), {}),
        (InvalidRequestError, ("p", "t", ["x"], 0), {}),
        (InvalidRequestError, ("p", "t", ["x"], 1), {"lease_s": 0}),
        (InvalidRequestError, ("p", "t", ["x"], 1), {"prefetch": -1}),
        (InvalidRequestError, ("p", "t", ["x"], 1), {"blocking": False}),
    ):
        with pytest.raises(error):
            next(client.stream(*arguments, **{"prefetch": prefetch, **words}))
        _all_given_back(client)
    batches = client.stream("p", "t", ["x"], 4, prefetch=prefetch)
    next(batches)
    with (
        faults.error_before("ack", BackendUnavailableError("no answer")),
        pytest.raises(BackendUnavailableError, match="no answer"),
    ):
        next(batches)
    _all_given_back(client)
    assert _consumed(client) == []


@ONLY_SYNC
@PREFETCH
def test_a_batch_is_renewed_until_it_is_acked_by_hand_also_after_a_failure(client, faults, monkeypatch, prefetch):
    monkeypatch.setattr(streams, "RENEWED_AFTER", 1 / 6000)

    def fail_the_second(meta, columns):
        return meta if meta.sample_ids == IDS[:4] else columns["absent"]

    feed = Feed(client, Terms("p", "t", ["x"], 4, 60.0, prefetch, fail_the_second, 5.0, None, {}))
    batches = feed.batches()
    meta = next(batches)
    with pytest.raises(KeyError):
        next(batches)
    with faults.counting() as calls:
        eventually(lambda: calls.count("renew") > 2, what="the first batch is renewed")
    client.ack(meta)
    eventually(lambda: not _threads(), what="the threads end")
    assert _consumed(client) == IDS[:4]


@PREFETCH
@pytest.mark.parametrize("end", ["stream", "client"])
def test_closing_a_stream_or_its_client_ends_a_wait_which_is_listed(client, end, prefetch):
    def listed():
        return [(call.operation, call.partition_id) for each in client.list_clients() for call in each.calls]

    batches = client.stream("endless", "t", ["x"], 1, prefetch=prefetch)
    waiting = Background(lambda: next(batches))
    eventually(lambda: ("claim_meta", "endless") in listed(), within_s=30.0, what="a call that is listed")
    (batches if end == "stream" else client).close()
    with pytest.raises(ClientClosedError, match="the stream or its client was closed"):
        waiting.result()
    with pytest.raises(StopIteration):
        next(batches)


@ONLY_SYNC
@pytest.mark.parametrize("faults", [Gate("claim", before=False)])
def test_what_is_claimed_while_the_stream_is_closed_is_given_back(client, faults):
    batches = client.stream("p", "t", ["x"], 1, prefetch=0)
    waiting = Background(lambda: next(batches))
    assert faults.entered.wait(30)
    batches.close()
    faults.opened.set()
    with pytest.raises(ClientClosedError, match="the stream"):
        waiting.result()
    assert _num_leased(client) == 0


@PREFETCH
def test_a_stream_waits_as_long_as_those_that_it_waits_for_live(opened, monkeypatch, prefetch):
    for module in (explaining, async_client):
        monkeypatch.setattr(module, "ADVICE_S", STARTS_S)  # a look may take as long as a busy machine needs
    told = []
    metrics = Metrics(on_event=lambda event: told.append(event.verdict) if event.verdict is not None else None)
    with opened({"backend": "noop", "warn_after_s": 0.1, "middleware": [metrics]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", {"x": [1]})
        batches = client.stream("p", "t", ["x"], 2, prefetch=prefetch)
        with client.phase("generate"):
            waiting = Background(lambda: next(batches))
            eventually(
                lambda: any(each.waited_s > 0.5 for each in told), STARTS_S, "a look after it has waited for long"
            )
            client.put_samples(["b"], "p", {"x": [1]})
            assert waiting.result().meta.sample_ids == ["a", "b"]
        with pytest.raises(
            ClaimTimeoutError, match="puts new samples, and waits for samples of this task itself"
        ) as over:
            next(batches)  # nobody is left who could put any
        assert over.value.verdict.is_over


@ONLY_SYNC
def test_a_stream_of_a_store_that_cannot_say_who_lives_has_a_timeout(client, monkeypatch):
    monkeypatch.setattr(streams, "_UNKNOWN_S", 0.01)
    with connect({"backend": "noop", "announce_s": None}) as silent:
        silent.register_partition("p", ["x"], None, ["t"])
        with pytest.raises(ClaimTimeoutError, match=r"timed out after 0\.01 s"):
            next(stream(silent, "p", "t", ["x"], 1))


@ONLY_SYNC
def test_metas_are_held_until_their_leases_have_ended(client, faults):
    held = HeldMetas(client, 60.0)
    metas = [client.claim_meta("p", "t", ["x"], 4, lease_s=30.0) for _ in range(2)]
    for meta in metas:
        held.add(meta)
    with faults.error_before("renew", BackendUnavailableError("no answer")):
        assert held.renew()
    client.ack(metas[0].subset([1]))
    client.clear_samples([metas[0].sample_ids[3], *metas[1].sample_ids], "p")
    assert held.renew(), "the rest of a batch is held while parts of it are settled"
    task = client.describe("p").tasks["t"]
    assert (task.num_leased, task.oldest_lease.left_s > 30) == (2, True)
    kept = [weakref.ref(meta) for meta in metas]
    del metas[:], meta
    gc.collect()
    # metas are kept by their ids, and a new object may get the id of one that is gone
    assert [each() is not None for each in kept] == [True, False]
    held.give_back()
    assert (_consumed(client), _num_leased(client), kept[0]()) == (["s1"], 0, None)
    assert not held.renew()


# --- streams that clear, and that give nothing too old ----------------------------------------------------------------


def _put(client, rows, weight_version=0):
    client.put_samples(
        [f"v{weight_version}_p{row}_g0" for row in rows],
        "replay",
        {"x": torch.tensor(rows)},
        tags=[{"weight_version": weight_version}] * len(rows),
    )


def _clearing(client, **options):
    return client.stream("replay", "train", ["x"], 4, **{"clear": True, "timeout_s": STARTS_S, **options})


@PREFETCH
def test_rows_are_cleared_once_they_are_acked_also_those_that_a_killed_process_left(client, prefetch):
    _put(client, range(12))
    client.ack(client.claim_meta("replay", "train", ["x"], 4, lease_s=60))  # killed before its clear
    trained = [batch.columns["x"].tolist() for batch in _clearing(client, prefetch=prefetch)]
    assert trained == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert client.list_samples("replay").size == 0


@ONLY_SYNC
@pytest.mark.parametrize(("prefetch", "second"), [(0, [[6, 7, 8, 9]]), (2, [[6, 7, 8, 9], [8, 9, 10, 11]])], ids=str)
@pytest.mark.parametrize("clear", [True, False])
def test_what_is_too_old_is_dropped_and_never_given(client, prefetch, second, clear):
    for version in range(4):
        _put(client, range(3 * version, 3 * version + 3), version)
    trained, version = [], 1
    steps = _clearing(client, prefetch=prefetch, clear=clear, fresh=lambda: {"weight_version": (">=", version - 1)})
    for batch in steps:
        trained.append(batch.columns["x"].tolist())
        version += 2
    assert trained in [[[0, 1, 2, 3], batch] for batch in second]  # what was read ahead may come first
    assert steps.num_stale == 4
    assert client.check_consumption_status("replay", ["train"])
    assert client.list_samples("replay").size == (0 if clear else 12)


@pytest.mark.parametrize(
    ("versions", "trained"), [([0, 1, 1, 1], [[2, 3]]), ([1, 1, 1, 0], [[0, 1]]), ([0, 1, 1, 0], [])], ids=str
)
def test_a_group_is_as_old_as_its_oldest_row(client, versions, trained):
    client.register_partition("replay", ["x"], 4, ["train"], grpo_group_size=2)
    tags = [{"weight_version": version} for version in versions]
    client.put_samples(["p0_g0", "p0_g1", "p1_g0", "p1_g1"], "replay", {"x": torch.arange(4)}, tags=tags)
    steps = _clearing(client, fresh=lambda: {"weight_version": (">=", 1)})
    assert [batch.columns["x"].tolist() for batch in steps] == trained
    assert steps.num_stale == 4 - 2 * len(trained)
    assert client.list_samples("replay").size == 0


@pytest.mark.parametrize("timeout_s", [None, STARTS_S])
def test_what_comes_too_old_while_it_waits_is_dropped(client, monkeypatch, timeout_s):
    """A store that is full of it takes no other rows."""
    monkeypatch.setattr(streams, "_PAUSE_S", 0.01)
    steps = _clearing(client, timeout_s=timeout_s, fresh=lambda: {"weight_version": (">=", 1)})
    batch = Background(lambda: next(steps))
    _put(client, range(4))
    eventually(lambda: not client.list_samples("replay").size, STARTS_S, "the stale rows are dropped")
    _put(client, range(4), 1)
    assert batch.result(STARTS_S).columns["x"].tolist() == [0, 1, 2, 3]
    steps.close()


def test_no_batch_in_time_is_an_error_that_says_so(client, monkeypatch):
    monkeypatch.setattr(streams, "_PAUSE_S", 0.01)
    _put(client, range(3), 1)
    with pytest.raises(ClaimTimeoutError, match=r"no batch within .* 3 of 4 samples were ready"):
        next(_clearing(client, timeout_s=0.1, fresh=lambda: {"weight_version": (">=", 1)}))
    with pytest.raises(InvalidRequestError, match="Expected lower bounds"):
        _clearing(client, fresh=lambda: {"weight_version": 1})
    with pytest.raises(InvalidRequestError, match="leave out dp_rank and tag_filter"):
        _clearing(client, fresh=dict, tag_filter={"weight_version": 1})


@ONLY_SYNC
def test_a_lease_that_was_lost_or_is_renewed_no_more_is_said_before_the_step(client):
    _put(client, range(12))
    with _clearing(client, lease_s=60.0, prefetch=0) as steps:
        batch = next(steps)
        batch.check()
        client.nack(batch.meta)  # as if it had come too late
        steps._feed.held.renew()
        with pytest.raises(LeaseExpiredError, match="held no longer"):
            batch.check()

    def refuse(*_):
        raise OperationTimeoutError("no answer")

    client.renew = refuse
    with _clearing(client, lease_s=0.2, prefetch=0) as steps:
        batch = next(steps)
        eventually(lambda: _is_refused(batch), STARTS_S, "the batch is no longer sure of its lease")


def _is_refused(batch):
    try:
        batch.check()
    except LeaseExpiredError:
        return True
    return False


# --- ranks ------------------------------------------------------------------------------------------------------------


def _of_ranks(client, size, num_rows, **terms):
    """What the batches of each rank hold. Ranks meet at each step, as in a collective."""
    client.register_partition("ranks", ["x", "text"], num_rows, ["t"])
    x = torch.arange(num_rows, dtype=torch.float64)[:, None].expand(-1, 3)
    client.put_samples([f"s{row}" for row in range(num_rows)], "ranks", {"x": x, "text": ["a"] * num_rows})
    step = threading.Barrier(size)

    def run(rank):
        trained = []
        terms.update(timeout_s=STARTS_S, dp_size=size)
        for batch in client.stream("ranks", "t", ["x", "text"], 2, dp_rank=rank, **terms):
            step.wait(STARTS_S)
            x, text = batch.columns["x"], batch.columns["text"]
            assert (x.dtype, len(x), len(text)) == (torch.float64, batch.meta.size, batch.meta.size)
            trained.append([int(row[0]) for row in x])
        return trained

    return in_threads(*(partial(run, rank) for rank in range(size)))


@pytest.mark.parametrize(
    ("size", "num_rows", "sampler"), [(2, 5, "balanced"), (3, 7, "first_write"), (2, 13, "freshest")]
)
def test_all_ranks_get_as_many_batches_the_last_of_which_may_be_empty(client, size, num_rows, sampler):
    trained = _of_ranks(client, size, num_rows, sampler=sampler)
    assert len(set(map(len, trained))) == 1, "a rank that has ended leaves the others waiting"
    assert [] in [batch for batches in trained for batch in batches]
    assert sorted(row for batches in trained for batch in batches for row in batch) == list(range(num_rows))
    assert client.check_consumption_status("ranks", ["t"])


def test_samples_that_are_fewer_than_the_ranks_are_dropped_or_refused_by_all(client):
    assert _of_ranks(client, 2, 5, uneven="drop") == [[[0, 1]], [[2, 3]]]
    assert client.check_consumption_status("ranks", ["t"])
    with pytest.raises(InvalidRequestError, match="give a batch to 1 of 2 ranks"):
        _of_ranks(client, 2, 5, uneven="error")
    assert not client.check_consumption_status("ranks", ["t"])


# --- asyncio ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _async_client(*middleware, **words):
    async with await connect_async({"backend": "noop", "middleware": list(middleware)}, **words) as client:
        await client.register_partition("p", ["x"], None, ["t", "u"])
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        yield client


@PREFETCH
async def test_a_cancelled_async_loop_loses_nothing(prefetch):
    async with _async_client() as client:

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


@PREFETCH
async def test_an_async_loop_that_stops_waiting_gets_the_batch_when_it_asks_again(prefetch):
    async with _async_client() as client, stream(client, "p", "t", ["x"], 3, prefetch=prefetch) as batches:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(batches), 0.05)
        await client.put_samples(["c", "d"], "p", {"x": torch.arange(2)})
        assert (await anext(batches)).meta.sample_ids == ["a", "b", "c"]
        if not prefetch:
            assert (await client.claim_meta("p", "t", ["x"], 1, timeout_s=20.0)).sample_ids == ["d"]


async def test_leases_are_renewed_while_calls_that_do_not_stop_the_event_loop_take_all_threads(faults, monkeypatch):
    monkeypatch.setattr(streams, "RENEWED_AFTER", 1 / 60)
    opened, names = threading.Event(), []

    def collate(meta, columns):
        names.append(threading.current_thread().name)
        opened.wait(60)

    async with _async_client(faults, threads=2) as client:
        batches = stream(client, "p", "t", ["x"], 1, lease_s=60.0, prefetch=0)
        await anext(batches)
        slow = [stream(client, "p", "u", ["x"], 1, prefetch=prefetch, collate=collate) for prefetch in (0, 1)]
        taken = [asyncio.create_task(anext(each)) for each in slow]
        try:
            async with asyncio.timeout(30):
                with faults.counting() as calls:
                    while calls.count("renew") < 3 or len(names) < 2:
                        await asyncio.sleep(0.01)
        finally:
            opened.set()
            await asyncio.gather(*taken)
            for each in (batches, *slow):
                await each.close()
    assert all(each.startswith("dataplane-stream") for each in names)
