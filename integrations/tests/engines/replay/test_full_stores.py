"""Collectors on a store that is full, and on one that stops answering."""

import os
import signal
import time

import pytest
from replaying import WAIT_S, answers, train_on_all, write

from dataplane_core import connect
from dataplane_core.errors import OperationTimeoutError
from dataplane_core.middleware import Middleware
from dataplane_core.spec import hookimpl
from dataplane_integrations.errors import CollectorFailedError
from dataplane_integrations.replay import Collector, InOrderPolicy, ReplayBuffer
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually

#: What the first batch of 2 groups takes; the store is given room for one and a half.
ROOM = 120


class ImpatientPuts(Middleware):
    """Puts may take 1 s; all else as long as a busy machine needs."""

    @hookimpl(wrapper=True)
    def put_samples(self, request):
        request.deadline = min(request.deadline, time.monotonic() + 1.0)
        return (yield)


@pytest.fixture
def client(request, monkeypatch):
    """A store, by default a Redis, with a partition and impatient puts. Collectors soon look again for room."""
    monkeypatch.setattr("dataplane_integrations.replay._collector._LONGEST_PAUSE_S", 0.05)
    backend, options = getattr(request, "param", ("redis_store", {}))
    with connect({"backend": backend, "options": options, "middleware": [ImpatientPuts()]}) as client:
        client.register_partition("replay", ["input_ids", "input_lengths"], None, ["train"], grpo_group_size=2)
        yield client


written_by_either = pytest.mark.parametrize("written_by", ["collector", "rollout"])
SMALL = [
    (backend, {"capacity_bytes": ROOM, "on_full": on_full})
    for backend in ("noop", "redis_store")
    for on_full in ("block", "raise")
]


@pytest.mark.parametrize("client", SMALL, ids=lambda each: f"{each[0]}-{each[1]['on_full']}", indirect=True)
@written_by_either
def test_a_full_store_holds_rollouts_back_and_loses_nothing(client, written_by):
    policy = InOrderPolicy(max_staleness=3, groups_per_version=2)
    buffer = ReplayBuffer(client, "replay", policy, group_size=2, num_prompts=10)
    generated = []

    def rollout(reservations):
        generated.extend(each.group for each in reservations)
        return answers(reservations) if written_by == "collector" else write(client, reservations)

    with Collector(buffer, rollout, client=client if written_by == "collector" else None) as collector:
        eventually(lambda: collector.counts.held_back, WAIT_S, "a store that is full")
        assert len(client.list_samples("replay").sample_ids) < 16
        assert sorted(train_on_all(buffer, 1)) == list(range(10))
    counts = collector.counts
    assert counts.groups == 10
    if client.backend_name == "noop":  # a server may besides be slow to answer, which is a failure
        assert counts.failures == 0
        if written_by == "collector":  # what found no room has waited, and was not generated again
            assert len(generated) == 10
    assert client.list_samples("replay").sample_ids == []


@written_by_either
def test_a_store_that_stops_answering_is_not_waited_for_without_end(client, written_by):
    policy = InOrderPolicy(max_staleness=1, groups_per_version=2)
    buffer = ReplayBuffer(client, "replay", policy, group_size=2)
    server = backend_of(client)._server.pid

    def rollout(reservations):
        client._connection.config = client.config.model_copy(update={"op_timeout_s": 0.2})
        os.kill(server, signal.SIGSTOP)
        return answers(reservations) if written_by == "collector" else write(client, reservations)

    collector = Collector(buffer, rollout, client=client if written_by == "collector" else None, max_failures=2)
    collector.start()
    try:
        with pytest.raises(CollectorFailedError, match=r"gave up after 2 failures .* OperationTimeoutError") as info:
            collector.wait(WAIT_S)
        assert isinstance(info.value.__cause__, OperationTimeoutError)
        with pytest.raises(OperationTimeoutError):
            buffer.select(1, timeout_s=WAIT_S)
    finally:
        os.kill(server, signal.SIGCONT)
