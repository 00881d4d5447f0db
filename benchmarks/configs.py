"""The configs of the stores that the benchmarks compare, and of processes that attach to one."""

from __future__ import annotations

from typing import Any, Final

from dataplane_core import DataPlaneClient
from dataplane_testkit import backend_of

_TQ: Final = {"instance": "bench"}
#: Name -> config, where the name alone is not enough. Those of one store: the first one starts it.
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "shm_store views": {"backend": "shm_store", "options": {"namespace": "views", "views": True}},
    "redis_store": {"backend": "redis_store", "options": {"server": "private"}},
    "tq_simple": {"backend": "tq_simple", "options": _TQ},
    "tq_simple views": {"backend": "tq_simple", "options": {**_TQ, "views": True}},
    "tq_simple wire": {"backend": "tq_simple", "options": {**_TQ, "share_memory": False}},
    "tq_simple in TQ": {"backend": "tq_simple", "options": {"instance": "rows", "storage": "transfer_queue"}},
}


def attaching(client: DataPlaneClient, config: dict[str, Any]) -> dict[str, Any]:
    """The config by which other processes attach to a client's store."""
    found = getattr(backend_of(client), "attach_options", dict)()
    return {**config, "options": {**config.get("options", {}), **found}}
