"""Instances whose units are TransferQueue's SimpleStorage.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import ray

from dataplane_core.host_memory import Arena, arena_bytes_for, memory_limit
from dataplane_core.hosting import ExtentHost, ExtentService, Server, listen_as, listen_on, new_socket_name, new_token
from dataplane_tq_simple import _privates
from dataplane_tq_simple._actors import NAMESPACE, lookup, nodes_for_units
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._cluster import Instance
from dataplane_tq_simple.config import TQSimpleConfig

#: Seconds between two looks of a unit that no process owns whether its instance still runs.
_FOLLOW_S: Final = 1.0
#: The least memory of a unit whose size is not said.
_LEAST_BYTES: Final = 64 << 20
#: Rows that TransferQueue's own requests may store.
_MOST_ROWS: Final = 100_000_000


class StorageUnit(_privates.UnitClass):  # type: ignore[misc]  # has no types
    """TransferQueue's storage unit as an importable class, whose rows lie in memory that its node shares.

    TransferQueue's own requests are answered as ever. The data plane's rows are served by a thread beside it.
    Each start is a new life of the unit, without rows, which has another secret.

    Args:
        config: TransferQueue's settings of a unit.
        size_bytes: The size of its memory; None: a share of what its node has available.
        share: How many units of a node share it.
        touch_ahead_bytes: Memory that is made ready before it is used.
        follows: The name and the id of the actor of the controller, for a unit that no process owns: it ends when that
            actor has ended for good.
    """

    def __init__(
        self,
        config: Any,
        size_bytes: int | None,
        share: int,
        touch_ahead_bytes: int,
        follows: tuple[str, str] | None = None,
    ) -> None:
        _privates.UnitClass.__init__(self, config)
        arena = Arena.create(size_bytes or max(memory_limit().available_bytes // (2 * share), _LEAST_BYTES))
        extents = ExtentService(arena, touch_ahead_bytes)
        ip, port = _privates.unit_server(self)
        name, secret = new_socket_name(), new_token()
        wire = listen_on(ip)
        server = Server(ExtentHost(extents), listen_as(name), wire, token=secret, between=extents.touch_ahead)
        threading.Thread(target=server.run, name="dataplane-rows", daemon=True).start()
        node = ray.get_runtime_context().get_node_id()
        unit, data_port = _privates.unit_id(self), wire.getsockname()[1]
        self._started = Started(unit, ip, port, node, data_port, name, secret, arena.size_bytes)
        if follows is not None:
            own = ray.get_runtime_context().get_actor_name()
            threading.Thread(target=_follow, args=(own, *follows), name="dataplane-follow", daemon=True).start()

    def describe(self) -> Started:
        """Where it is reached, and its life."""
        return self._started


def _follow(own: str, controller: str, actor_id: str) -> None:
    """Ends a unit when the controller has ended for good. An actor that Ray starts again keeps its id."""
    num_missed = 0
    while num_missed < 2:
        time.sleep(_FOLLOW_S)
        try:
            found = lookup(controller)
        except Exception:  # Ray does not answer: says nothing about the controller
            continue
        num_missed = 0 if found is not None and found._actor_id.hex() == actor_id else num_missed + 1
    ray.kill(ray.get_actor(own, namespace=NAMESPACE), no_restart=True)


class SimpleStorageInstance(Instance):
    """An instance of ``tq_simple``."""

    prefix = "tq-"
    distribution = "dataplane-tq-simple"
    protocol = 8
    unit_class = StorageUnit
    keeps_units = True

    @classmethod
    def _unit_arguments(cls, config: TQSimpleConfig) -> Mapping[str, Any]:
        size_bytes = config.unit_bytes
        if size_bytes is None and config.capacity_bytes is not None:
            size_bytes = arena_bytes_for(config.capacity_bytes)
        return {
            "config": {"total_storage_size": _MOST_ROWS, "num_data_storage_units": 1},
            "size_bytes": size_bytes,
            "share": -(-config.num_storage_units // len(nodes_for_units())),
            "touch_ahead_bytes": config.touch_ahead_bytes,
        }
