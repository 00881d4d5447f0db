"""Rollouts ahead of training: while the workers train on one step, the rollout worker answers the prompts of the next.

With a staleness of N, the answers of step ``k`` are made with the weights that the policy had N steps earlier (the
first ones with those at the start), neither older nor newer. So a run repeats bit for bit, whichever side is faster,
over every backend; with N = 0 it is the synchronous run.

Three rules make it so. The buffer admits rollouts in order and no more than N versions ahead (`InOrderPolicy`). New
weights are sent to the rollout worker only when the rollouts that are to be made with the present ones have been asked
for. And the rollout worker does what it is asked in order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ray import ObjectRef

from dataplane_core.errors import DataPlaneError
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.errors import CollectorFailedError, WorkerFailedError
from dataplane_integrations.ray import wait_for_all
from dataplane_integrations.replay import Collector, InOrderPolicy, ReplayBuffer, Reservation
from dataplane_integrations.rollout import RolloutReceipt

from .cluster import Actors
from .config import RunConfig
from .data_path import Draw, Scores, score
from .errors import RunFailedError
from .plane_path import DataPlanePath, PlaneRolloutWorker
from .rollout import RolloutCarry, RolloutWorker

__all__ = ["AsyncPath"]

_REPLAY_FOLDER = "replay"
#: Seconds to wait at the end of a failed run for a rollout that still generates.
_STOP_TIMEOUT_S = 10.0
#: Seconds between two checks of the waiting trainer whether the collector has failed.
_CHECK_S = 1.0


class AheadRolloutWorker(PlaneRolloutWorker):
    """The rollout worker, writing the rows that a replay buffer has reserved."""

    def generate_reserved(
        self,
        step: int,
        prompts: Sequence[str],
        answers_per_prompt: int,
        sample_ids: Sequence[str],
        tags: Sequence[dict[str, Any]],
        loaded: None,
    ) -> tuple[RolloutReceipt, RolloutCarry, dict[str, Any]]:
        """As `generate_to_plane`, under given ids.

        Args:
            step: The step that will train on the rows.
            prompts: The prompts.
            answers_per_prompt: The group size.
            sample_ids: One per answer.
            tags: Their tags, to which the lengths are added.
            loaded: What the newest `load_weights` returned. Passed as a reference, it makes a failure to load the
                weights a failure of this call.

        Returns:
            The receipt for the rows, the carry, and what this process' client did so far.
        """
        batch, carry = self.generate(step, prompts, answers_per_prompt)
        with_lengths = [{**row, "input_lengths": length} for row, length in zip(tags, carry.input_lengths, strict=True)]
        receipt = self._first_write(
            batch, sample_ids=sample_ids, partition_id=AsyncPath.partition, carry_fields=(), tags=with_lengths
        )
        return receipt, carry, self.data_plane_metrics()


class AsyncPath(DataPlanePath):
    """A data path on which the rows of later steps are generated while the workers train."""

    partition = "replay"
    rollout_class: ClassVar[type[RolloutWorker]] = AheadRolloutWorker
    collecting = "wait"

    def __init__(self, config: RunConfig, *files: Any) -> None:
        super().__init__(config, *files)
        self._staleness = config.rollouts.staleness
        self._prompts_per_step = config.grpo.prompts_per_step
        # A run that is saved runs ahead beyond its last step as well: one that goes on from there, to more steps, then
        # finds what it would have found had it never stopped.
        self._last_step = None if config.saving.every else config.grpo.steps
        self._buffer: ReplayBuffer | None = None
        self._collector: Collector | None = None
        self._collecting = False
        self._step = 0
        self._training_began = 0.0
        self._training_ended = 0.0
        self._clock_start = time.monotonic()
        self._changed = threading.Condition()
        # guarded by _changed
        self._loaded: ObjectRef | None = None
        self._last_begun = 0
        self._generated: dict[int, tuple[float, float]] = {}
        self._newest_metrics: dict[str, Any] = {}

    def start(self, actors: Actors, draw: Draw) -> None:
        super().start(actors, draw)
        self._open_step(0, None)
        self._begin(resume=False)

    def _begin(self, *, resume: bool) -> None:
        self._buffer = ReplayBuffer(
            self._require().client,
            self.partition,
            InOrderPolicy(max_staleness=self._staleness, groups_per_version=self._prompts_per_step),
            group_size=self._config.grpo.answers_per_prompt,
            num_prompts=None if self._last_step is None else self._last_step * self._prompts_per_step,
            resume=resume,
        )
        self._collector = Collector(
            self._buffer, self._roll_out, groups_per_call=self._prompts_per_step, max_failures=1
        )

    def hand_over(self, step: int, push: Callable[[], ObjectRef]) -> None:
        """Queues the newest weights after the rollouts that use the present ones. Does not wait."""
        buffer, collector = self._started()
        if self._collecting:
            self._await_begun(step - 1 + self._staleness)
        loaded = push()
        with self._changed:
            self._loaded = loaded
        buffer.set_weight_version(step - 1)
        if not self._collecting:
            self._collecting = True
            collector.start()

    def collect(self, step: int) -> Scores:
        """Waits until the rows of a step have been generated, and returns what the driver needs of them."""
        buffer, _ = self._started()
        try:
            self._meta = buffer.select(self._prompts_per_step, timeout_s=self._timeout_s)
        except CollectorFailedError as error:
            if isinstance(error.__cause__, WorkerFailedError):  # says it better
                raise error.__cause__ from None
            raise
        self._step = step
        self._training_began = self._clock()
        tags = self._meta.tags or []
        return Scores([float(row["reward"]) for row in tags], [int(row["input_lengths"]) for row in tags])

    def _drop_rows(self) -> None:
        buffer, _ = self._started()
        buffer.consume(self._meta)
        self._training_ended = self._clock()

    def step_facts(self) -> dict[str, Any]:
        """Of the newest step: how many versions old the weights were, and when what ran, in seconds of this process."""
        versions = {row["weight_version"] for row in self._meta.tags or []}
        with self._changed:
            generated = self._generated.pop(self._step, None)  # unknown where a save had the rows
        return {
            "staleness": self._step - 1 - min(versions),
            "spans": {"generate": generated, "train": (self._training_began, self._training_ended)},
        }

    def save(self, folder: Path) -> None:
        """See `DataPath.save`. Waits for running rollouts, and saves the prompts and the ready rows."""
        buffer, collector = self._started()
        self._await_begun(self._step + self._staleness)
        with collector.quiet(self._timeout_s):
            buffer.save(folder / _REPLAY_FOLDER)

    def restore(self, folder: Path, step: int) -> None:
        """See `DataPath.restore`."""
        buffer, _ = self._started()
        buffer.close()
        self._require().client.load(folder / _REPLAY_FOLDER)
        self._begin(resume=True)
        self._last_begun = step + self._staleness

    def close(self) -> None:
        if self._collector is not None:
            with contextlib.suppress(DataPlaneError):  # why it failed, or that it was cut off, is said elsewhere
                self._collector.stop(_STOP_TIMEOUT_S)
        if self._buffer is not None:
            self._buffer.close()
        super().close()

    # --- in the collector's thread ------------------------------------------------------------------------------------

    def _roll_out(self, reservations: Sequence[Reservation]) -> KVBatchMeta:
        """Lets the rollout worker generate the rows of one step, and scores its answers."""
        step = reservations[0].prompt // self._prompts_per_step + 1
        problems = self._draw(step, 0)
        ids = [sample_id for each in reservations for sample_id in each.sample_ids]
        tags = [{**each.tags, "step": step} for each in reservations for _ in each.sample_ids]
        prompts = [problem.prompt for problem in problems]
        group_size = self._config.grpo.answers_per_prompt
        began = self._clock()
        with self._changed:
            call = self._actors.rollout.generate_reserved.remote(step, prompts, group_size, ids, tags, self._loaded)
            self._last_begun = step
            self._changed.notify_all()
        doing = f"generating for step {step}"
        [(receipt, carry, metrics)] = wait_for_all({"rollout worker": call}, timeout_s=self._timeout_s, doing=doing)
        receipt.meta.stamp_tags({"reward": score(problems, carry.answers)})
        with self._changed:
            self._generated[step] = (began, self._clock())
            self._newest_metrics = metrics
        meta: KVBatchMeta = receipt.meta
        return meta

    # --- inside -------------------------------------------------------------------------------------------------------

    def _await_begun(self, step: int) -> None:
        """Waits until the rollout worker has been asked for the rows of ``step``, and of all before it."""
        if self._last_step is not None:
            step = min(step, self._last_step)
        patience_s = (self._staleness + 1) * self._timeout_s  # rows of steps before it may have to be made first
        give_up = time.monotonic() + patience_s
        _, collector = self._started()
        with self._changed:
            while not self._changed.wait_for(lambda: self._last_begun >= step, _CHECK_S):
                if collector.counts.failures:
                    return  # `collect` says why
                if time.monotonic() > give_up:
                    raise RunFailedError(
                        f"the rollouts for step {step} have not begun within {patience_s:g} s; the newest are those "
                        f"for step {self._last_begun}."
                    )

    def _started(self) -> tuple[ReplayBuffer, Collector]:
        assert self._buffer is not None, "start() comes first"
        assert self._collector is not None, "start() comes first"
        return self._buffer, self._collector

    def _clock(self) -> float:
        """Seconds since the start of this process's run."""
        return round(time.monotonic() - self._clock_start, 4)

    def _rollout_metrics(self) -> dict[str, Any]:
        with self._changed:
            return self._newest_metrics
