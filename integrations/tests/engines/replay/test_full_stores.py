"""Collectors on a store that is full."""

import time

import pytest
from replaying import REGISTRATION, WAIT_S, answers, train_on_all, write

from dataplane_core import connect
from dataplane_core.middleware import Middleware
from dataplane_core.spec import hookimpl
from dataplane_integrations.replay import Collector, InOrderPolicy, ReplayBuffer
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
    """A store with a partition and impatient puts. Collectors soon look again for room."""
    monkeypatch.setattr("dataplane_integrations.replay._collector._LONGEST_PAUSE_S", 0.05)
    backend, options = request.param
    with connect({"backend": backend, "options": options, "middleware": [ImpatientPuts()]}) as client:
        client.register_partition("replay", **REGISTRATION)
        yield client


SMALL = [
    (backend, {"capacity_bytes": ROOM, "on_full": on_full})
    for backend in ("noop", "redis_store")
    for on_full in ("block", "raise")
]


@pytest.mark.parametrize("client", SMALL, ids=lambda each: f"{each[0]}-{each[1]['on_full']}", indirect=True)
@pytest.mark.parametrize("written_by", ["collector", "rollout"])
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
