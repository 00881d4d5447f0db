"""How the policy is spread over the workers: tensor parallelism inside a data-parallel rank, `fully_shard` across them.

Rank ``r`` of ``W`` workers with ``T``-fold tensor parallelism is data-parallel rank ``r // T`` and tensor-parallel rank
``r % T``. All ranks of one data-parallel rank see the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .model import Block, Transformer
from .weights import PARTS

__all__ = ["Layout", "clip_gradients", "make_mesh", "shard_policy"]


@dataclass(frozen=True)
class Layout:
    """How a worker computes, beyond data parallelism.

    Attributes:
        tensor_parallel: Workers that share one data-parallel rank's forward.
        pack_sequences: Forward the rows of a microbatch as one packed sequence, without padding.
    """

    tensor_parallel: int = 1
    pack_sequences: bool = False


class SplitLinear(nn.Module):
    """A linear layer whose output is three parts side by side, kept as three layers.

    Attention's one layer for query, key and value cannot be cut along its output: a cut would give one rank the queries
    and another the values. With three layers, each rank gets all three for its own heads.
    """

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for weight, bias in zip(whole.weight.chunk(3), whole.bias.chunk(3), strict=True):
            part = nn.Linear(whole.in_features, weight.shape[0])
            with torch.no_grad():
                part.weight.copy_(weight)
                part.bias.copy_(bias)
            self.parts.append(part)

    def forward(self, hidden_nsc: Tensor) -> Tensor:
        """As the whole layer, for the heads of this rank."""
        return torch.cat([part(hidden_nsc) for part in self.parts], dim=-1)


def make_mesh(world_size: int, layout: Layout) -> DeviceMesh:
    """The mesh (dp), or (dp, tp) with tensor parallelism. Collective."""
    if layout.tensor_parallel == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    shape = (world_size // layout.tensor_parallel, layout.tensor_parallel)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def shard_policy(model: Transformer, mesh: DeviceMesh) -> None:
    """Cuts the heads and the feed-forward layers over ``tp``, where there is one, then all weights over ``dp``."""
    if "tp" in (mesh.mesh_dim_names or ()):
        for block in model.blocks:
            assert isinstance(block, Block)
            _cut_heads(block, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def _cut_heads(block: Block, mesh: DeviceMesh) -> None:
    block.qkv = SplitLinear(block.qkv)  # type: ignore[assignment]
    block.heads //= mesh.size()
    plan: dict[str, ParallelStyle] = {f"qkv.{PARTS}.{number}": ColwiseParallel() for number in range(3)}
    plan |= {"attention_out": RowwiseParallel()}
    plan |= {"feed_forward_in": ColwiseParallel(), "feed_forward_out": RowwiseParallel()}
    parallelize_module(block, mesh, plan)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scales the gradients down to a norm; returns the norm that they had. Collective.

    `torch.nn.utils.clip_grad_norm_` takes the parameters of one mesh: with tensor parallelism some lie on (dp, tp),
    others on (dp).
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        by_mesh.setdefault(gradient.device_mesh, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(part).full_tensor() for part in by_mesh.values()]  # type: ignore[attr-defined]
    norm = float(torch.stack(norms).norm().item())
    scale = min(1.0, max_norm / (norm + 1e-6))
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
