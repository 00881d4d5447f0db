import dataplane_core.sharding as sharding


def test_public_names():
    assert sharding.__all__ == [
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
    assert all(hasattr(sharding, name) for name in sharding.__all__)
