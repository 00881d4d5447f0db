"""A ledger and storage units on Ray: `TQSimpleBackend`.

What runs where. In a client: ``_backend`` (the controller is asked), ``_units`` or ``_transfer_queue`` (rows). In the
controller: ``_controller`` (the actor, and a unit on each node), ``_host`` (what it answers, and which unit has which
rows). In a unit: ``_storage_unit``, ``_folders``. Of the process that bootstraps: ``_instance`` (starts, finds and ends
the actors), ``_owners`` (so that others of the host find it). What they tell each other is in ``_messages``, and what
all of them need of Ray in ``_ray``.

A backend whose rows lie elsewhere derives from `QueueBackend`, which has the calls to the ledger; its options derive
from `QueueConfig`. `Instance` starts, finds and ends the controller: a subclass starts its storage units. Importing it,
or a function, imports Ray. ``dataplane_mooncake`` is made so. It also uses the modules ``addresses`` and ``config``.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataplane_tq_simple._backend import QueueBackend
    from dataplane_tq_simple._instance import Instance
    from dataplane_tq_simple._messages import UnitsGoneError
    from dataplane_tq_simple._ray import get_within, lookup, nodes_for_units
    from dataplane_tq_simple._units import TQSimpleBackend
    from dataplane_tq_simple.config import QueueConfig, TQSimpleConfig

__all__ = [
    "Instance",
    "QueueBackend",
    "QueueConfig",
    "TQSimpleBackend",
    "TQSimpleConfig",
    "UnitsGoneError",
    "get_within",
    "lookup",
    "nodes_for_units",
]

#: In the order of ``__all__``.
_MODULES: Final = ("_instance", "_backend", "config", "_units", "config", "_messages", "_ray", "_ray", "_ray")


def __getattr__(name: str) -> Any:
    """Imports what is named at its first use: controllers and storage units work without it and without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[__all__.index(name)]
    return getattr(importlib.import_module(f"dataplane_tq_simple.{module}"), name)
