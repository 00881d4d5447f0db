"""The neutral data plane of LLM post-training: the public names, nothing else."""

from dataplane_core.backend import Backend
from dataplane_core.batch import BatchedDataDict, SlicedDataDict
from dataplane_core.blobstore import BlobStore
from dataplane_core.capabilities import Capability, WireFormat
from dataplane_core.client import DataPlaneClient
from dataplane_core.codec.jagged import materialize, pack_jagged_fields
from dataplane_core.columns import kv_first_write, read_columns, write_columns
from dataplane_core.config import DataPlaneConfig
from dataplane_core.errors import DataPlaneError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.registry import connect
from dataplane_core.sharding import NamedSharding, shard_meta_for_dp

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
