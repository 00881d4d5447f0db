"""`shard_meta_for_dp`: assigns the rows of a meta to data-parallel ranks. No I/O and no tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from dataplane_core.errors import InvalidRequestError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_core.sharding.plan import plan_dynamic_batches, plan_even_shards

__all__ = ["ELEM_COUNTS_PER_GB", "MICRO_BATCH_INDICES", "MICRO_BATCH_LENGTHS", "shard_meta_for_dp"]

#: ``extra_info`` keys that carry a shard's plan; as the attributes of `BatchedDataDict`.
MICRO_BATCH_INDICES = "micro_batch_indices"
MICRO_BATCH_LENGTHS = "micro_batch_lengths"
ELEM_COUNTS_PER_GB = "elem_counts_per_gb"


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
    dynamic_batching_args: Mapping[str, Any] | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Assigns ``meta.sample_ids`` to ranks, as `BatchedDataDict.shard_by_batch_size` assigns the rows themselves.

    The width of the batch is ``extra_info[GLOBAL_FORWARD_PAD_SEQLEN]`` if present, else the largest length. The cost is
    that of sorting the lengths.

    Args:
        meta: The rows, with ``sequence_lengths``.
        dp_world: Number of data-parallel ranks.
        batch_size: Rows of a global batch over all ranks; None: one batch of everything.
        sequence_packing_args: As for `shard_by_batch_size`.
        dynamic_batching_args: As for `shard_by_batch_size`.

    Returns:
        One meta per rank, with tags, lengths and tokens of its rows, and in ``extra_info`` the meta's own entries and
        the plan; and where each row of the concatenated ranks came from, None if that is the meta's own order.
        `BatchedDataDict.reorder_data` with it, on rank-concatenated outputs, restores the meta's order.

    Raises:
        InvalidRequestError: An empty meta, missing lengths, both kinds of arguments, sizes that are no multiples.
    """
    if not meta.sample_ids:
        raise InvalidRequestError(f"shard_meta_for_dp('{meta.partition_id}') refused: the meta is empty.")
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise InvalidRequestError(
            "shard_meta_for_dp: dynamic_batching_args and sequence_packing_args exclude each other."
        )
    if sequence_packing_args is None and dynamic_batching_args is None:
        plan = plan_even_shards(meta.size, dp_world, batch_size)
    else:
        lengths = meta.sequence_lengths
        if lengths is None:
            raise InvalidRequestError(
                f"shard_meta_for_dp('{meta.partition_id}', {meta.size} samples) refused: the meta has no "
                "sequence_lengths. Expected one length per sample: put the tag 'input_lengths', or set them."
            )
        width = int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN) or max(lengths))
        if dynamic_batching_args is not None:
            plan = plan_dynamic_batches(lengths, width, dp_world, batch_size, dynamic_batching_args)
        else:
            from dataplane_core.sharding.packing import plan_packed_batches

            assert sequence_packing_args is not None
            plan = plan_packed_batches(lengths, width, dp_world, batch_size, sequence_packing_args)
    shards = []
    for rank, rows in enumerate(plan.rows):
        shard = meta.subset(rows)
        if plan.micro_batch_indices is not None:
            shard.extra_info[MICRO_BATCH_INDICES] = copy.deepcopy(plan.micro_batch_indices[rank])
        if plan.micro_batch_lengths is not None:
            shard.extra_info[MICRO_BATCH_LENGTHS] = copy.deepcopy(plan.micro_batch_lengths[rank])
        if plan.elem_counts_per_gb is not None:
            shard.extra_info[ELEM_COUNTS_PER_GB] = list(plan.elem_counts_per_gb[rank])
        shards.append(shard)
    order = plan.order()
    return shards, None if order == list(range(meta.size)) else order
