"""The neutral data plane of LLM post-training: the public names, nothing else.

A name is imported when it is first used, so a process that needs only one wing does not import torch: the ledger's
process of a store, or a command that lists backends.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataplane_core.backends import Backend, RowStoreBackend
    from dataplane_core.batch import BatchedDataDict, SlicedDataDict, kv_first_write, read_columns, write_columns
    from dataplane_core.batch.columns import pack_jagged_fields, to_arrow, to_numpy
    from dataplane_core.batch.transfer import materialize
    from dataplane_core.client import DataPlaneClient
    from dataplane_core.client.async_client import AsyncDataPlaneClient, OperationCancelledError
    from dataplane_core.client.streams import stream
    from dataplane_core.config import DataPlaneConfig
    from dataplane_core.connecting import connect, connect_async
    from dataplane_core.errors import DataPlaneError
    from dataplane_core.meta import KVBatchMeta
    from dataplane_core.sharding.axes import NamedSharding
    from dataplane_core.sharding.plan import shard_meta_for_dp
    from dataplane_core.spec import Capability, WireFormat

__all__ = [
    "AsyncDataPlaneClient",
    "Backend",
    "BatchedDataDict",
    "Capability",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "KVBatchMeta",
    "NamedSharding",
    "OperationCancelledError",
    "RowStoreBackend",
    "SlicedDataDict",
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

#: Public name -> the module that it is from.
_FROM: Final = {
    **dict.fromkeys(("Backend", "RowStoreBackend"), "backends"),
    **dict.fromkeys(("BatchedDataDict", "SlicedDataDict", "kv_first_write", "read_columns", "write_columns"), "batch"),
    **dict.fromkeys(("pack_jagged_fields", "to_arrow", "to_numpy"), "batch.columns"),
    "materialize": "batch.transfer",
    "NamedSharding": "sharding.axes",
    "shard_meta_for_dp": "sharding.plan",
    **dict.fromkeys(("Capability", "WireFormat"), "spec"),
    "DataPlaneClient": "client",
    **dict.fromkeys(("AsyncDataPlaneClient", "OperationCancelledError"), "client.async_client"),
    "stream": "client.streams",
    "DataPlaneConfig": "config",
    "DataPlaneError": "errors",
    "KVBatchMeta": "meta",
    **dict.fromkeys(("connect", "connect_async"), "connecting"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("dataplane-core")
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*__all__, "__version__"]
