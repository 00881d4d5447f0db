"""GRPO with rollouts of several rows: an agent works on its task part by part, and compacts its context in between.

The last row seals a rollout. Some die on the way: their groups end without them. Each row has its rollout's advantage.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import grpo
import torch

from dataplane_core import DataPlaneClient, connect, kv_first_write, materialize, stream
from dataplane_core.batch import rollouts_of
from dataplane_core.ledger import group_of, rollout_of
from dataplane_integrations.rollout import mint_sample_ids
from dataplane_integrations.weights import WeightReader, open_weights, publish_weights

TASKS_PER_STEP, STEPS_AHEAD, DIES = 16, 2, 0.03
TRAINED_ON = ["input_ids", "input_lengths", "token_mask", "generation_logprobs"]


def roll_out(plane: dict[str, object], name: str) -> None:
    """A process that works on tasks with the newest weights. There may be any number; they may come and go."""
    torch.set_num_threads(1)
    with connect(plane, bootstrap=False) as client:
        model, weights = grpo.Transformer(seed=0), WeightReader(client, name)
        for batch in stream(client, "tasks", "rollout", ["task"], batch_size=4, lease_s=5.0, prefetch=0):
            model.load_state_dict(weights.newest() or model.state_dict())
            for uid, task in zip(batch.meta.sample_ids, batch.columns["task"].tolist(), strict=True):
                work(client, model, uid, task.split())


def work(client: DataPlaneClient, model: grpo.Transformer, uid: str, parts: Sequence[str]) -> None:
    """Makes the rollouts of a task side by side, a row of each for each part."""
    rollouts, last = mint_sample_ids([uid], grpo.ANSWERS_PER_PROMPT), len(parts) - 1
    if client.list_samples("rows", sample_ids=[f"{rollout}/{last}" for rollout in rollouts]).size:
        return  # the process that had this task before was killed after its last put
    rewards = dict.fromkeys(rollouts, 0.0)
    for number, part in enumerate(parts):
        rollouts = [rollout for rollout in rollouts if rollout == rollouts[0] or random.random() > DIES]
        rows, answers = model.answer([part] * len(rollouts), seed=random.getrandbits(60))  # the context is this part
        tags: list[dict[str, int | float]] = []
        for rollout, answer in zip(rollouts, answers, strict=True):
            rewards[rollout] += grpo.reward(part, answer) / len(parts)
            seals = {"rollout_rows": len(parts), "group_rollouts": len(rollouts), "reward": rewards[rollout]}
            tags.append(seals if number == last else {})
        ids = [f"{rollout}/{number}" for rollout in rollouts]
        kv_first_write(rows, sample_ids=ids, dp_client=client, partition_id="rows", tags=tags)


def advantages(rewards: torch.Tensor, rollouts: Sequence[str]) -> torch.Tensor:
    """How much better each rollout is than the others of its group. Groups have as many rollouts as have not died."""
    groups = rewards.split([len(list(members)) for _, members in groupby(rollouts, group_of)])
    return torch.cat([grpo.group_advantages(group, len(group)) for group in groups])


def train(client: DataPlaneClient, steps: int) -> Iterator[tuple[int, list[str], list[str], float]]:
    """Trains on the groups that are whole first. Yields the step, its rows and rollouts, and their mean reward."""
    prompts = Path(__file__).with_name("prompts.txt").read_text().split()
    model = grpo.Transformer(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=grpo.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    num_put = 0
    with stream(client, "rows", "train", TRAINED_ON, TASKS_PER_STEP, prefetch=0, clear=True) as batches:
        for step in range(1, steps + 1):
            publish_weights(client, step - 1, model.state_dict())
            while num_put < min(step - 1 + STEPS_AHEAD, steps) * TASKS_PER_STEP:
                task = " ".join(random.choices(prompts, k=random.randint(1, 3)))
                client.put_samples([f"t{num_put}"], "tasks", {"task": [task]})
                num_put += 1
            meta, rows = (batch := next(batches)).meta, materialize(batch.columns)
            rollouts, rollout_of_row = rollouts_of(meta.sample_ids)
            named = zip(meta.sample_ids, meta.tags, strict=True)
            reward_of = {rollout_of(row): tags["reward"] for row, tags in named if "reward" in tags}  # of its last row
            rewards = torch.tensor([reward_of[rollout] for rollout in rollouts])
            rows["advantages"] = advantages(rewards, rollouts)[rollout_of_row].unsqueeze(1)
            logprobs_ns = model.token_logprobs(rows)
            rows |= {"prev_logprobs": rows["generation_logprobs"], "reference_policy_logprobs": logprobs_ns.detach()}
            optimizer.zero_grad()
            grpo.policy_loss(logprobs_ns, rows, rows["token_mask"].sum())[0].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), grpo.MAX_GRAD_NORM)
            optimizer.step()
            yield step, meta.sample_ids, rollouts, rewards.mean().item()


def main() -> None:
    """Trains, and kills a rollout process after a third of the steps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--backend", default="shm_store")
    chosen = parser.parse_args()
    plane = {"backend": chosen.backend, "options": {"namespace": f"agents-{multiprocessing.current_process().pid}"}}
    with connect(plane) as client:
        client.register_partition("tasks", ["task"], None, ["rollout"])
        client.register_partition("rows", TRAINED_ON, None, ["train"], rollouts=True)
        open_weights(client)
        start = multiprocessing.get_context("spawn").Process
        processes = [start(target=roll_out, args=(plane, f"rollout-{number}"), daemon=True) for number in range(2)]
        for process in processes:
            process.start()
        trained: list[str] = []
        for step, rows, rollouts, reward in train(client, chosen.steps):
            trained += (groups := list(dict.fromkeys(map(group_of, rows))))
            counts = f"{len(groups)} tasks, {len(rollouts)} rollouts, {len(rows)} rows"
            print(f"step {step:>3}/{chosen.steps}  reward {reward:.3f}  {counts}", flush=True)
            if step == max(1, chosen.steps // 3):
                processes[0].kill()
        for process in processes:
            process.terminate()
            process.join()
    print(f"trained on {len(set(trained))} of {chosen.steps * TASKS_PER_STEP} tasks, {len(trained)} groups")


if __name__ == "__main__":
    main()
