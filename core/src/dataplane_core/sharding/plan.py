"""Plans: assigns rows to shards and microbatches. Plain integers in and out.

`BatchedDataDict.shard_by_batch_size` and `shard_meta_for_dp` both apply these plans, so a driver that has only metas
and a trainer that has the tensors get the same assignment.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from dataplane_core.errors import InvalidRequestError, preview
from dataplane_core.schema import PLAN_KEYS, padded_length
from dataplane_core.sharding._placing import stable_argsort
from dataplane_core.sharding.packing import PACKERS, as_sizes, pack_flat


class DynamicBatchingArgs(TypedDict):
    """How microbatches are cut by token count.

    Attributes:
        max_tokens_per_microbatch: Limit for rows x padded length.
        sequence_length_round: Padded lengths are multiples of this many tokens.
        input_key: Column whose dim 1 is the batch's width.
        input_lengths_key: Column of lengths in tokens.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class SequencePackingArgs(TypedDict):
    """How sequences are packed in bins; each bin is one microbatch.

    Attributes:
        algorithm: Name of a packer in any case, see `dataplane_core.sharding.packing.PACKERS`.
        max_tokens_per_microbatch: Capacity of a bin.
        input_key: Column of token ids.
        input_lengths_key: Column of lengths in tokens.
        sequence_length_pad_multiple: Each sequence takes a multiple of this many tokens of its bin.
        microbatch_order: In which order a shard works on its bins. ``packer`` (default): in that of the packer;
            ``largest_first``: those with most tokens first. It does not change which shard gets which rows.
        seed: For ``first_fit_shuffle``. Default 0, so that all processes make the same plan.
    """

    algorithm: str
    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    sequence_length_pad_multiple: int
    microbatch_order: NotRequired[Literal["packer", "largest_first"]]
    seed: NotRequired[int]


_DYNAMIC_KEYS: Final = tuple(DynamicBatchingArgs.__annotations__)
_OPTIONAL_PACKING_KEYS: Final = ("microbatch_order", "seed")
_PACKING_KEYS: Final = tuple(key for key in SequencePackingArgs.__annotations__ if key not in _OPTIONAL_PACKING_KEYS)
_ORDERS: Final = ("packer", "largest_first")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """An assignment of rows to shards. Shards share no list.

    Attributes:
        rows: Per shard the rows that it gets, in its order, chunk after chunk.
        micro_batch_indices: Per shard and chunk the ``[start, end)`` pairs of its microbatches, counted from the first
            row that the shard holds of that chunk; None without microbatches. Every shard has equally many in a chunk.
            With dynamic batching they are the same for all shards; with packing a pair is a bin, and shards differ.
        micro_batch_lengths: Per shard and chunk the length in tokens of each microbatch, aligned with the pairs. With
            dynamic batching: the width to which its rows are padded. With packing: the tokens of the bin, each row
            rounded up to the multiple, which is the length of the packed sequence.
        elem_counts_per_gb: Per shard and chunk how many rows it holds (packing only: it may differ between shards).
    """

    rows: list[list[int]]
    micro_batch_indices: list[list[list[list[int]]]] | None = None
    micro_batch_lengths: list[list[list[int]]] | None = None
    elem_counts_per_gb: list[list[int]] | None = None

    def order(self) -> list[int]:
        """The original index of each row of the concatenated shards."""
        return list(itertools.chain.from_iterable(self.rows))

    def of_shard(self, shard: int) -> dict[str, Any]:
        """One shard's part of the plan, with the keys `schema.PLAN_KEYS`. Values that the plan lacks are None."""
        parts = {key: getattr(self, key) for key in PLAN_KEYS}
        return {key: None if of_shards is None else of_shards[shard] for key, of_shards in parts.items()}


# --- without microbatches --------------------------------------------------------------------------------------------


def plan_even_shards(num_rows: int, shards: int, batch_size: int | None) -> ShardPlan:
    """Cuts each chunk into ``shards`` equal parts and joins the parts by position.

    Raises:
        InvalidRequestError: Sizes are not multiples, or there are no rows.
    """
    rows: list[list[int]] = [[] for _ in range(max(shards, 0))]
    for start, end in _chunks(num_rows, shards, batch_size, equal=True):
        part = (end - start) // shards
        for shard in range(shards):
            rows[shard].extend(range(start + shard * part, start + (shard + 1) * part))
    return ShardPlan(rows)


def plan_uneven_shards(num_rows: int, shards: int) -> ShardPlan:
    """Cuts the rows into ``shards`` parts of equal size. The last ones may be smaller, or empty.

    Raises:
        InvalidRequestError: ``shards`` is below 1.
    """
    if shards < 1:
        raise InvalidRequestError(f"sharding refused: shards is {shards}. Expected 1 or more.")
    part = -(-num_rows // shards)
    return ShardPlan(
        [list(range(min(shard * part, num_rows), min((shard + 1) * part, num_rows))) for shard in range(shards)]
    )


# --- dynamic batching ------------------------------------------------------------------------------------------------


def plan_dynamic_batches(
    lengths: Sequence[int], width: int | None, shards: int, batch_size: int | None, args: Mapping[str, Any]
) -> ShardPlan:
    """Sorts each chunk by length, deals its rows out to the shards in turn, and cuts microbatches by token count.

    Args:
        lengths: Tokens per row.
        width: Length of the padded batch; no microbatch is longer. None or 0: the largest length.
        shards: Number of shards.
        batch_size: Rows of a chunk over all shards, or None for one chunk.
        args: `DynamicBatchingArgs`.

    Returns:
        The plan. In every microbatch, rows x padded length is at most ``max_tokens_per_microbatch``. The padded length
        is that of the longest row in this microbatch over all shards.

    Raises:
        InvalidRequestError: A single row is over the limit or longer than the width (the message has both numbers), or
            sizes are not multiples.
    """
    what = "dynamic_batching_args"
    _check_keys(what, args, _DYNAMIC_KEYS)
    limit = _at_least(1, what, args, "max_tokens_per_microbatch")
    multiple = _at_least(1, what, args, "sequence_length_round")
    chunks = _chunks(len(lengths), shards, batch_size, equal=True)
    sizes = as_sizes("sharding", "row", lengths)
    width = width or int(sizes.max())
    if int(sizes.max()) > width:
        raise InvalidRequestError(
            f"dynamic batching refused: row {int(sizes.argmax())} has {int(sizes.max())} tokens, and the batch is "
            f"padded to {width}. Expected no row longer than that."
        )
    rows: list[list[int]] = [[] for _ in range(shards)]
    indices: list[list[list[list[int]]]] = [[] for _ in range(shards)]
    padded: list[list[list[int]]] = [[] for _ in range(shards)]
    for start, end in chunks:
        order = stable_argsort(sizes[start:end]) + start
        longest = sizes[order[shards - 1 :: shards]]  # rising: the last of each deal is its longest
        rounded = np.minimum(padded_length(longest, multiple), width)
        if int(rounded[-1]) > limit:
            raise InvalidRequestError(
                f"dynamic batching refused: row {int(order[-1])} has {int(longest[-1])} tokens, padded to "
                f"{int(rounded[-1])}. Expected at most max_tokens_per_microbatch, {limit}."
            )
        ends, widths = _cut(rounded.tolist(), limit)
        for shard in range(shards):
            rows[shard] += order[shard::shards].tolist()
            indices[shard].append([list(pair) for pair in itertools.pairwise([0, *ends])])
            padded[shard].append(list(widths))
    return ShardPlan(rows, indices, padded)


def _cut(rounded: list[int], limit: int) -> tuple[list[int], list[int]]:
    """Cuts rising lengths greedily, so that rows x last length stays within the limit; ends and last lengths."""
    ends: list[int] = []
    widths: list[int] = []
    start = previous = 0
    for position, length in enumerate(rounded):
        if (position - start + 1) * length > limit:
            ends.append(position)
            widths.append(previous)
            start = position
        previous = length
    ends.append(len(rounded))
    widths.append(previous)
    return ends, widths


# --- sequence packing ------------------------------------------------------------------------------------------------


def plan_packed_batches(
    lengths: Sequence[int], shards: int, batch_size: int | None, args: Mapping[str, Any]
) -> ShardPlan:
    """Packs each chunk into bins and deals them out to the shards in turn: bin i goes to shard ``i % shards``.

    Each shard gets the same number of bins of each chunk, at least one. Its rows are those of its bins, in order. The
    width of the padded batch has no effect: a packed row takes its own length, rounded up.

    Args:
        lengths: Tokens per row.
        shards: Number of shards.
        batch_size: Rows of a chunk over all shards, or None for one chunk. Need not be a multiple of ``shards``.
        args: `SequencePackingArgs`.

    Returns:
        The plan. The rounded lengths of a bin sum up to ``max_tokens_per_microbatch`` at most.

    Raises:
        InvalidRequestError: A rounded length is over the limit (the message has both numbers), a chunk has fewer rows
            than it needs bins, or sizes are not multiples.
    """
    what = "sequence_packing_args"
    _check_keys(what, args, _PACKING_KEYS, _OPTIONAL_PACKING_KEYS)
    limit = _at_least(1, what, args, "max_tokens_per_microbatch")
    multiple = _at_least(1, what, args, "sequence_length_pad_multiple")
    seed = _at_least(0, what, {"seed": 0, **args}, "seed")
    bin_order = args.get("microbatch_order") or _ORDERS[0]
    algorithm = str(args["algorithm"]).lower()
    for key, value, known in (("algorithm", algorithm, PACKERS), ("microbatch_order", bin_order, _ORDERS)):
        if value not in known:
            raise InvalidRequestError(f"{what} refused: {key} is {value!r}. Expected one of {', '.join(known)}.")
    chunks = _chunks(len(lengths), shards, batch_size, equal=False)
    sizes = as_sizes("sharding", "row", lengths)
    rounded = padded_length(sizes, multiple)
    longest = int(rounded.argmax())
    if int(rounded[longest]) > limit:
        raise InvalidRequestError(
            f"sequence packing refused: row {longest} has {int(sizes[longest])} tokens, rounded up to "
            f"{int(rounded[longest])}. Expected at most max_tokens_per_microbatch, {limit}."
        )
    plan = ShardPlan(
        rows=[[] for _ in range(shards)],
        micro_batch_indices=[[] for _ in range(shards)],
        micro_batch_lengths=[[] for _ in range(shards)],
        elem_counts_per_gb=[[] for _ in range(shards)],
    )
    for start, end in chunks:
        items, counts = pack_flat(
            algorithm,
            rounded[start:end],
            limit,
            min_bin_count=shards,
            bin_count_multiple=shards,
            seed=seed,
        )
        items += start
        tokens = np.add.reduceat(rounded[items], np.cumsum(counts) - counts)
        _deal(plan, items, counts, tokens, largest_first=bin_order == "largest_first")
    return plan


def _deal(
    plan: ShardPlan,
    items: NDArray[np.int64],
    counts: NDArray[np.int64],
    tokens: NDArray[np.int64],
    *,
    largest_first: bool,
) -> None:
    """Adds a chunk's bins to the plan, dealt out in the packer's order.

    Args:
        plan: Grows by one chunk.
        items: The rows, bin after bin.
        counts: Per bin its rows.
        tokens: Per bin its tokens.
        largest_first: Sort the bins of each shard by falling tokens.
    """
    assert plan.micro_batch_indices is not None
    assert plan.micro_batch_lengths is not None
    assert plan.elem_counts_per_gb is not None
    shards = len(plan.rows)
    dealt = np.arange(len(counts)).reshape(-1, shards).T  # all of shard 0, all of shard 1, ...
    if largest_first:
        dealt = np.take_along_axis(dealt, np.argsort(-tokens[dealt], axis=1, kind="stable"), axis=1)
    bins = dealt.ravel()
    starts = (np.cumsum(counts) - counts)[bins]
    counts = counts[bins]
    ends = np.cumsum(counts)
    rows = items[np.repeat(starts - (ends - counts), counts) + np.arange(len(items))].tolist()
    # one line per shard, all converted at once: with small chunks, the cost of each numpy call counts
    counts, ends = counts.reshape(shards, -1), ends.reshape(shards, -1)
    firsts = (ends[:, 0] - counts[:, 0]).tolist()
    lasts = ends[:, -1].tolist()
    held = np.cumsum(counts, axis=1)
    pairs = np.stack([held - counts, held], axis=2).tolist()
    padded = tokens[bins].reshape(shards, -1).tolist()
    for shard, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        plan.rows[shard].extend(rows[first:last])
        plan.micro_batch_indices[shard].append(pairs[shard])
        plan.micro_batch_lengths[shard].append(padded[shard])
        plan.elem_counts_per_gb[shard].append(last - first)


# --- shared ----------------------------------------------------------------------------------------------------------


def _chunks(num_rows: int, shards: int, batch_size: int | None, *, equal: bool) -> list[tuple[int, int]]:
    """The chunks ``[start, end)`` of a batch: of ``batch_size`` rows, or one of everything.

    Args:
        num_rows: Rows of the batch.
        shards: Number of shards.
        batch_size: Rows of a chunk.
        equal: Whether each shard must get the same number of rows of a chunk.

    Raises:
        InvalidRequestError: Sizes are not multiples, or there are no rows.
    """
    if shards < 1:
        raise InvalidRequestError(f"sharding refused: shards is {shards}. Expected 1 or more.")
    if num_rows < 1:
        raise InvalidRequestError(
            f"sharding refused: there are {num_rows} rows for {shards} shards. Expected 1 or more."
        )
    size = num_rows if batch_size is None else batch_size
    if size < 1 or num_rows % size:
        raise InvalidRequestError(
            f"sharding refused: {num_rows} rows are not a multiple of batch_size {size}. Expected whole batches."
        )
    if equal and size % shards:
        raise InvalidRequestError(
            f"sharding refused: {size} rows are not a multiple of {shards} shards. Expected equal parts of each batch."
        )
    return [(start, start + size) for start in range(0, num_rows, size)]


def _check_keys(what: str, args: Mapping[str, Any], required: Sequence[str], optional: Sequence[str] = ()) -> None:
    missing = [key for key in required if key not in args]
    unknown = [key for key in args if key not in required and key not in optional]
    if missing or unknown:
        found = [
            f"{preview(keys, limit=9)} {said}" for keys, said in ((missing, "missing"), (unknown, "unknown")) if keys
        ]
        raise InvalidRequestError(
            f"{what} refused: {' and '.join(found)}. Expected {', '.join(required)}"
            f"{', and optionally ' + ', '.join(optional) if optional else ''}."
        )


def _at_least(least: int, what: str, args: Mapping[str, Any], key: str) -> int:
    value = args[key]
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidRequestError(f"{what} refused: {key} is {value!r}. Expected an integer of {least} or more.")
    return int(value)
