"""A ledger and storage units on Ray: `TQSimpleBackend`.

`QueueBackend` and `QueueConfig` are for backends that host their ledger in the same way, and store rows elsewhere; see
`dataplane_tq_simple.engines`. Of the other modules, others may import ``addresses`` and ``config``.
"""

from dataplane_tq_simple._backend import QueueBackend, TQSimpleBackend
from dataplane_tq_simple.config import QueueConfig, TQSimpleConfig

__all__ = ["QueueBackend", "QueueConfig", "TQSimpleBackend", "TQSimpleConfig"]
