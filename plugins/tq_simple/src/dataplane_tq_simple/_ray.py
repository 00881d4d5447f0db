"""This process's use of Ray: its connection, the actors that it finds, asks and ends.

Importing this module imports Ray.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import ray
import ray.exceptions

from dataplane_core.errors import BackendUnavailableError, ConfigError, DataPlaneError, OperationTimeoutError
from dataplane_core.host_memory import check_capacity
from dataplane_tq_simple.addresses import host_and_port, refuses

if TYPE_CHECKING:  # it imports torch, which controllers and storage units do without
    from dataplane_tq_simple.config import QueueConfig

_logger = logging.getLogger(__name__)

NAMESPACE: Final = "dataplane"
#: Seconds that Ray's head has to accept a connection.
_REACH_S: Final = 0.5
# Seconds that Ray may take to end a connection. After that, this process goes on without an answer: the call would wait
# for a dead head node.
_DISCONNECT_S = 15.0
# The same for a Ray that this process started. Ray then ends its processes too, and waits up to 30 s for each.
_SHUTDOWN_S = 60.0


# --- actors ----------------------------------------------------------------------------------------------------------


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
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)]


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


def get_within(ref: Any, what: str, deadline: float, hint: str | None = None) -> Any:
    """``ray.get`` of one or several references before the deadline. Raises `DataPlaneError`s."""
    try:
        return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise OperationTimeoutError(f"{what}: no answer in time.", hint=hint) from error
    except ray.exceptions.RayError as error:
        raise data_plane_error(error) or BackendUnavailableError(f"{what}: {cause(error)}", hint=hint) from error


def check_head(instance: str) -> None:
    """Refuses to wait for a process of the instance, if Ray's head is gone: then Ray starts nothing again."""
    address = ray.get_runtime_context().gcs_address
    if refuses(*host_and_port(address), _REACH_S):
        raise BackendUnavailableError(
            f"instance {instance!r} is dead, and so is the head of its Ray: nothing listens at {address}. A local Ray "
            "ends with the process that bootstrapped the instance.",
            retryable=False,
            hint="What it held is lost. Bootstrap it again in a new process: Ray ends those whose head is gone within "
            "a minute.",
        )


def end_within(limit_s: float, what: str, work: Callable[[], object]) -> None:
    """Runs a call that ends something on Ray. Returns after ``limit_s`` even if Ray does not answer: its thread is left
    behind. Raises what ``work`` raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="dataplane-ray-end", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        _logger.warning("Ray did not %s within %g s: its head node is dead or does not respond.", what, limit_s)
    elif errors:
        raise errors[0]


# --- the connection --------------------------------------------------------------------------------------------------


class RayConnection:
    """This process's connection to Ray, shared by the clients in it.

    The first client initialises Ray if it is not initialised. The last client to release that connection shuts it down.
    A connection that other code made is never shut down.
    """

    _lock = threading.Lock()
    _ours: tuple[str, str] | None = None  # the connection that a client made
    _local = False  # whether it also started Ray
    _num_users = 0
    _pid: int | None = None  # the process that used it: a fork lacks the threads that Ray needs

    def __init__(self, *, ours: bool) -> None:
        self._counted = ours
        context = ray.get_runtime_context()
        self.address = str(context.gcs_address)  # host:port, for clients in processes without Ray
        self.node = str(context.get_node_id())

    @classmethod
    def acquire(cls, config: QueueConfig, *, bootstrap: bool, deadline: float) -> RayConnection:
        """Connects to Ray, or starts it, unless this process is connected already."""
        if cls._pid not in (None, os.getpid()):
            raise BackendUnavailableError(
                f"process {os.getpid()} was forked from one that used Ray, and Ray does not work in a fork: every call "
                "would hang.",
                retryable=False,
                hint="Start such processes by spawn: multiprocessing.get_context('spawn'), or "
                "DataLoader(..., multiprocessing_context='spawn'); then call connect(config, bootstrap=False) in them, "
                "with ray_address (host:port of the cluster) among the options.",
            )
        cls._pid = os.getpid()
        if not cls._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise OperationTimeoutError(
                f"connect to instance {config.instance!r} timed out: another client of this process is still "
                "connecting to Ray, or ending its connection."
            )
        try:
            if not ray.is_initialized():
                address = config.ray_address or os.environ.get("RAY_ADDRESS") or ("local" if bootstrap else "auto")
                if address == "local":
                    check_capacity(config.capacity_bytes)
                cls._connect(address, config, deadline)
                cls._ours, cls._local, cls._num_users = _this_one(), address == "local", 0
            else:
                _check_same_cluster(config)
            ours = cls._ours is not None and cls._ours == _this_one()
            cls._num_users += ours
            return cls(ours=ours)
        finally:
            cls._lock.release()

    @staticmethod
    def _connect(address: str, config: QueueConfig, deadline: float) -> None:
        options: dict[str, Any] = {"address": address, "configure_logging": False}
        if address == "local":
            options.update(num_cpus=config.ray_num_cpus, include_dashboard=False)
        try:
            if address not in ("local", "auto"):
                # Ray itself keeps trying an address where nobody listens, for longer than callers want to wait.
                timeout_s = max(0.0, deadline - time.monotonic())
                socket.create_connection(host_and_port(address), timeout=timeout_s).close()
            ray.init(**options)
        except Exception as error:
            raise BackendUnavailableError(
                f"cannot connect to Ray at {address!r}: {type(error).__name__}: {error}",
                hint="Expected the host:port of a running cluster's GCS, 'auto', or 'local'.",
            ) from error

    def release(self) -> None:
        """Gives the connection back. Idempotent."""
        with RayConnection._lock:
            if not self._counted:
                return
            self._counted = False
            RayConnection._num_users -= 1
            if RayConnection._num_users == 0 and ray.is_initialized() and RayConnection._ours == _this_one():
                RayConnection._ours = None
                # wait for its processes, so that none is left behind; an older Ray cannot
                waits = "wait_for_processes" in inspect.signature(ray.shutdown).parameters
                shutdown = functools.partial(ray.shutdown, **({"wait_for_processes": True} if waits else {}))
                limit_s = _SHUTDOWN_S if RayConnection._local else _DISCONNECT_S
                end_within(limit_s, "end its connection", shutdown)


def _this_one() -> tuple[str, str]:
    """Identifies this process's connection to Ray: another connection has another job id."""
    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.get_job_id())


def _check_same_cluster(config: QueueConfig) -> None:
    _, _, wanted = (config.ray_address or "").rpartition(":")
    here = ray.get_runtime_context().gcs_address
    # A host has many names, so only the ports are compared: another port is certainly another cluster.
    if wanted.isdigit() and not here.endswith(f":{wanted}"):
        raise ConfigError(
            f"ray_address is {config.ray_address!r}, but this process is connected to the Ray cluster at {here!r}. "
            "Expected one cluster per process.",
            hint="Leave ray_address out to use the connection that is there.",
        )
