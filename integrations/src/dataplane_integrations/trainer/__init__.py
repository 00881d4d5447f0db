"""The trainer's side of a step: the driver's policy, the workers' mixin, how batches are cut, and groups of workers.

Drivers and policy workers import it. What only some trainers need is in its modules: `fsdp2`, `megatron`, `mimo`,
`router_replay`, `broadcast` and `results`.
"""

from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking
from dataplane_integrations.trainer.groups import InProcessWorkerGroup, WorkerGroup
from dataplane_integrations.trainer.policy import DataPlanePolicy
from dataplane_integrations.trainer.worker import DataPlaneWorkerMixin, FetchPolicy

__all__ = [
    "Batching",
    "DataPlanePolicy",
    "DataPlaneWorkerMixin",
    "DynamicBatching",
    "FetchPolicy",
    "InProcessWorkerGroup",
    "SequencePacking",
    "WorkerGroup",
]
