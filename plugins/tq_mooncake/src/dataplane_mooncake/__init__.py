"""A ledger on Ray, rows in Mooncake's segments: `TQMooncakeBackend`."""

from dataplane_mooncake._backend import TQMooncakeBackend
from dataplane_mooncake.config import TQMooncakeConfig

__all__ = ["TQMooncakeBackend", "TQMooncakeConfig"]
