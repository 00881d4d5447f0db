"""The neutral data plane of LLM post-training: the public names, nothing else.

A name is imported when it is first used, so a process that needs only one wing does not import torch: the ledger's
process of a store, or a command that lists backends.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataplane_core.backends import Backend, RowStoreBackend
    from dataplane_core.batch import (
        BatchedDataDict,
        SlicedDataDict,
        kv_first_write,
        materialize,
        pack_jagged_fields,
        read_columns,
        to_arrow,
        to_numpy,
        write_columns,
    )
    from dataplane_core.client import (
        AsyncDataPlaneClient,
        DataPlaneClient,
        OperationCancelledError,
        stream,
    )
    from dataplane_core.config import DataPlaneConfig
    from dataplane_core.connecting import connect, connect_async
    from dataplane_core.dataloader import StreamingDataset
    from dataplane_core.errors import DataPlaneError
    from dataplane_core.meta import KVBatchMeta
    from dataplane_core.sharding import NamedSharding, shard_meta_for_dp
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

#: Public name -> the module that it is from.
_FROM: Final = {
    **dict.fromkeys(("Backend", "RowStoreBackend"), "backends"),
    **dict.fromkeys(("BatchedDataDict", "SlicedDataDict", "kv_first_write", "materialize"), "batch"),
    **dict.fromkeys(("pack_jagged_fields", "read_columns", "to_arrow", "to_numpy", "write_columns"), "batch"),
    **dict.fromkeys(("NamedSharding", "shard_meta_for_dp"), "sharding"),
    **dict.fromkeys(("Capability", "WireFormat"), "spec"),
    **dict.fromkeys(("AsyncDataPlaneClient", "DataPlaneClient", "OperationCancelledError"), "client"),
    "StreamingDataset": "dataloader",
    "stream": "client",
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
