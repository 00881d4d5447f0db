"""The public names are a promise: a change here is a change of the package's version."""

import dataplane_core

NAMES = [
    "AsyncDataPlaneClient",
    "Backend",
    "BatchedDataDict",
    "BlobStore",
    "Capability",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "KVBatchMeta",
    "NamedSharding",
    "OperationCancelledError",
    "SlicedDataDict",
    "StreamingDataset",
    "WireFormat",
    "connect",
    "connect_async",
    "kv_first_write",
    "materialize",
    "pack_jagged_fields",
    "read_columns",
    "shard_meta_for_dp",
    "stream",
    "to_arrow",
    "to_numpy",
    "write_columns",
]


def test_the_top_level_names_are_as_promised_and_importable():
    assert sorted(dataplane_core.__all__) == NAMES
    for name in NAMES:
        assert getattr(dataplane_core, name).__name__
