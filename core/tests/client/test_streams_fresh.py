"""Streams that clear what was acked, that give nothing too old, and batches that are checked before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplane_core import connect, connect_async, stream
from dataplane_core.client import DataPlaneClient, streams
from dataplane_core.errors import ClaimTimeoutError, InvalidRequestError, LeaseExpiredError, OperationTimeoutError
from dataplane_testkit._timing import Background, eventually

WAIT_S = 60.0
prefetches = pytest.mark.parametrize("prefetch", [0, 2])


@pytest.fixture
def client():
    with connect({"backend": "noop"}) as client:
        client.register_partition("replay", ["x"], 12, ["train"])
        yield client


def put(client: DataPlaneClient, rows: range, weight_version: int = 0) -> None:
    client.put_samples(
        [f"v{weight_version}_p{row}_g0" for row in rows],
        "replay",
        {"x": torch.tensor(rows)},
        tags=[{"weight_version": weight_version}] * len(rows),
    )


def batches(client: DataPlaneClient, **options: Any) -> streams.Stream:
    return stream(client, "replay", "train", ["x"], 4, **{"clear": True, "timeout_s": WAIT_S, **options})


@prefetches
def test_rows_are_cleared_once_they_are_acked_also_those_that_a_killed_process_left(client, prefetch):
    put(client, range(12))
    client.ack(client.claim_meta("replay", "train", ["x"], 4, lease_s=60))  # killed before its clear
    trained = [batch.columns["x"].tolist() for batch in batches(client, prefetch=prefetch)]
    assert trained == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert client.list_samples("replay").size == 0


@pytest.mark.parametrize(("prefetch", "second"), [(0, [[6, 7, 8, 9]]), (2, [[6, 7, 8, 9], [8, 9, 10, 11]])], ids=str)
@pytest.mark.parametrize("clear", [True, False])
def test_what_is_too_old_is_dropped_and_never_given(client, prefetch, second, clear):
    for version in range(4):
        put(client, range(3 * version, 3 * version + 3), version)
    trained, version = [], 1
    steps = batches(client, prefetch=prefetch, clear=clear, fresh=lambda: {"weight_version": (">=", version - 1)})
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
    steps = batches(client, fresh=lambda: {"weight_version": (">=", 1)})
    assert [batch.columns["x"].tolist() for batch in steps] == trained
    assert client.list_samples("replay").size == 0


@pytest.mark.parametrize("timeout_s", [None, WAIT_S])
def test_what_comes_too_old_while_it_waits_is_dropped(client, monkeypatch, timeout_s):
    """A store that is full of it takes no other rows."""
    monkeypatch.setattr(streams, "_PAUSE_S", 0.01)
    steps = batches(client, timeout_s=timeout_s, fresh=lambda: {"weight_version": (">=", 1)})
    batch = Background(lambda: next(steps))
    put(client, range(4))
    eventually(lambda: not client.list_samples("replay").size, WAIT_S, "the stale rows are dropped")
    put(client, range(4), 1)
    assert batch.result(WAIT_S).columns["x"].tolist() == [0, 1, 2, 3]
    steps.close()


def test_no_batch_in_time_is_an_error_that_says_so(client, monkeypatch):
    monkeypatch.setattr(streams, "_PAUSE_S", 0.01)
    put(client, range(3), 1)
    with pytest.raises(ClaimTimeoutError, match=r"no batch within .* 3 of 4 samples were ready"):
        next(batches(client, timeout_s=0.1, fresh=lambda: {"weight_version": (">=", 1)}))
    with pytest.raises(InvalidRequestError, match="Expected lower bounds"):
        batches(client, fresh=lambda: {"weight_version": 1})
    with pytest.raises(InvalidRequestError, match="leave out dp_rank and tag_filter"):
        batches(client, fresh=dict, tag_filter={"weight_version": 1})


def test_a_lease_that_was_lost_or_is_renewed_no_more_is_said_before_the_step(client):
    put(client, range(12))
    with batches(client, lease_s=60.0, prefetch=0) as steps:
        batch = next(steps)
        batch.check()
        client.nack(batch.meta)  # as if it had come too late
        steps._feed.held.renew()
        with pytest.raises(LeaseExpiredError, match="held no longer"):
            batch.check()

    def refuse(*_: Any) -> None:
        raise OperationTimeoutError("no answer")

    client.renew = refuse
    with batches(client, lease_s=0.2, prefetch=0) as steps:
        batch = next(steps)
        eventually(lambda: _is_refused(batch), WAIT_S, "the batch is no longer sure of its lease")


def _is_refused(batch: streams.StreamBatch) -> bool:
    try:
        batch.check()
    except LeaseExpiredError:
        return True
    return False


@pytest.mark.anyio
async def test_an_async_stream_clears_and_drops_too():
    async with await connect_async({"backend": "noop"}) as client:
        await client.register_partition("replay", ["x"], 4, ["train"])
        tags = [{"weight_version": version} for version in (0, 1, 1, 2)]
        await client.put_samples(["a", "b", "c", "d"], "replay", {"x": torch.arange(4)}, tags=tags)
        trained, version = [], 1
        options = {"clear": True, "prefetch": 1, "fresh": lambda: {"weight_version": (">=", version)}}
        async for batch in stream(client, "replay", "train", ["x"], 2, **options):
            trained.append(batch.columns["x"].tolist())
            version = 2
        assert trained == [[1, 2], [3]]
        assert (await client.list_samples("replay")).size == 0
