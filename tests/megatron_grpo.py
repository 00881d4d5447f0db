"""The policy worker of `examples/grpo.py` on Megatron: the same weights in a `megatron.core` GPT model.

Megatron is imported in the workers alone.

Shape legend: ``N`` rows, ``S`` padded length, ``T`` tokens of all rows, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpo
import torch
import torch.distributed as dist
from tiny_megatron import SdpaAttention
from torch import Tensor, nn
from torch.nn import functional

from dataplane_core.batch import BatchedDataDict
from dataplane_integrations.trainer.megatron import MegatronDataPlaneMixin

VOCAB_SIZE = len(grpo.CHARACTERS)
_NAMES = {
    "token_embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "head.0": "decoder.final_layernorm",
    "head.1": "output_layer",
    "qkv.0": "input_layernorm",
    "qkv.1": "self_attention.linear_qkv",
    "out": "self_attention.linear_proj",
    "feed_forward.0": "pre_mlp_layernorm",
    "feed_forward.1": "mlp.linear_fc1",
    "feed_forward.3": "mlp.linear_fc2",
}
#: The bias of tokens that pad the vocabulary to a multiple of the tensor-parallel ranks, so that they are never chosen.
_NEVER = -1e30


class MegatronModel(nn.Module):
    """This rank's part of the policy, after ``initialize_model_parallel``."""

    def __init__(self, whole: grpo.Transformer, tensor_parallel: int, packed: bool) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer import TransformerConfig

        super().__init__()
        self.packed = packed
        config = TransformerConfig(
            num_layers=grpo.LAYERS,
            hidden_size=grpo.WIDTH,
            num_attention_heads=grpo.HEADS,
            tensor_model_parallel_size=tensor_parallel,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = SdpaAttention
        vocab_size = -(-VOCAB_SIZE // tensor_parallel) * tensor_parallel
        self.gpt = GPTModel(config, spec, vocab_size=vocab_size, max_sequence_length=grpo.CONTEXT)
        # the policy's last layer has a bias, GPTModel's has none
        self.gpt.output_layer = ColumnParallelLinear(
            grpo.WIDTH, vocab_size, config=config, init_method=config.init_method, bias=True, gather_output=False
        )
        self.load(dict(whole.named_parameters()))

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes this rank's part of the weights of a `grpo.Transformer`, by its names."""
        from megatron.core import parallel_state

        rank = parallel_state.get_tensor_model_parallel_rank()
        parameters = dict(self.gpt.named_parameters())
        for name, whole in weights.items():
            parameter = parameters.pop(megatron_name(name))
            if ".qkv.1." in name:
                whole = whole.unflatten(0, (3, grpo.HEADS, -1)).transpose(0, 1).flatten(0, 2)  # head by head
            if is_cut(parameter):
                dim = parameter.partition_dim
                room = parameter.shape[dim] * parallel_state.get_tensor_model_parallel_world_size() - whole.shape[dim]
                filler = _NEVER if name == "head.1.bias" else 0.0
                whole = torch.cat([whole, whole.new_full((room, *whole.shape[1:]), filler)]) if room else whole
                whole = whole.narrow(dim, rank * parameter.shape[dim], parameter.shape[dim])
            parameter.copy_(whole)
        assert not parameters, f"no weights for {', '.join(parameters)}"

    def whole(self, names: list[str]) -> dict[str, Tensor]:
        """The weights of all ranks by the names of a `grpo.Transformer`. Collective over ``tp``."""
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        parameters = dict(self.gpt.named_parameters())
        weights = {}
        for name in names:
            parameter = parameters[megatron_name(name)]
            whole = parameter.detach()
            if is_cut(parameter):
                parts = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, whole.contiguous(), group=group)
                whole = torch.cat(parts, parameter.partition_dim)
            if ".qkv.1." in name:
                whole = whole.unflatten(0, (grpo.HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)
            weights[name] = whole[:VOCAB_SIZE] if name.startswith(("token_embedding.", "head.1.")) else whole
        return weights

    def token_logprobs(self, data: BatchedDataDict) -> Tensor:
        """As `grpo.Transformer.token_logprobs`, on every tensor-parallel rank."""
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        ids_ns, lengths_n = data["input_ids"], data["input_lengths"]
        inside_ns = torch.arange(ids_ns.shape[1]) < lengths_n.unsqueeze(1)
        positions = torch.arange(ids_ns.shape[1]).expand_as(ids_ns)
        following = functional.pad(ids_ns[:, 1:], (0, 1))
        ids, params = ids_ns, None  # as the model takes them: (N, S), or (1, T)
        if self.packed:
            ids, positions, following = (column[inside_ns].unsqueeze(0) for column in (ids, positions, following))
            bounds = functional.pad(lengths_n.cumsum(0), (1, 0)).int()
            params = PackedSeqParams("thd", bounds, bounds)
        logits = self.gpt(ids, positions, None, packed_seq_params=params)
        logits = logits.transpose(0, 1).float().contiguous()  # sequence first, as Megatron's losses want it
        chosen = -vocab_parallel_cross_entropy(logits, following.transpose(0, 1).contiguous()).transpose(0, 1)
        if self.packed:
            chosen = torch.zeros(ids_ns.shape).masked_scatter(inside_ns, chosen.squeeze(0))
        aligned_ns = functional.pad(chosen[:, :-1], (1, 0))  # of each token given those before it
        return torch.where(inside_ns, aligned_ns, 0.0)


def megatron_name(name: str) -> str:
    """``blocks.1.qkv.1.weight`` -> ``decoder.layers.1.self_attention.linear_qkv.weight``."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{_NAMES[module]}.{kind}"
    _, number, part = module.split(".", 2)
    return f"decoder.layers.{number}.{_NAMES[part]}.{kind}"


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether each tensor-parallel rank holds a part of its own, rather than the same whole."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


class MegatronWorker(MegatronDataPlaneMixin, grpo.PolicyWorker):
    """One rank. Tensor parallelism is Megatron's; gradients are added up over data parallelism when a batch is done."""

    def __init__(self, rank: int, seed: int, rendezvous: str, tensor_parallel: int, packed: bool) -> None:
        from megatron.core import parallel_state

        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=grpo.NUM_WORKERS)
        parallel_state.initialize_model_parallel(tensor_parallel)
        self.rows_group = parallel_state.get_data_parallel_group()
        whole = grpo.Transformer(seed)
        self.names = [name for name, _ in whole.named_parameters()]
        self.model, self.reference = (MegatronModel(whole, tensor_parallel, packed) for _ in range(2))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=grpo.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / grpo.WARMUP_STEPS)
        )

    def weights(self) -> dict[str, Tensor]:
        return self.model.whole(self.names)

    def train(self, data: BatchedDataDict, loss_fn: Any, **_: Any) -> dict[str, Any]:
        loss, num_tokens, metrics = torch.zeros(()), data["token_mask"].sum(), {}
        dist.all_reduce(num_tokens, group=self.rows_group)
        for microbatch in data.get_batch(0).make_microbatch_iterator_with_dynamic_shapes():
            part, own = loss_fn(self.model.token_logprobs(microbatch), microbatch, num_tokens)
            part.backward()
            loss += part.detach()
            for name, value in own.items():
                metrics.setdefault(name, []).append(value.item())
        dist.all_reduce(loss, group=self.rows_group)
        norm = self._clip_gradients()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return {"global_loss": loss, "grad_norm": norm, "all_mb_metrics": metrics, "tokens": int(num_tokens)}

    def _clip_gradients(self) -> Tensor:
        """Adds the gradients up over the ranks with other rows, and scales them down. Returns their norm before."""
        from megatron.core import parallel_state

        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        dist.all_reduce(flat, group=self.rows_group)
        parts = flat.split([parameter.numel() for parameter in parameters])
        # tensor-parallel ranks hold parts of some gradients, and the same of others: those count once
        counts_whole = parallel_state.get_tensor_model_parallel_rank() == 0
        counted = [part for parameter, part in zip(parameters, parts, strict=True) if counts_whole or is_cut(parameter)]
        squares = torch.stack([part.square().sum() for part in counted]).sum()
        dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        norm = squares.sqrt()
        flat *= min(1.0, grpo.MAX_GRAD_NORM / (norm.item() + 1e-6))
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        return norm
