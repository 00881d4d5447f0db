"""What `dataplane doctor tq_simple` checks: Ray itself, and the Ray that an instance would run on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Final

from dataplane_core.backends import Finding
from dataplane_core.errors import DataPlaneError, preview
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple.addresses import check_address, host_and_port, refuses, this_nodes_addresses
from dataplane_tq_simple.config import QueueConfig

if TYPE_CHECKING:
    from dataplane_tq_simple._instance import Instance

#: Seconds that a Ray of this host has to accept a connection.
_ANSWERS_S: Final = 5.0


def diagnose(backend: type[Any], config: QueueConfig, deadline: float) -> Iterator[Finding]:
    """Findings for these options of a `QueueBackend`; see `Backend.diagnose`."""
    try:
        import_module("ray")
    except Exception as error:
        hint = "Run: pip install --force-reinstall dataplane-tq-simple"
        yield Finding.error(f"ray cannot be imported: {type(error).__name__}: {error}", hint)
        return
    yield Finding.ok(f"Ray {metadata.version('ray')}.")
    durable = getattr(config, "durable", None)
    if durable is not None:
        yield Finding.ok(_durable(durable, config))
    if durable is None or config.journal != durable:
        yield _journal(config)
    try:
        instance_class = backend.instance_class()
        from dataplane_tq_simple._ray import RayConnection

        if not (config.ray_address or os.environ.get("RAY_ADDRESS")):
            yield from _of_this_host(config, instance_class)
            yield from backend.diagnose_storage(config, deadline, connected=False)
            return
        connection = RayConnection.acquire(config, bootstrap=False, deadline=deadline)
        try:
            yield from _running(config, instance_class)
            yield from backend.diagnose_storage(config, deadline, connected=True)
        finally:
            connection.release()
    except DataPlaneError as error:
        yield Finding.error(error.message, error.hint)


def unit_paths(units: Iterable[UnitInfo], node: str) -> Iterator[Finding]:
    """How rows get from storage units to this process, which is on this node."""
    units = list(units)
    shared = [unit.name for unit in units if unit.path == "memory"]
    far = [unit.name for unit in units if unit.path == "wire" and unit.node != node]
    apart = [unit.name for unit in units if unit.path == "wire" and unit.node == node]
    if shared:
        yield Finding.ok(f"This process shares the memory of {preview(shared)}.")
    if far:
        yield Finding.ok(f"Rows of {preview(far)}, on other nodes, come over the wire.")
    if apart:
        yield Finding.warning(
            f"{preview(apart)} runs on this node, but rows come over the wire.",
            "A unit's memory is shared by processes of the same user in the same network namespace, with the option "
            "share_memory.",
        )


def _journal(config: QueueConfig) -> Finding:
    folder = config.journal
    if folder is None:
        return Finding.ok("The controller keeps no journal: if it dies, the instance is lost.")
    for refused, what in (
        (not os.path.isdir(folder), f"There is no folder {folder} on this node, in which"),
        (not os.access(folder, os.W_OK | os.X_OK), f"This user may not write in {folder}, where"),
    ):
        if refused:
            hint = "Set `journal` to a folder that all nodes of the Ray cluster share, and make it first."
            return Finding.error(f"{what} the controller is to keep a journal.", hint)
    when = "when the disk has it" if config.journal_sync else "before the disk has it (journal_sync is false)"
    return Finding.ok(
        f"The controller keeps a journal in {folder}, and answers {when}. If it dies, Ray starts it again on any node: "
        "all of them must see this folder."
    )


def _durable(folder: str, config: QueueConfig) -> str:
    """What lies in the durable folder of this node, and who has its journal open."""
    from dataplane_core.ownership import is_open, owner_of
    from dataplane_tq_simple._folders import folder_of, unit_of

    of_instance = folder_of(folder, config.instance)
    if not of_instance.is_dir():
        return f"There is no folder {of_instance} on this node yet. An instance that is bootstrapped begins it."
    rows = "rows" if unit_of(folder, config.instance).is_dir() else "no rows"
    what = f"The folder {of_instance} of this node has {rows}"
    owner = owner_of(of_instance)
    if owner is None:
        return f"{what}, and no journal: that is on another node."
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    open_in = "open in" if is_open(of_instance) else "open in no process. It was last in"
    return f"{what}. Its journal is {open_in} process {owner.pid} of host {owner.host}, since {since}."


def _of_this_host(config: QueueConfig, instance_class: type[Instance]) -> Iterator[Finding]:
    """The instances of this name that run on this host; if none does, what a new one would find."""
    from dataplane_tq_simple import _owners
    from dataplane_tq_simple._instance import check_cpus

    owners = _owners.running(instance_class.controller_name(config))
    instance = f"instance '{config.instance}'"
    for address in owners:
        where = f"{instance} on this host, on the Ray at {address}"
        if refuses(*host_and_port(address), _ANSWERS_S):
            yield Finding.error(
                f"A process of this user says that it runs {where}, but nothing listens there.",
                "Its Ray has died. Close that process's client, or end the process; then bootstrap again.",
            )
        else:
            yield Finding.ok(f"A process of this user runs {where}. Others of this user find it by its name.")
    if len(owners) > 1:
        yield Finding.error(
            f"{len(owners)} processes of this user run an {instance} on this host, so one that attaches by the name "
            "alone is refused.",
            "Set ray_address to one of these addresses, or give each an `instance` of its own.",
        )
    if not owners:
        yield Finding.ok(f"No process of this user runs {instance} on this host.")
        cpus = len(os.sched_getaffinity(0)) if config.ray_num_cpus is None else config.ray_num_cpus
        check_cpus(config, getattr(config, "num_storage_units", 1), cpus, "a local Ray")
        yield Finding.ok(
            f"No cluster is configured: connect uses the process's own Ray, or starts a local Ray of {cpus} logical "
            "CPUs."
        )


def _running(config: QueueConfig, instance_class: type[Instance]) -> Iterator[Finding]:
    """What the Ray cluster is like that this process is connected to."""
    import ray

    from dataplane_tq_simple._instance import check_cpus

    nodes = [node for node in ray.nodes() if node["Alive"]]
    own = ray.get_runtime_context()
    address = next(node["NodeManagerAddress"] for node in nodes if node["NodeID"] == own.get_node_id())
    said = f"Ray announces this host as {address}"
    check_address(address, num_nodes=len(nodes), of="Ray's address of this node")
    if address in this_nodes_addresses():
        yield Finding.ok(f"{said}.")
    else:
        hint = "Start Ray on this node with an address of its own: ray start --node-ip-address=ADDRESS"
        yield Finding.error(f"{said}: no interface of this machine has it.", hint)
    cpus = ray.cluster_resources().get("CPU", 0.0)
    check_cpus(config, instance_class.num_units(config), cpus, "the Ray cluster")
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    yield Finding.ok(f"The Ray cluster at {own.gcs_address} has {cpus:g} logical CPUs on {count}.")
