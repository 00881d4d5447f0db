"""Samplers: which of the ready rows a task gets, and which of them it will not get again."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

__all__ = ["BaseSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler", "SequentialSampler"]

#: Sampled indexes, and those of them that count as consumed.
_Chosen = tuple[list[int], list[int]]


class BaseSampler(ABC):
    """The base of all samplers. A sampler runs in the process that asks for rows.

    What was chosen for a ``dp_rank`` and a ``batch_index`` is kept in the store, so that the processes of a rank get
    the same rows. Other state of a sampler, in ``_states``, belongs to its process.
    """

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> _Chosen:
        """Chooses rows.

        Args:
            ready_indexes: The rows that have all fields and were not consumed, in ascending order.
            batch_size: How many rows are wanted.
            *args: None.
            **kwargs: The caller's ``sampling_config``, and ``partition``, whose ``get_custom_meta(indexes)`` returns
                the tags of rows.

        Returns:
            The rows, and those that the task will not get again. Two empty lists: there are not enough rows yet.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> _Chosen:
        """`sample`."""
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether this process has chosen the rows of this ``dp_rank`` and ``batch_index`` before."""
        config = sampling_config or {}
        rank = config.get("dp_rank")
        return rank is not None and config.get("batch_index") in self._chosen(partition_id, task_name).get(rank, {})

    def clear_cache(self, partition_id: str) -> None:
        """Forgets what was chosen in a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """The sampler's state."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Restores what `save_checkpoint` returned."""
        self._states = state["_states"]

    def _chosen(self, partition_id: str, task_name: str) -> dict[Any, dict[Any, Any]]:
        """Rank -> batch index -> what was chosen."""
        found: dict[Any, dict[Any, Any]] = self._states.get(partition_id, {}).get(task_name, {})
        return found

    def _keep(self, partition_id: str, task_name: str, rank: Any, batch_index: Any, chosen: Any) -> None:
        self._states.setdefault(partition_id, {}).setdefault(task_name, {}).setdefault(rank, {})[batch_index] = chosen


class SequentialSampler(BaseSampler):
    """The first rows, each once. The default."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> _Chosen:
        """The first ``batch_size`` rows, or all if there are fewer."""
        sampled = ready_indexes[:batch_size]
        return sampled, sampled


class RankAwareSampler(BaseSampler):
    """The first rows, each to one data-parallel rank. All processes of a rank get the same rows."""

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> _Chosen:
        """The rows of the batch ``batch_index`` of the rank ``dp_rank``."""
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        kept = self._chosen(partition_id, task_name).get(dp_rank, {}).get(batch_index)
        if kept is None:
            kept = ready_indexes[:batch_size]
            if len(kept) < batch_size:
                return [], []
            self._keep(partition_id, task_name, dp_rank, batch_index, kept)
        return kept, kept


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of rows with consecutive indexes."""

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> _Chosen:
        """The first whole groups; none if they do not fill the batch, whose size is a multiple of that of a group.

        With ``dp_rank`` and ``batch_index``, the rank's rows are kept.
        """
        rank, batch_index = kwargs.get("dp_rank"), kwargs.get("batch_index")
        kept: _Chosen | None = self._chosen(partition_id, task_name).get(rank, {}).get(batch_index)
        if kept is not None:
            return kept
        group = self.n_samples_per_prompt
        if batch_size % group:
            raise ValueError(f"batch_size ({batch_size}) must be a multiple of n_samples_per_prompt ({group})")
        rows, sampled, place = sorted(ready_indexes), list[int](), 0
        while place + group <= len(rows) and len(sampled) < batch_size:
            members = rows[place : place + group]
            is_group = members == list(range(members[0], members[0] + group))
            sampled.extend(members if is_group else ())
            place += group if is_group else 1
        if len(sampled) < batch_size:
            return [], []
        if rank is not None:
            self._keep(partition_id, task_name, rank, batch_index, (sampled, list(sampled)))
        return sampled, list(sampled)


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups for all data-parallel ranks at once, dealt so that each rank gets about as many tokens.

    The tag ``total_lengths`` of a row says how many tokens it has.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size
        self._balanced_cache: dict[tuple[Any, ...], list[list[int]]] = {}

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> _Chosen:
        """The rows of the rank ``dp_rank``. A rank gets ``batch_size`` rows on average."""
        rank, batch_index = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        name = (partition_id, task_name, batch_index)
        if name not in self._balanced_cache:
            rows, _ = super().sample(ready_indexes, batch_size * self.dp_size, task_name, partition_id)
            if not rows:
                return [], []
            self._balanced_cache[name] = self._deal(rows, kwargs.get("partition"))
            for place, chosen in enumerate(self._balanced_cache[name]):
                self._keep(partition_id, task_name, place, batch_index, (chosen, list(chosen)))
        ranks = self._balanced_cache[name]
        sampled = ranks[rank] if rank < len(ranks) else []
        return list(sampled), list(sampled)

    def _deal(self, rows: list[int], partition: Any) -> list[list[int]]:
        """The rows of each rank, groups kept whole where they divide."""
        size = self.n_samples_per_prompt
        if partition is None:
            share = len(rows) // self.dp_size
            ends = [place * share for place in range(self.dp_size)] + [len(rows)]
            return [rows[start:end] for start, end in pairwise(ends)]
        tags = partition.get_custom_meta(rows)
        lengths = [tags.get(row, {}).get("total_lengths", 1) for row in rows]
        groups = [rows[place : place + size] for place in range(0, len(rows), size)]
        weights = [sum(lengths[place : place + size]) for place in range(0, len(rows), size)]
        parts = balanced_parts(weights, self.dp_size)
        return [[row for group in part for row in groups[group]] for part in parts]

    def clear_cache(self, partition_id: str) -> None:
        """Forgets what was chosen in a partition."""
        super().clear_cache(partition_id)
        self._balanced_cache = {name: ranks for name, ranks in self._balanced_cache.items() if name[0] != partition_id}

    def save_checkpoint(self) -> dict[str, Any]:
        """The sampler's state."""
        return {**super().save_checkpoint(), "_balanced_cache": self._balanced_cache}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Restores what `save_checkpoint` returned."""
        super().load_checkpoint(state)
        self._balanced_cache = state["_balanced_cache"]


def balanced_parts(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Deals items to parts of equal size whose sums are about equal.

    It does so by Karmarkar and Karp's largest differencing method.

    Args:
        weights: One per item.
        num_parts: How many parts.

    Returns:
        The places of the items of each part, ascending.

    Raises:
        ValueError: The number of items does not divide.
    """
    if not weights or len(weights) % num_parts:
        raise ValueError(f"{len(weights)} items cannot be dealt to {num_parts} parts equally.")
    ordered = sorted((weight, place) for place, weight in enumerate(weights))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(ordered), num_parts):
        sets = [(weight, [place]) for weight, place in reversed(ordered[start : start + num_parts])]
        heap.append((sets[-1][0] - sets[0][0], start, sets))
    heapq.heapify(heap)
    while len(heap) > 1:  # combines the two solutions with the largest differences, large parts with small ones
        _, _, left = heapq.heappop(heap)
        _, order, right = heapq.heappop(heap)
        pairs = zip(left, reversed(right), strict=True)
        sets = sorted(((a + b, one + other) for (a, one), (b, other) in pairs), key=lambda part: part[0], reverse=True)
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], order, sets))
    return [sorted(places) for _, places in heap[0][2]]
