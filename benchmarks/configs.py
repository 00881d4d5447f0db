"""The configs of the stores that the benchmarks compare."""

from __future__ import annotations

from typing import Any, Final

_TQ: Final = {"instance": "bench"}
#: Name -> config, where the name alone is not enough. Those of one store: the first one starts it.
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "shm_store views": {"backend": "shm_store", "options": {"namespace": "views", "views": True}},
    "redis_store": {"backend": "redis_store", "options": {"server": "private"}},
    "tq_simple": {"backend": "tq_simple", "options": _TQ},
    "tq_simple views": {"backend": "tq_simple", "options": {**_TQ, "views": True}},
    "tq_simple wire": {"backend": "tq_simple", "options": {**_TQ, "share_memory": False}},
}
