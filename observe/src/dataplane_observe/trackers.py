"""Listeners for experiment trackers: what a process moved through the data plane, as scalars per training step.

They take the tracker's object from the trainer, so neither package is needed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dataplane_core.middleware import OperationEvent


class _StepListener:
    """Adds up events until the trainer says that a step has ended. Several clients may share it.

    Args:
        log: Gives scalars and the number of the step to the tracker.
    """

    def __init__(self, log: Callable[[dict[str, float], int], object]) -> None:
        self._log = log
        self._lock = threading.RLock()  # a signal handler may use the client in the middle of `step`
        self._sums: dict[str, float] = {}

    def __call__(self, event: OperationEvent) -> None:
        """Counts an event. A target for ``on_event``."""
        name = f"dataplane/{event.op.removesuffix('_samples')}"
        parts = {
            "rows": event.n_keys,
            "bytes": event.n_bytes,
            "seconds": event.wall_ms / 1e3,
            "errors": event.status != "ok",
        }
        with self._lock:
            for part, value in parts.items():
                key = f"{name}/{part}"
                self._sums[key] = self._sums.get(key, 0) + value

    def step(self, step: int, **values: float) -> None:
        """Logs what this process did since the last call; 0 for operations that it did before, but not since.

        Args:
            step: The number of the step that has ended.
            values: Further scalars, such as ``staleness``, logged as ``dataplane/staleness``.
        """
        with self._lock:
            sums = self._sums
            self._sums = dict.fromkeys(sums, 0)
        self._log({**sums, **{f"dataplane/{name}": value for name, value in values.items()}}, step)


class TensorBoardListener(_StepListener):
    """Logs to TensorBoard.

    Args:
        writer: A ``SummaryWriter``, such as that of ``torch.utils.tensorboard``. It stays the caller's to close.
    """

    def __init__(self, writer: Any) -> None:
        def log(scalars: dict[str, float], step: int) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        super().__init__(log)


class WandbListener(_StepListener):
    """Logs to Weights & Biases.

    Args:
        run: What ``wandb.init`` returned. It stays the caller's to finish. Its steps must not fall: log what else
            belongs to a step with the same ``step=``.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(lambda scalars, step: run.log(scalars, step=step))
