"""Memory of one host: an arena that processes share, an allocator for it, how much memory may be used, private memory
that is used again, and copies by several threads.

Backends use it for payload, the codec for what reads return. Nothing here knows backends, partitions or samples.
"""

from dataplane_core.host_memory.arena import Arena
from dataplane_core.host_memory.copying import copy_arrays, default_copy_threads, in_threads, recycled_bytes
from dataplane_core.host_memory.limits import MemoryLimit, arena_bytes_for, check_capacity, memory_limit

__all__ = [
    "Arena",
    "MemoryLimit",
    "arena_bytes_for",
    "check_capacity",
    "copy_arrays",
    "default_copy_threads",
    "in_threads",
    "memory_limit",
    "recycled_bytes",
]
