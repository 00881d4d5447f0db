"""What TRL 1.16.0 lacks to run AsyncGRPOTrainer without a GPU: its attention is a kernel for GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def without_a_gpu() -> None:
    """Makes AsyncGRPOTrainer run in this process without a GPU."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention_of_segments)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA for the name of the device


def attention_of_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins_q: Tensor,
    begins_k: Tensor,
    *_: Any,
    softmax_scale: float | None = None,
    **__: Any,
) -> Tensor:
    """Causal attention within each of S segments.

    The queries (Q, H, D) of segment ``s`` are those from ``begins_q[s]`` to ``begins_q[s + 1]``, its keys and values
    (K, H, D) those from ``begins_k[s]`` to ``begins_k[s + 1]``. Its last query is that of its last key.
    """
    segment = torch.repeat_interleave(begins_q.diff())  # (Q,)
    own_key = begins_k[1:][segment] - (begins_q[1:][segment] - torch.arange(len(segment)))
    position = torch.arange(len(key))
    seen = (position >= begins_k[segment].unsqueeze(1)) & (position <= own_key.unsqueeze(1))
    heads_first = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    out = scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
