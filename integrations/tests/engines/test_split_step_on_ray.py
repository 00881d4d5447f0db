"""A split step on workers that are Ray actors, where one fails while another is still busy."""

from __future__ import annotations

import time

import pytest

from dataplane_core import KVBatchMeta, kv_first_write
from dataplane_integrations import DataPlanePolicy, DataPlaneWorkerMixin
from dataplane_integrations.errors import WorkerFailedError
from dataplane_integrations.ray import RayWorkerGroup

FIELDS = ["input_ids", "input_lengths"]
#: How long the busy worker waits for the driver; only a driver that waits for it in turn uses it up.
PATIENCE_S = 20.0


class Worker(DataPlaneWorkerMixin):
    """Rank 0 raises in a portion; rank 1 is busy with it until ``released`` exists, as in a collective."""

    def __init__(self, rank, released):
        self.rank, self.released = rank, released
        self.fails = False
        self.was_released: bool | None = None
        self.portions = 0
        self.rows_at_abort: int | None = None

    def _local_coords(self):
        return {"data_parallel": self.rank}

    def fail_from_now_on(self):
        self.fails = True

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        self.portions = 0

    def train_microbatch(self, data):
        if self.fails and self.rank == 0:
            raise RuntimeError("out of memory")
        if self.fails:
            give_up = time.monotonic() + PATIENCE_S
            while not self.released.exists() and time.monotonic() < give_up:
                time.sleep(0.02)
            self.was_released = self.released.exists()
        self.portions += 1

    def finish_train_step(self):
        raise AssertionError("the step has failed")

    def abort_train_step(self):
        self.portions = 0
        self.rows_at_abort = self._require_dp_client().list_samples("train").size

    def report(self):
        return {
            "open": self._split_step_open,
            "portions": self.portions,
            "rows at abort": self.rows_at_abort,
            "released": self.was_released,
        }


@pytest.fixture
def actors(local_ray, tmp_path):
    started = [local_ray.remote(Worker).options(num_cpus=0.5).remote(rank, tmp_path / "released") for rank in range(2)]
    yield started
    for actor in started:
        local_ray.kill(actor)


def test_a_failed_portion_is_told_while_another_worker_is_still_busy_with_it(local_ray, actors, tmp_path, make_batch):
    config = {"backend": "redis_store", "options": {"namespace": "split-step"}, "op_timeout_s": 30}
    with DataPlanePolicy(RayWorkerGroup(actors), config, train_fields=FIELDS, timeout_s=120) as policy:
        policy.prepare_step()
        meta: KVBatchMeta = kv_first_write(
            make_batch([2, 1, 3, 2]), sample_ids=list("abcd"), dp_client=policy.client, partition_id="train"
        )
        policy.begin_train_step(1.0)
        policy.train_microbatch_from_meta(meta.slice(0, 2))
        local_ray.get([actor.fail_from_now_on.remote() for actor in actors])

        with pytest.raises(WorkerFailedError, match=r"policy worker 0 failed while training.*out of memory") as caught:
            policy.train_microbatch_from_meta(meta.slice(2, 4))
        (tmp_path / "released").touch()

        assert isinstance(caught.value.__cause__, RuntimeError)
        assert policy.client.list_samples("train").size == 0, "rows of earlier portions too"
        failed, busy = local_ray.get([actor.report.remote() for actor in actors])
        assert busy["released"], "the driver did not wait for it"
        for worker in (failed, busy):  # the busy one aborts once its call ends
            assert (worker["open"], worker["portions"]) == (False, 0)
            assert worker["rows at abort"] == 0, "cleared before anyone is waited for"
