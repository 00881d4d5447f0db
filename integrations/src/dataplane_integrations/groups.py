"""Worker groups: how the driver calls one method on all policy workers, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.errors import WorkerFailedError

__all__ = ["InProcessWorkerGroup", "WorkerGroup", "check_dp_ranks"]


class WorkerGroup(Protocol):
    """The policy workers as the driver sees them. `dataplane_integrations.ray.RayWorkerGroup` is one."""

    @property
    def dp_ranks(self) -> Sequence[int]:
        """Per worker, its data-parallel rank; workers of equal rank are replica twins and get the same rows."""

    @property
    def in_process(self) -> bool:
        """Whether the workers live in the driver's process."""

    def call(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        doing: str,
    ) -> list[Any]:
        """Runs a method on every worker at the same time and waits for all.

        Args:
            method: Its name.
            args: Per worker, the positional arguments.
            kwargs: Keyword arguments, the same for all.
            timeout_s: Deadline for all of them together.
            doing: What they are doing, for messages: "training".

        Returns:
            The results in the order of the workers.

        Raises:
            WorkerFailedError: A worker raised or died, which ends the wait for the others; the cause is its error.
            WorkerTimeoutError: Not all answered in time.
        """


class InProcessWorkerGroup:
    """Workers that are objects of the driver's process, called one after another.

    For one worker, or for workers that do not wait for each other; collectives need a process per rank.

    Args:
        workers: The workers.
        dp_ranks: Per worker, its data-parallel rank; None: each has rows of its own.
    """

    def __init__(self, workers: Sequence[Any], dp_ranks: Sequence[int] | None = None) -> None:
        self._workers = list(workers)
        self._dp_ranks = check_dp_ranks(len(self._workers), dp_ranks)

    @property
    def dp_ranks(self) -> Sequence[int]:
        """Per worker, its data-parallel rank."""
        return self._dp_ranks

    @property
    def in_process(self) -> bool:
        """True."""
        return True

    def call(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        doing: str,
    ) -> list[Any]:
        """As `WorkerGroup.call`; a deadline cannot interrupt a call in this process, so ``timeout_s`` is not used."""
        results = []
        for index, (worker, own) in enumerate(zip(self._workers, args, strict=True)):
            try:
                results.append(getattr(worker, method)(*own, **(kwargs or {})))
            except Exception as error:
                raise WorkerFailedError(
                    f"policy worker {index} failed while {doing}: {type(error).__name__}: {error}",
                    worker=f"policy worker {index}",
                ) from error
        return results


def check_dp_ranks(num_workers: int, dp_ranks: Sequence[int] | None) -> list[int]:
    """One data-parallel rank per worker, with none missing between 0 and the largest.

    Raises:
        InvalidRequestError: Not so, or twins are not of equal number.
    """
    ranks = list(range(num_workers)) if dp_ranks is None else [int(rank) for rank in dp_ranks]
    counts = [ranks.count(rank) for rank in sorted(set(ranks))]
    if not ranks or len(ranks) != num_workers or sorted(set(ranks)) != list(range(len(counts))) or len(set(counts)) > 1:
        raise InvalidRequestError(
            f"worker group refused: {num_workers} workers with the data-parallel ranks {ranks}. Expected at least one "
            "worker, one rank each, every rank from 0 up, the same number of workers on each."
        )
    return ranks
