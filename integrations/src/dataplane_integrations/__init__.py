"""`dataplane` in a trainer: rooms for its workers and driver, its rollouts, its replay buffer, and Ray.

Trainers import it. Between the rooms: `weights`, `trl_async`, `attach` and `errors`.
"""

from dataplane_integrations.trainer import DataPlanePolicy, DataPlaneWorkerMixin

__all__ = ["DataPlanePolicy", "DataPlaneWorkerMixin"]
