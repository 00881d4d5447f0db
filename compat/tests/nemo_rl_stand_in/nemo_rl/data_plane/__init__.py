"""As NeMo RL's package, it imports the factory by name."""

from nemo_rl.data_plane.factory import build_data_plane_client

__all__ = ["build_data_plane_client"]
