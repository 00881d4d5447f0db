"""What `dataplane doctor tq_simple` checks: Ray itself, and the Ray that an instance would run on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Final

from dataplane_core.backends import Finding, Level, check_announced_address
from dataplane_core.errors import DataPlaneError, preview
from dataplane_core.spec import UnitInfo
from dataplane_tq_simple.addresses import host_and_port, refuses
from dataplane_tq_simple.config import QueueConfig

if TYPE_CHECKING:
    from dataplane_tq_simple._cluster import Instance

#: Seconds that a Ray of this host has to accept a connection.
_ANSWERS_S: Final = 5.0


def diagnose(config: QueueConfig, deadline: float, find_class: Callable[[], type[Instance]]) -> Iterator[Finding]:
    """Findings for these options; see `Backend.diagnose`. ``find_class`` gives the class of the instance."""
    try:
        import_module("ray")
    except Exception as error:
        hint = "Run: pip install --force-reinstall dataplane-tq-simple"
        yield Finding.error(f"ray cannot be imported: {type(error).__name__}: {error}", hint)
        return
    yield Finding.ok(f"Ray {metadata.version('ray')}.")
    if getattr(config, "storage", None) == "memory":
        yield Finding.ok("Rows are kept in the memory of storage units, one on each node (storage: memory).")
    durable = getattr(config, "durable", None)
    if durable is not None:
        yield _durable(durable, config)
    if durable is None or config.journal != durable:
        yield _journal(config)
    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    if address is None:
        yield from _of_this_host(config, find_class())
    else:
        yield from _running(config, find_class(), deadline)


def unit_paths(units: Iterable[UnitInfo], node: str) -> Iterator[Finding]:
    """How rows get from storage units to this process, which is on this node."""
    units = [each for each in units if each.path]
    shared = [each.name for each in units if each.path == "memory"]
    far = [each.name for each in units if each.path == "wire" and each.node != node]
    apart = [each.name for each in units if each.path == "wire" and each.node == node]
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
    hint = "Set `journal` to a folder that all nodes of the Ray cluster share, and make it first."
    if not os.path.isdir(folder):
        return Finding.error(
            f"There is no folder {folder} on this node, in which the controller is to keep a journal.", hint
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding.error(f"This user may not write in {folder}, where the controller is to keep a journal.", hint)
    when = "when the disk has it" if config.journal_sync else "before the disk has it (journal_sync is false)"
    return Finding.ok(
        f"The controller keeps a journal in {folder}, and answers {when}. If it dies, Ray starts it again on any node: "
        "all of them must see this folder."
    )


def _durable(folder: str, config: QueueConfig) -> Finding:
    """What lies in the durable folder of this node, and who has its journal open."""
    from dataplane_core.hosting import is_open, owner_of
    from dataplane_tq_simple._folders import folder_of, folders_in, units_of

    of_instance = folder_of(folder, config.instance)
    if not of_instance.is_dir():
        return Finding.ok(
            f"There is no folder {of_instance} on this node yet. An instance that is bootstrapped begins it."
        )
    count = len(folders_in(units_of(folder, config.instance)))
    what = f"The folder {of_instance} of this node has rows of {count} storage unit{'s' * (count != 1)}"
    owner = owner_of(of_instance)
    if owner is None:
        return Finding.ok(f"{what}, and no journal: that is on another node.")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    who = f"process {owner.pid} of host {owner.host}, since {since}"
    if is_open(of_instance):
        return Finding.ok(f"{what}. Its journal is open in {who}.")
    return Finding.ok(f"{what}. Its journal is open in no process. It was last in {who}.")


def _of_this_host(config: QueueConfig, instance_class: type[Instance]) -> Iterator[Finding]:
    """What owners of this name have left on this host; if none runs, what a new one would find."""
    from dataplane_tq_simple import _owners

    try:
        owners = _owners.look(instance_class.controller_name(config))
    except DataPlaneError as error:
        yield Finding.error(error.message, error.hint)
        return
    running = [owner for owner in owners if owner.runs]
    instance = f"instance '{config.instance}'"
    for owner in owners:
        where = f"{instance} on this host, on the Ray at {owner.address}"
        if not owner.runs:
            yield Finding.warning(
                f"The folder {owner.folder.path} is left from an owner of {instance} that was killed.",
                f"The next process that attaches removes it. Or run: rm -r {owner.folder.path}",
            )
        elif refuses(*host_and_port(owner.address), _ANSWERS_S):
            yield Finding.error(
                f"A process of this user says that it runs {where}, but nothing listens there.",
                "Its Ray has died. Close that process's client, or end the process; then bootstrap again.",
            )
        else:
            yield Finding.ok(f"A process of this user runs {where}. Others of this user find it by its name.")
    if len(running) > 1:
        yield Finding.error(
            f"{len(running)} processes of this user run an {instance} on this host, so one that attaches by the name "
            "alone is refused.",
            "Set ray_address to one of these addresses, or give each an `instance` of its own.",
        )
    if not running:
        yield Finding.ok(f"No process of this user runs {instance} on this host.")
        yield _local(config)


def _local(config: QueueConfig) -> Finding:
    from dataplane_tq_simple._cluster import cpu_error

    cpus = len(os.sched_getaffinity(0)) if config.ray_num_cpus is None else config.ray_num_cpus
    refused = cpu_error(config, getattr(config, "num_storage_units", 1), cpus, cpus, "a local Ray has")
    if refused is not None:
        return Finding.error(refused.message, refused.hint)
    return Finding.ok(
        f"No cluster is configured: connect uses the process's own Ray, or starts a local Ray of {cpus} logical CPUs."
    )


def _running(config: QueueConfig, instance_class: type[Instance], deadline: float) -> Iterator[Finding]:
    import ray

    from dataplane_tq_simple._cluster import check_cpus
    from dataplane_tq_simple._connection import RayConnection

    try:
        connection = RayConnection.acquire(config, bootstrap=False, deadline=deadline)
    except DataPlaneError as error:
        yield Finding.error(error.message, error.hint)
        return
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        own = ray.get_runtime_context().get_node_id()
        try:
            check_cpus(config, instance_class.num_units(config), deadline)
        except DataPlaneError as error:
            yield Finding.error(error.message, error.hint)
        else:
            cpus = ray.cluster_resources().get("CPU", 0.0)
            where = ray.get_runtime_context().gcs_address
            count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
            yield Finding.ok(f"The Ray cluster at {where} has {cpus:g} logical CPUs on {count}.")
        address = next(node["NodeManagerAddress"] for node in nodes if node["NodeID"] == own)
        announced = check_announced_address(
            address, "Ray", "Start Ray on this node with an address of its own: ray start --node-ip-address=ADDRESS"
        )
        if announced.level is not Level.WARNING or len(nodes) > 1:  # on one node, loopback is enough
            yield announced
    finally:
        connection.release()
