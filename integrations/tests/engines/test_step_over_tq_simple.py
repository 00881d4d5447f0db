"""A step over a multi-process backend: a rollout actor, two FSDP2 workers, and a driver that holds metas."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_policy import TinyWorker, batch_of, in_one_process, loss_of

from dataplane_core import KVBatchMeta
from dataplane_core.batch import BatchedDataDict
from dataplane_core.client import DataPlaneClient
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.ray import RayWorkerGroup, wait_for_all
from dataplane_integrations.rollout import DataPlaneRolloutMixin, RolloutReceipt, mint_sample_ids
from dataplane_integrations.trainer.batching import Batching, DynamicBatching
from dataplane_testkit._timing import STARTS_S, eventually

pytestmark = pytest.mark.long  # `make test` has a whole run of the example over the same backend and workers

LENGTHS = [4, 1, 3, 2, 6, 5, 2, 7]
CONFIG = {
    "backend": "tq_simple",
    "options": {"instance": "integrations-step", "num_storage_units": 2},
    "op_timeout_s": 120,
}


def generated() -> BatchedDataDict:
    """What the rollout makes: the driver adds the advantages."""
    batch = batch_of(LENGTHS, seed=1)
    batch["generation_logprobs"] = torch.zeros(batch["input_ids"].shape)
    del batch["advantages"]
    return batch


class Rollout(DataPlaneRolloutMixin):
    """The rollout actor."""

    def generate(self, step: int, partition_id: str) -> RolloutReceipt:
        ids = mint_sample_ids([f"s{step}_p{i}" for i in range(4)], 2)
        return self._first_write(generated(), sample_ids=ids, partition_id=partition_id)

    def generate_again(self, sample_ids: list[str], rows: list[int], partition_id: str) -> RolloutReceipt:
        return self._first_write(generated().select_indices(rows), sample_ids=sample_ids, partition_id=partition_id)


class Worker(TinyWorker):
    """A policy worker with a real model, in a process of its own."""

    def __init__(self, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.port = port

    def start(self) -> int:
        store = dist.TCPStore("127.0.0.1", self.port, 2, self.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2, timeout=timedelta(seconds=40))
        super().__init__((2, 1, 1))
        self.optimizer.param_groups[0]["lr"] = 0.0  # every step is from the same weights
        return self.rank


@pytest.fixture(scope="module")
def run(local_ray: Any) -> Iterator[tuple[Any, DataPlanePolicy]]:
    ray = local_ray
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rollout = ray.remote(Rollout).options(num_cpus=0.5).remote()
    workers = [ray.remote(Worker).options(num_cpus=0.5).remote(rank, port) for rank in range(2)]
    wait_for_all({f"worker {i}": w.start.remote() for i, w in enumerate(workers)}, timeout_s=120, doing="starting")
    batching = Batching(dynamic=DynamicBatching(train_mb_tokens=16, sequence_length_round=4))

    def generate_again(meta: KVBatchMeta, lost: Sequence[str]) -> KVBatchMeta:
        policy.client.clear_samples(list(lost), meta.partition_id)
        rows = [meta.sample_ids.index(each) for each in lost]
        again = rollout.generate_again.remote(list(lost), rows, meta.partition_id)
        wait_for_all({"rollout": again}, timeout_s=120, doing="generating again")
        return meta

    group = RayWorkerGroup(workers)
    policy = DataPlanePolicy(group, CONFIG, batching=batching, timeout_s=120, replace_lost=generate_again)
    wait_for_all({"rollout": rollout.setup_data_plane.remote(policy.client.config)}, timeout_s=120, doing="attaching")
    yield rollout, policy
    wait_for_all({"rollout": rollout.close_data_plane.remote()}, timeout_s=120, doing="detaching")
    policy.close()
    for actor in (rollout, *workers):
        ray.kill(actor)


def _generate(rollout: Any, step: int, partition_id: str) -> KVBatchMeta:
    [receipt] = wait_for_all(
        {"rollout": rollout.generate.remote(step, partition_id)}, timeout_s=120, doing="generating"
    )
    assert receipt.carry == {"input_lengths": LENGTHS}
    meta: KVBatchMeta = receipt.meta
    return meta


def _end_a_unit(client: DataPlaneClient) -> None:
    """Ends a storage unit that holds rows, and waits until its process serves no more."""
    unit = next(each for each in client.list_units() if each.num_rows)
    host, _, port = unit.address.rpartition(":")

    def is_gone() -> bool:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except ConnectionRefusedError:
            return True
        return False

    client.remove_unit(unit.name, now=True)
    eventually(is_gone, within_s=STARTS_S, what="the end of the unit")


def test_a_step_gives_the_loss_and_gradient_of_one_process(run: Any) -> None:
    rollout, policy = run
    batch = batch_of(LENGTHS, seed=1)
    [loss], [norm] = in_one_process(batch, 1)

    for step in range(2):
        partition = policy.prepare_step(num_samples=8, group_size=2)
        meta = _generate(rollout, step, partition)
        if step == 1:
            _end_a_unit(policy.client)
        meta = policy.get_logprobs_from_meta(meta)
        assert (policy.num_lost > 0) == (step == 1)
        meta = policy.get_reference_policy_logprobs_from_meta(meta)
        meta = policy.write_to_dataplane(meta, {"advantages": batch["advantages"]})
        result = policy.train_from_meta(meta, loss_of)

        read = policy.read_from_dataplane(meta, ["prev_logprobs"])
        expected = torch.nn.functional.pad(batch["prev_logprobs"], (0, 1))
        assert torch.allclose(read["prev_logprobs"], expected, atol=1e-6), "as wide as the workers' forward"
        assert result["loss"].item() == pytest.approx(loss, abs=1e-5)
        assert result["grad_norm"].item() == pytest.approx(norm, rel=1e-5)
        assert sum(result["all_mb_metrics"]["loss"]) / sum(LENGTHS) == pytest.approx(loss, abs=1e-5)
        policy.finish_step(meta)
        assert policy.client.list_samples("train").size == 0
