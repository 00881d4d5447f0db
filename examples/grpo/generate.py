"""Batched generation: many prompts of different lengths at once, every token computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import KeyValueCache, Transformer
from .task import EOS_ID, PAD_ID

__all__ = ["Completions", "generate"]


@dataclass(frozen=True)
class Completions:
    """Prompts and what followed them.

    Attributes:
        input_ids: (N, S) int64, prompt then answer (end-of-sequence included), padded on the right.
        prompt_lengths: (N,) int64.
        input_lengths: (N,) int64, prompt and answer together.
        logprobs: (N, S) float32, of each answer token when it was drawn; 0 elsewhere.
    """

    input_ids: Tensor
    prompt_lengths: Tensor
    input_lengths: Tensor
    logprobs: Tensor


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Completions:
    """Continues every prompt until end-of-sequence or ``max_new_tokens``.

    All rows advance together, one position at a time. A row that still has prompt left is fed its prompt there; the
    others are fed the token just drawn. So prompts need no padding on the left, and rows stay independent.

    Args:
        model: An unsharded model.
        prompts: (N) lists of token ids, none empty.
        max_new_tokens: The most tokens an answer may have, end-of-sequence included.
        temperature: 0 takes the likeliest token.
        generator: The source of randomness. It is drawn from once per position for all rows, so what it yields to a
            row depends on the whole batch.
    """
    num_rows = len(prompts)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = prompt_lengths + max_new_tokens  # where each row must stop
    shortest, width = int(prompt_lengths.min()), int(ends.max())
    ids_ns = torch.full((num_rows, width), PAD_ID)
    for row, prompt in enumerate(prompts):
        ids_ns[row, : len(prompt)] = torch.tensor(prompt)
    logprobs_ns = torch.zeros(num_rows, width)
    lengths = ends.clone()
    done = torch.zeros(num_rows, dtype=torch.bool)

    cache = KeyValueCache(model.config, num_rows)
    fresh = ids_ns[:, :shortest]
    for position in range(shortest, width):
        all_logprobs_nv = model(fresh, cache)[:, -1].log_softmax(dim=-1)
        if temperature == 0.0:
            drawn = all_logprobs_nv.argmax(dim=-1)
        else:
            drawn = torch.multinomial((all_logprobs_nv / temperature).softmax(dim=-1), 1, generator=generator)[:, 0]
        writes = (position >= prompt_lengths) & ~done
        ids_ns[:, position] = torch.where(writes, drawn, ids_ns[:, position])
        chosen = all_logprobs_nv.gather(-1, drawn.unsqueeze(-1))[:, 0]
        logprobs_ns[:, position] = torch.where(writes, chosen, torch.zeros_like(chosen))
        stops = writes & ((drawn == EOS_ID) | (position + 1 >= ends))
        lengths = torch.where(stops, torch.full_like(lengths, position + 1), lengths)
        done |= stops
        if bool(done.all()):
            break
        fresh = ids_ns[:, position : position + 1]

    longest = int(lengths.max())
    return Completions(
        input_ids=ids_ns[:, :longest].contiguous(),
        prompt_lengths=prompt_lengths,
        input_lengths=lengths,
        logprobs=logprobs_ns[:, :longest].contiguous(),
    )
