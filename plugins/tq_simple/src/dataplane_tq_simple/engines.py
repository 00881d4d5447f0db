"""What a backend is built from whose ledger runs in a controller on Ray, and whose rows lie elsewhere.

`QueueEngine` is a client's connection: it has the calls to the ledger, and a subclass moves the rows. `Instance`
starts, finds and ends the actors: a subclass says what a storage unit is. The backend's class derives from
`QueueBackend`, its options from `QueueConfig`; these two are in `dataplane_tq_simple`, which imports no Ray.
``dataplane_mooncake`` is made so.

Importing this module imports Ray.
"""

from dataplane_tq_simple._client import QueueEngine
from dataplane_tq_simple._instance import Instance
from dataplane_tq_simple._messages import UnitsGoneError
from dataplane_tq_simple._ray import get_within

__all__ = ["Instance", "QueueEngine", "UnitsGoneError", "get_within"]
