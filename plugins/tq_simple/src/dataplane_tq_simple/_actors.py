"""Finds actors, and asks them.

Importing this module imports Ray.
"""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any, Final

import ray
import ray.exceptions

from dataplane_core.errors import BackendUnavailableError, DataPlaneError, OperationTimeoutError
from dataplane_tq_simple.addresses import host_and_port, refuses

NAMESPACE: Final = "dataplane"
#: Seconds that Ray's head has to accept a connection.
_REACH_S: Final = 0.5


def cause(error: BaseException) -> str:
    """The line of a Ray error that gives the reason. The other lines repeat names and advice."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "error raised in its creation task" in str(error):
        return lines[-1]
    why = [line for line in lines if line.startswith("The actor is dead because")]
    return (why or lines or [type(error).__name__])[0]


def data_plane_error(error: BaseException) -> DataPlaneError | None:
    """The `DataPlaneError` that an actor's method raised, or None if it raised another exception."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, DataPlaneError) else None


def lookup(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def named_actors(prefix: str) -> list[str]:
    """The names of our actors that begin so."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in actors if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)]


def alive_nodes() -> set[str]:
    """The ids of the nodes that run."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def nodes_for_units() -> list[str]:
    """The nodes that are to have a storage unit, this node first. Without nodes that have no CPUs, if others have."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    workers = [node["NodeID"] for node in alive if node["Resources"].get("CPU", 0) > 0]
    return sorted(workers or [node["NodeID"] for node in alive], key=lambda node: (node != here, node))


#: As Ray's. That exports each function and class that it makes to all workers, and keeps it: one for each is enough.
remote: Final = functools.cache(ray.remote)


def own_address() -> str:
    """The address of this process's node."""
    return str(ray.util.get_node_ip_address()).strip("[]")


def was_started_before() -> bool:
    """Whether Ray has started this process's actor again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own code, on something that it uses itself
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def get_within(ref: Any, what: str, deadline: float) -> Any:
    """``ray.get`` of one or several references before the deadline. Raises `DataPlaneError`s."""
    try:
        return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise OperationTimeoutError(f"{what}: no answer in time.") from error
    except ray.exceptions.RayError as error:
        raise data_plane_error(error) or BackendUnavailableError(f"{what}: {cause(error)}") from error


def check_head(instance: str) -> None:
    """For a process of the instance that does not answer: Ray, without its head, starts nothing again.

    Raises:
        BackendUnavailableError: Nothing listens where the head of this process's Ray was.
    """
    address = ray.get_runtime_context().gcs_address
    if refuses(*host_and_port(address), _REACH_S):
        raise BackendUnavailableError(
            f"instance {instance!r} is dead, and so is the head of its Ray: nothing listens at {address}. A local Ray "
            "ends with the process that bootstrapped the instance.",
            retryable=False,
            hint="What it held is lost. Bootstrap it again in a new process: Ray ends those whose head is gone within "
            "a minute.",
        )


def controller_dead(instance: str, error: BaseException) -> BackendUnavailableError:
    """The error of a controller that Ray does not start again."""
    return BackendUnavailableError(
        f"the controller of instance {instance!r} is dead for good: {cause(error)}",
        retryable=False,
        hint="Close this client and bootstrap the instance again.",
    )
