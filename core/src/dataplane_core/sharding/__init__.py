"""Assigns rows to ranks: packers, plans of shards, sharding of metas without tensors, named grids of ranks.

Trainers shard metas with it. `BatchedDataDict` shards and packs its rows by the same plans.
"""

from dataplane_core.sharding.axes import REPLICATED_AXES, NamedSharding
from dataplane_core.sharding.packing import (
    PACKERS,
    PackingMetrics,
    SequencePacker,
    concatenative,
    first_fit_decreasing,
    first_fit_shuffle,
    get_packer,
    modified_first_fit_decreasing,
    packing_metrics,
)
from dataplane_core.sharding.plan import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardPlan,
    plan_dynamic_batches,
    plan_even_shards,
    plan_packed_batches,
    plan_uneven_shards,
)
from dataplane_core.sharding.preshard import shard_meta_for_dp

__all__ = [
    "PACKERS",
    "REPLICATED_AXES",
    "DynamicBatchingArgs",
    "NamedSharding",
    "PackingMetrics",
    "SequencePacker",
    "SequencePackingArgs",
    "ShardPlan",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "get_packer",
    "modified_first_fit_decreasing",
    "packing_metrics",
    "plan_dynamic_batches",
    "plan_even_shards",
    "plan_packed_batches",
    "plan_uneven_shards",
    "shard_meta_for_dp",
]
