"""A trainer's workers on Ray: groups of actors, and what the nodes must have.

Drivers on Ray import it. Importing it does not import Ray.
"""

from dataplane_integrations.ray.nodes import (
    NodeReport,
    backend_runtime_env,
    check_backend_on_nodes,
    require_backend_on_nodes,
)
from dataplane_integrations.ray.worker_group import RayWorkerGroup, wait_for_all

__all__ = [
    "NodeReport",
    "RayWorkerGroup",
    "backend_runtime_env",
    "check_backend_on_nodes",
    "require_backend_on_nodes",
    "wait_for_all",
]
