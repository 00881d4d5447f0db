"""Instances whose units are TransferQueue's SimpleStorage.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import ray

from dataplane_tq_simple import _privates
from dataplane_tq_simple._actors import NAMESPACE, lookup
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._cluster import Instance
from dataplane_tq_simple._wire import LIFE_KEY, OTHER_LIFE
from dataplane_tq_simple.config import TQSimpleConfig

#: Seconds between two looks of a unit that no process owns whether its instance still runs.
_FOLLOW_S: Final = 1.0
#: For how many seconds at least a unit remembers rows that were deleted before they came, and about how many of them.
_LATE_S: Final = 60.0
_MOST_LATE: Final = 250_000


class StorageUnit(_privates.UnitClass):  # type: ignore[misc]  # has no types
    """TransferQueue's storage unit as an importable class.

    Each start is a new life of the unit, without rows. It refuses requests that are meant for an earlier one, which
    reach it if it got the same port.

    A put that was given up may still lie in the unit's buffers when the delete of its rows comes over another
    connection. So rows that are deleted before they came are refused later. No handle is used twice.

    Args:
        config: TransferQueue's settings of a unit.
        follows: The name and the id of the actor of the controller, for a unit that no process owns: it ends when that
            actor has ended for good.
    """

    def __init__(self, config: Any, follows: tuple[str, str] | None = None) -> None:
        _privates.UnitClass.__init__(self, config)
        self._late: tuple[set[int], set[int]] = (set(), set())  # handles: the newer ones, and those before
        self._forget_at = time.monotonic() + _LATE_S
        if follows is not None:
            own = ray.get_runtime_context().get_actor_name()
            threading.Thread(target=_follow, args=(own, *follows), name="dataplane-follow", daemon=True).start()

    def describe(self) -> Started:
        """Where it is reached, and its life."""
        return Started(_privates.unit_id(self), *_privates.unit_server(self), ray.get_runtime_context().get_node_id())

    # without super(): Ray may send a copy of this class, of which ``self`` is then an instance

    def _handle_put(self, data_parts: Any) -> Any:
        handles = data_parts.body["global_indexes"]
        if not all(late.isdisjoint(handles) for late in self._late if late):
            return self._error("its rows were deleted before they came.")
        return self._refused(data_parts) or _privates.answer_put(self, data_parts)

    def _handle_get(self, data_parts: Any) -> Any:
        return self._refused(data_parts) or _privates.answer_get(self, data_parts)

    def _handle_clear(self, data_parts: Any) -> Any:
        refused = self._refused(data_parts)
        if refused is not None:
            return refused
        if len(self._late[0]) >= _MOST_LATE or time.monotonic() >= self._forget_at:
            self._late, self._forget_at = (set(), self._late[0]), time.monotonic() + _LATE_S
        self._late[0].update(set(data_parts.body["global_indexes"]) - _privates.active_keys(self))
        return _privates.answer_clear(self, data_parts)

    def _refused(self, request: Any) -> Any | None:
        life = _privates.unit_id(self)
        if request.body.get(LIFE_KEY, life) == life:
            return None
        return self._error(f"{OTHER_LIFE}: the unit was started again.")

    def _error(self, message: str) -> Any:
        return _privates.Message.create(
            request_type=_privates.RequestType.PUT_GET_ERROR,
            sender_id=_privates.unit_id(self),
            body={"message": message},
        )


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
    protocol = 7
    unit_class = StorageUnit
    keeps_units = True

    @classmethod
    def _unit_arguments(cls, config: TQSimpleConfig) -> Mapping[str, Any]:
        return {"config": {"total_storage_size": config.storage_unit_size, "num_data_storage_units": 1}}
