"""GRPO through the data plane, in one file: a small transformer learns to add one to each digit, from rewards alone.

              prompts               metas, rewards
    driver -----------> rollout worker -----------> driver: advantages
                          |  ^                        |
            token columns |  | weights                | which rows, in which microbatches
                          v  |                        v
                       policy worker 0 <-- gloo --> policy worker 1      (FSDP2)

Each worker is a Ray actor. The driver holds metas and a few small values, never a token tensor: those go through the
store that ``--backend`` names. With one seed the bits are the same over every backend. Takes two minutes on two cores.
Shape legend: ``N`` sequences, ``S`` tokens of the longest, ``V`` vocabulary, ``C`` width of the model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dataplane_core import BatchedDataDict
from dataplane_integrations.ray import RayWorkerGroup, wait_for_all
from dataplane_integrations.rollout import DataPlaneRolloutMixin, RolloutReceipt, mint_sample_ids
from dataplane_integrations.trainer import Batching, DataPlanePolicy, DynamicBatching
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin

CHARACTERS = "_.0123456789+="  # token i is the i-th character: "_" pads, "." ends an answer
CONTEXT, MAX_NEW_TOKENS, WIDTH, LAYERS, HEADS = 24, 6, 64, 2, 4
PROMPTS_PER_STEP, ANSWERS_PER_PROMPT, NUM_WORKERS, NUM_EVAL = 32, 8, 2, 128
LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM, CLIP_RATIO, KL_WEIGHT = 2e-3, 5, 1.0, 0.2, 0.005
BATCHING = Batching(dynamic=DynamicBatching(train_mb_tokens=1024, sequence_length_round=4))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        wider, narrower = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.LayerNorm(WIDTH), wider, nn.GELU(), narrower)

    def forward(self, hidden_nsc: Tensor, cache: dict[Block, tuple[Tensor, Tensor]] | None) -> Tensor:
        query, key, value = self.qkv(hidden_nsc).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:  # keys and values of the tokens before these
            if self in cache:
                key, value = torch.cat([cache[self][0], key], 2), torch.cat([cache[self][1], value], 2)
            cache[self] = key, value
        # one new token sees all that the cache holds; several at once each see what precedes them
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=hidden_nsc.shape[1] > 1)
        hidden_nsc = hidden_nsc + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden_nsc + self.feed_forward(hidden_nsc)


class Transformer(nn.Module):
    """Token ids in, next-token logits out. Its 0.1 million weights are random, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token_embedding = nn.Embedding(len(CHARACTERS), WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS)))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5)

    def forward(self, ids_ns: Tensor, cache: dict[Any, Any] | None = None, start: int = 0) -> Tensor:
        """Logits (N, S, V). With a cache, these tokens follow the ``start`` ones that it holds."""
        positions_s = torch.arange(start, start + ids_ns.shape[1])
        hidden_nsc = self.token_embedding(ids_ns) + self.position_embedding(positions_s)
        for block in self.blocks:
            hidden_nsc = block(hidden_nsc, cache)
        return self.head(hidden_nsc)

    def token_logprobs(self, data: BatchedDataDict) -> Tensor:
        """Log-probability (N, S) of every token given those before it; 0 for the first one, and on padding."""
        ids_ns = data["input_ids"]
        logprobs_nsv = self(ids_ns)[:, :-1].log_softmax(dim=-1)
        chosen_ns = nn.functional.pad(logprobs_nsv.gather(-1, ids_ns[:, 1:, None]).squeeze(-1), (1, 0))
        return torch.where(torch.arange(ids_ns.shape[1]) < data["input_lengths"].unsqueeze(1), chosen_ns, 0.0)

    @torch.no_grad()
    def answer(self, prompts: Sequence[str], seed: int, greedy: bool = False) -> tuple[BatchedDataDict, list[str]]:
        """Answers every prompt. Returns the columns that a rollout writes, and what the answers spell."""
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        fed, width = 0, int(prompt_lengths.max()) + MAX_NEW_TOKENS
        ids_ns = torch.tensor([[CHARACTERS.index(char) for char in prompt.ljust(width, "_")] for prompt in prompts])
        logprobs_ns, mask_ns = torch.zeros(ids_ns.shape), torch.zeros(ids_ns.shape)
        open_n = torch.ones(len(prompts), dtype=torch.bool)
        generator, cache = torch.Generator().manual_seed(seed), {}
        # All rows advance together: one that still has prompt left is fed its prompt, the others the token just drawn.
        for position in range(int(prompt_lengths.min()), width):
            all_logprobs_nv = self(ids_ns[:, fed:position], cache, fed)[:, -1].log_softmax(dim=-1)
            fed = position
            drawn_n = torch.multinomial(all_logprobs_nv.softmax(dim=-1), 1, generator=generator).squeeze(1)
            if greedy:
                drawn_n = all_logprobs_nv.argmax(dim=-1)
            writes_n = open_n & (position >= prompt_lengths) & (position < prompt_lengths + MAX_NEW_TOKENS)
            ids_ns[writes_n, position] = drawn_n[writes_n]
            logprobs_ns[writes_n, position] = all_logprobs_nv[writes_n, drawn_n[writes_n]]
            mask_ns[writes_n, position] = 1.0
            open_n &= ~writes_n | (drawn_n != CHARACTERS.index("."))
        lengths_n = prompt_lengths + mask_ns.sum(1).long()
        answers = [decode(ids_s[mask_s == 1].tolist()) for ids_s, mask_s in zip(ids_ns, mask_ns, strict=True)]
        columns = {"input_ids": ids_ns, "generation_logprobs": logprobs_ns, "token_mask": mask_ns}
        columns |= {"input_lengths": lengths_n, "sample_mask": torch.ones(len(prompts))}
        return BatchedDataDict(columns), answers


def reward(prompt: str, answer: str) -> float:
    """The share of characters that are right: ``2749=`` is answered by ``3850`` and an end."""
    right = "".join(str((int(digit) + 1) % 10) for digit in prompt[:-1]) + "."
    return sum(a == b for a, b in zip(right, answer, strict=False)) / max(len(right), len(answer))


def decode(tokens: Sequence[int]) -> str:
    """What tokens spell: the tokenizer of ``dataplane read``."""
    return "".join(CHARACTERS[token] for token in tokens)


def seed_of(seed: int, purpose: str, step: int) -> int:
    """A seed for every purpose and step, so that no draw depends on those before it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()[:8], "little") % 2**63


def group_advantages(rewards_n: Tensor, group_size: int = ANSWERS_PER_PROMPT) -> Tensor:
    """How much better each answer (N,) is than its group, the adjacent answers to one prompt, in its deviations."""
    groups = rewards_n.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    spread = groups.std(dim=1, correction=0, keepdim=True)
    return torch.where(spread > 0, centred / (spread + 1e-6), 0.0).view(-1)


def policy_loss(logprobs_ns: Tensor, data: BatchedDataDict, num_tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A microbatch's part of the loss and of some metrics, which are means over the answer tokens of all ranks."""
    ratio_ns = (logprobs_ns - data["prev_logprobs"]).exp()
    clipped_ns = ratio_ns.clamp(1.0 - CLIP_RATIO, 1.0 + CLIP_RATIO)
    policy_ns = -torch.minimum(ratio_ns * data["advantages"], clipped_ns * data["advantages"])
    away_ns = data["reference_policy_logprobs"] - logprobs_ns
    kl_ns = away_ns.exp() - away_ns - 1.0  # k3: unbiased, never negative, of low variance
    values = {
        "loss": policy_ns + KL_WEIGHT * kl_ns,
        "kl": kl_ns.detach(),
        "clipped_fraction": (ratio_ns != clipped_ns).float(),
        "generation_logprob_error": (data["generation_logprobs"] - data["prev_logprobs"]).abs(),
    }
    parts = {name: (value_ns * data["token_mask"]).sum() / num_tokens for name, value_ns in values.items()}
    return parts.pop("loss"), parts


class RolloutWorker(DataPlaneRolloutMixin):
    """Answers prompts with the newest weights, and writes the answers to the store."""

    def __init__(self, seed: int) -> None:
        self.seed, self.model = seed, Transformer(seed)

    def rollout(self, step: int, prompts: Sequence[str], partition: str) -> RolloutReceipt:
        """The receipt has the meta of the rows, and the small columns that the driver needs."""
        repeated = [prompt for prompt in prompts for _ in range(ANSWERS_PER_PROMPT)]
        rows, answers = self.model.answer(repeated, seed_of(self.seed, "rollout", step))
        rows["reward"] = torch.tensor(list(map(reward, repeated, answers)))
        ids = mint_sample_ids([f"s{step}_p{number}" for number in range(len(prompts))], ANSWERS_PER_PROMPT)
        return self._first_write(rows, sample_ids=ids, partition_id=partition, carry_fields=("reward", "input_lengths"))

    def update(self, weights: dict[str, Tensor], prompts: Sequence[str]) -> float:
        """Takes new weights. Returns the share of these prompts that they answer exactly, by greedy decoding."""
        self.model.load_state_dict(weights)
        _, answers = self.model.answer(prompts, seed=0, greedy=True)
        return list(map(reward, prompts, answers)).count(1.0) / len(prompts)


class PolicyWorker(FSDP2DataPlaneMixin):
    """A shard of the policy. The mixin reads its rows from the store, and writes back what it computes."""

    def __init__(self, rank: int, seed: int, rendezvous: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_WORKERS)
        self.mesh = dist.init_device_mesh("cpu", (NUM_WORKERS,), mesh_dim_names=("dp",))
        self.model, self.reference = Transformer(seed), Transformer(seed).requires_grad_(False)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=self.mesh)
        parameters, warm_up = self.model.parameters(), lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)

    def weights(self) -> dict[str, Tensor]:
        """The whole policy. Collective."""
        return {name: shard.full_tensor() for name, shard in self.model.state_dict().items()}

    @torch.no_grad()
    def get_logprobs(self, data: BatchedDataDict, model: Transformer | None = None, **_: Any) -> dict[str, Tensor]:
        microbatches = data.get_batch(0).make_microbatch_iterator_with_dynamic_shapes()
        parts = [(model or self.model).token_logprobs(microbatch) for microbatch in microbatches]
        width = data["input_ids"].shape[1]
        return {"logprobs": torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])}

    def get_reference_policy_logprobs(self, data: BatchedDataDict, **_: Any) -> dict[str, Tensor]:
        return {"reference_logprobs": self.get_logprobs(data, self.reference)["logprobs"]}

    def train(self, data: BatchedDataDict, loss_fn: Any, **_: Any) -> dict[str, Any]:
        """One optimizer step. The microbatches are those of the driver's plan: equally many on each rank."""
        loss, num_tokens, metrics = torch.zeros(()), data["token_mask"].sum(), {}
        dist.all_reduce(num_tokens)
        microbatches = list(data.get_batch(0).make_microbatch_iterator_with_dynamic_shapes())
        for number, microbatch in enumerate(microbatches, start=1):
            self.model.set_requires_gradient_sync(number == len(microbatches))
            part, own = loss_fn(self.model.token_logprobs(microbatch), microbatch, num_tokens)
            (part * NUM_WORKERS).backward()  # gradients are averaged over the ranks, and the parts must add up
            loss += part.detach()
            for name, value in own.items():
                metrics.setdefault(name, []).append(value.item())
        dist.all_reduce(loss)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM).full_tensor()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return {"global_loss": loss, "grad_norm": norm, "all_mb_metrics": metrics, "tokens": int(num_tokens)}


def train(policy: DataPlanePolicy, rollout: Any, workers: Sequence[Any], seed: int, steps: int) -> Iterator[Any]:
    """The driver's loop. Yields the metrics of each step."""
    prompts = Path(__file__).with_name("prompts.txt").read_text().split()
    held_out = [prompts[number * len(prompts) // NUM_EVAL] for number in range(NUM_EVAL)]
    prompts = [prompt for prompt in prompts if prompt not in held_out]
    for step in range(1, steps + 1):
        start = time.monotonic()
        partition = policy.prepare_step(group_size=ANSWERS_PER_PROMPT, keep_rows=False)  # clears the step before
        chosen = random.Random(seed_of(seed, "prompts", step)).sample(prompts, PROMPTS_PER_STEP)
        receipt = ray.get(rollout.rollout.remote(step, chosen, partition))

        rewards_n = torch.tensor(receipt.carry["reward"])
        advantages_ns = group_advantages(rewards_n).unsqueeze(1).repeat(1, max(receipt.carry["input_lengths"]))
        meta = policy.write_to_dataplane(receipt.meta, {"advantages": advantages_ns})
        meta = policy.get_reference_policy_logprobs_from_meta(policy.get_logprobs_from_meta(meta))
        result = policy.train_from_meta(meta, policy_loss)
        # The weights go from worker to worker: only a reference to those of worker 0 passes through the driver.
        calls = {f"policy worker {rank}": worker.weights.remote() for rank, worker in enumerate(workers)}
        calls["rollout worker"] = rollout.update.remote(calls["policy worker 0"], held_out)
        *_, exact = wait_for_all(calls, timeout_s=600, doing="handing over the weights")
        record = {"step": step, "reward": rewards_n.mean().item(), "exact": exact, "tokens": result["tokens"]}
        record |= {name: result[name].item() for name in ("loss", "grad_norm")}
        record |= {name: math.fsum(parts) for name, parts in result["all_mb_metrics"].items()}
        yield {**record, "seconds": round(time.monotonic() - start, 3)}


def main() -> None:
    """Trains. Writes the metrics, the reward curve, a recording, and the rows of the last step to the folder --out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name, default in {"backend": "shm_store", "seed": 0, "steps": 150, "out": Path("out")}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    args = parser.parse_args()
    shutil.rmtree(args.out / "events", ignore_errors=True)
    recorder = {"recorder": {"folder": str(args.out.resolve() / "events"), "payload": "none"}}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    actor, ranks = ray.remote(num_cpus=0.5), range(NUM_WORKERS)
    rollout = actor(RolloutWorker).remote(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        workers = [actor(PolicyWorker).remote(rank, args.seed, f"{folder}/rendezvous") for rank in ranks]
        plane = {"backend": args.backend, "middleware": [recorder]}
        policy = DataPlanePolicy(RayWorkerGroup(workers), plane, batching=BATCHING)
    records = []
    with policy:
        ray.get(rollout.setup_data_plane.remote(policy.client.config))
        for record in train(policy, rollout, workers, args.seed, args.steps):
            records.append(record)
            shown = (f"{name} {record[name]:.3f}" for name in ("reward", "exact", "loss", "kl", "seconds"))
            print(f"step {record['step']:>3}/{args.steps}", *shown, sep="  ", flush=True)
            policy.client.mark_step(record["step"], loss=record["loss"], reward=record["reward"])
        policy.client.save(args.out / "last_step")
    (args.out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    axes = Figure(figsize=(9, 5), layout="tight").subplots()
    for name, label in (("reward", "mean reward of a step's answers"), ("exact", "held-out prompts answered exactly")):
        axes.plot(range(1, args.steps + 1), [record[name] for record in records], label=label)
    axes.set(xlabel="step", ylim=(0, 1.03))
    axes.legend()
    axes.figure.savefig(args.out / "reward.png")


if __name__ == "__main__":
    main()
