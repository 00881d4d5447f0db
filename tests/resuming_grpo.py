"""Run as a program: `examples/grpo.py` made to go on where it was killed. The command is the same for every start.

``resuming_grpo.py JOB``: ``JOB`` is a JSON file: ``folder``, ``plane``, ``ray`` (an address), ``steps``, ``every``.

The rows of a step lie in a partition of its own, in a store that outlives the processes, until a save has what was
learnt from them. A start goes on from the newest save. Of the steps after it, it has those answers generated that the
store lacks: an answer follows from the weights, the seed, the step and its portion of the prompts.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import grpo
import ray
import torch.distributed.checkpoint as dcp
from grpo_runs import SEED, actor, answered, policy_workers, train_on
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.ray import RayWorkerGroup
from dataplane_integrations.rollout import FoundRollouts, mint_sample_ids, missing_groups

#: Prompts that are answered together, and whose answers are written by one put.
PORTION = 4
PORTIONS = range(0, grpo.PROMPTS_PER_STEP, PORTION)


class Rollout(grpo.RolloutWorker):
    """Generates portions of a step."""

    def portion(self, step: int, first: int, prompts: list[str], partition: str, uids: list[str]) -> None:
        rows = answered(self, prompts, grpo.seed_of(self.seed, f"rollout/{first}", step))
        ids = mint_sample_ids(uids, grpo.ANSWERS_PER_PROMPT)
        self._first_write(rows, sample_ids=ids, partition_id=partition)


class Worker(grpo.PolicyWorker):
    """Writes its part of the training state, and takes it over."""

    def save(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()["last_epoch"]}
        dcp.save(state, checkpoint_id=folder)

    def restore(self, folder: str, step: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": 0}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.schedule.load_state_dict({**self.schedule.state_dict(), "last_epoch": step})


def newest_save(folder: Path) -> Path | None:
    saves = sorted(folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return saves[-1] if saves else None


def main(job: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    found = FoundRollouts(folder / "found.jsonl")
    ray.init(address=job["ray"], log_to_driver=False, logging_level="ERROR")
    meeting = folder / uuid.uuid4().hex
    meeting.mkdir()
    workers, rollout = policy_workers(meeting, Worker), actor(Rollout, SEED)
    policy = DataPlanePolicy(
        RayWorkerGroup(workers), job["plane"], batching=grpo.BATCHING, timeout_s=400, clear_on_failure=False
    )
    with policy:
        client = policy.client
        ray.get(rollout.setup_data_plane.remote(client.config))
        records = []
        if save := newest_save(folder):
            records = json.loads((save / "records.json").read_text())
            ray.get([worker.restore.remote(str(save), len(records)) for worker in workers])
            weights = [worker.weights.remote() for worker in workers]
            ray.get(rollout.update.remote(weights[0], ["1="]))
        drop(client, len(records))  # what a start that was killed after its save has left
        for step in range(len(records) + 1, job["steps"] + 1):
            records.append(run_step(policy, rollout, workers, step, found))
            if step % job["every"] == 0 or step == job["steps"]:
                unfinished, place = folder / "unfinished", folder / f"step_{step}"
                shutil.rmtree(unfinished, ignore_errors=True)
                ray.get([worker.save.remote(str(unfinished)) for worker in workers])
                (unfinished / "records.json").write_text(json.dumps(records))
                unfinished.rename(place)
                drop(client, step)
    print(found)


def run_step(policy: DataPlanePolicy, rollout: Any, workers: list[Any], step: int, found: FoundRollouts) -> Any:
    client, partition, size = policy.client, f"train-{step}", grpo.ANSWERS_PER_PROMPT
    interrupted = partition in client.list_partitions()
    policy.prepare_step(group_size=size, partition_id=partition)
    prompts = Path(grpo.__file__).with_name("prompts.txt").read_text().split()
    chosen = random.Random(grpo.seed_of(SEED, "prompts", step)).sample(prompts, grpo.PROMPTS_PER_STEP)
    uids = [f"s{step}_p{number}" for number in range(len(chosen))]
    missing = {int(uid.partition("_p")[2]) // PORTION for uid in missing_groups(client, partition, uids, size)}
    if interrupted:
        found.add(step, len(uids) * size, (len(PORTIONS) - len(missing)) * PORTION * size)
    for first in PORTIONS:
        if first // PORTION in missing:
            part = slice(first, first + PORTION)
            ray.get(rollout.portion.remote(step, first, chosen[part], partition, uids[part]))
    meta = client.list_samples(partition, sample_ids=mint_sample_ids(uids, size))
    rewards_n, result = train_on(policy, meta)
    weights = [worker.weights.remote() for worker in workers]
    ray.get(rollout.update.remote(weights[0], ["1="]))
    return {"step": step, "reward": rewards_n.mean().item(), "loss": result["loss"].item(), **result["all_mb_metrics"]}


def drop(client: Any, step: int) -> None:
    """Drops the rows of the steps up to this one."""
    names = {f"train-{number}" for number in range(1, step + 1)}
    for name in names.intersection(client.list_partitions()):
        client.clear_samples(None, name)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
