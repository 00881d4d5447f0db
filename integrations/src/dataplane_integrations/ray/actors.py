"""On Ray: checks that a run's actors can be placed, and starts them.

Ray silently queues an actor that fits on no node, forever. So the demand is compared with the cluster first, and an
error names the numbers. Everything here runs in the driver. Ray is imported only when something here is called.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.errors import PlacementError, WorkerFailedError, WorkerTimeoutError
from dataplane_integrations.ray.worker_group import RayWorkerGroup, wait_for_all

#: Seconds in which Ray may still count the resources of actors that have just ended.
_SETTLE_S: Final = 3.0
_POLL_S: Final = 0.1
#: Ray counts fractions of a resource in units of 1e-4.
_UNIT: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRequest:
    """One actor to start.

    Attributes:
        name: Its name in messages, unique in its group: ``policy worker 0``.
        cls: A plain class.
        args: Positional arguments of its constructor.
        kwargs: Keyword arguments of its constructor.
        num_cpus: Logical CPUs that Ray reserves; a fraction lets several actors share one.
        num_gpus: The same for GPUs.
        max_concurrency: Number of its calls that can run at the same time.
    """

    name: str
    cls: type
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_cpus: float = 0.5
    num_gpus: float = 0.0
    max_concurrency: int = 1

    @property
    def demand(self) -> dict[str, float]:
        """The amount of each Ray resource that the actor takes."""
        return {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus)}


class ActorGroup:
    """Started actors; a context manager that ends them.

    Attributes:
        actors: Their handles, by name, in the order of the requests.
    """

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self.actors = dict(actors)

    def workers(self, names: Sequence[str] | None = None, dp_ranks: Sequence[int] | None = None) -> RayWorkerGroup:
        """Some of the actors, as the worker group of a `DataPlanePolicy`.

        Args:
            names: Their names, in the order of the ranks; None: all actors.
            dp_ranks: As for `RayWorkerGroup`.

        Raises:
            InvalidRequestError: A name that no actor has.
        """
        chosen = list(self.actors) if names is None else list(names)
        unknown = [name for name in chosen if name not in self.actors]
        if unknown:
            raise InvalidRequestError(
                f"worker group refused: there is no actor '{unknown[0]}'. Expected names of {', '.join(self.actors)}."
            )
        return RayWorkerGroup([self.actors[name] for name in chosen], dp_ranks, chosen)

    def close(self) -> None:
        """Ends these actors. Idempotent."""
        import ray

        actors, self.actors = self.actors, {}
        if ray.is_initialized():
            for actor in actors.values():
                ray.kill(actor)

    def __enter__(self) -> ActorGroup:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def start_actors(
    requests: Sequence[ActorRequest],
    *,
    runtime_env: Mapping[str, Any] | None = None,
    reserve_cpus: float = 0.0,
    timeout_s: float = 120.0,
) -> ActorGroup:
    """Checks that the actors can be placed, starts them, and waits until all are up.

    Ray does not restart them: a restarted worker would have lost its weights, and would train wrongly.

    Args:
        requests: The actors.
        runtime_env: Ray's environment of their processes; see
            `dataplane_integrations.ray.nodes.backend_runtime_env`.
        reserve_cpus: Logical CPUs to leave for other actors that will start later, such as a backend's.
        timeout_s: For all actors together, in seconds, including the download of packages.

    Raises:
        PlacementError: The cluster has too few free resources, or not all actors started in time. All are ended.
        WorkerFailedError: A constructor raised.
    """
    import ray

    check_placement(requests, reserve_cpus=reserve_cpus)
    group = ActorGroup({})
    try:
        for request in requests:
            options: dict[str, Any] = {
                "num_cpus": request.num_cpus,
                "max_restarts": 0,
                "max_concurrency": request.max_concurrency,
            }
            if request.num_gpus:
                options["num_gpus"] = request.num_gpus
            if runtime_env is not None:
                options["runtime_env"] = dict(runtime_env)
            group.actors[request.name] = (
                ray.remote(request.cls).options(**options).remote(*request.args, **request.kwargs)
            )
        ready = {name: actor.__ray_ready__.remote() for name, actor in group.actors.items()}
        try:
            wait_for_all(ready, timeout_s=timeout_s, doing="starting")
        except WorkerTimeoutError as error:
            total, free = (each.get("CPU", 0.0) for each in (ray.cluster_resources(), ray.available_resources()))
            state = f"The cluster has {total:g} logical CPUs, {free:g} of them free."
            raise PlacementError(f"{error.message} {state}", hint=error.hint) from error
        except WorkerFailedError as error:
            raise _start_error(error) from error.__cause__
    except BaseException:
        group.close()
        raise
    return group


def check_placement(requests: Sequence[ActorRequest], *, reserve_cpus: float = 0.0) -> None:
    """Compares the demand of the actors with the free resources of the cluster. Starts nothing.

    Args:
        requests: The actors.
        reserve_cpus: Logical CPUs that other actors will take.

    Raises:
        InvalidRequestError: Two actors have the same name, or a demand is negative.
        PlacementError: Too few CPUs or GPUs, with the numbers.
    """
    import ray

    _check_requests(requests, reserve_cpus)
    demand = {
        name: sum(request.demand[name] for request in requests) + (reserve_cpus if name == "CPU" else 0.0)
        for name in ("CPU", "GPU")
    }
    deadline = time.monotonic() + _SETTLE_S
    while True:
        total, free = ray.cluster_resources(), ray.available_resources()
        short = [name for name, asked in demand.items() if asked > free.get(name, 0.0) + _UNIT]
        if not short:
            break
        never = [name for name in short if demand[name] > total.get(name, 0.0) + _UNIT]
        if never or time.monotonic() > deadline:  # Ray may not have noticed before that some actors have ended
            name = (never or short)[0]
            raise _too_few(name, demand[name], total.get(name, 0.0), free.get(name, 0.0), len(requests))
        time.sleep(_POLL_S)
    _check_largest(requests)


def _check_requests(requests: Sequence[ActorRequest], reserve_cpus: float) -> None:
    names = [request.name for request in requests]
    if len(set(names)) != len(names) or not names:
        raise InvalidRequestError(
            f"actors refused: {len(names)} requests with the names {names}. Expected at least one, all different."
        )
    for name, amounts in [*((r.name, r.demand.values()) for r in requests), ("reserve_cpus", [reserve_cpus])]:
        if any(amount < 0 for amount in amounts):
            raise InvalidRequestError(f"actors refused: '{name}' asks for {min(amounts):g}. Expected 0 or more.")


def _check_largest(requests: Sequence[ActorRequest]) -> None:
    """Checks the largest actor against the largest node: an actor runs on one node."""
    for resource in ("CPU", "GPU"):
        largest = max(requests, key=lambda request: request.demand[resource])
        asked, most = largest.demand[resource], max((node.get(resource, 0.0) for node in _nodes()), default=0.0)
        if asked > most + _UNIT:
            raise PlacementError(
                f"'{largest.name}' cannot be placed: it asks for {asked:g} {resource}s, the largest of "
                f"{len(_nodes())} nodes has {most:g}. Expected a node that holds the whole actor.",
                hint=f"Lower num_{resource.lower()}s of that actor: Ray's CPUs only count, they do not bind.",
            )


def _too_few(name: str, asked: float, total: float, free: float, num_actors: int) -> PlacementError:
    kind = "logical CPUs" if name == "CPU" else f"{name}s"
    remedy = (
        f"Start Ray with num_cpus={asked + total - free:g} or more (they only count actors, the machine may have "
        "fewer), or lower num_cpus of the actors."
        if name == "CPU"
        else "Add nodes, or lower num_gpus of the actors."
    )
    return PlacementError(
        f"{num_actors} actors cannot be placed: they ask for {asked:g} {kind}, the cluster has {total:g}, {free:g} of "
        f"them free. Expected {asked:g} free.",
        hint=remedy,
    )


def _start_error(error: WorkerFailedError) -> WorkerFailedError | PlacementError:
    """The reason why an actor did not start. Ray reports it as the death of the actor."""
    from ray.exceptions import RayActorError, RuntimeEnvSetupError

    cause = error.__cause__
    if isinstance(cause, RuntimeEnvSetupError):
        return PlacementError(
            f"'{error.worker}' cannot start: its runtime_env cannot be set up on the node. {cause}",
            hint="Install the packages on the nodes, or give requirements that the nodes can fetch.",
        )
    if isinstance(cause, RayActorError) and cause.actor_init_failed:
        last_line = str(cause).strip().rpartition("\n")[2]
        return WorkerFailedError(
            f"{error.worker} failed while starting: {last_line}", worker=error.worker, details=error.details
        )
    return error


def _nodes() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
