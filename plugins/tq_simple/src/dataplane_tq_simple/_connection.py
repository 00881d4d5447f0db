"""This process's connection to Ray.

Importing this module imports Ray.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import threading
import time
from typing import Any

import ray

from dataplane_core.errors import BackendUnavailableError, ConfigError, OperationTimeoutError
from dataplane_core.host_memory import check_capacity
from dataplane_tq_simple._ray_calls import end_within, refuse_fork
from dataplane_tq_simple.addresses import host_and_port
from dataplane_tq_simple.config import QueueConfig

# Seconds that Ray may take to end a connection. After that, this process goes on without an answer: the call would wait
# for a dead head node.
_DISCONNECT_S = 15.0
# The same for a Ray that this process started. Ray then ends its processes too, and waits up to 30 s for each.
_SHUTDOWN_S = 60.0


class RayConnection:
    """This process's connection to Ray, shared by the engines in it.

    The first engine initialises Ray if it is not initialised. The last engine to release that connection shuts it down.
    A connection that other code made is never shut down.
    """

    _lock = threading.Lock()
    _ours: tuple[str, str] | None = None  # the connection that an engine made
    _local = False  # whether it also started Ray
    _num_users = 0

    def __init__(self, *, ours: bool) -> None:
        self._counted = ours

    @classmethod
    def acquire(cls, config: QueueConfig, *, bootstrap: bool, deadline: float) -> RayConnection:
        """Connects to Ray, or starts it, unless this process is connected already.

        Raises:
            BackendUnavailableError: There is no Ray to connect to, or this process is a fork of one that used Ray.
            OperationTimeoutError: Another client of this process is connecting to Ray all that time.
            ConfigError: This process is connected to another cluster than the configured one, or Ray would run on
                this host alone and it has less memory than ``capacity_bytes``.
        """
        refuse_fork()
        if not cls._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise OperationTimeoutError(
                f"connect to instance {config.instance!r} timed out: another client of this process is still "
                "connecting to Ray, or ending its connection."
            )
        try:
            if not ray.is_initialized():
                address = config.ray_address or os.environ.get("RAY_ADDRESS") or ("local" if bootstrap else None)
                if address is None:
                    raise BackendUnavailableError(
                        f"cannot attach to instance {config.instance!r}: Ray is not initialised in this process and no "
                        "address of a cluster is configured.",
                        retryable=False,
                        hint="Set ray_address (host:port, as the bootstrapping side logs it; or 'auto' for a cluster "
                        "on this machine) or RAY_ADDRESS, or call ray.init first.",
                    )
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
