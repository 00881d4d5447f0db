"""GRPO with rollouts elsewhere: `DataPlaneRollouts` in the trainer's process, `serve` in each rollout process.

Three kinds of partitions connect them:

- ``prompts``: a row per prompt. The trainer writes them, the rollout processes claim them.
- ``weights``: the two newest versions of the weights, see `dataplane_integrations.weights`.
- ``answers-0``, ``answers-1``, ...: the answers of one generation batch each, cleared when it has been trained on.
  With an asynchronous trainer one partition, ``answers``, in which the rows are cleared.

Nothing here imports TRL: the trainer comes as an argument.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dataplane_core import DataPlaneClient, KVBatchMeta
from dataplane_core.errors import ClaimTimeoutError, LeaseExpiredError, StalePartitionError, UnknownPartitionError
from dataplane_integrations.replay import StreamingConsumer, group_of
from dataplane_integrations.rollout import mint_sample_ids
from dataplane_integrations.weights import WEIGHTS, WeightReader, open_weights, publish_weights

__all__ = ["ANSWERS", "FIELDS", "PROMPTS", "DataPlaneRollouts", "Generate", "sample_columns", "serve"]

FIELDS = ["prompt_ids", "completion_ids", "logprobs"]
PROMPTS = "prompts"
#: The partition of all answers of an asynchronous run.
ANSWERS = "answers"
#: Raised by calls on a partition that has been dropped.
_DROPPED = (UnknownPartitionError, StalePartitionError)
#: Seconds between two questions whether the run has begun.
_POLL_S = 0.2

#: ``generate(prompts, answers, max_new_tokens, temperature)`` returns the columns `FIELDS` as lists, a row per answer;
#: for an asynchronous trainer, `sample_columns` of them. The answers to a prompt are adjacent.
Generate = Callable[[Sequence[Any], int, int, float], dict[str, list[Any]]]


class DataPlaneRollouts:
    """A `rollout_func` for GRPOTrainer. It generates nothing: other processes do.

    When the trainer asks for the answers of generation batch ``k``, it has been trained on all batches before. Then

    1. the answers of batch ``k - 1`` are acked and cleared,
    2. the weights are written, as version ``k``,
    3. the prompts of the next batches are written, up to batch ``k + ahead``,
    4. the answers of batch ``k`` are claimed, as soon as all of them are there, and returned.

    So the weights that made an answer are at most ``ahead`` versions older than those that are trained on it.

    Use it as a context manager around ``trainer.train()``. At its end, also after an error, all partitions are dropped,
    which ends the rollout processes.

    Args:
        client: The trainer's client.
        ahead: By how many batches rollouts may run ahead. With 0 they wait while the trainer trains.
        lease_s: Seconds of lease on the answers. The lease is renewed until they have been trained on.
        timeout_s: Seconds to wait for the answers of a batch.

    Attributes:
        trained: The ids of the answers that have been trained on.
        timeline: What ran when: dicts with ``what`` ("generate" or "train"), ``batch``, and ``began`` and ``ended`` in
            seconds of the host's monotonic clock. Those of "generate" also have ``prompt``, ``worker`` and
            ``weight_version``.
    """

    def __init__(
        self, client: DataPlaneClient, *, ahead: int = 1, lease_s: float = 60.0, timeout_s: float = 600.0
    ) -> None:
        self.trained: list[str] = []
        self.timeline: list[dict[str, Any]] = []
        self._client = client
        self._ahead = ahead
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._batch = -1  # the newest that the trainer asked for
        self._asked = 0  # batches whose prompts have been written
        self._held = contextlib.ExitStack()  # the claim of the newest batch
        self._in_training: list[str] = []
        self._training_began = 0.0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Called by GRPOTrainer for each generation batch, with each prompt ``num_generations`` times. Blocks."""
        args, answers = trainer.args, trainer.num_generations
        batch = self._batch + 1
        wanted = _prompts(trainer, batch)
        if prompts != [prompt for prompt in wanted.values() for _ in range(answers)]:
            raise ValueError(
                f"the trainer asks for other prompts than those of generation batch {batch} in the order of its data "
                "set. Expected shuffle_dataset=False, one training process, and no evaluation by the trainer."
            )
        passes = args.steps_per_generation * trainer.num_iterations  # of the trainer, over a batch
        batches = -(-trainer.state.max_steps * args.gradient_accumulation_steps // passes)

        self._finish()
        self._batch = batch
        if batch == 0:
            open_weights(self._client)
            self._client.register_partition(PROMPTS, ["prompt"], None, ["rollout"])
        publish_weights(self._client, batch, trainer.accelerator.unwrap_model(trainer.model).state_dict())

        while self._asked < min(batch + self._ahead + 1, batches):
            self._ask(trainer, self._asked)
            self._asked += 1
        return self._claim(batch, mint_sample_ids(list(wanted), answers))

    def __enter__(self) -> DataPlaneRollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
            else:
                self._held.__exit__(kind, error, trace)
        finally:
            for name in (PROMPTS, WEIGHTS, *map(_answers, range(max(self._batch, 0), self._asked))):
                self._client.clear_samples(None, name)

    def _ask(self, trainer: Any, batch: int) -> None:
        """Writes the prompts of a batch, with what a rollout process must know."""
        prompts, answers = _prompts(trainer, batch), trainer.num_generations
        self._client.register_partition(
            _answers(batch), FIELDS, len(prompts) * answers, ["train"], grpo_group_size=answers
        )
        tags = {
            "batch": batch,
            "into": _answers(batch),
            "answers": answers,
            "max_new_tokens": trainer.args.max_completion_length,
            "temperature": float(trainer.args.temperature),
        }
        columns = {"prompt": list(prompts.values())}
        self._client.put_samples(list(prompts), PROMPTS, columns, tags=[tags] * len(prompts))

    def _claim(self, batch: int, sample_ids: list[str]) -> dict[str, list[Any]]:
        """Waits for the answers of a batch, which are held on lease from then on, and returns them in this order."""
        consumer = StreamingConsumer(
            self._client,
            _answers(batch),
            "train",
            FIELDS,
            len(sample_ids),
            lease_s=self._lease_s,
            timeout_s=self._timeout_s,
        )
        claimed = self._held.enter_context(next(iter(consumer)))
        rows = self._client.get_samples(sample_ids, claimed.meta.partition_id, FIELDS)
        made = dict(zip(map(group_of, claimed.meta.sample_ids), claimed.meta.tags or [], strict=True))
        self.timeline += [{"what": "generate", "batch": batch, "prompt": name, **tags} for name, tags in made.items()]
        self._in_training, self._training_began = sample_ids, time.monotonic()
        return {name: [row.tolist() for row in rows[name].unbind()] for name in FIELDS}

    def _finish(self) -> None:
        """Acks and clears the answers of the newest batch, which has been trained on."""
        if self._batch < 0:
            return
        span = {"began": self._training_began, "ended": time.monotonic()}
        self.timeline.append({"what": "train", "batch": self._batch, **span})
        self._client.mark_step(self._batch + 1)
        self._held.close()
        self.trained += self._in_training
        self._client.clear_samples(None, _answers(self._batch))


def _answers(batch: int) -> str:
    """The partition of a generation batch's answers."""
    return f"answers-{batch}"


def _prompts(trainer: Any, batch: int) -> dict[str, Any]:
    """The prompts of a generation batch by id: GRPOTrainer's order without shuffling, epoch after epoch."""
    size = trainer.args.generation_batch_size // trainer.num_generations
    epoch = len(trainer.train_dataset) // size * size  # a last, smaller batch is left out
    numbers = range(batch * size, (batch + 1) * size)
    return {f"p{number}": trainer.train_dataset[number % epoch]["prompt"] for number in numbers}


def sample_columns(rows: dict[str, list[Any]], rewards: Sequence[float], answers: int) -> dict[str, list[Any]]:
    """What `StoreRolloutWorker` reads, from the columns `FIELDS` and a reward per row: GRPO's advantages, and masks."""
    of_group = torch.tensor(rewards).view(-1, answers)
    std, mean = torch.std_mean(of_group, 1, correction=0, keepdim=True)
    both = list(zip(rows["prompt_ids"], rows["completion_ids"], strict=True))
    return {
        "input_ids": [prompt + answer for prompt, answer in both],
        "token_mask": [[0] * len(prompt) + [1] * len(answer) for prompt, answer in both],
        "generation_logprobs": [
            [0.0] * len(prompt) + logprobs
            for prompt, logprobs in zip(rows["prompt_ids"], rows["logprobs"], strict=True)
        ],
        "advantage": ((of_group - mean) / (std + 1e-8)).flatten().tolist(),
        "metrics": [{"reward": each} for each in rewards],
    }


def serve(
    client: DataPlaneClient,
    model: nn.Module,
    generate: Generate,
    *,
    worker: str,
    prompts_per_claim: int = 1,
    lease_s: float = 60.0,
    timeout_s: float = 600.0,
    most_waiting: int | None = None,
) -> None:
    """Answers prompts until the run needs no more. Any number of processes may do so, and join or die at any time.

    The prompts are claimed on lease, which a thread renews while the process lives. If it dies, others get its prompts
    when the lease ends.

    Args:
        client: This process's client.
        model: Gets the newest weights before each call of ``generate``.
        generate: Answers prompts with the model.
        worker: A name of this process.
        prompts_per_claim: Prompts for each call of ``generate``. A divisor of the number of prompts per batch.
        lease_s: Seconds of lease on the prompts.
        timeout_s: Seconds to wait for the run to begin, for prompts, and for room.
        most_waiting: If so many answers wait for an asynchronous trainer, rollouts wait too. None: they do not.
    """
    _wait_for_run(client, timeout_s)
    claims = StreamingConsumer(
        client, PROMPTS, "rollout", ["prompt"], prompts_per_claim, lease_s=lease_s, timeout_s=timeout_s
    )
    reader = WeightReader(client, worker)
    with contextlib.suppress(*_DROPPED):  # the run is over
        for claimed in claims:
            with contextlib.suppress(LeaseExpiredError), claimed:  # too late: others were given the prompts
                began = time.monotonic()
                # after the claim, so they are new enough
                weights = reader.wait(timeout_s) if reader.version is None else reader.newest()
                if weights is not None:
                    model.load_state_dict(weights)
                tags = (claimed.meta.tags or [])[0]
                prompts = list(claimed.read()["prompt"])
                rows = generate(prompts, tags["answers"], tags["max_new_tokens"], tags["temperature"])
                claimed.check()
                made = {"worker": worker, "weight_version": reader.version, "began": began, "ended": time.monotonic()}
                _put(client, claimed.meta, rows, made)
            if most_waiting is not None:
                _wait_for_room(client, most_waiting, timeout_s)


def _put(client: DataPlaneClient, meta: KVBatchMeta, rows: dict[str, list[Any]], made: dict[str, Any]) -> None:
    """Writes the answers to claimed prompts, each into the partition that its prompt names."""
    for index, (prompt, tags) in enumerate(zip(meta.sample_ids, meta.tags or [], strict=True)):
        answers = tags["answers"]
        own = {name: column[index * answers : (index + 1) * answers] for name, column in rows.items()}
        with contextlib.suppress(*_DROPPED):  # others answered it, and it has been trained on
            client.put_samples(mint_sample_ids([prompt], answers), tags["into"], own, tags=[made] * answers)


def _wait_for_room(client: DataPlaneClient, most_waiting: int, timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while client.describe(ANSWERS, count_rows=False).tasks["train"].num_ready >= most_waiting:
        if time.monotonic() > give_up:
            raise ClaimTimeoutError(f"the trainer took no answers for {timeout_s:g} s.")
        time.sleep(_POLL_S)


def _wait_for_run(client: DataPlaneClient, timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            client.list_samples(PROMPTS)
            return
        except UnknownPartitionError:
            if time.monotonic() > give_up:
                raise
            time.sleep(_POLL_S)
