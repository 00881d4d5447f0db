"""The state with which a policy worker resumes exactly: its part of weights, optimizer and schedule.

Every rank has a state of its own, a dict of plain tensors and numbers, and writes it to a file of its own: nothing is
gathered, nothing passes through the driver. No state of a random generator is in it, since the run draws every random
number from its seed and the number of the step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["read_state", "write_state"]


def write_state(
    folder: Path,
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Writes a rank's file into ``folder``, which all ranks and the driver see; on the disk when it returns.

    The parameters may be sharded (FSDP2), or cut by hand: the file has this rank's part. Not collective.
    """
    state = {
        "model": _local(dict(model.named_parameters())),
        "optimizer": _local(optimizer.state_dict()),
        "schedule": schedule.state_dict(),
    }
    with _file_of(folder, rank).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


@torch.no_grad()
def read_state(
    folder: Path,
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Takes over what `write_state` wrote for a model of the same sizes, sharded the same way. Not collective."""
    state = torch.load(_file_of(folder, rank), map_location="cpu", weights_only=True)
    live = _local(dict(model.named_parameters()))
    for name, saved in state["model"].items():
        live[name].copy_(saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {name: _like(parameters[number], value) for name, value in values.items()}
        for number, values in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({**state["optimizer"], "state": moments})
    schedule.load_state_dict(state["schedule"])


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pt"


def _local(value: Any) -> Any:
    """The same tree with this rank's parts in place of sharded tensors."""
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_local(item) for item in value]
    if not torch.is_tensor(value):
        return value
    return value.detach().to_local() if isinstance(value, DTensor) else value.detach()


def _like(parameter: Tensor, value: Any) -> Any:
    """An optimizer's value as the optimizer holds it: sharded as its parameter, unless it is one number."""
    if not isinstance(parameter, DTensor) or not torch.is_tensor(value) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
