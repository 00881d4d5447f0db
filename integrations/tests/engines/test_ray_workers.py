"""Workers that are Ray actors: called together, waited for with a deadline, failures told by their cause."""

import os
import time
from types import SimpleNamespace

import pytest

from dataplane_core.errors import MissingDataError
from dataplane_integrations.errors import ReplicaLeaderError, WorkerFailedError, WorkerTimeoutError
from dataplane_integrations.ray import RayWorkerGroup, wait_for_all

GROUP_MODULE = "dataplane_integrations.ray.worker_group"


class Actor:
    """One rank."""

    def echo(self, value, scale=1):
        return value * scale

    def sleep(self, seconds):
        time.sleep(seconds)

    def meet(self, folder, name, count):
        """Whether so many of these calls run at the same time. Each waits for the others."""
        (folder / name).touch()
        give_up = time.monotonic() + 60
        while len(list(folder.iterdir())) < count and time.monotonic() < give_up:
            time.sleep(0.02)
        return len(list(folder.iterdir())) == count

    def fail(self, how):
        if how == "leader":
            raise MissingDataError("'a_g0' lacks 'advantages'.", backend="tq_simple")
        if how == "sibling":
            raise ReplicaLeaderError("the leader, rank 0, failed")
        if how == "peer":
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
        if how == "die":
            os._exit(1)
        time.sleep(60)


@pytest.fixture(scope="module")
def group(local_ray):
    actors = [
        local_ray.remote(Actor).options(num_cpus=0.1, max_concurrency=8, max_restarts=-1).remote() for _ in range(3)
    ]
    local_ray.get([actor.echo.remote(0) for actor in actors])
    yield RayWorkerGroup(actors)
    for actor in actors:
        local_ray.kill(actor)


def _fail(group, *how, timeout_s=30.0):
    with pytest.raises(WorkerFailedError) as caught:
        group.call("fail", [(each,) for each in how], timeout_s=timeout_s, doing="training")
    return caught.value


def test_every_worker_gets_its_own_arguments_and_calls_run_at_the_same_time(group, tmp_path):
    assert group.call("echo", [(1,), (2,), (3,)], {"scale": 10}, timeout_s=30, doing="echoing") == [10, 20, 30]
    assert group.dp_ranks == [0, 1, 2]
    assert not group.in_process
    calls = [(tmp_path, name, 3) for name in "abc"]
    assert group.call("meet", calls, timeout_s=240, doing="meeting") == [True] * 3


def test_the_first_failure_ends_the_wait_and_a_leaders_own_error_is_told_before_its_siblings(group, monkeypatch):
    monkeypatch.setattr(f"{GROUP_MODULE}._CAUSE_GRACE_S", 0.1)
    error = _fail(group, "hang", "leader", "hang")
    assert str(error).startswith("policy worker 1 failed while training: MissingDataError: [tq_simple] 'a_g0' lacks")
    assert isinstance(error.__cause__, MissingDataError)
    assert error.worker == "policy worker 1"
    assert not error.died
    assert "in fail" in error.details
    monkeypatch.setattr(f"{GROUP_MODULE}._CAUSE_GRACE_S", 60.0)
    assert _fail(group, "sibling", "peer", "leader").worker == "policy worker 2"


def test_after_a_failure_the_others_have_the_grace_together(group, local_ray, monkeypatch):
    now = [0.0]

    def an_answer_every_2_s(pending, *, num_returns, timeout):
        now[0] += min(timeout, 2.0)
        return (pending[:1], pending[1:]) if timeout >= 2.0 else ([], pending)

    failing, other, _ = group._workers
    calls = {"first": failing.fail.remote("leader"), **{str(n): other.echo.remote(n) for n in range(20)}}
    monkeypatch.setattr(local_ray, "wait", an_answer_every_2_s)
    monkeypatch.setattr(f"{GROUP_MODULE}.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(f"{GROUP_MODULE}._CAUSE_GRACE_S", 3.0)
    with pytest.raises(WorkerFailedError, match="first failed"):
        wait_for_all(calls, timeout_s=60.0, doing="training")
    assert now == [5.0], "the failure came after 2 s"


def test_a_death_explains_the_errors_of_its_peers(group, monkeypatch):
    monkeypatch.setattr(f"{GROUP_MODULE}._CAUSE_GRACE_S", 60.0)  # Ray may take seconds to see a death
    error = _fail(group, "peer", "die", "sibling", timeout_s=90.0)
    assert error.worker == "policy worker 1"
    assert error.died
    assert "policy worker 1 died while training" in str(error)
    give_up = time.monotonic() + 120
    while True:  # Ray starts it again, for the tests that follow
        try:
            group.call("echo", [(1,), (2,), (3,)], timeout_s=60, doing="coming back")
            break
        except WorkerFailedError:
            assert time.monotonic() < give_up
            time.sleep(0.1)


def test_workers_that_do_not_answer_are_named(group):
    with pytest.raises(WorkerTimeoutError, match="no answer from policy worker 1 within 5 s while sleeping") as caught:
        group.call("sleep", [(0.0,), (60.0,), (0.0,)], timeout_s=5, doing="sleeping")
    assert isinstance(caught.value, TimeoutError)
