"""Errors of this package: replica groups, workers, placement, dynamic sampling, asynchronous replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dataplane_core.errors import ClientClosedError, DataPlaneError, OperationTimeoutError

__all__ = [
    "CollectorFailedError",
    "PlacementError",
    "ReplayClosedError",
    "ReplayTimeoutError",
    "ReplicaLeaderError",
    "ReservationLostError",
    "RolloutAbortedError",
    "SamplingExhaustedError",
    "StepTooSmallError",
    "WorkerFailedError",
    "WorkerTimeoutError",
]


class ReplicaLeaderError(DataPlaneError, RuntimeError):
    """The leader of this rank's replica group failed to provide a batch; the cause is the leader's own error."""


class WorkerFailedError(DataPlaneError, RuntimeError):
    """A worker raised or died; the cause is its own error.

    Attributes:
        worker: Name of the worker that failed first, or None if unknown.
        died: Whether its process is gone.
        details: The reports of all failed workers, with tracebacks; too long for the message.
    """

    def __init__(
        self, message: str, *, worker: str | None = None, died: bool = False, details: str = "", **kwargs: Any
    ) -> None:
        super().__init__(message, **kwargs)
        self.worker = worker
        self.died = died
        self.details = details


class WorkerTimeoutError(WorkerFailedError, TimeoutError):
    """Workers did not answer before the deadline."""

    default_retryable = False


class PlacementError(DataPlaneError, RuntimeError):
    """The actors of a run cannot be placed: too few logical CPUs, or nodes that lack the backend's package."""


class SamplingExhaustedError(DataPlaneError, RuntimeError):
    """Dynamic sampling used up its generations before it had the wanted number of groups.

    Attributes:
        counts: What became of the groups (`dataplane_integrations.rollout.dynamic_sampling.SamplingCounts`), or None.
    """

    def __init__(self, message: str, *, counts: Any = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.counts = counts


class ReplayTimeoutError(OperationTimeoutError):
    """A replay buffer had no room to reserve, or not enough groups to select, before the deadline. Nothing changed."""


class ReplayClosedError(ClientClosedError):
    """The replay buffer was closed."""


class ReservationLostError(DataPlaneError, RuntimeError):
    """A reservation is no longer held: it was given up, or its collector was started again. Its rows must be cleared.

    Attributes:
        groups: The groups whose reservations are lost.
    """

    def __init__(self, message: str, *, groups: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.groups = tuple(groups)


class RolloutAbortedError(DataPlaneError, RuntimeError):
    """A rollout was ended because its groups would not be trained on any more. Raised by a rollout; no failure."""


class StepTooSmallError(DataPlaneError, RuntimeError):
    """So many prompts of a step were given up that it has fewer groups than its staleness rule allows.

    Attributes:
        step: The weight version.
        num_groups: The groups that are left of it.
    """

    def __init__(self, message: str, *, step: int = 0, num_groups: int = 0, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.step = step
        self.num_groups = num_groups


class CollectorFailedError(DataPlaneError, RuntimeError):
    """Rollouts have stopped: too many failed one after another. The cause is the error of the last one."""


@contextmanager
def noted_on(error: BaseException, what: str) -> Iterator[None]:
    """For what is done after ``error``, which is the one to report: an error inside the block becomes a note of it."""
    try:
        yield
    except Exception as broken:
        error.add_note(f"{what}: {type(broken).__name__}: {broken}")
