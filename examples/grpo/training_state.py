"""The state with which a policy worker resumes exactly: its part of weights, optimizer and schedule.

Every rank has a state of its own, a dict of plain tensors and numbers, and writes it to a file of its own: nothing is
gathered, nothing passes through the driver. No state of a random generator is in it, since the run draws every random
number from its seed and the number of the step.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["KeepsTrainingState", "TrainingState", "load_sharded_state", "sharded_state"]

#: Nested dicts and lists of tensors, numbers, strings, booleans and None: what ``torch.load(weights_only=True)`` reads.
TrainingState: TypeAlias = dict[str, Any]


class KeepsTrainingState(ABC):
    """A worker whose training can be saved and resumed; the same calls for every kind of worker."""

    rank: int

    @abstractmethod
    def training_state(self) -> TrainingState:
        """This rank's state. Tensors are plain ones on the host, and may share memory with the live ones."""

    @abstractmethod
    def load_training_state(self, state: TrainingState) -> None:
        """Takes over what `training_state` gave on the same rank of a group of the same layout, after set-up."""

    def write_training_state(self, folder: Path) -> None:
        """Writes this rank's file into ``folder``, which all ranks and the driver see; on the disk when it returns."""
        with _file_of(folder, self.rank).open("wb") as file:
            torch.save(self.training_state(), file)
            file.flush()
            os.fsync(file.fileno())

    def read_training_state(self, folder: Path) -> None:
        """Takes over this rank's file, by `load_training_state`."""
        self.load_training_state(torch.load(_file_of(folder, self.rank), map_location="cpu", weights_only=True))


def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> TrainingState:
    """The state of a model whose parameters are sharded (FSDP2), or cut by hand: this rank's part. Not collective."""
    return {
        "model": _local(dict(model.named_parameters())),
        "optimizer": _local(optimizer.state_dict()),
        "schedule": schedule.state_dict(),
    }


@torch.no_grad()
def load_sharded_state(
    state: TrainingState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Takes over what `sharded_state` gave for a model of the same sizes, sharded the same way. Not collective."""
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
