"""Plans: assigns rows to shards and microbatches. Plain integers in and out, no tensors and no I/O.

`BatchedDataDict.shard_by_batch_size` and `shard_meta_for_dp` both apply `plan_shards`, so a driver that has only metas
and a trainer that has the tensors get the same assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, Final, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from dataplane_core.arguments import Count, check_dict, check_meta, checked_as
from dataplane_core.errors import InvalidRequestError, preview
from dataplane_core.meta import KVBatchMeta, rows_of
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, INPUT_LENGTHS_FIELD, PLAN_KEYS, padded_length
from dataplane_core.sharding.balancing import BalanceBy, balanced_bins, costs_of
from dataplane_core.sharding.packing import PACKERS, Lengths, as_sizes
from dataplane_core.spec.costs import divide_evenly


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


class _PackingOptions(TypedDict, total=False):
    microbatch_order: Literal["packer", "largest_first"]
    seed: int


class SequencePackingArgs(_PackingOptions):
    """How sequences are packed in bins; each bin is one microbatch.

    Attributes:
        algorithm: Name of a packer in any case, see `dataplane_core.sharding.PACKERS`.
        max_tokens_per_microbatch: Capacity of a bin.
        input_key: Column of token ids.
        input_lengths_key: Column of lengths in tokens.
        sequence_length_pad_multiple: Each sequence takes a multiple of this many tokens of its bin.
        microbatch_order: In which order a shard works on its bins. ``packer`` (default): in that of the packer;
            ``largest_first``: those with most tokens first. It does not change which shard gets which rows. Balanced
            plans have the costliest first.
        seed: For ``first_fit_shuffle``. Default 0, so that all processes make the same plan.
    """

    algorithm: str
    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    sequence_length_pad_multiple: int


_ORDERS: Final = ("packer", "largest_first")


@dataclass(slots=True)
class Shard:
    """What one shard gets. Shards share no list.

    Attributes:
        rows: Its rows, in its order, chunk after chunk.
        micro_batch_indices: Per chunk the ``[start, end)`` pairs of its microbatches, counted from the first row that
            the shard holds of that chunk. Every shard has equally many in a chunk. With dynamic batching they are the
            same for all shards; with packing a pair is a bin, and shards differ. None without microbatches.
        micro_batch_lengths: Per chunk the length in tokens of each microbatch, aligned with the pairs. With dynamic
            batching: the width to which its rows are padded. With packing: the tokens of the bin, each row rounded up
            to the multiple, which is the length of the packed sequence.
        elem_counts_per_gb: Per chunk how many rows it holds (packing only: it may differ between shards).
    """

    rows: list[int] = field(default_factory=list)
    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None

    def plan(self) -> dict[str, Any]:
        """All but the rows, by the keys `schema.PLAN_KEYS`."""
        return {key: getattr(self, key) for key in PLAN_KEYS}

    def add_chunk(self, rows: list[int], ends: Sequence[int], lengths: list[int]) -> None:
        """Adds the rows of a chunk, where each of its microbatches ends among them, and the microbatches' lengths."""
        assert self.micro_batch_indices is not None
        assert self.micro_batch_lengths is not None
        self.rows += rows
        self.micro_batch_indices.append([list(pair) for pair in pairwise([0, *ends])])
        self.micro_batch_lengths.append(lengths)
        if self.elem_counts_per_gb is not None:
            self.elem_counts_per_gb.append(len(rows))


def plan_shards(
    num_rows: int,
    shards: int,
    batch_size: int | None,
    dynamic_batching_args: Mapping[str, Any] | None,
    sequence_packing_args: Mapping[str, Any] | None,
    *,
    lengths: Callable[[Mapping[str, Any]], Lengths],
    width: Callable[[Mapping[str, Any]], int | None],
    uneven: bool = False,
    balance: BalanceBy | None = None,
) -> list[Shard]:
    """Assigns each chunk of ``batch_size`` rows (None: all rows) to the shards.

    - With neither kind of arguments: each chunk in equal parts, which are joined by position.
    - Dynamic batching: sorts each chunk by length, deals its rows out to the shards in turn, and cuts microbatches in
      which rows x padded length is within the limit. The padded length is that of the longest row over all shards,
      rounded up, but at most the width of the padded batch.
    - Packing: packs each chunk into bins, whose number is a multiple of ``shards``, and deals them out in turn: bin i
      goes to shard ``i % shards``. The rounded lengths of a bin are within the limit.

    ``lengths`` gives the tokens per row for the arguments of either kind, once their keys are checked. ``width`` gives
    the width of the padded batch for dynamic batching; None or 0: the largest length. ``uneven``, without arguments and
    ``batch_size``: the last shards may get fewer rows, or none.

    ``balance``: parts and bins cost about as much. Dynamic batching needs none: all shards have the same padded shapes.
    """
    shards = checked_as("sharding: shards", Count, shards)
    batch_size = checked_as("sharding: batch_size", Count | None, batch_size)
    if dynamic_batching_args is not None and sequence_packing_args is not None:
        raise InvalidRequestError(
            "sharding refused: got dynamic_batching_args and sequence_packing_args. Expected one of them, or none."
        )
    args: Mapping[str, Any]
    form: Any
    if dynamic_batching_args is not None:
        args, form, rounding = dynamic_batching_args, DynamicBatchingArgs, "sequence_length_round"
    elif sequence_packing_args is not None:
        args, form, rounding = sequence_packing_args, SequencePackingArgs, "sequence_length_pad_multiple"
    else:
        column = dict.fromkeys(("input_key", "input_lengths_key"), INPUT_LENGTHS_FIELD)
        costs = None if balance is None else costs_of(balance, as_sizes("sharding", "row", lengths(column)))
        planned = [Shard() for _ in range(shards)]
        for start, end in [(0, num_rows)] if uneven else _chunks(num_rows, shards, batch_size, equal=True):
            part = -(-(end - start) // shards)
            parts: list[Sequence[int]] = [range(start, end)[number * part :][:part] for number in range(shards)]
            if costs is not None:
                divided = divide_evenly(costs[start:end], list(map(len, parts)))
                parts = [[start + position for position in positions] for positions in divided]
            for shard, rows in zip(planned, parts, strict=True):
                shard.rows += rows
        return planned
    is_dynamic = form is DynamicBatchingArgs
    what = "dynamic_batching_args" if is_dynamic else "sequence_packing_args"
    check_dict(f"sharding: {what}", args)
    _check_keys(what, args, form)
    limit = _at_least(1, what, args, "max_tokens_per_microbatch")
    multiple = _at_least(1, what, args, rounding)
    sizes = as_sizes("sharding", "row", lengths(args))
    widest = width(args) if is_dynamic else None
    chunks = _chunks(num_rows, shards, batch_size, equal=is_dynamic)
    if is_dynamic:
        if balance is not None:  # it changes nothing, but is checked
            costs_of(balance, sizes)
        return _dynamic_batches(shards, chunks, sizes, limit, multiple, widest or int(sizes.max()))
    return _packed_batches(shards, chunks, sizes, limit, multiple, args, balance)


def order_of(shards: Sequence[Shard]) -> list[int]:
    """The original index of each row of the concatenated shards."""
    return list(chain.from_iterable(shard.rows for shard in shards))


def _dynamic_batches(
    shards: int, chunks: Sequence[tuple[int, int]], sizes: NDArray[np.int64], limit: int, multiple: int, widest: int
) -> list[Shard]:
    if int(sizes.max()) > widest:
        raise InvalidRequestError(
            f"dynamic batching refused: row {int(sizes.argmax())} has {int(sizes.max())} tokens, and the batch is "
            f"padded to {widest}. Expected no row longer than that."
        )
    planned = [Shard([], [], []) for _ in range(shards)]
    for start, end in chunks:
        order = np.argsort(sizes[start:end], kind="stable") + start
        longest = sizes[order[shards - 1 :: shards]]  # rising: the last of each deal is its longest
        rounded = np.minimum(padded_length(longest, multiple), widest)
        if int(rounded[-1]) > limit:
            raise InvalidRequestError(
                f"dynamic batching refused: row {int(order[-1])} has {int(longest[-1])} tokens, padded to "
                f"{int(rounded[-1])}. Expected at most max_tokens_per_microbatch, {limit}."
            )
        padded = rounded.tolist()
        ends, first = [], 0
        for row, length in enumerate(padded):
            if (row - first + 1) * length > limit:
                ends.append(row)
                first = row
        ends.append(len(padded))
        for number, shard in enumerate(planned):
            shard.add_chunk(order[number::shards].tolist(), ends, [padded[end - 1] for end in ends])
    return planned


def _packed_batches(
    shards: int,
    chunks: Sequence[tuple[int, int]],
    sizes: NDArray[np.int64],
    limit: int,
    multiple: int,
    args: Mapping[str, Any],
    balance: BalanceBy | None,
) -> list[Shard]:
    what = "sequence_packing_args"
    seed = _at_least(0, what, {"seed": 0, **args}, "seed")
    bin_order = args.get("microbatch_order") or _ORDERS[0]
    algorithm = str(args["algorithm"]).lower()
    for key, value, offered in (("algorithm", algorithm, PACKERS), ("microbatch_order", bin_order, _ORDERS)):
        if value not in offered:
            raise InvalidRequestError(f"{what} refused: {key} is {value!r}. Expected one of {', '.join(offered)}.")
    rounded: NDArray[np.int64] = padded_length(sizes, multiple)
    longest = int(rounded.argmax())
    if int(rounded[longest]) > limit:
        raise InvalidRequestError(
            f"sequence packing refused: row {longest} has {int(sizes[longest])} tokens, rounded up to "
            f"{int(rounded[longest])}. Expected at most max_tokens_per_microbatch, {limit}."
        )
    options = {"seed": seed} if algorithm == "first_fit_shuffle" else {}
    costs = [] if balance is None else costs_of(balance, rounded)
    planned = [Shard([], [], [], []) for _ in range(shards)]
    for start, end in chunks:
        tokens = rounded[start:end].tolist()
        bins = PACKERS[algorithm](tokens, limit, min_bin_count=shards, bin_count_multiple=shards, **options)
        if balance is None:
            dealt = [bins[number::shards] for number in range(shards)]
        else:
            dealt = balanced_bins(bins, tokens, costs[start:end], limit, shards)
        for shard, mine in zip(planned, dealt, strict=True):
            filled = [(sum(tokens[row] for row in rows), [start + row for row in rows]) for rows in mine]
            if bin_order == "largest_first" and balance is None:
                filled.sort(key=lambda entry: -entry[0])
            ends = list(accumulate(len(rows) for _, rows in filled))
            shard.add_chunk([row for _, rows in filled for row in rows], ends, [length for length, _ in filled])
    return planned


def _chunks(num_rows: int, shards: int, batch_size: int | None, *, equal: bool) -> list[tuple[int, int]]:
    """The chunks ``[start, end)`` of a batch; each shard gets the same number of rows of a chunk if they are equal."""
    if num_rows < 1:
        raise InvalidRequestError(
            f"sharding refused: there are {num_rows} rows for {shards} shards. Expected 1 or more."
        )
    size = num_rows if batch_size is None else batch_size
    if num_rows % size:
        raise InvalidRequestError(
            f"sharding refused: {num_rows} rows are not a multiple of batch_size {size}. Expected whole batches."
        )
    if equal and size % shards:
        raise InvalidRequestError(
            f"sharding refused: {size} rows are not a multiple of {shards} shards. Expected equal parts of each batch."
        )
    return [(start, start + size) for start in range(0, num_rows, size)]


def _check_keys(what: str, args: Mapping[str, Any], form: Any) -> None:
    required, optional = (
        [key for key in form.__annotations__ if key in keys]
        for keys in (form.__required_keys__, form.__optional_keys__)
    )
    missing = [key for key in required if key not in args]
    unknown = [key for key in args if key not in form.__annotations__]
    if missing or unknown:
        wrong = [
            f"{preview(keys, limit=9)} {said}" for keys, said in ((missing, "missing"), (unknown, "unknown")) if keys
        ]
        raise InvalidRequestError(
            f"{what} refused: {' and '.join(wrong)}. Expected {', '.join(required)}"
            f"{', and optionally ' + ', '.join(optional) if optional else ''}."
        )


def _at_least(least: int, what: str, args: Mapping[str, Any], key: str) -> int:
    value = args[key]
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidRequestError(f"{what} refused: {key} is {value!r}. Expected an integer of {least} or more.")
    return int(value)


# --- metas ------------------------------------------------------------------------------------------------------------


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
    dynamic_batching_args: Mapping[str, Any] | None = None,
    balance: BalanceBy | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Assigns ``meta.sample_ids`` to ranks, as `BatchedDataDict.shard_by_batch_size` assigns the rows themselves.

    The width of the batch is ``extra_info[GLOBAL_FORWARD_PAD_SEQLEN]`` if present, else the largest length. The cost is
    that of sorting the lengths.

    Args:
        meta: The rows, with ``sequence_lengths``.
        dp_world: Number of data-parallel ranks.
        batch_size: Rows of a global batch over all ranks; None: one batch of everything.
        sequence_packing_args: `SequencePackingArgs`.
        dynamic_batching_args: `DynamicBatchingArgs`.
        balance: By what cost the ranks get about as much work, within the same limits, in as many microbatches.
            ``{"cost": "flops", "hidden_size": 4096}``: the FLOPs of a transformer of this width, which grow with a
            row's length and its square. Or a function: tokens of a row (packing: rounded up) -> its cost, a number
            from 0 to 1e100. Dynamic batching pads all ranks alike, so it changes nothing there.

    Returns:
        One meta per rank, and the original index of each row of the concatenated ranks, or None if the order did not
        change. With these indices, `BatchedDataDict.reorder_data` restores the meta's order in outputs that were
        concatenated over ranks.

        Tags, lengths and lease tokens follow their rows. The dicts of tags are shared with ``meta``, since copying them
        costs more than the plan. (`KVBatchMeta.stamp_tags` makes new dicts, so other metas do not see its changes.)
        ``extra_info`` has a copy of the meta's entries. If microbatches are planned, it also has
        ``micro_batch_indices``, ``micro_batch_lengths`` and ``elem_counts_per_gb`` (None for dynamic batching), as
        `Shard` describes them. A plan in the meta's own ``extra_info`` is not copied: it was made for other rows.

    Raises:
        InvalidRequestError: The meta is empty or has no lengths, both kinds of arguments are given, sizes are not
            multiples, a row is over the token limit, or ``balance`` names no cost or gives none.
        InvalidTypeError: ``balance`` has a value of the wrong type.
    """
    check_meta("shard_meta_for_dp: meta", meta)
    dp_world = checked_as("shard_meta_for_dp: dp_world", Count, dp_world)
    where = f"shard_meta_for_dp('{meta.partition_id}', {meta.size} samples)"
    if not meta.sample_ids:
        raise InvalidRequestError(f"{where} refused: the meta is empty. Expected one row or more.")
    lengths = meta.sequence_lengths
    if lengths is None:
        raise InvalidRequestError(
            f"{where} refused: the meta has no sequence_lengths. Expected one length per sample: put the tag "
            "'input_lengths', or set them."
        )
    try:
        shards = plan_shards(
            meta.size,
            dp_world,
            batch_size,
            dynamic_batching_args,
            sequence_packing_args,
            lengths=lambda _: lengths,
            width=lambda _: meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN),
            balance=balance,
        )
    except InvalidRequestError as error:
        error.message = f"{where}: {error.message}"
        raise
    inherited = {key: value for key, value in meta.extra_info.items() if key not in PLAN_KEYS}
    metas = []
    for shard in shards:
        part = rows_of(meta, shard.rows, inherited)
        if shard.micro_batch_indices is not None:
            part.extra_info |= shard.plan()
        metas.append(part)
    order = order_of(shards)
    unchanged = order[-1] == meta.size - 1 and order == list(range(meta.size))
    return metas, None if unchanged else order
