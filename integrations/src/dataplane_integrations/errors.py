"""Errors of the trainer's side: replica groups, workers, their placement, dynamic sampling, asynchronous replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane_core.errors import ClientClosedError, DataPlaneError, OperationTimeoutError

__all__ = [
    "CollectorFailedError",
    "PlacementError",
    "ReplayClosedError",
    "ReplaySaveError",
    "ReplayTimeoutError",
    "ReplicaLeaderError",
    "ReservationLostError",
    "SamplingExhaustedError",
    "WorkerFailedError",
    "WorkerTimeoutError",
]


class ReplicaLeaderError(DataPlaneError, RuntimeError):
    """The leader of this rank's replica group failed to provide a batch; the cause is the leader's own error."""


class WorkerFailedError(DataPlaneError, RuntimeError):
    """A worker raised or died; the cause is its own error.

    Attributes:
        worker: Name of the worker that failed first, or None where that is unknown.
        died: Whether its process is gone.
        details: What every failed worker reported, tracebacks included; too long for a terminal.
    """

    def __init__(
        self, message: str, *, worker: str | None = None, died: bool = False, details: str = "", **kwargs: Any
    ) -> None:
        super().__init__(message, **kwargs)
        self.worker = worker
        self.died = died
        self.details = details


class WorkerTimeoutError(WorkerFailedError, TimeoutError):
    """Workers did not answer within the deadline."""

    default_retryable = False


class PlacementError(DataPlaneError, RuntimeError):
    """The actors of a run cannot be placed: too few logical CPUs, or nodes that lack the backend's package."""


class SamplingExhaustedError(DataPlaneError, RuntimeError):
    """Dynamic sampling used up its generations without the wanted number of groups.

    Attributes:
        counts: What became of the groups (`dataplane_integrations.dynamic_sampling.SamplingCounts`), or None.
    """

    def __init__(self, message: str, *, counts: Any = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.counts = counts


class ReplayTimeoutError(OperationTimeoutError):
    """A replay buffer had no room to reserve, or not enough groups to select, within the deadline; nothing changed."""


class ReplayClosedError(ClientClosedError):
    """The replay buffer was closed."""


class ReplaySaveError(DataPlaneError, OSError):
    """The disk refuses to write or to read the save of a replay buffer; the cause says why."""


class ReservationLostError(DataPlaneError, RuntimeError):
    """A reservation is no longer held: it was given up, or its collector was started anew. Its rows must be cleared.

    Attributes:
        groups: The groups at fault.
    """

    def __init__(self, message: str, *, groups: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.groups = tuple(groups)


class CollectorFailedError(DataPlaneError, RuntimeError):
    """Rollouts have stopped for good: too many failed one after another. The cause is the last one's error."""
