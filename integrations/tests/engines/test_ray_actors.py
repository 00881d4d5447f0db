"""A run's actors on Ray: placed or refused with the numbers, started together, ended alone."""

import time

import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.errors import PlacementError, WorkerFailedError
from dataplane_integrations.ray import ActorRequest, check_placement, start_actors

pytestmark = pytest.mark.usefixtures("local_ray")


class Rank:
    """One rank."""

    def __init__(self, rank, fail=False, hang=False):
        if fail:
            raise ValueError(f"rank {rank} has no weights")
        if hang:
            time.sleep(600)
        self.rank = rank

    def where(self, scale=1):
        return self.rank * scale


def _requests(count, **options):
    return [ActorRequest(name=f"worker {i}", cls=Rank, args=(i,), **options) for i in range(count)]


def test_several_actors_share_a_cpu_and_form_a_worker_group():
    with start_actors(_requests(4, num_cpus=0.25), timeout_s=60) as group:
        workers = group.workers(["worker 3", "worker 1"], dp_ranks=[0, 0])
        assert workers.call("where", [(), ()], {"scale": 10}, timeout_s=30, doing="asking") == [30, 10]
        assert group.workers().dp_ranks == [0, 1, 2, 3]
        with pytest.raises(InvalidRequestError, match="no actor 'worker 9'"):
            group.workers(["worker 9"])
    assert group.actors == {}
    group.close()
    check_placement(_requests(8, num_cpus=1))  # waits until Ray has noticed that they have ended


def test_too_few_cpus_are_said_with_numbers():
    with pytest.raises(
        PlacementError, match=r"3 actors cannot be placed: they ask for 9\.5 logical CPUs, the cluster has 8, .* free"
    ) as caught:
        start_actors(_requests(3, num_cpus=3), reserve_cpus=0.5)
    assert caught.value.hint is not None
    assert "num_cpus=" in caught.value.hint


def test_what_the_cluster_lacks_is_said_and_what_others_hold_counts(monkeypatch):
    with pytest.raises(PlacementError, match="ask for 4 GPUs, the cluster has 0"):
        check_placement(_requests(4, num_gpus=1))
    with start_actors(_requests(2, num_cpus=3)):
        monkeypatch.setattr("dataplane_integrations.ray.actors._SETTLE_S", 0.0)  # nothing has ended
        with pytest.raises(PlacementError, match=r"ask for 2\.5 logical CPUs, the cluster has 8, 2 of them free"):
            check_placement(_requests(1, num_cpus=2.5))
    monkeypatch.undo()
    # two nodes of 4: the sum would do; a second node takes longer to start than all these tests
    monkeypatch.setattr("dataplane_integrations.ray.actors._nodes", lambda: [{"CPU": 4.0}, {"CPU": 4.0}])
    with pytest.raises(PlacementError, match="'worker 0' cannot be placed: it asks for 6 CPUs, the largest of 2 nodes"):
        check_placement(_requests(1, num_cpus=6))


def test_a_constructor_that_raises_ends_the_others():
    broken = ActorRequest(name="worker 4", cls=Rank, args=(4,), kwargs={"fail": True})
    with pytest.raises(WorkerFailedError, match=r"worker 4.*rank 4 has no weights"):
        start_actors([*_requests(2), broken], timeout_s=60)
    check_placement(_requests(8, num_cpus=1))


def test_actors_that_do_not_come_up_are_named_with_the_clusters_state():
    with pytest.raises(PlacementError, match=r"no answer from worker 0.*The cluster has 8 logical CPUs"):
        start_actors(_requests(1, kwargs={"hang": True}), timeout_s=0.01)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "0 requests"),
        ([ActorRequest(name="a", cls=Rank)] * 2, "all different"),
        ([ActorRequest(name="a", cls=Rank, num_cpus=-1)], "'a' asks for -1"),
    ],
)
def test_requests_that_make_no_sense_are_refused(requests, message):
    with pytest.raises(InvalidRequestError, match=message):
        check_placement(requests)
