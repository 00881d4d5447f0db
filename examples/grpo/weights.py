"""Weights of the model as one flat array: this is sent between processes instead of hundreds of small tensors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["PARTS", "PackedWeights", "load_packed_weights", "pack_tensors", "pack_weights"]

#: Name of the list of layers that a cut layer is made of.
PARTS = "parts"
#: All parameters, flattened and joined in the order of ``model.parameters()``: (P,) float32.
PackedWeights = npt.NDArray[np.float32]


def pack_weights(model: nn.Module) -> PackedWeights:
    """Copies all parameters into one flat array; those of a cut layer (`parallel.SplitLinear`) as of the whole one.

    With sharded parameters (FSDP) this is collective: every rank must call it, or the others wait forever.
    """
    joined: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        full = parameter.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()
        whole, mark, part = name.partition(f".{PARTS}.")
        joined.setdefault(f"{whole}.{part.partition('.')[2]}" if mark else name, []).append(full)
    return pack_tensors(torch.cat(parts) for parts in joined.values())


def pack_tensors(weights: Iterable[Tensor]) -> PackedWeights:
    """Copies whole parameters, in the order of ``model.parameters()``, into one flat array."""
    packed: PackedWeights = torch.cat([weight.reshape(-1) for weight in weights]).numpy()
    return packed


def load_packed_weights(model: nn.Module, packed: PackedWeights) -> None:
    """Copies ``packed`` into the parameters of an unsharded model of the same sizes.

    Raises:
        ValueError: The number of weights differs.
    """
    parameters = list(model.parameters())
    expected = sum(p.numel() for p in parameters)
    if packed.size != expected:
        raise ValueError(f"load_packed_weights: got {packed.size} weights for a model of {expected}.")
    # Ray hands out read-only views of shared memory; torch asks for a writable array even where it only reads.
    flat = torch.from_numpy(packed if packed.flags.writeable else packed.copy())
    with torch.no_grad():
        for parameter, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))
