"""A trainer's workers on Ray: groups of actors, how they are placed and started, and what the nodes must have.

Drivers on Ray import it. Importing it does not import Ray.
"""

from dataplane_integrations.ray.actors import ActorGroup, ActorRequest, check_placement, start_actors
from dataplane_integrations.ray.nodes import (
    NodeReport,
    backend_runtime_env,
    check_backend_on_nodes,
    require_backend_on_nodes,
)
from dataplane_integrations.ray.worker_group import RayWorkerGroup, wait_for_all

__all__ = [
    "ActorGroup",
    "ActorRequest",
    "NodeReport",
    "RayWorkerGroup",
    "backend_runtime_env",
    "check_backend_on_nodes",
    "check_placement",
    "require_backend_on_nodes",
    "start_actors",
    "wait_for_all",
]
