"""GRPO with rollouts elsewhere: `DataPlaneRollouts` in the trainer's process, `serve` in each rollout process.

Three kinds of partitions connect them:

- ``prompts``: a row per prompt. The trainer writes them, the rollout processes claim them.
- ``weights``: the two newest versions of the weights, see `dataplane_integrations.weights`.
- ``answers-0``, ``answers-1``, ...: the answers of one generation batch each, cleared when it has been trained on. In
  a run that can be started again, they are ``answers-RUN-0`` and so on, and cleared when a checkpoint has the batch.
  With an asynchronous trainer one partition, ``answers``, in which the rows are cleared.

Nothing here imports TRL: the trainer comes as an argument.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dataplane_core import DataPlaneClient, KVBatchMeta, stream
from dataplane_core.client import Stream
from dataplane_core.errors import ClaimTimeoutError, LeaseExpiredError, StalePartitionError, UnknownPartitionError
from dataplane_core.ledger import group_of
from dataplane_integrations.rollout import FoundRollouts, mint_sample_ids, missing_groups
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
    which ends the rollout processes. With ``run``, after an error the answers stay for the next start.

    Args:
        client: The trainer's client.
        ahead: By how many batches rollouts may run ahead. With 0 they wait while the trainer trains.
        lease_s: Seconds of lease on the answers. The lease is renewed until they have been trained on.
        timeout_s: Seconds to wait for the answers of a batch.
        run: The name of a run that can be started again, on a store that outlives its processes. A start has only
            those answers generated that the store lacks. The seed of each prompt follows from this name. With
            ``prompts_per_claim`` 1 and ``ahead`` 0, so do all answers, whoever generates them.
        saved: With ``run``: returns how many batches the newest checkpoint has. Answers of later ones are kept.
        found: Counts the answers that were there when a batch was begun again.

    Attributes:
        trained: The ids of the answers that have been trained on.
        timeline: What ran when: dicts with ``what`` ("generate" or "train"), ``batch``, and ``began`` and ``ended`` in
            seconds of the host's monotonic clock. Those of "generate" also have ``prompt``, ``worker`` and
            ``weight_version``.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        *,
        ahead: int = 1,
        lease_s: float = 60.0,
        timeout_s: float = 600.0,
        run: str | None = None,
        saved: Callable[[], int] | None = None,
        found: FoundRollouts | None = None,
    ) -> None:
        self.trained: list[str] = []
        self.timeline: list[dict[str, Any]] = []
        self._client = client
        self._ahead = ahead
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._run = run
        self._saved = saved
        self._found = found
        self._batch = -1  # the newest that the trainer asked for
        self._asked = 0  # batches whose prompts have been written
        self._kept: list[int] = []  # batches that have been trained on, and that no checkpoint has
        self._claim: Stream | None = None  # of the newest batch
        self._in_training: list[str] = []
        self._training_began = 0.0
        if run is not None:  # of a start that was killed; the rollout processes of this one come later
            client.clear_samples(None, PROMPTS)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Called by GRPOTrainer for each generation batch, with each prompt ``num_generations`` times. Blocks."""
        answers = trainer.num_generations
        args, first = trainer.args, self._batch < 0
        passes = args.steps_per_generation * trainer.num_iterations  # of the trainer, over a batch
        begun, end = (
            steps * args.gradient_accumulation_steps for steps in (trainer.state.global_step, trainer.state.max_steps)
        )
        batch = begun // passes if first else self._batch + 1  # not 0, if it goes on from a checkpoint
        if first and begun % passes:
            raise ValueError("the checkpoint lies within a generation batch. Expected save_steps at the end of one.")
        wanted = _prompts(trainer, batch)
        if prompts != [prompt for prompt in wanted.values() for _ in range(answers)]:
            raise ValueError(
                f"the trainer asks for other prompts than those of generation batch {batch} in the order of its data "
                "set. Expected shuffle_dataset=False, one training process, and no evaluation by the trainer."
            )

        self._finish()
        self._batch = batch
        if first:
            self._asked = batch
            self._drop_before(batch)
            open_weights(self._client)
            self._client.register_partition(PROMPTS, ["prompt"], None, ["rollout"])
        publish_weights(self._client, batch, trainer.accelerator.unwrap_model(trainer.model).state_dict())

        while self._asked < min(batch + self._ahead + 1, -(-end // passes)):
            self._ask(trainer, self._asked)
            self._asked += 1
        return self._claimed(batch, mint_sample_ids(list(wanted), answers))

    def __enter__(self) -> DataPlaneRollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dropped = [PROMPTS, WEIGHTS]
        if self._run is None:
            dropped += map(self._answers, [*self._kept, *range(max(self._batch, 0), self._asked)])
        elif error is None:  # also of a start that was killed after its last checkpoint; the next start needs none
            prefix = self._answers("")
            dropped += [name for name in self._client.list_partitions() if name.startswith(prefix)]
        try:
            if error is None:
                self._finish()
            else:
                self._close_claim()
        finally:
            for name in dropped:
                self._client.clear_samples(None, name)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this object. The newest batch counts as trained on."""
        return {"trained": [*self.trained, *self._in_training], "timeline": [*self.timeline, self._span()]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave, so that `trained` and `timeline` are those of the whole run."""
        self.trained, self.timeline = state["trained"], state["timeline"]

    def _ask(self, trainer: Any, batch: int) -> None:
        """Writes those prompts of a batch that are not answered yet, with what a rollout process must know."""
        client, into = self._client, self._answers(batch)
        prompts, answers = _prompts(trainer, batch), trainer.num_generations
        missing = list(prompts)
        begun = self._run is not None and into in client.list_partitions()
        client.register_partition(
            into,
            FIELDS,
            len(prompts) * answers,
            ["train"],
            grpo_group_size=answers,
            if_exists="keep" if begun else "replace",
        )
        if begun:
            client.reset_consumption(into, "train")  # it is trained on again
            missing = missing_groups(client, into, missing, answers)
            if self._found is not None:
                self._found.add(batch, len(prompts) * answers, (len(prompts) - len(missing)) * answers)
        tags = {
            "batch": batch,
            "into": into,
            "answers": answers,
            "max_new_tokens": trainer.args.max_completion_length,
            "temperature": float(trainer.args.temperature),
        }
        seeds = [{} if self._run is None else {"seed": _seed(f"{self._run}/{uid}")} for uid in missing]
        if missing:
            columns = {"prompt": [prompts[uid] for uid in missing]}
            client.put_samples(missing, PROMPTS, columns, tags=[tags | seed for seed in seeds])

    def _answers(self, batch: int | str) -> str:
        """The partition of a generation batch's answers."""
        return f"answers-{batch}" if self._run is None else f"answers-{self._run}-{batch}"

    def _drop_before(self, batch: int) -> None:
        """Drops what a start that was killed had not dropped yet of the batches before this one."""
        if self._run is not None:
            there = set(self._client.list_partitions())
            for name in there.intersection(map(self._answers, range(batch))):
                self._client.clear_samples(None, name)

    def _claimed(self, batch: int, sample_ids: list[str]) -> dict[str, list[Any]]:
        """Waits for the answers of a batch, which are held on lease from then on, and returns them in this order."""
        self._claim = stream(
            self._client,
            self._answers(batch),
            "train",
            FIELDS,
            len(sample_ids),
            lease_s=self._lease_s,
            prefetch=0,
            timeout_s=self._timeout_s,
        )
        claimed = next(self._claim)
        made = dict(zip(map(group_of, claimed.meta.sample_ids), claimed.meta.tags or [], strict=True))
        self.timeline += [{"what": "generate", "batch": batch, "prompt": name, **tags} for name, tags in made.items()]
        self._in_training, self._training_began = sample_ids, time.monotonic()
        place = {sample_id: row for row, sample_id in enumerate(claimed.meta.sample_ids)}
        rows = {name: claimed.columns[name].unbind() for name in FIELDS}
        return {name: [column[place[each]].tolist() for each in sample_ids] for name, column in rows.items()}

    def _finish(self) -> None:
        """Acks the answers of the newest batch, which has been trained on. Clears those that no restart needs."""
        if self._claim is None:
            return
        self.timeline.append(self._span())
        self._claim.ack()
        self._close_claim()
        self._client.mark_step(self._batch + 1)
        self.trained += self._in_training
        self._in_training = []
        self._kept.append(self._batch)
        saved = self._batch + 1 if self._saved is None else self._saved()
        for batch in [batch for batch in self._kept if batch < saved]:
            self._client.clear_samples(None, self._answers(batch))
            self._kept.remove(batch)

    def _close_claim(self) -> None:
        """Gives the newest batch back, unless it is acked."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _span(self) -> dict[str, Any]:
        """The training on the newest batch, up to now."""
        return {"what": "train", "batch": self._batch, "began": self._training_began, "ended": time.monotonic()}


def _seed(name: str) -> int:
    """A seed that follows from a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])


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
    reader = WeightReader(client, worker)

    def answer_all() -> None:
        claims = stream(
            client,
            PROMPTS,
            "rollout",
            ["prompt"],
            prompts_per_claim,
            lease_s=lease_s,
            prefetch=0,
            timeout_s=timeout_s,
            clear=True,
        )
        for claimed in claims:
            began = time.monotonic()
            # after the claim, so they are new enough
            weights = reader.wait(timeout_s) if reader.version is None else reader.newest()
            if weights is not None:
                model.load_state_dict(weights)
            tags = (claimed.meta.tags or [])[0]
            prompts = claimed.columns["prompt"].tolist()
            if "seed" in tags:
                torch.manual_seed(tags["seed"])
            rows = generate(prompts, tags["answers"], tags["max_new_tokens"], tags["temperature"])
            claimed.check()
            made = {"worker": worker, "weight_version": reader.version, "began": began, "ended": time.monotonic()}
            _put(client, claimed.meta, rows, made)
            claims.ack()
            if most_waiting is not None:
                _wait_for_room(client, most_waiting, timeout_s)

    with contextlib.suppress(*_DROPPED):  # the run is over
        while True:
            with contextlib.suppress(LeaseExpiredError):  # too late: others were given the prompts
                answer_all()
                return


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
