"""How much memory and how many cores this process may use: of the machine, and of the container that it runs in."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dataplane_core.errors import ConfigError

_ROOT: Final = Path("/")  # below it lie ``proc`` and ``sys``


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that may still be used."""

    available_bytes: int
    source: str  # what limits it, for messages: ``this machine`` or ``the container's limit``
    most_bytes: int = 0  # how much there would be if nothing else used memory: the least of all limits


def memory_limit(root: Path = _ROOT) -> MemoryLimit:
    """The memory that a new store on this host may use. Linux only.

    It is the least of what the machine has available and what the control groups of this process (versions 1 and 2)
    leave it. Shared memory counts for both. Pages of files that the kernel can drop at any time are available.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    limits = [MemoryLimit(fields["MemAvailable"], "this machine", fields["MemTotal"])]
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for limit_file, used_file in _control_groups(root, "memory", *names):
        try:
            limit, used = int(limit_file.read_text()), int(used_file.read_text())
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
        left = limit - used + _droppable_bytes(limit_file.parent)
        limits.append(MemoryLimit(max(0, left), "the container's limit", limit))
    least = min(limits, key=lambda limit: limit.available_bytes)
    return replace(least, most_bytes=min(limit.most_bytes for limit in limits))


def check_capacity(capacity_bytes: int | None) -> None:
    """Refuses a capacity that this host cannot hold. Backends whose payload lies in its memory call it at their start.

    Raises:
        ConfigError: It is more than all memory that processes here may use.
    """
    if capacity_bytes is None or not Path("/proc/meminfo").exists():  # not Linux
        return
    most_bytes = memory_limit().most_bytes
    if capacity_bytes > most_bytes:
        raise ConfigError(
            f"capacity_bytes is {capacity_bytes / 1e9:,.1f} GB. Expected at most the memory that this host, or its "
            f"container, has in all: {most_bytes / 1e9:,.1f} GB.",
            hint="Lower capacity_bytes. A store that holds more than there is would be killed by the system.",
        )


def arena_bytes_for(capacity_bytes: int) -> int:
    """The size of the arena of a store: its capacity and room for tables, and for cleared rows that are still read."""
    return capacity_bytes + capacity_bytes // 4 + (64 << 20)


def _droppable_bytes(group: Path) -> int:
    """Bytes of file pages that count as used by a group and the groups in it, although nobody needs them."""
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))  # version 1 has both


def usable_cores(root: Path = _ROOT) -> int:
    """How many cores this thread may run on: those of its mask, or fewer if the control groups grant less time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _cores_granted(root)))


@functools.cache
def _cores_granted(root: Path) -> int:
    """The least that the control groups (versions 1 and 2) of this process grant, in whole cores. Read only once."""
    granted = sys.maxsize
    for file, period_file in _control_groups(
        root, "cpu", ("cpu.max", "cpu.max"), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ):
        try:  # version 2 has both numbers in one file
            quota, period = int(file.read_text().split()[0]), int(period_file.read_text().split()[-1])
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
        if quota > 0:  # version 1 says -1 for no limit
            granted = min(granted, quota // period)
    return granted


def _control_groups(
    root: Path, controller: str, names: tuple[str, str], names_of_version_1: tuple[str, str]
) -> list[tuple[Path, Path]]:
    """Two files of this process's group of a controller, and of all groups above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    pairs = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            home, files = root / "sys/fs/cgroup", names
        elif controller in controllers.split(","):
            home, files = root / "sys/fs/cgroup" / controller, names_of_version_1
        else:
            continue
        folder = home / path.strip("/")
        while folder.is_relative_to(home):
            pairs.append((folder / files[0], folder / files[1]))
            folder = folder.parent
    return pairs
