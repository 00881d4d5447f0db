"""A named Ray actor that holds the config of the running store, so that other processes of the cluster find it.

It has the name of TransferQueue's controller, and its method ``get_config``. Without Ray there is none.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from dataplane_core.errors import OperationTimeoutError

_NAME: Final = "TransferQueueController"
_NAMESPACE: Final = "transfer_queue"
#: Seconds to wait for an answer, where no config says it.
_WAIT_S: Final = 60.0


class _Directory:
    """The actor."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def get_config(self) -> dict[str, Any]:
        """What was published."""
        return self._config


def _ray() -> Any:
    """Ray, if this process uses it."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def publish(config: dict[str, Any], timeout_s: float) -> Any:
    """Starts the actor, and returns it. It lives as long as its handle. Without Ray: None.

    Raises:
        OperationTimeoutError: The actor did not start in time.
    """
    ray = _ray()
    if ray is None:
        return None
    actor = ray.remote(_Directory).options(name=_NAME, namespace=_NAMESPACE, num_cpus=0).remote(config)
    try:
        _ask(actor, timeout_s)
    except BaseException:
        withdraw(actor)  # or the next one could not have its name
        raise
    return actor


def _ask(actor: Any, timeout_s: float) -> Any:
    ray = sys.modules["ray"]
    try:
        return ray.get(actor.get_config.remote(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise OperationTimeoutError(
            f"the Ray actor '{_NAME}', which holds the config of the store, did not answer within {timeout_s:g} s.",
            hint="Ray starts a process for it, which takes long on a busy node. Raise op_timeout_s of the config.",
        ) from error


def look_up() -> dict[str, Any] | None:
    """What was published, or None."""
    ray = _ray()
    if ray is None:
        return None
    try:
        actor = ray.get_actor(_NAME, namespace=_NAMESPACE)
    except ValueError:
        return None
    found = _ask(actor, _WAIT_S)
    return found if isinstance(found, dict) and "dataplane" in found else None


def cluster_address() -> str | None:
    """The address of the Ray cluster that this process uses, or None."""
    ray = _ray()
    return None if ray is None else str(ray.get_runtime_context().gcs_address)


def withdraw(actor: Any) -> None:
    """Ends an actor of `publish`, if there is one."""
    ray = _ray()
    if actor is not None and ray is not None:
        ray.kill(actor)
