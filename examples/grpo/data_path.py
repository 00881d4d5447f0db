"""How the tensors of a step are passed between the processes: the part of the run that a data plane replaces.

The trainer calls a `DataPath` and never sees a tensor of token width, so the same loop runs over a data plane and
without one. Both ways share three decisions, and with them every bit of the result:

- the order of the rows: that of the rollout, with the answers to a prompt adjacent;
- the width: all ranks forward at one length, the longest row of the step rounded up (`padded_length`);
- the split over ranks and into microbatches: that of `BatchedDataDict.shard_by_batch_size`, computed from lengths.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from ray import ObjectRef
from torch import Tensor
from torch.nn import functional

from dataplane_core.batch import BatchedDataDict
from dataplane_core.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS, padded_length
from dataplane_integrations.ray import wait_for_all
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking

from .cluster import Actors
from .config import RunConfig
from .megatron_workers import MegatronPolicyWorker
from .rollout import RolloutCarry, RolloutWorker
from .task import PAD_ID, Problem, reward
from .workers import LossFunction, PolicyWorker

__all__ = [
    "DataPath",
    "Draw",
    "InMemoryPath",
    "Scores",
    "Traffic",
    "batching_of",
    "score",
    "summarize_training",
]


@dataclass
class Traffic:
    """Bytes of bulk tensors that one step handed over: written by their producers, and read by their consumers."""

    bytes_put: int = 0
    bytes_get: int = 0


#: Draws the problems of a step, by its number and that of the generation within it; always the same ones.
Draw: TypeAlias = Callable[[int, int], list[Problem]]


@dataclass(frozen=True)
class Scores:
    """What the driver needs to know of the rows that a step trains on, a prompt's answers side by side.

    Attributes:
        rewards: One per answer.
        input_lengths: Tokens of prompt and answer together, one per answer.
    """

    rewards: list[float]
    input_lengths: list[int]


class DataPath(ABC):
    """Carries one step's columns from the rollout worker to the policy workers, and the workers' columns onward.

    Called in this order at every step: `hand_over`, `collect`, `put_scores`, `compute_prev_logprobs`,
    `compute_reference_logprobs`, `train`, `finish_step`. The implementation keeps the step's rows between the calls.
    """

    name: str  #: shown in the output and written to the metrics
    recording: Path | None = None  #: where its processes record what they do
    _timeout_s: float
    _draw: Draw
    #: The classes to run as actors; a path that needs more of them than plain methods names its own subclasses.
    rollout_class: type[RolloutWorker] = RolloutWorker
    #: Policy workers by `RunConfig.workers`.
    worker_classes: Mapping[str, type[PolicyWorker]] = {"fsdp2": PolicyWorker, "megatron": MegatronPolicyWorker}
    #: What `collect` does, in the metrics and the picture.
    collecting: str = "generate"

    @abstractmethod
    def start(self, actors: Actors, draw: Draw) -> None:
        """Prepares the path when the actors are up.

        Args:
            actors: The run's processes.
            draw: What the steps train on.
        """

    def hand_over(self, step: int, push: Callable[[], ObjectRef]) -> None:
        """Gives the rollout worker the newest weights; here, returns when it has them.

        Args:
            step: The step that is about to begin.
            push: Sends them; what it returns is done when they have arrived.
        """
        doing = f"handing over the weights in step {step}"
        wait_for_all({"rollout worker": push()}, timeout_s=self._timeout_s, doing=doing)

    @abstractmethod
    def generate(self, step: int, prompts: Sequence[str]) -> RolloutCarry:
        """Has the rollout worker answer the prompts; keeps its columns, returns what the driver needs of them."""

    def collect(self, step: int) -> Scores:
        """Generates the rows of a step, and scores them; here, one generation."""
        problems = self._draw(step, 0)
        carry = self.generate(step, [problem.prompt for problem in problems])
        return Scores(score(problems, carry.answers), carry.input_lengths)

    def step_facts(self) -> dict[str, Any]:
        """What else there is to record of the newest step."""
        return {}

    @abstractmethod
    def put_scores(self, rewards_n: Tensor, advantages_ns: Tensor) -> None:
        """Adds what the driver made of small per-row values: ``advantages`` (N, S) float32, for training; and where
        people can look at the rows, ``reward`` (N,) float32."""

    @abstractmethod
    def compute_prev_logprobs(self) -> None:
        """Has the workers add the column ``prev_logprobs``: under the policy before this step's update."""

    @abstractmethod
    def compute_reference_logprobs(self) -> None:
        """Has the workers add the column ``reference_policy_logprobs``."""

    @abstractmethod
    def train(self, loss_fn: LossFunction) -> dict[str, float]:
        """Has the workers train on the step's rows; returns `summarize_training` of their results."""

    @abstractmethod
    def finish_step(self, keep: Path | None) -> Traffic:
        """Drops the step's rows and returns how many bytes they had.

        Args:
            keep: A folder, in which a data plane saves them first. None: they are not kept.
        """

    def mark_step(self, step: int, loss: float, staleness: int) -> None:  # noqa: B027 - not abstract: nobody may care
        """Says that a step has ended: here, to nobody."""

    def saved(self, step: int) -> None:  # noqa: B027 - nor to let go of
        """Says that a save of ``step`` is on the disk, so that its rows are needed no more: here, nothing."""

    def save(self, folder: Path) -> None:  # noqa: B027 - not abstract: most have nothing to save
        """Writes what the path holds between two steps into ``folder``: here, nothing."""

    def restore(self, folder: Path, step: int) -> None:  # noqa: B027 - nor to take over
        """Takes over what `save` wrote after ``step``; called after `start`."""

    @abstractmethod
    def close(self) -> None:
        """Ends what `start` began. Safe to call twice, and after a failure."""


class InMemoryPath(DataPath):
    """No data plane: whole batches go through the driver as Ray objects, shard by shard."""

    name = "in-memory"

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._timeout_s = config.ray.step_timeout_s
        self._batch = BatchedDataDict()
        self._traffic = Traffic()
        self._step = 0

    def start(self, actors: Actors, draw: Draw) -> None:
        self._actors = actors
        self._draw = draw

    def generate(self, step: int, prompts: Sequence[str]) -> RolloutCarry:
        self._step = step
        call = self._actors.rollout.generate.remote(step, prompts, self._config.grpo.answers_per_prompt)
        doing = f"generating in step {step}"
        [(batch, carry)] = wait_for_all({"rollout worker": call}, timeout_s=self._timeout_s, doing=doing)
        width = padded_length(max(carry.input_lengths), self._config.dynamic_batching.sequence_length_round)
        self._batch = _pad_to(batch, width)
        self._traffic.bytes_put += _size_bytes(batch)
        return carry

    def put_scores(self, rewards_n: Tensor, advantages_ns: Tensor) -> None:
        self._batch["advantages"] = functional.pad(advantages_ns, (0, self._width - advantages_ns.shape[1]))
        self._traffic.bytes_put += _size_bytes({"advantages": advantages_ns})

    def compute_prev_logprobs(self) -> None:
        self._batch["prev_logprobs"] = self._column("get_logprobs", "logprobs")

    def compute_reference_logprobs(self) -> None:
        column = self._column("get_reference_policy_logprobs", "reference_logprobs")
        self._batch["reference_policy_logprobs"] = column

    def train(self, loss_fn: LossFunction) -> dict[str, float]:
        shards, _ = self._shards(DP_TRAIN_FIELDS)
        return summarize_training(self._call("train", shards, loss_fn)[:: self._config.tensor_parallel])

    def finish_step(self, keep: Path | None) -> Traffic:
        traffic, self._traffic = self._traffic, Traffic()
        self._batch = BatchedDataDict()
        return traffic

    def close(self) -> None:
        self._batch = BatchedDataDict()

    @property
    def _width(self) -> int:
        return int(self._batch["input_ids"].shape[1])

    def _column(self, method: str, key: str) -> Tensor:
        shards, came_from = self._shards(LP_SEED_FIELDS)
        results = self._call(method, shards)[:: self._config.tensor_parallel]  # the others computed the same
        joined = BatchedDataDict.from_batches(results)
        joined.reorder_data(came_from)
        self._traffic.bytes_put += _size_bytes(joined)
        column: Tensor = joined[key]
        return column

    def _shards(self, fields: Sequence[str]) -> tuple[Sequence[BatchedDataDict], list[int]]:
        """One shard per data-parallel rank, with its plan, and where each row of the joined shards came from."""
        columns = BatchedDataDict({name: self._batch[name] for name in fields})
        plan = batching_of(self._config).shard_args("train")
        shards, came_from = columns.shard_by_batch_size(self._config.data_parallel, **plan)
        self._traffic.bytes_get += sum(_size_bytes(shard) for shard in shards) * self._config.tensor_parallel
        return shards, came_from

    def _call(self, method: str, shards: Sequence[BatchedDataDict], *args: object) -> list[Any]:
        calls = {
            f"policy worker {rank}": getattr(worker, method).remote(shards[rank // self._config.tensor_parallel], *args)
            for rank, worker in enumerate(self._actors.workers)
        }
        return wait_for_all(calls, timeout_s=self._timeout_s, doing=f"running {method} in step {self._step}")


def score(problems: Sequence[Problem], answers: Sequence[str]) -> list[float]:
    """The reward of every answer, where each problem has equally many, side by side."""
    per_problem = len(answers) // len(problems)
    repeated = [problem for problem in problems for _ in range(per_problem)]
    return [reward(problem, answer) for problem, answer in zip(repeated, answers, strict=True)]


def batching_of(config: RunConfig) -> Batching:
    """Dynamic batching, or sequence packing of the same limit and rounding."""
    limit, multiple = config.dynamic_batching.max_tokens_per_microbatch, config.dynamic_batching.sequence_length_round
    if config.sequence_packing.enabled:
        packing = SequencePacking(
            train_mb_tokens=limit,
            algorithm=config.sequence_packing.algorithm,
            sequence_length_pad_multiple=multiple,
        )
        return Batching(packing=packing)
    return Batching(dynamic=DynamicBatching(train_mb_tokens=limit, sequence_length_round=multiple))


def summarize_training(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One number per name from what `PolicyWorker.train` returned on every rank.

    Sums are exact (`math.fsum`) before they are rounded, so they do not depend on the order of the parts.
    """
    first = results[0]
    num_batches = len(first["global_loss"])
    parts: dict[str, list[float]] = {}
    for result in results:
        for name, values in result["all_mb_metrics"].items():
            parts.setdefault(name, []).extend(values)
    return {
        "loss": math.fsum(first["global_loss"].tolist()) / num_batches,
        "grad_norm": math.fsum(first["grad_norm"].tolist()) / num_batches,
        "tokens": float(first["global_tokens"]),
        **{name: math.fsum(values) / num_batches for name, values in parts.items()},
    }


def _pad_to(batch: BatchedDataDict, width: int) -> BatchedDataDict:
    """The batch with its (N, S) columns padded on the right to ``width``."""
    padded = BatchedDataDict()
    for name, column in batch.items():
        if column.dim() > 1:
            column = functional.pad(column, (0, width - column.shape[1]), value=PAD_ID if name == "input_ids" else 0)
        padded[name] = column
    return padded


def _size_bytes(columns: Mapping[str, Tensor]) -> int:
    return sum(column.numel() * column.element_size() for column in columns.values() if torch.is_tensor(column))
