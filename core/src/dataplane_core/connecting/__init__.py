"""Backends and middleware by entry-point name: `connect` finds, checks and starts those that a config names.

Trainers call `connect`; the command line lists what is installed.
"""

from dataplane_core.connecting.registry import Bootstrap, connect, connect_async, connect_backend, load_backend
from dataplane_core.entry_points import BACKEND_GROUP, KNOWN_BACKENDS, MIDDLEWARE_GROUP, PluginRecord, find_plugins

__all__ = [
    "BACKEND_GROUP",
    "KNOWN_BACKENDS",
    "MIDDLEWARE_GROUP",
    "Bootstrap",
    "PluginRecord",
    "connect",
    "connect_async",
    "connect_backend",
    "find_plugins",
    "load_backend",
]
