"""What a backend is built from whose ledger runs in a controller on Ray, and whose rows lie elsewhere.

The backend's class derives from `QueueBackend`, which has the calls to the ledger, and moves the rows; its options
derive from `QueueConfig`. These two are in `dataplane_tq_simple`, which imports no Ray. `Instance` starts, finds and
ends the actors: a subclass says what a storage unit is. ``dataplane_mooncake`` is made so.

Importing this module imports Ray.
"""

from dataplane_tq_simple._instance import Instance
from dataplane_tq_simple._ray import get_within

__all__ = ["Instance", "get_within"]
