"""The neutral data plane of LLM post-training: the public names, nothing else."""

from dataplane_core.errors import DataPlaneError
from dataplane_core.meta import KVBatchMeta

__all__ = ["DataPlaneError", "KVBatchMeta"]
