import dataplane_core.sharding as sharding


def test_public_names():
    assert sharding.__all__ == [
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
    assert all(hasattr(sharding, name) for name in sharding.__all__)
