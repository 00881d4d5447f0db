"""Trains the same model with TRL's AsyncGRPOTrainer: it takes whatever answers are there, and drops stale ones.

    python examples/trl/train_async.py

Leaves ``metrics.jsonl`` (what the trainer logs, a line per step) and ``summary.json`` in the folder given by ``--out``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import train
from cpu import without_a_gpu
from datasets import Dataset
from rollouts import ANSWERS, PROMPTS
from toy import DIGITS, Generator, build_model, build_tokenizer, draw_prompts, evaluate, reward
from transformers import PrinterCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from dataplane_core import DataPlaneClient, connect
from dataplane_integrations.trl_async import SAMPLE_FIELDS, StoreRolloutWorker, StoreWeightTransfer
from dataplane_integrations.weights import WEIGHTS


def run(config: dict[str, Any], config_file: Path, out: Path) -> None:
    """One run, from random weights to the summary."""
    began = time.monotonic()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        without_a_gpu()
    options, own_options = config["rollouts"], config["asynchronous"]
    model, tokenizer = build_model(config["seed"]), build_tokenizer()
    model.save_pretrained(out / "model")  # AsyncGRPOTrainer loads it by its name
    generate = Generator(model, tokenizer)
    before = evaluate(generate, tokenizer)
    print(f"before: held-out prompts: sampled {before['sampled']:.3f}, greedy {before['greedy']:.3f}", flush=True)
    dataset = Dataset.from_dict({"prompt": draw_prompts(config["steps"] * config["prompts_per_step"], config["seed"])})
    with connect(config["data_plane"]) as client:
        weights = StoreWeightTransfer(client)
        worker = StoreRolloutWorker(
            client,
            ANSWERS,
            "train",
            claim_size=config["answers_per_prompt"],
            weights=weights,
            buffer_size=own_options["buffer_size"],
            lease_s=options["lease_s"],
        )
        trainer = AsyncGRPOTrainer(
            model=str(out / "model"),
            reward_funcs=reward,  # not called: the rollout processes do
            args=AsyncGRPOConfig(
                **train.common_arguments({**config, "save_steps": 0}, out),
                gradient_checkpointing=False,
                token_budget=0,  # a step is trained on per_device_train_batch_size answers
                max_staleness=own_options["max_staleness"],
                heartbeat_stale_after_s=options["timeout_s"],
            ),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[train.StepLines()],
            rollout_worker=worker,
            weight_transfer=weights,
        )
        trainer.remove_callback(PrinterCallback)  # `StepLines` prints
        with (
            train.rollout_processes(options["processes"], "--config", config_file, "--asynchronous"),
            partitions(client, config, dataset["prompt"]),
        ):
            trainer.train()
    model.load_state_dict(trainer.model.state_dict())
    after = evaluate(generate, tokenizer)
    print(f"after:  held-out prompts: sampled {after['sampled']:.3f}, greedy {after['greedy']:.3f}", flush=True)
    metrics = [line for line in trainer.state.log_history if "reward" in line]
    summary = {
        "evaluation": {"before": before, "after": after},
        "answers_acked": worker.acked,
        "staleness": sum(line["sample/staleness_mean"] for line in metrics) / len(metrics),
        "seconds": round(time.monotonic() - began, 1),
    }
    train.write_lines(out / "metrics.jsonl", metrics)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary))
    print(f"written to {out}: metrics.jsonl, summary.json")


@contextlib.contextmanager
def partitions(client: DataPlaneClient, config: dict[str, Any], prompts: list[str]) -> Iterator[None]:
    """Opens the partitions, and writes all prompts, in order. At the end they are dropped, also after an error."""
    answers = config["answers_per_prompt"]
    client.register_partition(ANSWERS, SAMPLE_FIELDS, None, ["train"], grpo_group_size=answers)
    client.register_partition(PROMPTS, ["prompt"], None, ["rollout"])
    tags = {"into": ANSWERS, "answers": answers, "max_new_tokens": DIGITS, "temperature": 1.0}
    # the trainer reads one step ahead
    numbers = range(len(prompts) + 2 * config["prompts_per_step"])
    columns = {"prompt": [prompts[number % len(prompts)] for number in numbers]}
    client.put_samples([f"p{number}" for number in numbers], PROMPTS, columns, tags=[tags] * len(numbers))
    try:
        yield
    finally:
        for name in (PROMPTS, ANSWERS, WEIGHTS):
            client.clear_samples(None, name)


if __name__ == "__main__":
    sys.exit(train.main(run, __doc__, "out/trl_async"))
