"""On Ray: checks whether every node can run the backend, and has Ray install it on nodes that cannot.

A backend is found by its entry point, so a node needs the backend's distribution, not only its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dataplane_core.connecting import load_backend
from dataplane_core.entry_points import BACKEND_GROUP, PluginRecord, find_plugins, unknown_plugin
from dataplane_core.errors import ConfigError
from dataplane_integrations.errors import PlacementError

#: Longest excerpt of a node's report, in characters: pip writes pages.
_EXCERPT: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node reports about the backend.

    Attributes:
        node_id: Ray's id of the node.
        address: Its address in the cluster.
        version: Version of the distribution there; None if it is missing.
        problem: Why the backend cannot run there; None if it can.
        command: What to run on the node to repair it; None if there is no problem.
    """

    node_id: str
    address: str
    version: str | None
    problem: str | None
    command: str | None


def backend_runtime_env(
    backend: str, *, packages: Sequence[str] | None = None, env_vars: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A Ray ``runtime_env`` that installs the backend on the nodes where it is used.

    Args:
        backend: Entry-point name.
        packages: What to install. Requirements for pip, which each node must be able to fetch; or paths of wheels on
            this machine, which Ray copies to the nodes, but only with ``ray.init(runtime_env=...)``, not for single
            actors. None: the backend's distribution, in the version of this process.
        env_vars: Environment variables of the processes.

    Raises:
        UnknownBackendError: ``packages`` is None, and this process does not have the backend either.
    """
    wanted = [f"{_record(backend).distribution}=={_record(backend).version}"] if packages is None else list(packages)
    if not wanted:
        raise ConfigError(
            f"backend_runtime_env('{backend}') refused: packages is empty. Expected at least one requirement or wheel, "
            "or None for the backend's own distribution."
        )
    wheels = [package for package in wanted if package.endswith(".whl")]
    requirements = [package for package in wanted if not package.endswith(".whl")]
    env: dict[str, Any] = {}
    if requirements:
        env["pip"] = requirements
    if wheels:
        env["py_modules"] = wheels
    if env_vars:
        env["env_vars"] = dict(env_vars)
    return env


def require_backend_on_nodes(
    backend: str, *, runtime_env: Mapping[str, Any] | None = None, timeout_s: float = 120.0
) -> list[NodeReport]:
    """As `check_backend_on_nodes`, but raises if one node cannot run the backend.

    Raises:
        PlacementError: Names each such node, its problem, and the command that repairs it.
    """
    reports = check_backend_on_nodes(backend, runtime_env=runtime_env, timeout_s=timeout_s)
    bad = [report for report in reports if report.problem is not None]
    if bad:
        lines = "; ".join(f"node {r.address} ({r.node_id[:8]}): {r.problem} Run there: {r.command}" for r in bad)
        raise PlacementError(
            f"backend '{backend}' cannot run on {len(bad)} of {len(reports)} nodes: {lines}. Expected it on every node "
            "that runs an actor.",
            backend=backend,
            hint="Or let Ray install it: runtime_env=backend_runtime_env(...) of dataplane_integrations.ray.nodes.",
        )
    return reports


def check_backend_on_nodes(
    backend: str, *, runtime_env: Mapping[str, Any] | None = None, timeout_s: float = 120.0
) -> list[NodeReport]:
    """Makes every node of the cluster import the backend by its entry point.

    Args:
        backend: Entry-point name; this process must have it.
        runtime_env: The environment in which the actors will run there; None: that of ``ray.init``.
        timeout_s: For all nodes together, in seconds.

    Returns:
        One report per node that is alive, in the order of their addresses.

    Raises:
        UnknownBackendError: This process does not have the backend.
        PluginImportError: This process cannot import it.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    load_backend(backend)
    record = _record(backend)
    command = f"pip install {record.distribution}=={record.version}"
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))
    probe = ray.remote(_probe())
    options = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
    calls = []
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        node_probe = probe.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy, **options)
        calls.append(node_probe.remote(BACKEND_GROUP, backend))
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    reports = []
    for node, call in zip(nodes, calls, strict=True):
        version: str | None = None
        problem: str | None
        if call not in ready:
            problem = f"it did not answer within {timeout_s:g} s."
        else:
            try:
                version, problem = ray.get(call)
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
                problem = f"{type(cause).__name__}: {_excerpt(str(cause))}."
        if problem is None and version != record.version:
            problem = f"it has {record.distribution} {version}, this process {record.version}."
        reports.append(
            NodeReport(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                version=version,
                problem=problem,
                command=None if problem is None else command,
            )
        )
    return reports


def _probe() -> Any:
    """The check. Ray sends a nested function by value, so it also runs on a node that has none of our packages."""

    def import_backend(group: str, name: str) -> tuple[str | None, str | None]:
        """The version of the backend's distribution, and what is wrong with it."""
        from importlib.metadata import entry_points

        points = list(entry_points(group=group, name=name))
        if not points:
            others = sorted({point.name for point in entry_points(group=group)})
            return None, f"no distribution there registers it; found: {', '.join(others) or 'no backend at all'}."
        point = points[0]
        version = None if point.dist is None else point.dist.version
        try:
            point.load()
        except BaseException as error:  # the driver needs to know whatever the import raised
            return version, f"its import fails there: {type(error).__name__}: {error}."
        return version, None

    return import_backend


def _record(backend: str) -> PluginRecord:
    for record in find_plugins():
        if record.name == backend:
            return record
    raise unknown_plugin(BACKEND_GROUP, backend, "backend")


def _excerpt(text: str) -> str:
    """The end of a long text: pip names the problem there."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _EXCERPT else f"... {text[-_EXCERPT:]}"
