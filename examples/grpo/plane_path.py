"""The run over a data plane: the driver moves metas, the columns go from the rollout worker to the policy workers.

The rollout worker writes its columns to the store and hands the driver a meta: ids, lengths, no tensors. The driver
sends each policy worker the part of the meta that is its own, with a microbatch plan; the worker reads its rows from
the store, and writes the columns that it computes back under the same ids.

A run with ``saving.resume`` keeps the rows of a step until a save has what was learnt from them. Started again, on a
store that outlives its processes, it has only those answers generated that the store lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from dataplane_core.batch import BatchedDataDict
from dataplane_core.meta import KVBatchMeta
from dataplane_core.middleware import merge_snapshots
from dataplane_core.schema import DP_TRAIN_FIELDS
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.ray import RayWorkerGroup, wait_for_all
from dataplane_integrations.rollout import DataPlaneRolloutMixin, FoundRollouts, mint_sample_ids, missing_groups
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin
from dataplane_integrations.trainer.megatron import MegatronDataPlaneMixin

from .checkpoint import run_digest
from .cluster import Actors
from .config import RunConfig
from .data_path import DataPath, Draw, Traffic, batching_of, summarize_training
from .errors import UserError
from .megatron_workers import MegatronPolicyWorker
from .rollout import RolloutCarry, RolloutWorker, portions
from .task import PAD_ID
from .workers import LossFunction, PolicyWorker

__all__ = ["DataPlanePath"]

#: What the rows of a step have: what training reads, and for people the reward.
_FIELDS = [*DP_TRAIN_FIELDS, "reward"]
#: The rollout worker draws by the number of the step; further generations of a step must not repeat another's draw.
_FURTHER_DRAWS = 1_000_000


class PlaneRolloutWorker(DataPlaneRolloutMixin, RolloutWorker):
    """The rollout worker, writing what it generates to the store."""

    def generate_portion(
        self, step: int, prompts: Sequence[str], answers_per_prompt: int, first: int
    ) -> tuple[BatchedDataDict, RolloutCarry]:
        """As `RolloutWorker.generate_portion`. Meanwhile ``dataplane why`` says that this process generates."""
        with self._require_dp_client().phase("generate"):
            return super().generate_portion(step, prompts, answers_per_prompt, first)

    def generate_to_plane(
        self,
        step: int,
        prompts: Sequence[str],
        answers_per_prompt: int,
        partition_id: str,
        uids: Sequence[str],
        missing: Collection[str],
        tags: Mapping[str, Any],
    ) -> None:
        """As `RolloutWorker.generate`, with the columns left in the store: a put for each portion.

        Args:
            step: Decides the draw.
            prompts: The prompts.
            answers_per_prompt: The group size.
            partition_id: Where the rows go.
            uids: A name for each prompt, of which the ids of its rows are made.
            missing: Those of the prompts to answer. The others are there.
            tags: Tags of all rows. To these are added the answer and the length.
        """
        for portion in portions(len(prompts), self.prompts_per_put):
            if set(missing).isdisjoint(uids[portion]):
                continue
            batch, carry = self.generate_portion(step, prompts[portion], answers_per_prompt, portion.start)
            own = zip(carry.answers, carry.input_lengths, strict=True)
            self._first_write(
                batch,
                sample_ids=mint_sample_ids(uids[portion], answers_per_prompt),
                partition_id=partition_id,
                carry_fields=(),
                tags=[{**tags, "answer": answer, "input_lengths": length} for answer, length in own],
            )


class _PadsAnswers:
    def _pad_value_dict(self) -> dict[str, int | float]:
        return {"input_ids": PAD_ID}


class PlanePolicyWorker(_PadsAnswers, FSDP2DataPlaneMixin, PolicyWorker):
    """The policy worker with the data plane's entry points: ``train_presharded`` and its siblings."""


class MegatronPlanePolicyWorker(_PadsAnswers, MegatronDataPlaneMixin, MegatronPolicyWorker):
    """The same on Megatron."""


class DataPlanePath(DataPath):
    """The rows live in the store that the configuration names; the driver holds their meta."""

    #: Where they are. With ``saving.resume``, each step has a partition of its own, whose name ends with its number.
    partition: ClassVar[str] = "train"
    rollout_class: ClassVar[type[RolloutWorker]] = PlaneRolloutWorker
    worker_classes: ClassVar[Mapping[str, type[PolicyWorker]]] = {
        "fsdp2": PlanePolicyWorker,
        "megatron": MegatronPlanePolicyWorker,
    }

    def __init__(
        self,
        config: RunConfig,
        recording: Path | None = None,
        payload: str = "none",
        found: FoundRollouts | None = None,
    ) -> None:
        """Makes the path.

        Args:
            config: The run.
            recording: An absolute folder where all processes record what they do, with this ``payload`` of puts.
            found: Counts the rollouts that were there when a step was begun again.
        """
        plane = config.data_plane
        others = [each for each in plane.middleware if each != "metrics"]
        recorder = [] if recording is None else [{"recorder": {"folder": str(recording), "payload": payload}}]
        plane = plane.model_copy(update={"middleware": ["metrics", *recorder, *others]})
        self.name = plane.backend
        self.recording = recording
        self._config = config
        self._plane = plane
        self._timeout_s = config.ray.step_timeout_s
        self._policy: DataPlanePolicy | None = None
        self._seen = Traffic()
        self._found = found
        #: Whether rows stay until a save has what was learnt from them.
        self._keeps_rows = config.saving.resume and config.rollouts.mode == "sync"
        self._row_tags = {"run": run_digest(config)} if self._keeps_rows else {}
        self._partition = self.partition
        self._interrupted = False

    def start(self, actors: Actors, draw: Draw) -> None:
        self._actors = actors
        self._draw = draw
        dp_ranks = [rank // self._config.tensor_parallel for rank in range(len(actors.workers))]
        self._policy = DataPlanePolicy(
            RayWorkerGroup(actors.workers, dp_ranks),
            self._plane,
            batching=batching_of(self._config),
            timeout_s=self._timeout_s,
            read_ahead=self._config.portions.read_ahead,
            clear_on_failure=not self._keeps_rows,
        )
        self._refuse_other_runs()
        self._on_rollout("setup_data_plane", self._plane, doing="attaching to the data plane")

    def _refuse_other_runs(self) -> None:
        """Refuses a store that holds rows which another run keeps: a resume would drop them as its own."""
        client = self._require().client
        for name in client.list_partitions() if self._keeps_rows else ():
            if not name.startswith(f"{self.partition}-"):
                continue
            meta = client.list_samples(name, {"run": ("!=", self._row_tags["run"])})
            if meta.size:
                raise UserError(
                    f"the store holds rows of another run in '{name}', which that run needs to go on. Start it again "
                    "with its configuration and its --out; or name another folder or namespace in "
                    "data_plane; or remove the rows, if nobody needs them."
                )

    def generate(self, step: int, prompts: Sequence[str]) -> RolloutCarry:
        self._open_step(step, len(prompts) * self._config.grpo.answers_per_prompt)
        self._meta, carry = self._generate(step, 0, prompts)
        return carry

    def _open_step(self, step: int, num_samples: int | None) -> None:
        group_size, client = self._config.grpo.answers_per_prompt, self._require().client
        if self._keeps_rows:
            self._partition = f"{self.partition}-{step}"
            self._interrupted = self._partition in client.list_partitions()
        self._require().prepare_step(
            num_samples, group_size, partition_id=self._partition, fields=_FIELDS, keep_rows=self._keeps_rows
        )
        self._refuse_other_runs()  # one that was started beside this one

    def _generate(self, step: int, generation: int, prompts: Sequence[str]) -> tuple[KVBatchMeta, RolloutCarry]:
        client, group_size = self._require().client, self._config.grpo.answers_per_prompt
        mark = f"s{step}" if generation == 0 else f"s{step}r{generation}"
        uids = missing = [f"{mark}_p{number}" for number in range(len(prompts))]
        if self._keeps_rows:
            missing = missing_groups(client, self._partition, uids, group_size)
            if self._interrupted and self._found is not None:
                together = [uids[each] for each in portions(len(uids), self._config.rollouts.prompts_per_put)]
                whole = sum(len(each) for each in together if set(missing).isdisjoint(each))
                self._found.add(step, len(uids) * group_size, whole * group_size)
        if missing:
            tags = {"step": step, **self._row_tags}
            draw = step + generation * _FURTHER_DRAWS
            self._answer(step, [draw, list(prompts), group_size, self._partition, uids, missing, tags])
        meta = client.list_samples(self._partition, sample_ids=mint_sample_ids(uids, group_size))
        rows = meta.tags or []
        return meta, RolloutCarry([str(row["answer"]) for row in rows], [int(row["input_lengths"]) for row in rows])

    def _answer(self, step: int, arguments: Sequence[Any]) -> None:
        """Lets the rollout worker answer prompts: see `PlaneRolloutWorker.generate_to_plane`."""
        self._on_rollout("generate_to_plane", *arguments, doing=f"generating in step {step}")

    def put_scores(self, rewards_n: Tensor, advantages_ns: Tensor) -> None:
        columns = {"advantages": advantages_ns, "reward": rewards_n}
        self._meta = self._require().write_to_dataplane(self._meta, columns)

    def compute_prev_logprobs(self) -> None:
        self._meta = self._require().get_logprobs_from_meta(self._meta)

    def compute_reference_logprobs(self) -> None:
        self._meta = self._require().get_reference_policy_logprobs_from_meta(self._meta)

    def train(self, loss_fn: LossFunction) -> dict[str, float]:
        policy, portions = self._require(), self._config.portions
        if portions.per_step == 1:
            result = policy.train_from_meta(self._meta, loss_fn)
        else:
            policy.begin_train_step(loss_fn)
            policy.train_microbatches_from_metas(self._cut(portions.per_step))
            result = policy.finish_train_step()
        return summarize_training([{**result, "global_loss": result["loss"]}])

    def _cut(self, portions: int) -> list[KVBatchMeta]:
        """The step's rows in portions of about equal size that all data-parallel ranks can share equally."""
        unit = self._config.data_parallel
        bounds = [self._meta.size // unit * number // portions * unit for number in range(portions + 1)]
        return [self._meta.slice(start, end) for start, end in pairwise(bounds) if start < end]

    def mark_step(self, step: int, loss: float, staleness: int) -> None:
        self._require().client.mark_step(step, loss=loss, staleness=staleness)

    def finish_step(self, keep: Path | None) -> Traffic:
        now = self._traffic()
        if keep is not None:
            self._require().client.save(keep, partitions=[self._partition])
        if not self._keeps_rows:
            self._drop_rows()
        step = Traffic(now.bytes_put - self._seen.bytes_put, now.bytes_get - self._seen.bytes_get)
        self._seen = now
        return step

    def _drop_rows(self) -> None:
        self._require().finish_step()

    def saved(self, step: int) -> None:
        """See `DataPath.saved`. Drops the rows of all steps up to this one."""
        client, names = self._require().client, {f"{self.partition}-{number}" for number in range(1, step + 1)}
        if self._keeps_rows:
            for name in names.intersection(client.list_partitions()):
                client.clear_samples(None, name)

    def restore(self, folder: Path, step: int) -> None:
        """See `DataPath.restore`. The store holds the rows of later steps, and those that were not dropped in time."""
        self.saved(step)

    def close(self) -> None:
        if self._policy is not None:
            self._policy.close()

    def _require(self) -> DataPlanePolicy:
        assert self._policy is not None, "start() comes first"
        return self._policy

    def _on_rollout(self, method: str, *args: Any, doing: str) -> Any:
        call = getattr(self._actors.rollout, method).remote(*args)
        return wait_for_all({"rollout worker": call}, timeout_s=self._timeout_s, doing=doing)[0]

    def _traffic(self) -> Traffic:
        """What all processes moved so far: payload bytes, as the metrics middleware counted them."""
        operations = merge_snapshots([self._require().metrics(), self._rollout_metrics()])["operations"]
        put, got = (operations.get(name, {}).get("n_bytes", 0) for name in ("put_samples", "get_samples"))
        return Traffic(put, got)

    def _rollout_metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = self._on_rollout("data_plane_metrics", doing="counting the bytes moved")
        return metrics
