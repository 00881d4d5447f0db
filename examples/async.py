"""Asynchronous GRPO with plain processes: rollouts run ahead of the trainer, and one of them is killed on the way.

             prompts             answers             answers with rewards
    trainer ---------> rollouts ---------> scorer ----------------------> trainer
       |                  ^
       +---- weights -----+

Each process is a loop over a stream of the store. A stream takes rows under leases, which end when its process dies:
what the killed process had taken goes to the other one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpo
import torch

from dataplane_core import DataPlaneClient, KVBatchMeta, connect, kv_first_write, materialize, stream
from dataplane_core.ledger import group_of
from dataplane_integrations.rollout import mint_sample_ids, missing_groups
from dataplane_integrations.weights import WeightReader, open_weights, publish_weights

STEPS_AHEAD = 2  # the prompts of so many steps are out at a time: bounds how old the weights behind an answer are
TRAINED_ON = ["input_ids", "input_lengths", "token_mask", "generation_logprobs", "reward"]


def roll_out(plane: dict[str, object], name: str) -> None:
    """A process that answers prompts with the newest weights. There may be any number; they may come and go."""
    torch.set_num_threads(1)
    with connect(plane, bootstrap=False) as client:
        model, weights = grpo.Transformer(seed=0), WeightReader(client, name)
        for batch in stream(client, "prompts", "rollout", ["prompt"], batch_size=4, lease_s=5.0, prefetch=0):
            model.load_state_dict(weights.newest() or model.state_dict())
            # the process that had these prompts before may have died after it wrote their answers
            missing = missing_groups(client, "answers", batch.meta.sample_ids, grpo.ANSWERS_PER_PROMPT)
            prompt_of = dict(zip(batch.meta.sample_ids, batch.columns["prompt"].tolist(), strict=True))
            prompts = [prompt_of[uid] for uid in missing for _ in range(grpo.ANSWERS_PER_PROMPT)]
            if prompts:
                rows, answers = model.answer(prompts, seed=random.getrandbits(60))
                texts, by = zip(prompts, answers, strict=True), {"rollout": name, "weight_version": weights.version}
                tags = [{"prompt": prompt, "answer": answer, **by} for prompt, answer in texts]
                ids = mint_sample_ids(missing, grpo.ANSWERS_PER_PROMPT)
                kv_first_write(rows, sample_ids=ids, dp_client=client, partition_id="answers", tags=tags)


def score(plane: dict[str, object]) -> None:
    """A process that adds the column ``reward``."""
    with connect(plane, bootstrap=False) as client:
        for batch in stream(client, "answers", "score", ["input_lengths"], batch_size=grpo.ANSWERS_PER_PROMPT):
            rewards = [grpo.reward(tags["prompt"], tags["answer"]) for tags in batch.meta.tags]
            client.put_samples(batch.meta.sample_ids, "answers", {"reward": torch.tensor(rewards)})


def train(client: DataPlaneClient, steps: int) -> Iterator[tuple[int, KVBatchMeta, float]]:
    """Trains on what is answered and scored first. Yields the step, its rows and their mean reward."""
    prompts = Path(__file__).with_name("prompts.txt").read_text().split()
    model = grpo.Transformer(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=grpo.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    num_put, batch_size = 0, grpo.PROMPTS_PER_STEP * grpo.ANSWERS_PER_PROMPT
    with stream(client, "answers", "train", TRAINED_ON, batch_size, prefetch=0) as batches:
        for step in range(1, steps + 1):
            publish_weights(client, step - 1, model.state_dict())
            while num_put < min(step - 1 + STEPS_AHEAD, steps) * grpo.PROMPTS_PER_STEP:
                client.put_samples([f"p{num_put}"], "prompts", {"prompt": [random.choice(prompts)]})
                num_put += 1
            batch = next(batches)  # acks the one before
            rows = materialize(batch.columns)
            logprobs_ns = model.token_logprobs(rows)
            rows["prev_logprobs"], rows["reference_policy_logprobs"] = rows["generation_logprobs"], logprobs_ns.detach()
            rows["advantages"] = grpo.group_advantages(rows["reward"]).unsqueeze(1)
            optimizer.zero_grad()
            grpo.policy_loss(logprobs_ns, rows, rows["token_mask"].sum())[0].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), grpo.MAX_GRAD_NORM)
            optimizer.step()
            # only what nobody holds any more: a process may have died, or stand still, before its ack
            acked = {*client.list_consumed("prompts", "rollout"), *client.list_consumed("answers", "score")}
            done = [uid for uid in client.list_consumed("answers", "train") if {uid, group_of(uid)} <= acked]
            client.clear_samples(done, "answers")
            client.clear_samples(list(set(map(group_of, done))), "prompts")
            yield step, batch.meta, rows["reward"].mean().item()


def main() -> None:
    """Trains, and kills a rollout process after a third of the steps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    plane = {"backend": "shm_store", "options": {"namespace": f"async-{multiprocessing.current_process().pid}"}}
    with connect(plane) as client:
        client.register_partition("prompts", ["prompt"], None, ["rollout"])
        client.register_partition("answers", TRAINED_ON, None, ["score", "train"], grpo.ANSWERS_PER_PROMPT)
        open_weights(client)
        start = multiprocessing.get_context("spawn").Process
        processes = [start(target=roll_out, args=(plane, f"rollout-{number}"), daemon=True) for number in range(2)]
        processes.append(start(target=score, args=(plane,), daemon=True))
        for process in processes:
            process.start()
        trained: set[str] = set()
        for step, meta, mean_reward in train(client, steps):
            trained.update(map(group_of, meta.sample_ids))
            age = step - 1 - sum(tags["weight_version"] for tags in meta.tags) / len(meta)
            by = dict(Counter(tags["rollout"] for tags in meta.tags))
            print(f"step {step:>3}/{steps}  reward {mean_reward:.3f}  weights {age:.1f} steps old  {by}", flush=True)
            if step == max(1, steps // 3):
                processes[0].kill()
                print(f"killed rollout-0, process {processes[0].pid}", flush=True)
        for process in processes:
            process.terminate()
            process.join()
    print(f"trained on {len(trained)} of {steps * grpo.PROMPTS_PER_STEP} prompts; rollout-0: {processes[0].exitcode}")


if __name__ == "__main__":
    main()
