"""Ray: start it or attach to it, start the actors, wait for them with a deadline, end everything."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.actor import ActorHandle

from dataplane_integrations.ray import wait_for_all

from .config import RaySection, RunConfig
from .errors import UserError
from .parallel import Layout
from .rollout import RolloutWorker
from .weights import PackedWeights
from .workers import PolicyWorker

__all__ = ["Actors", "connect_actors", "ray_session", "required_cpus", "start_actors"]

_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Actors:
    """Handles of the run's processes."""

    rollout: ActorHandle
    workers: list[ActorHandle]

    def names(self) -> dict[str, ActorHandle]:
        """Every actor by a name that a message can use."""
        return {"rollout worker": self.rollout, **self.worker_names()}

    def worker_names(self) -> dict[str, ActorHandle]:
        """The policy workers among them."""
        return {f"policy worker {i}": worker for i, worker in enumerate(self.workers)}


def required_cpus(config: RunConfig) -> float:
    """Logical CPUs that the actors of a run ask Ray for."""
    return config.ray.cpus_per_actor * (1 + config.num_workers)


@contextlib.contextmanager
def ray_session(config: RaySection, cpus: float) -> Iterator[None]:
    """Starts a private Ray, or attaches to a running one, and ends or leaves it on exit.

    Args:
        config: Where, and how large.
        cpus: Logical CPUs that the run will ask for; checked before anything waits for them.

    Raises:
        UserError: Too few CPUs, or nothing to attach to.
    """
    if config.address is None and config.num_cpus < cpus:
        raise UserError(
            f"Ray has too few CPUs: the run's actors ask for {cpus:g}, ray.num_cpus is {config.num_cpus:g}. "
            f"These are logical CPUs, so set ray.num_cpus to {cpus:g} or more, whatever the machine has."
        )
    # The actors import this package by name, and compute on one thread each: more would change the last bits.
    package_parent = str(Path(__file__).resolve().parent.parent)
    python_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}},
    }
    if config.address is None:
        options |= {"address": "local", "num_cpus": config.num_cpus, "include_dashboard": False}
        options |= {"object_store_memory": 256 * 1024**2}
    else:
        _check_reachable(config.address)
        options |= {"address": config.address}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        hint = (
            ""
            if config.address is None
            else " If it says InvalidAuthToken above, give the cluster and this run the same RAY_AUTH_MODE."
        )
        raise UserError(f"Ray does not start (ray.address: {config.address}): {error}.{hint}") from error
    # Ray's own handler aborts the process. Set after ray.init, this one lets the program clean up as after Ctrl-C.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if config.address is not None:
            _check_cpus(cpus, config.address)
        yield
    finally:
        ray.shutdown(wait_for_processes=True)
        signal.signal(signal.SIGTERM, previous)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check_reachable(address: str) -> None:
    """Ray tries for minutes to reach a cluster that is not there; a plain connection tells at once."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto", or a form that only Ray understands
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster answers at ray.address {address}: {error}.") from error


def _check_cpus(cpus: float, address: str) -> None:
    total = ray.cluster_resources().get("CPU", 0.0)
    free = ray.available_resources().get("CPU", 0.0)
    if free < cpus:
        raise UserError(
            f"the Ray cluster at {address} has too few CPUs: the run's actors ask for {cpus:g}, {free:g} of its "
            f"{total:g} are free. Start it with more (ray start --num-cpus=N; they are logical), or lower "
            f"ray.cpus_per_actor."
        )


def start_actors(
    config: RunConfig,
    rollout_class: type[RolloutWorker] = RolloutWorker,
    worker_class: type[PolicyWorker] = PolicyWorker,
) -> Actors:
    """Starts the processes and returns at once; they come up while the caller does something else."""
    layout = Layout(config.tensor_parallel, config.sequence_packing.enabled)

    def actor(cls: type) -> Any:
        # max_restarts=0: a restarted actor would have lost its weights, and would train wrongly.
        return ray.remote(cls).options(num_cpus=config.ray.cpus_per_actor, max_restarts=0).remote

    return Actors(
        rollout=actor(rollout_class)(
            config.model,
            max_new_tokens=config.grpo.max_new_tokens,
            temperature=config.grpo.temperature,
            seed=config.seed,
            prompts_per_put=config.rollouts.prompts_per_put,
        ),
        workers=[
            actor(worker_class)(config.model, config.grpo, rank, config.num_workers, layout)
            for rank in range(config.num_workers)
        ],
    )


def connect_actors(actors: Actors, packed: PackedWeights, config: RaySection) -> dict[str, int]:
    """Waits until all actors are up, then forms the workers' process group and hands them their weights.

    Returns:
        The process id of every actor, by name.
    """
    timeout_s = config.start_timeout_s
    calls = {name: handle.process_id.remote() for name, handle in actors.names().items()}
    pids = wait_for_all(calls, timeout_s=timeout_s, doing="starting")
    first = actors.workers[0].open_rendezvous.remote()
    (rendezvous,) = wait_for_all({"policy worker 0": first}, timeout_s=timeout_s, doing="opening the rendezvous")
    weights = ray.put(packed)
    setups = {
        f"policy worker {rank}": worker.setup.remote(rendezvous, weights, 2 * config.step_timeout_s)
        for rank, worker in enumerate(actors.workers)
    }
    wait_for_all(setups, timeout_s=timeout_s, doing="forming the process group")
    return dict(zip(calls, pids, strict=True))
