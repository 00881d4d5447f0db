"""`dataplane` in a trainer: the workers' side, the driver's side, the rollout actor's first write."""

from dataplane_integrations.policy import DataPlanePolicy
from dataplane_integrations.worker import DataPlaneWorkerMixin

__all__ = ["DataPlanePolicy", "DataPlaneWorkerMixin"]
