"""Assigning rows to ranks: packers, metas sharded without tensors, named rank grids."""

from dataplane_core.sharding.preshard import shard_meta_for_dp

__all__ = ["shard_meta_for_dp"]
