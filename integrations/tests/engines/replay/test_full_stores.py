"""Collectors on a store that is full, and on one that stops answering."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest

from dataplane_core import connect
from dataplane_core.errors import OperationTimeoutError
from dataplane_core.middleware import Middleware
from dataplane_core.spec import hookimpl
from dataplane_integrations.errors import CollectorFailedError
from dataplane_integrations.replay import Collector, InOrderPolicy, ReplayBuffer, parse_sample_id
from dataplane_testkit import backend_of

Make = Callable[..., ReplayBuffer]
Held = Callable[[], list[str]]
WAIT_S = 60.0


def train_on_all(buffer, num_groups=2):
    """Trains to the end, on two groups per version; the prompts in the order of training."""
    prompts: list[int] = []
    while (meta := buffer.select(num_groups, timeout_s=WAIT_S)).size:
        prompts += [parse_sample_id(sample_id)["prompt"] for sample_id in meta.sample_ids[::2]]
        buffer.consume(meta)
        if len(prompts) % 2 == 0:
            buffer.set_weight_version(buffer.weight_version + 1)
    return prompts


#: What the first batch of 2 groups takes; the store is given room for one and a half.
ROOM = 120


class ImpatientPuts(Middleware):
    """Puts may take 1 s; all else as long as a busy machine needs."""

    @hookimpl(wrapper=True)
    def put_samples(self, request):
        request.deadline = min(request.deadline, time.monotonic() + 1.0)
        return (yield)


@contextlib.contextmanager
def impatient_client(backend, **options):
    """A client with a partition, whose puts are impatient."""
    with connect({"backend": backend, "options": options, "middleware": [ImpatientPuts()]}) as client:
        client.register_partition("replay", ["input_ids", "input_lengths"], None, ["train"], grpo_group_size=2)
        yield client


@pytest.fixture
def small_store(request, monkeypatch):
    """A store of little room that blocks or raises when it is full. Collectors soon look again whether there is any."""
    monkeypatch.setattr("dataplane_integrations.replay._collector._LONGEST_PAUSE_S", 0.05)
    backend, on_full = request.param
    with impatient_client(backend, capacity_bytes=ROOM, on_full=on_full) as client:
        yield client


@pytest.mark.parametrize(
    "small_store",
    [(backend, on_full) for backend in ("noop", "redis_store") for on_full in ("block", "raise")],
    ids="-".join,
    indirect=True,
)
@pytest.mark.parametrize("written_by", ["collector", "rollout"])
def test_a_full_store_holds_rollouts_back_and_loses_nothing(small_store, answers, write, written_by):
    buffer = ReplayBuffer(
        small_store,
        "replay",
        InOrderPolicy(max_staleness=3, groups_per_version=2),
        group_size=2,
        num_prompts=10,
    )
    generated: list[str] = []

    def rollout(reservations):
        generated.extend(each.group for each in reservations)
        return answers(reservations) if written_by == "collector" else write(small_store, reservations)

    client = small_store if written_by == "collector" else None
    with Collector(buffer, rollout, client=client) as collector:
        give_up = time.monotonic() + WAIT_S
        while not collector.counts.held_back:  # until the store is full
            assert time.monotonic() < give_up, collector.counts
            time.sleep(0.005)
        assert len(small_store.list_samples("replay").sample_ids) < 16
        assert sorted(train_on_all(buffer, 1)) == list(range(10))
    counts = collector.counts
    assert counts.groups == 10
    if small_store.backend_name == "noop":  # a server may besides be slow to answer, which is a failure
        assert counts.failures == 0
        if written_by == "collector":  # what found no room has waited, and was not generated again
            assert len(generated) == 10
    assert small_store.list_samples("replay").sample_ids == []


@pytest.fixture
def stalling_store():
    """A Redis, and what makes it stop answering; it goes on with the end of the test."""
    with impatient_client("redis_store") as client:
        pid = backend_of(client)._server.pid

        def stall():
            client._config = client.config.model_copy(update={"op_timeout_s": 0.2})
            os.kill(pid, signal.SIGSTOP)

        yield client, stall
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("written_by", ["collector", "rollout"])
def test_a_store_that_stops_answering_is_not_waited_for_without_end(stalling_store, answers, write, written_by):
    client, stall = stalling_store
    policy = InOrderPolicy(max_staleness=1, groups_per_version=2)
    buffer = ReplayBuffer(client, "replay", policy, group_size=2)

    def rollout(reservations):
        stall()
        return answers(reservations) if written_by == "collector" else write(client, reservations)

    collector = Collector(buffer, rollout, client=client if written_by == "collector" else None, max_failures=2)
    collector.start()
    with pytest.raises(CollectorFailedError, match=r"gave up after 2 failures .* OperationTimeoutError") as info:
        buffer.select(1, timeout_s=WAIT_S)
    assert isinstance(info.value.__cause__, OperationTimeoutError)
    with pytest.raises(CollectorFailedError):
        collector.stop()
