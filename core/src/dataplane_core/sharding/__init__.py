"""Assigns rows to ranks: packers, plans of shards, sharding of metas without tensors, named grids of ranks.

Trainers shard metas with it. `BatchedDataDict` shards and packs its rows by the same plans.
"""

from dataplane_core.sharding.axes import REPLICATED_AXES
from dataplane_core.sharding.packing import (
    PACKERS,
    concatenative,
    first_fit_decreasing,
    first_fit_shuffle,
    get_packer,
    modified_first_fit_decreasing,
    packing_metrics,
)
from dataplane_core.sharding.plan import DynamicBatchingArgs, SequencePackingArgs

__all__ = [
    "PACKERS",
    "REPLICATED_AXES",
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "get_packer",
    "modified_first_fit_decreasing",
    "packing_metrics",
]
