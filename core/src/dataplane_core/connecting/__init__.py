"""Backends and middleware by entry-point name: `connect` finds, checks and starts those that a config names.

Trainers call `connect`; the command line lists what is installed.
"""

from dataplane_core.connecting.registry import Bootstrap, connect, connect_backend, load_backend

__all__ = [
    "Bootstrap",
    "connect",
    "connect_backend",
    "load_backend",
]
