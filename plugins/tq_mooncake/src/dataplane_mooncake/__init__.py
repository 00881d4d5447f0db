"""TransferQueue with MooncakeStore, on Ray: `TQMooncakeBackend`."""

from dataplane_mooncake._backend import TQMooncakeBackend
from dataplane_mooncake.config import TQMooncakeConfig

__all__ = ["TQMooncakeBackend", "TQMooncakeConfig"]
