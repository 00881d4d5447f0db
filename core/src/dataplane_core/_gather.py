"""All-gather of columns over a process group, for `BatchedDataDict.all_gather`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dataplane_core.errors import InvalidRequestError

__all__ = ["all_gather_columns"]


def all_gather_columns(columns: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Concatenates the columns of all ranks, in rank order. Collective, and blocks.

    Args:
        columns: Tensors, lists or object arrays; the leading size may differ between ranks.
        group: The process group. Lists travel pickled between its ranks.

    Returns:
        The joined columns; tensors on the device that this rank's had.

    Raises:
        InvalidRequestError: Ranks disagree on names, dtypes or trailing shapes; raised on every rank.
    """
    import torch.distributed as dist

    world = dist.get_world_size(group)
    mine = {
        name: (str(column.dtype), tuple(column.shape)) if isinstance(column, torch.Tensor) else column
        for name, column in columns.items()
    }
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine, group=group)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    for name in names:
        _check(name, everyone)
    # NCCL moves CUDA memory only
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None
    joined: dict[str, Any] = {}
    for name in names:
        parts = [theirs[name] for theirs in everyone]
        column = columns[name]
        if isinstance(column, torch.Tensor):
            joined[name] = _gather_tensor(column, [shape for _, shape in parts], device, group, dist)
        elif isinstance(column, np.ndarray):
            joined[name] = np.concatenate(parts)
        else:
            joined[name] = [item for part in parts for item in part]
    return joined


def _check(name: str, everyone: list[Any]) -> None:
    forms = [
        "missing"
        if name not in theirs
        else (theirs[name][0], theirs[name][1][1:])
        if isinstance(theirs[name], tuple)
        else type(theirs[name]).__name__
        for theirs in everyone
    ]
    if len({str(form) for form in forms}) > 1:
        raise InvalidRequestError(f"all_gather: ranks disagree on column '{name}': {forms}.")


def _gather_tensor(
    column: torch.Tensor, shapes: list[tuple[int, ...]], device: torch.device | None, group: Any, dist: Any
) -> torch.Tensor:
    """Pads the leading size to the largest, gathers as bytes (every dtype travels), and cuts the padding off."""
    most = max(shape[0] for shape in shapes)
    row_bytes = column.element_size()
    for dim in column.shape[1:]:
        row_bytes *= dim
    sent = torch.zeros(most * row_bytes, dtype=torch.uint8, device=device or column.device)
    own = column.contiguous()
    if own.numel():
        sent[: own.numel() * own.element_size()] = own.reshape(-1).view(torch.uint8).to(sent.device)
    received = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather(received, sent, group=group)
    parts = [
        part[: shape[0] * row_bytes].view(column.dtype).reshape(shape) if shape[0] * row_bytes else own.new_empty(shape)
        for part, shape in zip(received, shapes, strict=True)
    ]
    return torch.cat([part.to(column.device) for part in parts])
