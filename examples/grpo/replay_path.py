"""A recorded run again, without generation: the rows of each step come from the recording, the rest is computed anew.

The recording (`train.py --record`) has what every process of the run wrote. Here each process opens it by the backend
``recording``. The driver takes what the rollout worker wrote in place of asking it, and the policy workers read their
rows as in the run. What driver and policy workers write is compared with what they wrote in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray import ObjectRef

from dataplane_core.meta import KVBatchMeta

from .plane_path import DataPlanePath
from .rollout import RolloutCarry
from .task import decode

__all__ = ["ReplayPath"]


class ReplayPath(DataPlanePath):
    """A data path on which nothing is generated. It needs the backend ``recording``."""

    collecting = "read"

    def hand_over(self, step: int, push: Callable[[], ObjectRef]) -> None:
        """Does nothing: nobody generates with the newest weights."""

    def _generate(self, step: int, generation: int, prompts: Sequence[str]) -> tuple[KVBatchMeta, RolloutCarry]:
        client = self._require().client
        meta = client.list_samples(self.partition)
        rows = client.get_samples(meta.sample_ids, self.partition, ["input_ids", "token_mask"])
        answers = [
            decode(ids[mask == 1].tolist()) for ids, mask in zip(rows["input_ids"], rows["token_mask"], strict=True)
        ]
        return meta, RolloutCarry(answers, [int(tags["input_lengths"]) for tags in meta.tags or []])
