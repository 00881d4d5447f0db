"""Which rows go to which shard, and into which microbatches: plain integers in, plain integers out.

`BatchedDataDict.shard_by_batch_size` and `shard_meta_for_dp` both carry out what is planned here, so a driver that has
only metas and a trainer that has the tensors get the same assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import numpy as np

from dataplane_core.errors import InvalidRequestError

__all__ = ["DynamicBatchingArgs", "ShardPlan", "chunk_bounds", "plan_dynamic_batches", "plan_even_shards", "read_args"]


class DynamicBatchingArgs(TypedDict):
    """How microbatches are cut by token count.

    Attributes:
        max_tokens_per_microbatch: Bound on rows x padded length.
        sequence_length_round: Padded lengths are multiples of this many tokens.
        input_key: Column whose dim 1 is the batch's width.
        input_lengths_key: Column of lengths in tokens.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """An assignment of rows to shards.

    Attributes:
        rows: Per shard the rows that it gets, in its order, chunk after chunk.
        micro_batch_indices: Per chunk the ``[start, end)`` pairs of the shard's rows of that chunk, the same for every
            shard; None without microbatches.
        micro_batch_lengths: Per chunk the padded length of each microbatch, aligned with the pairs.
        elem_counts_per_gb: Per shard and chunk how many rows it holds (packing only: it may differ between shards).
    """

    rows: list[list[int]]
    micro_batch_indices: list[list[list[list[int]]]] | None = None
    micro_batch_lengths: list[list[list[int]]] | None = None
    elem_counts_per_gb: list[list[int]] | None = None

    def order(self) -> list[int]:
        """Where each row of the concatenated shards came from."""
        return [row for shard in self.rows for row in shard]


_DYNAMIC_KEYS: Final = tuple(DynamicBatchingArgs.__annotations__)


def read_args(args: Mapping[str, Any], required: Sequence[str], optional: Sequence[str], what: str) -> dict[str, Any]:
    """Checks the keys of an argument dict.

    Raises:
        InvalidRequestError: A key is missing or unknown.
    """
    missing = [key for key in required if key not in args]
    unknown = [key for key in args if key not in required and key not in optional]
    if missing or unknown:
        raise InvalidRequestError(
            f"{what}: {'missing ' + ', '.join(missing) if missing else ''}{'; ' if missing and unknown else ''}"
            f"{'unknown ' + ', '.join(unknown) if unknown else ''}. Expected {', '.join([*required, *optional])}."
        )
    return dict(args)


def chunk_bounds(num_rows: int, shards: int, batch_size: int | None) -> list[tuple[int, int]]:
    """The chunks ``[start, end)`` of a batch: of ``batch_size`` rows, or one of everything.

    Raises:
        InvalidRequestError: Sizes that are no multiples.
    """
    if shards < 1:
        raise InvalidRequestError(f"shards must be at least 1, got {shards}.")
    size = num_rows if batch_size is None else batch_size
    if size < 1:
        raise InvalidRequestError(f"batch_size must be at least 1, got {size} for {num_rows} rows.")
    if num_rows % size:
        raise InvalidRequestError(f"{num_rows} rows are not a multiple of batch_size {size}.")
    if size % shards:
        raise InvalidRequestError(f"a batch of {size} rows cannot be shared equally by {shards} shards.")
    return [(start, start + size) for start in range(0, num_rows, size)]


def plan_even_shards(num_rows: int, shards: int, batch_size: int | None) -> ShardPlan:
    """Cuts each chunk in ``shards`` equal parts and joins the parts by position."""
    rows: list[list[int]] = [[] for _ in range(shards)]
    for start, end in chunk_bounds(num_rows, shards, batch_size):
        part = (end - start) // shards
        for shard in range(shards):
            rows[shard].extend(range(start + shard * part, start + (shard + 1) * part))
    return ShardPlan(rows)


def plan_dynamic_batches(
    lengths: Sequence[int], width: int, shards: int, batch_size: int | None, args: Mapping[str, Any]
) -> ShardPlan:
    """Sorts each chunk by length, deals it round over the shards, and cuts microbatches by token count.

    Args:
        lengths: Tokens per row.
        width: Length of the padded batch; no microbatch is longer.
        shards: Number of shards.
        batch_size: Rows of a chunk over all shards, or None for one chunk.
        args: `DynamicBatchingArgs`.

    Returns:
        The plan; rows x padded length of every microbatch, the longest row over all shards at each position counted,
        stays within ``max_tokens_per_microbatch``.

    Raises:
        InvalidRequestError: A row alone is over the limit (both numbers are said), or sizes that are no multiples.
    """
    checked = read_args(args, _DYNAMIC_KEYS, (), "dynamic_batching_args")
    limit, multiple = int(checked["max_tokens_per_microbatch"]), int(checked["sequence_length_round"])
    if limit < 1 or multiple < 1:
        raise InvalidRequestError(
            f"dynamic_batching_args: max_tokens_per_microbatch {limit} and sequence_length_round {multiple} must be at "
            "least 1."
        )
    sizes = np.asarray(lengths, dtype=np.int64)
    rows: list[list[int]] = [[] for _ in range(shards)]
    indices: list[list[list[int]]] = []
    padded: list[list[int]] = []
    for start, end in chunk_bounds(len(sizes), shards, batch_size):
        order = np.argsort(sizes[start:end], kind="stable") + start
        for shard in range(shards):
            rows[shard].extend(order[shard::shards].tolist())
        longest = sizes[order[shards - 1 :: shards]]  # ascending: the last of each deal is its longest
        rounded = np.minimum(-(-longest // multiple) * multiple, width)
        if len(rounded) and int(rounded[-1]) > limit:
            raise InvalidRequestError(
                f"dynamic batching: a row of {int(longest[-1])} tokens, padded to {int(rounded[-1])}, is over "
                f"max_tokens_per_microbatch {limit}."
            )
        cuts, ends = _cut(rounded.tolist(), limit)
        indices.append(cuts)
        padded.append(ends)
    return ShardPlan(rows, [indices] * shards, [padded] * shards)


def _cut(rounded: list[int], limit: int) -> tuple[list[list[int]], list[int]]:
    """Greedy cuts of ascending lengths, such that rows x last length stays within the limit."""
    cuts: list[list[int]] = []
    lengths: list[int] = []
    start = 0
    for position, length in enumerate(rounded):
        if (position - start + 1) * length > limit:
            cuts.append([start, position])
            lengths.append(rounded[position - 1])
            start = position
    if rounded:
        cuts.append([start, len(rounded)])
        lengths.append(rounded[-1])
    return cuts, lengths
