"""Checkpoints of a trainer of transformers that are whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from rollouts import DataPlaneRollouts
from transformers import TrainerCallback

from dataplane_core.durable_files import sync_path, write_file

__all__ = ["Checkpoints"]

_STATE = "rollouts.json"


class Checkpoints(TrainerCallback):
    """Brings each checkpoint to the disk, and then gives it its name. The trainer alone writes it in place.

    Args:
        folder: Where whole checkpoints are: ``step-7`` and so on. The newest one stays.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rollouts: DataPlaneRollouts | None = None

    def newest(self) -> Path | None:
        """The newest checkpoint. None: there is none yet."""
        return max(self._folder.glob("step-*"), key=_step_of, default=None)

    def step(self) -> int:
        """The number of steps in the newest checkpoint."""
        newest = self.newest()
        return 0 if newest is None else _step_of(newest)

    def attach(self, rollouts: DataPlaneRollouts) -> None:
        """Saves the state of this object too, from now on. Before, it gets the one of the newest checkpoint."""
        newest, self._rollouts = self.newest(), rollouts
        if newest is not None:
            rollouts.load_state(json.loads((newest / _STATE).read_text(encoding="utf-8")))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when the trainer has written a checkpoint."""
        assert self._rollouts is not None, "attach() comes first"
        written = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_file(written / _STATE, [json.dumps(self._rollouts.state()).encode()])
        for file in filter(Path.is_file, written.rglob("*")):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        sync_path(written)
        self._folder.mkdir(parents=True, exist_ok=True)
        before = list(self._folder.glob("step-*"))
        written.rename(self._folder / f"step-{state.global_step}")
        sync_path(self._folder)
        for old in before:
            shutil.rmtree(old)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
