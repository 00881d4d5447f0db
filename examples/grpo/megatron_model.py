"""The policy as a `megatron.core` GPT model, with the weights of `model.Transformer`, cut over tensor parallelism.

On the CPU, Megatron has no attention for packed sequences: that needs Transformer Engine. `SdpaAttention` replaces it.
Megatron is imported where it is used: in the workers, not in the driver.

Shape legend: ``N`` rows, ``S`` padded length, ``T`` tokens of all rows, ``V`` vocabulary, ``D`` size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from .config import ModelConfig
from .task import VOCAB_SIZE

__all__ = ["build_megatron_model", "load_state", "megatron_token_logprobs", "whole_state"]

_TOP = {
    "token_embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "head": "output_layer",
}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "attention_out": "self_attention.linear_proj",
    "feed_forward_norm": "pre_mlp_layernorm",
    "feed_forward_in": "mlp.linear_fc1",
    "feed_forward_out": "mlp.linear_fc2",
}
#: The bias of tokens that pad the vocabulary to a multiple of the tensor-parallel ranks, so that they are never chosen.
_NEVER = -1e30


class SdpaAttention(nn.Module):
    """Causal attention inside each row; rows side by side (S, N, heads, D), or one after another (T, heads, D)."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any) -> Tensor:
        """As Megatron calls it; with ``packed_seq_params`` the rows' bounds are in its ``cu_seqlens_q``."""
        packed = given.get("packed_seq_params")
        mask = None
        if packed is not None:
            place_t = torch.arange(query.shape[0])
            row_t = torch.bucketize(place_t, packed.cu_seqlens_q[1:], right=True)
            mask = (row_t.unsqueeze(1) == row_t) & (place_t.unsqueeze(1) >= place_t)
        heads = [part.movedim(0, -2) for part in (query, key, value)]
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        return mixed.movedim(-2, 0).flatten(-2).contiguous()


def build_megatron_model(sizes: ModelConfig, tensor_parallel: int) -> nn.Module:
    """This rank's part of the policy, after ``initialize_model_parallel``; its weights are to be loaded."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.width,
        num_attention_heads=sizes.heads,
        tensor_model_parallel_size=tensor_parallel,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    vocab_size = -(-VOCAB_SIZE // tensor_parallel) * tensor_parallel
    model: nn.Module = GPTModel(config, spec, vocab_size=vocab_size, max_sequence_length=sizes.context)
    # the policy's last layer has a bias, GPTModel's has none
    model.output_layer = ColumnParallelLinear(
        sizes.width, vocab_size, config=config, init_method=config.init_method, bias=True, gather_output=False
    )
    return model


def load_state(model: nn.Module, state: Mapping[str, Tensor], heads: int) -> None:
    """Copies the weights of a whole `model.Transformer`, by its names, into this rank's part of the Megatron model."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, whole in state.items():
            parameter = parameters.pop(_megatron_name(name))
            if name.startswith("blocks.") and ".qkv." in name:
                whole = whole.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)  # head by head
            dim = _cut_dim(parameter)
            if dim is not None:
                room = parameter.shape[dim] * parallel_state.get_tensor_model_parallel_world_size() - whole.shape[dim]
                filler = _NEVER if name == "head.bias" else 0.0
                whole = torch.cat([whole, whole.new_full((room, *whole.shape[1:]), filler)]) if room else whole
                whole = whole.narrow(dim, rank * parameter.shape[dim], parameter.shape[dim])
            parameter.copy_(whole)
    assert not parameters, f"no weights for {', '.join(parameters)}"


def whole_state(model: nn.Module, names: list[str], heads: int) -> dict[str, Tensor]:
    """The weights of all ranks by the names of a `model.Transformer`, in their order. Collective over ``tp``."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parameters = dict(model.named_parameters())
    state = {}
    for name in names:
        parameter = parameters[_megatron_name(name)]
        whole, dim = parameter.detach(), _cut_dim(parameter)
        if dim is not None:
            parts = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, whole.contiguous(), group=group)
            whole = torch.cat(parts, dim)
        if name.startswith("blocks.") and ".qkv." in name:
            whole = whole.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        if name.startswith(("token_embedding.", "head.")):
            whole = whole[:VOCAB_SIZE]
        state[name] = whole
    return state


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether each tensor-parallel rank holds a part of its own, rather than the same whole."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def megatron_token_logprobs(model: nn.Module, input_ids_ns: Tensor, input_lengths_n: Tensor, packed: bool) -> Tensor:
    """What `model.token_logprobs` gives, on every tensor-parallel rank, although each has a part of the vocabulary.

    Args:
        model: Of `build_megatron_model`.
        input_ids_ns: (N, S) int64, padded on the right.
        input_lengths_n: (N,) int64.
        packed: Forward the rows as one sequence without padding.

    Returns:
        (N, S) float32. Position 0 is 0, and so is everything from a row's length on.
    """
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    width = input_ids_ns.shape[1]
    inside_ns = torch.arange(width) < input_lengths_n.unsqueeze(1)
    position_ns = torch.arange(width).expand_as(input_ids_ns)
    following_ns = functional.pad(input_ids_ns[:, 1:], (0, 1))
    # as the model takes them: (N, S), or (1, T)
    ids, positions, following = input_ids_ns, position_ns, following_ns
    params = None
    if packed:
        ids, positions, following = (column[inside_ns].unsqueeze(0) for column in (ids, positions, following))
        bounds = functional.pad(input_lengths_n.cumsum(0), (1, 0)).int()
        params = PackedSeqParams("thd", bounds, bounds)
    logits = model(ids, positions, None, packed_seq_params=params)
    logits = logits.transpose(0, 1).float().contiguous()  # sequence first, as Megatron's losses want it
    chosen = -vocab_parallel_cross_entropy(logits, following.transpose(0, 1).contiguous()).transpose(0, 1)
    if packed:
        chosen = torch.zeros(input_ids_ns.shape).masked_scatter(inside_ns, chosen.squeeze(0))
    aligned_ns = functional.pad(chosen[:, :-1], (1, 0))  # of each token given those before it
    return torch.where(inside_ns, aligned_ns, torch.zeros_like(aligned_ns))


def _megatron_name(name: str) -> str:
    """``blocks.2.qkv.weight`` -> ``decoder.layers.2.self_attention.linear_qkv.weight``."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, number, part = module.split(".")
    return f"decoder.layers.{number}.{_IN_BLOCK[part]}.{kind}"


def _cut_dim(parameter: nn.Parameter) -> int | None:
    return int(parameter.partition_dim) if is_cut(parameter) else None
