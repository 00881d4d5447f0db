"""The backend for processes of one host: `ShmBackend`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane_shm._backend import ShmBackend

__all__ = ["ShmBackend"]


def __getattr__(name: str) -> Any:
    """Imports the backend at its first use: the process of the ledger works without it and without torch."""
    if name != "ShmBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("dataplane_shm._backend").ShmBackend
