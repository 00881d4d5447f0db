"""The policy worker on Megatron: `workers.PolicyWorker` with a `megatron.core` model in place of FSDP2's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataplane_core.batch import BatchedDataDict

from .megatron_model import build_megatron_model, is_cut, load_state, megatron_token_logprobs, whole_state
from .model import Transformer
from .weights import PackedWeights, load_packed_weights, pack_tensors
from .workers import PolicyWorker

__all__ = ["MegatronPolicyWorker"]


class MegatronPolicyWorker(PolicyWorker):
    """One rank. Tensor parallelism is Megatron's; gradients are averaged over data parallelism when a batch is done."""

    def _build(self, packed: PackedWeights) -> None:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(self.layout.tensor_parallel)
        whole = Transformer(self.model_config)
        load_packed_weights(whole, packed)
        self._names = [name for name, _ in whole.named_parameters()]
        self.model = self._make_model(whole)
        self.reference = self._make_model(whole).requires_grad_(False)

    def _make_model(self, whole: Transformer) -> nn.Module:
        model = build_megatron_model(self.model_config, self.layout.tensor_parallel)
        load_state(model, dict(whole.named_parameters()), self.model_config.heads)
        return model

    def packed_weights(self) -> PackedWeights | None:
        """See `PolicyWorker.packed_weights`."""
        state = whole_state(self.model, self._names, self.model_config.heads)
        return pack_tensors(state.values()) if self.rank == 0 else None

    def _rows_group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        return group

    def _forward(self, model: nn.Module, data: BatchedDataDict) -> Tensor:
        return megatron_token_logprobs(
            model, data["input_ids"], data["input_lengths"], packed=self.layout.pack_sequences
        )

    def _before_backward(self, last: bool) -> None:
        """Gradients are exchanged in `_clip_gradients`."""

    def _clip_gradients(self) -> float:
        from megatron.core import parallel_state

        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self._rows_group())
        flat /= self.dp_size
        # tensor-parallel ranks hold parts of some gradients, and the same of others: those count once
        counts_whole = parallel_state.get_tensor_model_parallel_rank() == 0
        squares = torch.zeros([])
        parts = flat.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(self.model.parameters(), parts, strict=True):
            if counts_whole or is_cut(parameter):
                squares += part.square().sum()
        dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        norm = squares.sqrt().item()
        flat *= min(1.0, self.optimizer_config.max_grad_norm / (norm + 1e-6))
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return norm
