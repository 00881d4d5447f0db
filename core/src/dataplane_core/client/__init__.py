"""`DataPlaneClient`: checks arguments, encodes, calls the hooks, decodes.

Trainers use it through `dataplane_core.connect`, which makes it.
"""

from dataplane_core.client.async_client import AsyncDataPlaneClient
from dataplane_core.client.client import DataPlaneClient
from dataplane_core.client.leases import HeldMetas
from dataplane_core.client.partitions import common_fields
from dataplane_core.client.streams import RENEWED_AFTER, AsyncStream, Feed, Stream, StreamBatch, Terms

__all__ = [
    "RENEWED_AFTER",
    "AsyncDataPlaneClient",
    "AsyncStream",
    "DataPlaneClient",
    "Feed",
    "HeldMetas",
    "Stream",
    "StreamBatch",
    "Terms",
    "common_fields",
]
