"""Sequence packing: the rows of a microbatch as one sequence without padding, in which each sees itself alone.

Shape legend: ``N`` rows, ``S`` padded length, ``T`` tokens of all rows together, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["packed_token_logprobs"]


def packed_token_logprobs(model: nn.Module, input_ids_ns: Tensor, input_lengths_n: Tensor) -> Tensor:
    """What `model.token_logprobs` gives for the padded rows, from one forward over their tokens.

    The attention mask is block-diagonal: a token sees those of its own row that precede it. Positions start anew in
    each row. The plan leaves each row room up to a multiple of tokens, as attention kernels want; this one wants none,
    so the room stays unused.

    Returns:
        (N, S) float32. Position 0 is 0, and so is everything from a row's length on.
    """
    inside_ns = torch.arange(input_ids_ns.shape[1]) < input_lengths_n.unsqueeze(1)
    row_t, position_t = inside_ns.nonzero(as_tuple=True)
    mask_tt = (row_t.unsqueeze(1) == row_t) & (position_t.unsqueeze(1) >= position_t)
    input_ids_t = input_ids_ns[inside_ns]
    logits_tv = model(input_ids_t.unsqueeze(0), positions=position_t, mask=mask_tt).squeeze(0)
    logprobs_tv = logits_tv[:-1].float().log_softmax(dim=-1)
    chosen_t = logprobs_tv.gather(-1, input_ids_t[1:].unsqueeze(-1)).squeeze(-1)
    # the first token of a row follows the last one of another: nothing of its own precedes it
    aligned_t = torch.where(position_t > 0, functional.pad(chosen_t, (1, 0)), 0.0)
    return torch.zeros(input_ids_ns.shape).masked_scatter(inside_ns, aligned_t)
