"""The neutral data plane of LLM post-training: the public names, nothing else."""

from dataplane_core import _compiler_marks as _compiler_marks  # first: it imports tensordict for those below
from dataplane_core.backends import Backend, BlobStore
from dataplane_core.batch import (
    BatchedDataDict,
    SlicedDataDict,
    kv_first_write,
    materialize,
    pack_jagged_fields,
    read_columns,
    write_columns,
)
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig
from dataplane_core.errors import DataPlaneError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.plugins import connect
from dataplane_core.sharding import NamedSharding, shard_meta_for_dp
from dataplane_core.spec import Capability, WireFormat

__all__ = [
    "Backend",
    "BatchedDataDict",
    "BlobStore",
    "Capability",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "KVBatchMeta",
    "NamedSharding",
    "SlicedDataDict",
    "WireFormat",
    "connect",
    "kv_first_write",
    "materialize",
    "pack_jagged_fields",
    "read_columns",
    "shard_meta_for_dp",
    "write_columns",
]
