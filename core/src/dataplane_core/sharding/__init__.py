"""Assigning rows to ranks: packers, metas sharded without tensors, named rank grids."""

from dataplane_core.sharding.axes import REPLICATED_AXES, NamedSharding
from dataplane_core.sharding.packing import (
    PACKERS,
    PackingMetrics,
    concatenative,
    first_fit_decreasing,
    first_fit_shuffle,
    modified_first_fit_decreasing,
    packing_metrics,
)
from dataplane_core.sharding.plan import DynamicBatchingArgs, SequencePackingArgs
from dataplane_core.sharding.preshard import shard_meta_for_dp

__all__ = [
    "PACKERS",
    "REPLICATED_AXES",
    "DynamicBatchingArgs",
    "NamedSharding",
    "PackingMetrics",
    "SequencePackingArgs",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
    "packing_metrics",
    "shard_meta_for_dp",
]
