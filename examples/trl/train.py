"""Trains a small model with TRL's GRPOTrainer. Other processes generate the answers; a data plane connects them.

    python examples/trl/train.py

Leaves ``metrics.jsonl`` (what GRPOTrainer logs, a line per step), ``timeline.jsonl`` (what ran when), ``summary.json``
and ``reward.png`` in the folder given by ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is marked experimental

import torch
import yaml
from checkpoints import Checkpoints
from datasets import Dataset
from plot import plot_run
from rollouts import DataPlaneRollouts
from toy import DIGITS, Generator, build_model, build_tokenizer, draw_prompts, evaluate, reward
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from dataplane_core import DataPlaneError, connect
from dataplane_integrations.rollout import FoundRollouts

#: Settings that change no result.
_CHANGE_NO_RESULT = ("data_plane", "steps", "save_steps", "asynchronous", "processes", "lease_s", "timeout_s")


class StepLines(TrainerCallback):
    """Prints a line for every tenth step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "reward" in logs and state.global_step % 10 == 0:
            print(f"step {state.global_step:>4}/{state.max_steps}  reward {logs['reward']:.3f}", flush=True)


def run(config: dict[str, Any], config_file: Path, out: Path) -> None:
    """One run, from random weights to the picture."""
    began = time.monotonic()
    torch.set_num_threads(1)
    disable_progress_bar()  # there is one for each checkpoint
    model, tokenizer = build_model(config["seed"]), build_tokenizer()
    generate = Generator(model, tokenizer)
    options = config["rollouts"]
    if config["prompts_per_step"] % options["prompts_per_claim"]:
        raise SystemExit("error: rollouts.prompts_per_claim must be a divisor of prompts_per_step.")
    if config["save_steps"] and options["prompts_per_claim"] > 1:  # any number of prompts may be left of a step
        raise SystemExit("error: a run with save_steps needs rollouts.prompts_per_claim 1.")
    before = evaluate(generate, tokenizer)
    print(f"before: held-out prompts: sampled {before['sampled']:.3f}, greedy {before['greedy']:.3f}", flush=True)

    dataset = Dataset.from_dict({"prompt": draw_prompts(config["steps"] * config["prompts_per_step"], config["seed"])})
    name, going_on = name_of(config), {}
    found = FoundRollouts(out / f"found-{name}.jsonl")
    checkpoints = Checkpoints(out / "checkpoints" / name)
    if config["save_steps"]:
        going_on = {"run": name, "saved": checkpoints.step, "found": found}
    with connect(config["data_plane"]) as client:
        rollouts = DataPlaneRollouts(
            client, ahead=options["ahead"], lease_s=options["lease_s"], timeout_s=options["timeout_s"], **going_on
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            rollout_func=rollouts,
            args=training_arguments(config, out),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[StepLines(), checkpoints],
        )
        trainer.remove_callback(PrinterCallback)  # `StepLines` prints
        newest = None
        if going_on:  # else checkpoints of an earlier run are left alone
            checkpoints.attach(rollouts)
            newest = checkpoints.newest()
        ended = newest is not None and checkpoints.step() >= config["steps"]
        with rollout_processes(0 if ended else options["processes"], "--config", config_file), rollouts:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))

    after = evaluate(generate, tokenizer)
    print(f"after:  held-out prompts: sampled {after['sampled']:.3f}, greedy {after['greedy']:.3f}", flush=True)
    made = [span for span in rollouts.timeline if span["what"] == "generate"]
    summary = {
        "evaluation": {"before": before, "after": after},
        "answers_trained_on": len(rollouts.trained),
        "prompts_by_staleness": Counter(span["batch"] - span["weight_version"] for span in made),
        "prompts_by_worker": Counter(span["worker"] for span in made),
        "seconds": round(time.monotonic() - began, 1),
    }
    metrics = [line for line in trainer.state.log_history if "reward" in line]
    write_lines(out / "metrics.jsonl", metrics)
    write_lines(out / "timeline.jsonl", rollouts.timeline)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plot_run(metrics, rollouts.timeline, summary["evaluation"], out / "reward.png")
    print(json.dumps(summary))
    if going_on:
        print(found)
    print(f"written to {out}: metrics.jsonl, timeline.jsonl, summary.json, reward.png")


def training_arguments(config: dict[str, Any], out: Path) -> GRPOConfig:
    return GRPOConfig(
        **common_arguments(config, out),
        shuffle_dataset=False,  # the rollout processes get the prompts in the order of the data set
        off_policy_mask_threshold=config["off_policy_mask_threshold"],
        activation_checkpointing=False,
    )


def name_of(config: dict[str, Any]) -> str:
    """The name of a run: another one if the results may be others."""
    decides = {key: value for key, value in config.items() if key not in _CHANGE_NO_RESULT}
    decides["rollouts"] = {key: value for key, value in config["rollouts"].items() if key not in _CHANGE_NO_RESULT}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]


def common_arguments(config: dict[str, Any], out: Path) -> dict[str, Any]:
    """The arguments that both trainers of TRL get."""
    return {
        "output_dir": str(out / "trl"),
        "max_steps": config["steps"],
        "per_device_train_batch_size": config["prompts_per_step"] * config["answers_per_prompt"],
        "num_generations": config["answers_per_prompt"],
        "max_completion_length": DIGITS,
        "learning_rate": config["learning_rate"],
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "steps" if config["save_steps"] else "no",
        "save_steps": config["save_steps"] or 1,
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": config["seed"],
    }


@contextlib.contextmanager
def rollout_processes(number: int, *options: object) -> Iterator[None]:
    """Starts rollout processes. They end by themselves when the run needs no more. If it fails, they are ended, and so
    is one that came after the end of a short run, since it waits for the start of another one."""
    program = [sys.executable, str(Path(__file__).with_name("rollout_process.py")), *map(str, options)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(number):
            processes.append(subprocess.Popen([*program, "--name", f"rollout-{index}"]))
            print(f"rollout-{index} (pid {processes[-1].pid})", flush=True)
        yield
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main(run: Callable[[dict[str, Any], Path, Path], None], description: str, out: str) -> int:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.yaml"))
    parser.add_argument("--out", type=Path, default=Path(out), help="where results go (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        run(yaml.safe_load(args.config.read_text(encoding="utf-8")), args.config, args.out)
    except DataPlaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(run, __doc__, "out/trl"))
