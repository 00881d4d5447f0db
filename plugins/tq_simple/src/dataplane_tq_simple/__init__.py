"""A ledger and storage units on Ray: `TQSimpleBackend`.

`QueueBackend`, `QueueConfig` and `UnitsGoneError` are for backends that host their ledger in the same way, and store
rows elsewhere; see `dataplane_tq_simple.engines`. Of the other modules, others may import ``addresses`` and ``config``.

What runs where. In a client: ``_backend`` (the controller is asked), ``_units`` or ``_transfer_queue`` (rows). In the
controller: ``_controller`` (the actor), ``_host`` (what it answers), ``_book`` (which unit has which rows),
``_keeper`` (a unit on each node). In a unit: ``_storage_unit``, ``_folders``. Of the process that bootstraps:
``_instance`` (starts, finds and ends the actors), ``_owners`` (so that others of the host find it). What they tell each
other is in ``_messages``, and what all of them need of Ray in ``_ray``.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataplane_tq_simple._backend import QueueBackend
    from dataplane_tq_simple._messages import UnitsGoneError
    from dataplane_tq_simple._units import TQSimpleBackend
    from dataplane_tq_simple.config import QueueConfig, TQSimpleConfig

__all__ = ["QueueBackend", "QueueConfig", "TQSimpleBackend", "TQSimpleConfig", "UnitsGoneError"]

_MODULES: Final = {
    "QueueBackend": "_backend",
    "QueueConfig": "config",
    "TQSimpleBackend": "_units",
    "TQSimpleConfig": "config",
    "UnitsGoneError": "_messages",
}


def __getattr__(name: str) -> Any:
    """Imports what is named at its first use: controllers and storage units work without it and without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dataplane_tq_simple.{_MODULES[name]}"), name)
