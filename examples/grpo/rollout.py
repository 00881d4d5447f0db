"""The rollout worker: an actor that holds the newest weights and generates answers."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dataplane_core.batch import BatchedDataDict

from .config import ModelConfig, RunConfig
from .generate import Completions, generate
from .model import Transformer
from .task import PAD_ID, Problem, decode, encode
from .weights import PackedWeights, load_packed_weights

__all__ = ["RolloutCarry", "RolloutWorker", "draw_problems", "portions", "step_seed"]


@dataclass(frozen=True)
class RolloutCarry:
    """The small per-row values that the driver needs; the tensors travel apart from it.

    Attributes:
        answers: What was written, in the order of the prompts, a prompt's answers side by side.
        input_lengths: Tokens of prompt and answer together, one per answer.
    """

    answers: list[str]
    input_lengths: list[int]


def step_seed(seed: int, stream: str, step: int) -> int:
    """A seed of its own for every step and purpose, so that no draw depends on what was drawn before it."""
    # Not hash(): Python salts the hashes of strings per process.
    digest = hashlib.sha256(f"{seed}/{stream}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % 2**63


def portions(num_prompts: int, prompts_per_put: int | None) -> Iterator[slice]:
    """The prompts of a step that are answered together: always the same ones. None: all."""
    size = prompts_per_put or num_prompts
    return (slice(first, first + size) for first in range(0, num_prompts, size))


def draw_problems(config: RunConfig, problems: Sequence[Problem], step: int, generation: int) -> list[Problem]:
    """Problems for one generation of a step: all different, unless there are fewer than a step needs."""
    stream = "prompts" if generation == 0 else f"prompts/{generation}"
    rng = random.Random(step_seed(config.seed, stream, step))
    count = config.grpo.prompts_per_step
    return rng.sample(problems, count) if count <= len(problems) else rng.choices(problems, k=count)


class RolloutWorker:
    """Generates answers. One Ray actor; its methods run in that process, one at a time."""

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        prompts_per_put: int | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.model = Transformer(model_config).eval()
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.seed = seed
        self.prompts_per_put = prompts_per_put

    def process_id(self) -> int:
        """Process id; answers as soon as the actor is up."""
        return os.getpid()

    def load_weights(self, packed: PackedWeights) -> None:
        """Replaces the weights by those of a policy worker."""
        load_packed_weights(self.model, packed)

    def generate(
        self, step: int, prompts: Sequence[str], answers_per_prompt: int
    ) -> tuple[BatchedDataDict, RolloutCarry]:
        """Answers every prompt several times.

        Args:
            step: The training step; with the run's seed it decides the draw.
            prompts: The prompts.
            answers_per_prompt: The group size.

        Returns:
            The columns that training starts from, N = prompts x answers rows: ``input_ids`` (N, S) int64,
            ``input_lengths`` (N,) int64, ``generation_logprobs`` and ``token_mask`` (1 on answer tokens) (N, S)
            float32, ``sample_mask`` (N,) float32; and the carry for the driver.
        """
        made = [
            self.generate_portion(step, prompts[portion], answers_per_prompt, portion.start)
            for portion in portions(len(prompts), self.prompts_per_put)
        ]
        batch = BatchedDataDict.from_batches([batch for batch, _ in made], {"input_ids": PAD_ID})
        carries = [carry for _, carry in made]
        answers = [answer for carry in carries for answer in carry.answers]
        return batch, RolloutCarry(answers, [length for carry in carries for length in carry.input_lengths])

    def generate_portion(
        self, step: int, prompts: Sequence[str], answers_per_prompt: int, first: int
    ) -> tuple[BatchedDataDict, RolloutCarry]:
        """As `generate`, for a portion, whose first prompt has this number in its step.

        The answers follow from the weights, the seed, the step and the portion, whatever else is generated.
        """
        repeated = [prompt for prompt in prompts for _ in range(answers_per_prompt)]
        stream = "rollout" if first == 0 else f"rollout/{first}"
        generator = torch.Generator().manual_seed(step_seed(self.seed, stream, step))
        completions = self._complete(repeated, self.temperature, generator)
        position = torch.arange(completions.input_ids.shape[1])
        is_answer = (position >= completions.prompt_lengths.unsqueeze(1)) & (
            position < completions.input_lengths.unsqueeze(1)
        )
        batch = BatchedDataDict(
            {
                "input_ids": completions.input_ids,
                "input_lengths": completions.input_lengths,
                "generation_logprobs": completions.logprobs,
                "token_mask": is_answer.float(),
                "sample_mask": torch.ones(len(repeated)),
            }
        )
        return batch, RolloutCarry(_answers(completions), completions.input_lengths.tolist())

    def evaluate(self, prompts: Sequence[str], *, greedy: bool) -> list[str]:
        """One answer per prompt, the same draw at every call: differences come from the weights alone."""
        generator = torch.Generator().manual_seed(step_seed(self.seed, "evaluation", 0))
        return _answers(self._complete(prompts, 0.0 if greedy else self.temperature, generator))

    def _complete(self, prompts: Sequence[str], temperature: float, generator: torch.Generator) -> Completions:
        return generate(
            self.model,
            [encode(prompt) for prompt in prompts],
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            generator=generator,
        )


def _answers(completions: Completions) -> list[str]:
    starts, ends = completions.prompt_lengths.tolist(), completions.input_lengths.tolist()
    rows = completions.input_ids.tolist()
    return [decode(row[start:end]) for row, start, end in zip(rows, starts, ends, strict=True)]
