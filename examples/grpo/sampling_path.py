"""Dynamic sampling (DAPO) over a data plane: generate until there are enough groups with a learning signal.

A group whose answers all have the same reward has advantages of 0. The driver writes the rewards as tags on the
meta. `DynamicSampling` reads only these, and clears the rows of such groups in the store before anybody reads them.
Further prompts replace the dropped groups.
"""

from __future__ import annotations

from typing import Any

from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.rollout import DynamicSampling

from .config import RunConfig
from .data_path import Scores, score
from .plane_path import DataPlanePath

__all__ = ["SamplingPath"]


class SamplingPath(DataPlanePath):
    """A data path whose steps are made of groups whose rewards differ."""

    def __init__(self, config: RunConfig, *files: Any) -> None:
        super().__init__(config, *files)
        self._settings = config.dynamic_sampling
        self._facts: dict[str, float] = {}

    def collect(self, step: int) -> Scores:
        """See `DataPath.collect`. Fewer groups than a step wants only if the generations are used up."""
        group_size = self._config.grpo.answers_per_prompt
        rows: dict[str, tuple[float, int]] = {}

        def generate(generation: int) -> KVBatchMeta:
            problems = self._draw(step, generation)
            meta, carry = self._generate(step, generation, [problem.prompt for problem in problems])
            rewards = score(problems, carry.answers)
            meta.stamp_tags({"reward": rewards})
            rows.update(zip(meta.sample_ids, zip(rewards, carry.input_lengths, strict=True), strict=True))
            return meta

        policy = self._require()
        self._open_step(step, None)
        sampling = DynamicSampling(
            policy.client,
            num_groups=self._config.grpo.prompts_per_step,
            group_size=group_size,
            max_generations=self._settings.max_generations,
            allow_fewer=True,
        )
        self._meta = sampling.collect(generate)
        kept = [rows[sample_id] for sample_id in self._meta.sample_ids]
        counts = sampling.counts
        self._facts = {
            "generations": counts.generations,
            "groups": counts.held,
            "groups_dropped": counts.dropped,
            "groups_overflow": counts.overflow,
            "reward_generated": sum(reward for reward, _ in rows.values()) / len(rows),
        }
        return Scores([reward for reward, _ in kept], [length for _, length in kept])

    def step_facts(self) -> dict[str, Any]:
        """What the sampling took in the newest step; ``reward_generated`` counts the dropped answers too."""
        return self._facts
