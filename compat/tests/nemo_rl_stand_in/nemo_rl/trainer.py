"""A trainer's config, and a module that imports the factory by name."""

from pydantic import BaseModel

from nemo_rl.data_plane import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneConfig

__all__ = ["MasterConfig", "build_data_plane_client"]


class MasterConfig(BaseModel, extra="allow"):
    data_plane: DataPlaneConfig | None = None
