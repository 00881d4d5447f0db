"""Worker groups: the driver calls one method on all policy workers, in this process or on Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.errors import WorkerFailedError


class WorkerGroup(ABC):
    """The policy workers, as the driver calls them. A subclass defines `call`.

    Args:
        workers: The workers, in the order of the ranks.
        dp_ranks: Per worker, its data-parallel rank; None: each worker is a rank. Workers of equal rank are a replica
            group and get the same rows.

    Attributes:
        in_process: Whether the workers run in the driver's process.
    """

    in_process: ClassVar[bool] = False

    def __init__(self, workers: Sequence[Any], dp_ranks: Sequence[int] | None = None) -> None:
        self._workers = list(workers)
        self.dp_ranks = check_dp_ranks(len(self._workers), dp_ranks)
        self._names = [f"policy worker {number}" for number in range(len(self._workers))]  # in messages

    @abstractmethod
    def call(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        doing: str,
    ) -> list[Any]:
        """Runs a method on all workers at the same time and waits for all results.

        Args:
            method: Its name.
            args: Per worker, the positional arguments.
            kwargs: Keyword arguments, the same for all.
            timeout_s: For all workers together, in seconds.
            doing: What the workers do, for messages: "training".

        Returns:
            The results in the order of the workers.

        Raises:
            WorkerFailedError: A worker raised or died; its error is the cause. This does not wait for the others then.
            WorkerTimeoutError: Not all answered in time.
        """


class InProcessWorkerGroup(WorkerGroup):
    """Workers that are objects in the driver's process, called one after another.

    For one worker, or for workers without collectives: collectives need a process per rank.
    """

    in_process = True

    def call(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        doing: str,
    ) -> list[Any]:
        """As `WorkerGroup.call`, without the timeout: a call in this process cannot be interrupted."""
        results = []
        for name, worker, own in zip(self._names, self._workers, args, strict=True):
            try:
                results.append(getattr(worker, method)(*own, **(kwargs or {})))
            except Exception as error:
                raise WorkerFailedError(
                    f"{name} failed while {doing}: {type(error).__name__}: {error}", worker=name
                ) from error
        return results


def check_dp_ranks(num_workers: int, dp_ranks: Sequence[int] | None) -> list[int]:
    """Checks that there is one data-parallel rank per worker, and returns the ranks.

    Raises:
        InvalidRequestError: A rank between 0 and the largest is missing, or the ranks have different numbers of
            workers.
    """
    ranks = list(range(num_workers)) if dp_ranks is None else [int(rank) for rank in dp_ranks]
    counts = [ranks.count(rank) for rank in sorted(set(ranks))]
    if not ranks or len(ranks) != num_workers or sorted(set(ranks)) != list(range(len(counts))) or len(set(counts)) > 1:
        raise InvalidRequestError(
            f"worker group refused: {num_workers} workers with the data-parallel ranks {ranks}. Expected at least one "
            "worker, one rank each, every rank from 0 up, the same number of workers on each."
        )
    return ranks
