"""`shard_meta_for_dp`: assigns the rows of a meta to data-parallel ranks. No I/O and no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataplane_core.arguments import check_dict, check_meta, check_number, takes
from dataplane_core.errors import InvalidRequestError
from dataplane_core.meta import KVBatchMeta, rows_of
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, PLAN_KEYS
from dataplane_core.sharding.plan import ShardPlan, plan_dynamic_batches, plan_even_shards, plan_packed_batches


@takes(
    meta=check_meta,
    dp_world=check_number,
    batch_size=check_number,
    sequence_packing_args=check_dict,
    dynamic_batching_args=check_dict,
)
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
        sequence_packing_args: `SequencePackingArgs`.
        dynamic_batching_args: `DynamicBatchingArgs`.

    Returns:
        One meta per rank, and the original index of each row of the concatenated ranks, or None if the order did not
        change. With these indices, `BatchedDataDict.reorder_data` restores the meta's order in outputs that were
        concatenated over ranks.

        Tags, lengths and lease tokens follow their rows. The dicts of tags are shared with ``meta``, since copying them
        costs more than the plan. (`KVBatchMeta.stamp_tags` makes new dicts, so other metas do not see its changes.)
        ``extra_info`` has a copy of the meta's entries. If microbatches are planned, it also has
        ``micro_batch_indices``, ``micro_batch_lengths`` and ``elem_counts_per_gb`` (None for dynamic batching), as
        `ShardPlan` describes them. A plan in the meta's own ``extra_info`` is not copied: it was made for other rows.

    Raises:
        InvalidRequestError: The meta is empty or has no lengths, both kinds of arguments are given, sizes are not
            multiples, or a row is over the token limit.
    """
    where = f"shard_meta_for_dp('{meta.partition_id}', {meta.size} samples)"
    if not meta.sample_ids:
        raise InvalidRequestError(f"{where} refused: the meta is empty. Expected one row or more.")
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise InvalidRequestError(
            f"{where} refused: got dynamic_batching_args and sequence_packing_args. Expected one of them, or none."
        )
    lengths = meta.sequence_lengths
    if lengths is None:
        raise InvalidRequestError(
            f"{where} refused: the meta has no sequence_lengths. Expected one length per sample: put the tag "
            "'input_lengths', or set them."
        )
    try:
        if sequence_packing_args is not None:
            plan = plan_packed_batches(lengths, dp_world, batch_size, sequence_packing_args)
        elif dynamic_batching_args is not None:
            width = meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN)
            plan = plan_dynamic_batches(lengths, width, dp_world, batch_size, dynamic_batching_args)
        else:
            plan = plan_even_shards(meta.size, dp_world, batch_size)
    except InvalidRequestError as error:
        error.message = f"{where}: {error.message}"
        raise
    order = plan.order()
    unchanged = order[-1] == meta.size - 1 and order == list(range(meta.size))
    return _apply_plan(meta, plan), None if unchanged else order


def _apply_plan(meta: KVBatchMeta, plan: ShardPlan) -> list[KVBatchMeta]:
    inherited = {key: value for key, value in meta.extra_info.items() if key not in PLAN_KEYS}
    shards = []
    for rank, rows in enumerate(plan.rows):
        shard = rows_of(meta, rows, inherited)
        if plan.micro_batch_indices is not None:
            shard.extra_info |= plan.of_shard(rank)
        shards.append(shard)
    return shards
