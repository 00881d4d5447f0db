"""Runs of `examples/grpo.py` on a Ray that is there: over a backend, or without a data plane, to be compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpo
import psutil
import ray
import torch

from dataplane_core import KVBatchMeta
from dataplane_core.batch import BatchedDataDict
from dataplane_core.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS, padded_length
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.ray import RayWorkerGroup, wait_for_all
from dataplane_integrations.rollout import RolloutReceipt

EXAMPLES = Path(grpo.__file__).parent
SEED = 5
STEPS = 3
#: What a step computed, without what it took.
Results = list[dict[str, Any]]


def actor(cls: type, *arguments: Any) -> Any:
    """Starts an actor that finds the examples, and the modules beside the tests."""
    folders = [EXAMPLES, Path(__file__).parent, EXAMPLES.parent / "integrations" / "tests"]
    python_path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    return ray.remote(cls).options(num_cpus=0.5, runtime_env={"env_vars": variables}).remote(*arguments)


def policy_workers(folder: Path, cls: type = grpo.PolicyWorker, *arguments: Any) -> list[Any]:
    """Starts the ranks, which meet in a folder that has seen no others."""
    ranks = range(grpo.NUM_WORKERS)
    return [actor(cls, rank, SEED, str(folder / "rendezvous"), *arguments) for rank in ranks]


@contextmanager
def run_actors(folder: Path, rollout: type, worker: type = grpo.PolicyWorker, *arguments: Any) -> Iterator[Any]:
    """The ranks and the rollout worker of a run. When the block ends, so do their processes."""
    workers, generator = policy_workers(folder, worker, *arguments), actor(rollout, SEED)
    actors = [generator, *workers]
    try:
        yield workers, generator
    finally:
        pids = ray.get([handle.__ray_call__.remote(lambda _: os.getpid()) for handle in actors])
        processes = [psutil.Process(pid) for pid in pids]
        for handle in actors:
            ray.kill(handle)
        psutil.wait_procs(processes, timeout=60)


def plane_of(backend: str, folder: Path) -> dict[str, Any]:
    """A store of this folder alone, where others may run beside it."""
    return {"backend": backend, "options": {"namespace": folder.name} if backend == "shm_store" else {}}


def results_of(records: Any) -> Results:
    """The steps' results."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def run_over(
    plane: dict[str, Any],
    folder: Path,
    *,
    rollout: type = grpo.RolloutWorker,
    worker: type = grpo.PolicyWorker,
    arguments: Sequence[Any] = (),
    dp_ranks: Sequence[int] | None = None,
    batching: Any = grpo.BATCHING,
    on_step: Callable[[DataPlanePolicy, dict[str, Any]], None] = lambda policy, record: None,
) -> Results:
    """A run over a data plane."""
    records = []
    with (
        run_actors(folder, rollout, worker, *arguments) as (workers, generator),
        DataPlanePolicy(RayWorkerGroup(workers, dp_ranks), plane, batching=batching) as policy,
    ):
        ray.get(generator.setup_data_plane.remote(policy.client.config))
        for record in grpo.train(policy, generator, workers, SEED, STEPS):
            records.append(record)
            on_step(policy, record)
    return results_of(records)


def run_in_memory(folder: Path) -> Results:
    """The same without a data plane: whole batches go through the driver."""
    with run_actors(folder, InMemoryRollout) as (workers, generator):
        return results_of(grpo.train(InMemoryPolicy(workers), generator, workers, SEED, STEPS))


def answered(worker: grpo.RolloutWorker, prompts: Sequence[str], seed: int) -> BatchedDataDict:
    """The rows of each prompt's answers, with their rewards."""
    repeated = [prompt for prompt in prompts for _ in range(grpo.ANSWERS_PER_PROMPT)]
    rows, answers = worker.model.answer(repeated, seed)
    rows["reward"] = torch.tensor(list(map(grpo.reward, repeated, answers)))
    return rows


def train_on(policy: DataPlanePolicy, meta: KVBatchMeta) -> tuple[torch.Tensor, dict[str, Any]]:
    """Trains on answers that are in the store. Returns their rewards, and what the workers say."""
    rewards_n = policy.client.get_data(meta, ["reward"])["reward"]
    advantages_ns = grpo.group_advantages(rewards_n).unsqueeze(1).repeat(1, max(meta.sequence_lengths or []))
    meta = policy.write_to_dataplane(meta, {"advantages": advantages_ns})
    meta = policy.get_reference_policy_logprobs_from_meta(policy.get_logprobs_from_meta(meta))
    return rewards_n, policy.train_from_meta(meta, grpo.policy_loss)


class InMemoryRollout(grpo.RolloutWorker):
    """Gives its rows to the driver, in place of a meta."""

    def _first_write(self, rows: Any, *, carry_fields: Sequence[str], **_: Any) -> RolloutReceipt:
        return RolloutReceipt(meta=rows, carry={name: rows[name].tolist() for name in carry_fields})


class InMemoryPolicy:
    """What `grpo.train` calls of a `DataPlanePolicy`; a meta is here the batch itself."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers

    def prepare_step(self, **_: Any) -> str:
        return ""

    def write_to_dataplane(self, rows: BatchedDataDict, columns: dict[str, torch.Tensor]) -> BatchedDataDict:
        width = padded_length(int(rows["input_lengths"].max()), 4)
        inside_ns = torch.arange(width) < rows["input_lengths"].unsqueeze(1)
        batch = BatchedDataDict()
        for name, column in {**rows, **columns}.items():
            if column.dim() > 1:
                column = torch.nn.functional.pad(column, (0, max(0, width - column.shape[1])))[:, :width]
                column = torch.where(inside_ns, column, torch.zeros_like(column))
            batch[name] = column
        return batch

    def get_logprobs_from_meta(self, batch: BatchedDataDict) -> BatchedDataDict:
        return self._with_column(batch, "get_logprobs", "logprobs", "prev_logprobs")

    def get_reference_policy_logprobs_from_meta(self, batch: BatchedDataDict) -> BatchedDataDict:
        names = "get_reference_policy_logprobs", "reference_logprobs", "reference_policy_logprobs"
        return self._with_column(batch, *names)

    def train_from_meta(self, batch: BatchedDataDict, loss_fn: Any) -> dict[str, Any]:
        results, _ = self._call("train", batch, DP_TRAIN_FIELDS, loss_fn)
        names = results[0]["all_mb_metrics"]
        metrics = {name: [value for result in results for value in result["all_mb_metrics"][name]] for name in names}
        return {**results[0], "loss": results[0]["global_loss"], "all_mb_metrics": metrics}

    def _with_column(self, batch: BatchedDataDict, method: str, key: str, name: str) -> BatchedDataDict:
        results, came_from = self._call(method, batch, LP_SEED_FIELDS)
        joined = BatchedDataDict.from_batches([BatchedDataDict(result) for result in results])
        joined.reorder_data(came_from)
        return BatchedDataDict({**batch, name: joined[key]})

    def _call(self, method: str, batch: BatchedDataDict, fields: Sequence[str], *arguments: Any) -> Any:
        """Each rank works on its shard. Returns the results, and where each row of the joined shards came from."""
        columns = BatchedDataDict({name: batch[name] for name in fields})
        plan = grpo.BATCHING.shard_args("train")
        shards, came_from = columns.shard_by_batch_size(len(self._workers), **plan)
        calls = {
            f"policy worker {rank}": getattr(worker, method).remote(shard, *arguments)
            for rank, (worker, shard) in enumerate(zip(self._workers, shards, strict=True))
        }
        return wait_for_all(calls, timeout_s=400, doing=method), came_from
