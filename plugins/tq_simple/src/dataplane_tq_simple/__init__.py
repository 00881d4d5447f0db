"""TransferQueue with SimpleStorage, on Ray: `TQSimpleBackend`."""

from dataplane_tq_simple._backend import TQSimpleBackend
from dataplane_tq_simple.config import TQSimpleConfig

__all__ = ["TQSimpleBackend", "TQSimpleConfig"]
