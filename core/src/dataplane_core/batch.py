"""`BatchedDataDict`: equally long columns, and the ways in which trainers cut, join and order them.

Shape legend: ``N`` rows, ``S`` padded sequence length.
"""

from __future__ import annotations

import copy
import itertools
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch.nn import functional

from dataplane_core.errors import InvalidRequestError, MissingDataError
from dataplane_core.sharding.plan import ShardPlan, plan_dynamic_batches, plan_even_shards

__all__ = ["BatchedDataDict", "Column", "SlicedDataDict"]

#: A column: rows along dim 0.
Column: TypeAlias = torch.Tensor | list[Any] | np.ndarray[Any, Any]

_B = TypeVar("_B", bound="BatchedDataDict")


class UnsupportedColumnError(InvalidRequestError, NotImplementedError):
    """A column that is neither a tensor, a list nor an array."""


class BatchedDataDict(UserDict[str, Any]):
    """A dict of equally long columns, each a tensor (batch first), a list, or an object array.

    Attributes:
        micro_batch_indices: Per chunk the ``[start, end)`` row pairs of its microbatches, or None.
        micro_batch_lengths: Per chunk the padded length of each microbatch, or None.
        elem_counts_per_gb: Per chunk how many rows this shard holds of it, or None.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None
        super().__init__(*args, **kwargs)

    # --- joining ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_batches(
        cls: type[_B],
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, int | float] | None = None,
    ) -> _B:
        """Concatenates batches: lists join, 1-D tensors join, tensors of 2 and more dims are right-padded on dim 1.

        Args:
            batches: In order; empty ones may lack keys.
            pad_value_dict: Column -> its pad value; default 0.

        Raises:
            MissingDataError: A key is missing from a non-empty batch.
            NotImplementedError: A column of another type; names key and type.
        """
        full = [batch for batch in batches if len(batch)]
        joined = cls()
        for key in dict.fromkeys(key for batch in full for key in batch):
            for number, batch in enumerate(full):
                if key not in batch:
                    raise MissingDataError(
                        f"from_batches: key '{key}' is missing from batch {number}, which has {', '.join(batch)}."
                    )
            pad_value = (pad_value_dict or {}).get(key, 0)
            joined[key] = _concatenate(key, [batch[key] for batch in full], pad_value)
        return joined

    def all_gather(self: _B, group: Any) -> _B:
        """Concatenates the batches of all ranks of a process group, in rank order. Collective, and blocks.

        Leading sizes may differ between ranks, and may be 0; tensors travel on the group's own device and come back on
        the device they had.

        Args:
            group: A `torch.distributed` process group.

        Raises:
            InvalidRequestError: Ranks disagree on a column's dtype or trailing shape.
        """
        from dataplane_core._gather import all_gather_columns

        gathered = type(self)()
        gathered.data = all_gather_columns(self.data, group)
        return gathered

    # --- cutting ------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of rows.

        Raises:
            InvalidRequestError: Columns of different length; names them.
        """
        sizes = {key: len(column) for key, column in self.data.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidRequestError(f"columns differ in length: {sizes}. Expected one row per sample in each.")
        return next(iter(sizes.values()), 0)

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """The rows ``[start, end)``; tensors are views.

        Raises:
            InvalidRequestError: The range does not lie within the batch.
        """
        if not 0 <= start <= end <= self.size:
            raise InvalidRequestError(f"slice: [{start}, {end}) does not lie within the {self.size} rows.")
        return SlicedDataDict({key: column[start:end] for key, column in self.data.items()})

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """The ``rank``-th of ``chunks`` equal parts.

        Raises:
            InvalidRequestError: ``rank`` is out of range, or the rows are not a multiple of ``chunks``.
        """
        size = self.size
        if chunks < 1 or size % chunks:
            raise InvalidRequestError(f"chunk: {size} rows are not a multiple of {chunks} chunks.")
        if not 0 <= rank < chunks:
            raise InvalidRequestError(f"chunk: rank {rank} is out of range for {chunks} chunks.")
        part = size // chunks
        return self.slice(rank * part, (rank + 1) * part)

    def select_indices(self: _B, indices: Sequence[int] | torch.Tensor) -> _B:
        """The rows at ``indices``, in that order; repeats are allowed. Copies tensors.

        Raises:
            InvalidRequestError: An index lies outside ``[-size, size)``.
        """
        picks = [int(index) for index in indices]
        size = self.size
        for index in picks:
            if not -size <= index < size:
                raise InvalidRequestError(f"select_indices: index {index} is out of range for {size} rows.")
        picked = type(self)()
        picked.data = {key: _select(column, picks) for key, column in self.data.items()}
        return picked

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """One global batch's rows of a shard, with that batch's microbatch plan.

        Args:
            batch_idx: Which.
            batch_size: Rows of each batch in this shard. Where packing gave batches of differing size
                (``elem_counts_per_gb``), those counts decide, and this may be None.

        Raises:
            InvalidRequestError: Out of range.
        """
        size = self.size
        if self.elem_counts_per_gb is not None:
            counts = self.elem_counts_per_gb
        elif batch_size is None or batch_size < 1:
            raise InvalidRequestError(f"get_batch: batch_size must be at least 1, got {batch_size}.")
        else:
            counts = [batch_size] * (size // batch_size)
        if not 0 <= batch_idx < len(counts):
            raise InvalidRequestError(
                f"get_batch: batch {batch_idx} of {batch_size} rows is out of range for {size} rows ({len(counts)} "
                "batches)."
            )
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        if self.micro_batch_indices is not None:
            batch.micro_batch_indices = [copy.deepcopy(self.micro_batch_indices[batch_idx])]
        if self.micro_batch_lengths is not None:
            batch.micro_batch_lengths = [list(self.micro_batch_lengths[batch_idx])]
        if self.elem_counts_per_gb is not None:
            batch.elem_counts_per_gb = [counts[batch_idx]]
        return batch

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: Mapping[str, Any] | None = None,
        sequence_packing_args: Mapping[str, Any] | None = None,
    ) -> Any:
        """Cuts the batch in chunks, each chunk in ``shards`` equal parts, and joins the parts by position.

        ``[A A B B C C D D]`` with batch_size 2 and shards 2 gives ``[A B C D]`` twice.

        Args:
            shards: Number of shards.
            batch_size: Rows of a chunk over all shards; None: one chunk of everything.
            allow_uneven_shards: Without ``batch_size``: the last shards may be smaller, or empty.
            dynamic_batching_args: Sort each chunk by length, deal it round, and cut microbatches by token count.
            sequence_packing_args: Pack each chunk in bins and deal those round.

        Returns:
            A list of `SlicedDataDict`; with dynamic batching or packing ``(shards, indices)``, where ``indices`` says
            where each row of the concatenated shards came from: `reorder_data` of the concatenation restores the batch.

        Raises:
            InvalidRequestError: Sizes that are no multiples, both kinds of arguments, or a row over the limit.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise InvalidRequestError(
                "shard_by_batch_size: dynamic_batching_args and sequence_packing_args exclude each other."
            )
        if allow_uneven_shards and (batch_size is not None or dynamic_batching_args or sequence_packing_args):
            raise InvalidRequestError(
                "shard_by_batch_size: allow_uneven_shards goes without batch_size, dynamic batching and packing."
            )
        size = self.size
        if dynamic_batching_args is not None:
            lengths, width = self._lengths(dynamic_batching_args)
            plan = plan_dynamic_batches(lengths, width, shards, batch_size, dynamic_batching_args)
            return self._carry_out(plan), plan.order()
        if sequence_packing_args is not None:
            from dataplane_core.sharding.packing import plan_packed_batches

            lengths, width = self._lengths(sequence_packing_args)
            plan = plan_packed_batches(lengths, width, shards, batch_size, sequence_packing_args)
            return self._carry_out(plan), plan.order()
        if allow_uneven_shards:
            if shards < 1:
                raise InvalidRequestError(f"shards must be at least 1, got {shards}.")
            part = -(-size // shards)
            cuts = [min(shard * part, size) for shard in range(shards + 1)]
            return [self.slice(start, end) for start, end in itertools.pairwise(cuts)]
        return self._carry_out(plan_even_shards(size, shards, batch_size))

    def _lengths(self, args: Mapping[str, Any]) -> tuple[list[int], int]:
        for key in ("input_key", "input_lengths_key"):
            name = args.get(key)
            if name is not None and name not in self.data:
                raise MissingDataError(f"shard_by_batch_size: {key} '{name}' is not among {', '.join(self.data)}.")
        lengths = self.data[args["input_lengths_key"]] if "input_lengths_key" in args else []
        inputs = self.data[args["input_key"]] if "input_key" in args else torch.empty(0, 0)
        return [int(length) for length in lengths], int(inputs.shape[1])

    def _carry_out(self, plan: ShardPlan) -> list[SlicedDataDict]:
        shards = []
        for number, rows in enumerate(plan.rows):
            shard = SlicedDataDict()
            shard.data = {key: _select(column, rows) for key, column in self.data.items()}
            if plan.micro_batch_indices is not None:
                shard.micro_batch_indices = copy.deepcopy(plan.micro_batch_indices[number])
            if plan.micro_batch_lengths is not None:
                shard.micro_batch_lengths = copy.deepcopy(plan.micro_batch_lengths[number])
            if plan.elem_counts_per_gb is not None:
                shard.elem_counts_per_gb = list(plan.elem_counts_per_gb[number])
            shards.append(shard)
        return shards

    # --- ordering and changing ----------------------------------------------------------------------------------------

    def reorder_data(self, indices: Sequence[int]) -> None:
        """Reorders **in place**: row j goes to the position that ``indices[j]`` ranks to.

        ``indices`` names where each row came from, as `shard_by_batch_size` returns it: reordering puts the rows back.

        Raises:
            InvalidRequestError: Not one index per row, or repeats.
        """
        if len(indices) != self.size or len(set(indices)) != len(indices):
            raise InvalidRequestError(
                f"reorder_data: expected {self.size} different indices, got {len(indices)} with {len(set(indices))} "
                "different ones."
            )
        order = np.argsort(np.asarray(indices, dtype=np.int64), kind="stable").tolist()
        self.data = {key: _select(column, order) for key, column in self.data.items()}

    def repeat_interleave(self: _B, n: int) -> _B:
        """Each row ``n`` times, side by side; list items are deep-copied.

        Raises:
            InvalidRequestError: ``n`` below 0.
        """
        if n < 0:
            raise InvalidRequestError(f"repeat_interleave: n must be at least 0, got {n}.")
        repeated = type(self)()
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                repeated.data[key] = column.repeat_interleave(n, dim=0)
            else:
                items = [copy.deepcopy(item) for item in column for _ in range(n)]
                repeated.data[key] = _object_array(items) if isinstance(column, np.ndarray) else items
        return repeated

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cuts **in place** every tensor that has ``dim`` to its first ``truncated_len`` elements there; views.

        Raises:
            InvalidRequestError: ``dim`` below 1, or a negative length.
        """
        if dim < 1 or truncated_len < 0:
            raise InvalidRequestError(
                f"truncate_tensors: dim must be at least 1 and truncated_len at least 0, got {dim} and {truncated_len}."
            )
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor) and column.dim() > dim:
                self.data[key] = column.narrow(dim, 0, min(truncated_len, column.shape[dim]))

    def to(self: _B, device: str | torch.device) -> _B:
        """Moves the tensors **in place**; returns itself."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[key] = column.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """The columns as a plain dict, not copied."""
        return self.data

    # --- microbatches -------------------------------------------------------------------------------------------------

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Microbatches of equal size, in order.

        Raises:
            InvalidRequestError: The rows are not a multiple of ``microbatch_size``.
        """
        size = self.size
        if microbatch_size < 1 or size % microbatch_size:
            raise InvalidRequestError(f"{size} rows are not a multiple of microbatch_size {microbatch_size}.")
        return (self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[SlicedDataDict]:
        """Microbatches of the plan, each cut to its padded length along ``sequence_dim``.

        For a batch with one chunk, as `get_batch` gives it.

        Raises:
            InvalidRequestError: No plan, or the plan of several chunks.
        """
        indices, lengths = self.micro_batch_indices, self.micro_batch_lengths
        if indices is None or lengths is None or len(indices) != 1 or len(lengths) != 1:
            held = "no plan" if indices is None or lengths is None else f"a plan of {len(indices)} chunks"
            raise InvalidRequestError(
                f"make_microbatch_iterator_with_dynamic_shapes: the batch has {held}. Expected the microbatch plan of "
                "one chunk: shard with dynamic batching, then take get_batch."
            )
        return self._microbatches(indices[0], lengths[0], sequence_dim)

    def _microbatches(self, pairs: list[list[int]], lengths: list[int], sequence_dim: int) -> Iterator[SlicedDataDict]:
        for (start, end), length in zip(pairs, lengths, strict=True):
            microbatch = self.slice(start, end)
            microbatch.truncate_tensors(sequence_dim, length)
            yield microbatch


class SlicedDataDict(BatchedDataDict):
    """A shard, or a part of a batch."""


def _select(column: Column, rows: Sequence[int]) -> Column:
    if isinstance(column, torch.Tensor):
        return column.index_select(0, torch.tensor(rows, dtype=torch.int64, device=column.device))
    if isinstance(column, np.ndarray):
        return column[np.asarray(rows, dtype=np.int64)]
    return [column[row] for row in rows]


def _object_array(items: Sequence[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


def _concatenate(key: str, columns: Sequence[Any], pad_value: int | float) -> Column:
    if all(isinstance(column, torch.Tensor) for column in columns):
        dims = {column.dim() for column in columns}
        if len(dims) > 1:
            raise InvalidRequestError(f"from_batches: column '{key}' has {sorted(dims)} dims. Expected one number.")
        if dims.pop() < 2:
            return torch.cat(list(columns))
        width = max(column.shape[1] for column in columns)
        return torch.cat([_pad_dim_1(column, width, pad_value) for column in columns])
    if all(isinstance(column, list) for column in columns):
        return [item for column in columns for item in column]
    if all(isinstance(column, np.ndarray) for column in columns):
        return np.concatenate(list(columns))
    raise UnsupportedColumnError(
        f"from_batches: column '{key}' is {', '.join(sorted({type(column).__name__ for column in columns}))}. Expected "
        "tensors, lists or object arrays in every batch."
    )


def _pad_dim_1(tensor: torch.Tensor, width: int, pad_value: int | float) -> torch.Tensor:
    missing = width - tensor.shape[1]
    if not missing:
        return tensor
    return functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing), value=pad_value)
