"""Shared memory of one host: an arena that processes map, an allocator for it, and how much memory may be used.

A backend whose clients share a host uses it for payload. Nothing here knows backends, partitions or samples.
"""

from dataplane_core.host_memory.arena import Arena
from dataplane_core.host_memory.extents import Extent, Extents
from dataplane_core.host_memory.limits import MemoryLimit, memory_limit

__all__ = ["Arena", "Extent", "Extents", "MemoryLimit", "memory_limit"]
