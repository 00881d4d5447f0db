"""The supervised warm start: the model learns the format, and half-learns the arithmetic, before GRPO begins.

Reinforcement learning can only strengthen answers that the model already gives now and then, so it needs a start. A
clean warm start of this length would leave little to improve; therefore a share of the targets (half, by default)
carries one wrong digit, and the model learns to be right about half of the time. What GRPO then does is to move
probability from the plausible wrong answers to the right ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .model import Transformer
from .task import EOS_ID, PAD_ID, corrupt_one_digit, encode, random_problem

__all__ = ["pad_rows", "warm_start"]


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Token id rows of different lengths as one tensor (N, S) int64, padded on the right to the longest."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[PAD_ID] * (width - len(row))] for row in rows], dtype=torch.int64)


def warm_start(
    model: Transformer,
    *,
    seed: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    max_digits: int,
    wrong_fraction: float,
    on_step: Callable[[int, float], None],
) -> None:
    """Trains ``model`` in place on random sums, by next-token cross-entropy over the answer.

    Args:
        model: The model; runs in this process on one thread.
        seed: Decides the sums and the corrupted digits.
        steps: Number of optimizer steps.
        batch_size: Sums per step.
        learning_rate: The highest rate; it rises over the first tenth of the steps and then falls to a tenth.
        max_digits: The longest number in a sum.
        wrong_fraction: Share of the targets that carry one wrong digit.
        on_step: Called after every step with the number of steps done and the loss.
    """
    rng = random.Random(f"warm start {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    rise = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / rise) * (1.0 - 0.9 * step / max(1, steps))
    )
    for step in range(steps):
        rows, prompt_lengths = [], []
        for _ in range(batch_size):
            problem = random_problem(rng, max_digits)
            wrong = rng.random() < wrong_fraction
            answer = corrupt_one_digit(rng, problem.answer) if wrong else problem.answer
            rows.append([*encode(problem.prompt), *encode(answer), EOS_ID])
            prompt_lengths.append(len(problem.prompt))
        ids_ns = pad_rows(rows)
        logits_nsv = model(ids_ns[:, :-1])
        loss_ns = functional.cross_entropy(logits_nsv.transpose(1, 2), ids_ns[:, 1:], reduction="none")
        # Position t of the loss is about token t + 1: the answer's tokens, and no padding.
        position = torch.arange(1, ids_ns.shape[1])
        mask_ns = (position >= torch.tensor(prompt_lengths).unsqueeze(1)) & (ids_ns[:, 1:] != PAD_ID)
        loss = (loss_ns * mask_ns).sum() / mask_ns.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, loss.item())
