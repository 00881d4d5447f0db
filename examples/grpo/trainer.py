"""The loop of GRPO, the same for every data path. It holds metas and small per-row values, never a token tensor.

A step: the newest weights go to the rollout worker; it answers each prompt several times; the driver scores the
answers and compares each with its group; the workers compute the log-probabilities of the answers under the current
and under the reference policy; the workers train.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from ray import ObjectRef
from torch import Tensor

from dataplane_integrations.ray import wait_for_all

from .cluster import Actors
from .config import RunConfig
from .data_path import DataPath
from .loss import ClippedPolicyLoss, group_advantages
from .task import Problem, is_exact

__all__ = ["LAST_ROWS", "Trainer", "expand_advantages"]

#: The rows of the last step, in the folder of the run: a save of the data plane.
LAST_ROWS = "last_step"
#: Sampled answers per prompt in an evaluation.
_EVAL_SAMPLES = 8


class Trainer:
    """Runs GRPO steps, and writes a line of ``metrics.jsonl`` for each; of the last one, the path keeps the rows.

    Attributes:
        records: What was written, one dict per step.
    """

    def __init__(self, config: RunConfig, actors: Actors, path: DataPath, out: Path) -> None:
        self._config = config
        self._actors = actors
        self._path = path
        self._out = out
        self._loss_fn = ClippedPolicyLoss(config.grpo.clip_ratio, config.grpo.kl_weight)
        self.records: list[dict[str, Any]] = []

    def save_state(self, folder: Path) -> None:
        """Writes what the actors hold between two steps into ``folder``; they must see it."""
        self._on_workers("write_training_state", folder, doing="saving the training state")
        self._path.save(folder)

    def load_state(self, folder: Path, records: Sequence[dict[str, Any]]) -> None:
        """Takes over what `save_state` wrote; `run` goes on after the last of ``records``."""
        self._on_workers("read_training_state", folder, doing="reading the saved training state")
        self._path.restore(folder, len(records))
        self.records = list(records)

    def run(self, on_step: Callable[[dict[str, Any]], None]) -> None:
        """Runs all steps, or those that are left.

        Args:
            on_step: Called with the record of every step when it is done.

        Raises:
            WorkerFailedError: An actor died, raised, or did not answer in time.
        """
        with (self._out / "metrics.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in self.records)
            file.flush()
            for step in range(len(self.records) + 1, self._config.grpo.steps + 1):
                record = self._step(step)
                self.records.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
                on_step(record)

    def push_weights(self, doing: str) -> ObjectRef:
        """Sends the policy's weights to the rollout worker, from worker to worker.

        Returns:
            What is done when they have arrived. Calls of the rollout worker that are made from now on see them.
        """
        # Every rank must gather before any can finish, so all calls start before the first is waited for. The result
        # of rank 0 is passed on as a reference: the weights do not come through the driver.
        gathers = {name: worker.packed_weights.remote() for name, worker in self._actors.worker_names().items()}
        loaded = self._actors.rollout.load_weights.remote(gathers["policy worker 0"])
        wait_for_all(gathers, timeout_s=self._config.ray.step_timeout_s, doing=doing)
        return loaded

    def evaluate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Share of exact answers with the newest weights: several sampled answers and a greedy one per problem."""
        timeout_s, doing = self._config.ray.step_timeout_s, "evaluating"
        wait_for_all({"rollout worker": self.push_weights(doing)}, timeout_s=timeout_s, doing=doing)
        shares = {}
        for kind, answers_per_prompt in (("sampled", _EVAL_SAMPLES), ("greedy", 1)):
            repeated = [problem for problem in problems for _ in range(answers_per_prompt)]
            prompts = [problem.prompt for problem in repeated]
            call = self._actors.rollout.evaluate.remote(prompts, greedy=kind == "greedy")
            [answers] = wait_for_all({"rollout worker": call}, timeout_s=timeout_s, doing=doing)
            shares[kind] = sum(map(is_exact, repeated, answers)) / len(repeated)
        return shares

    def _on_workers(self, method: str, *args: object, doing: str) -> None:
        calls = {name: getattr(worker, method).remote(*args) for name, worker in self._actors.worker_names().items()}
        wait_for_all(calls, timeout_s=self._config.ray.step_timeout_s, doing=doing)

    def _step(self, step: int) -> dict[str, Any]:
        seconds: dict[str, float] = {}
        grpo = self._config.grpo
        path = self._path
        with _timed(seconds, "weights"):
            path.hand_over(step, lambda: self.push_weights(f"handing over the weights in step {step}"))
        with _timed(seconds, path.collecting):
            scores = path.collect(step)
        with _timed(seconds, "advantages"):
            rewards_n = torch.tensor(scores.rewards)
            advantages_n = group_advantages(rewards_n, grpo.answers_per_prompt)
            path.put_scores(rewards_n, expand_advantages(advantages_n, scores.input_lengths))
        with _timed(seconds, "prev"):
            path.compute_prev_logprobs()
        with _timed(seconds, "reference"):
            path.compute_reference_logprobs()
        with _timed(seconds, "train"):
            results = path.train(self._loss_fn)
            traffic = path.finish_step(self._out / LAST_ROWS if step == grpo.steps else None)
        return {
            "step": step,
            "reward": rewards_n.mean().item(),
            **results,
            "tokens": int(results["tokens"]),
            "answers": len(scores.rewards),
            "mean_length": sum(scores.input_lengths) / len(scores.input_lengths),
            "advantages_sha256": hashlib.sha256(advantages_n.numpy().tobytes()).hexdigest(),
            **path.step_facts(),
            "path": path.name,
            "bytes_put": traffic.bytes_put,
            "bytes_get": traffic.bytes_get,
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
        }


def expand_advantages(advantages_n: Tensor, input_lengths: Sequence[int]) -> Tensor:
    """One advantage per row as a column: (N, S) float32, repeated over the row's tokens and 0 on padding."""
    inside = torch.arange(max(input_lengths)) < torch.tensor(input_lengths).unsqueeze(1)
    return advantages_n.unsqueeze(1) * inside


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - start
