"""How much memory this process may use: of the machine, and of the container that it runs in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dataplane_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that may still be used.

    Attributes:
        available_bytes: How much.
        source: What limits it, for messages: ``this machine`` or ``the container's limit``.
        most_bytes: How much there would be if nothing else used memory. It is the least of all limits.
    """

    available_bytes: int
    source: str
    most_bytes: int = 0


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The memory that a new store on this host may use. Linux only.

    It is the least of what the machine has available and what the control groups of this process (versions 1 and 2)
    leave it. Shared memory counts for both. Pages of files that the kernel can drop at any time are available.

    Args:
        root: Where ``proc`` and ``sys`` lie.

    Example:
        >>> memory_limit().available_bytes > 0
        True
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    limits = [MemoryLimit(fields["MemAvailable"], "this machine", fields["MemTotal"])]
    for limit_file, used_file in _control_groups(root):
        try:
            limit, used = int(limit_file.read_text()), int(used_file.read_text())
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
        left = limit - used + _droppable_bytes(limit_file.parent)
        limits.append(MemoryLimit(max(0, left), "the container's limit", limit))
    least = min(limits, key=lambda each: each.available_bytes)
    return replace(least, most_bytes=min(each.most_bytes for each in limits))


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


def _droppable_bytes(group: Path) -> int:
    """Bytes of file pages that count as used by a group and the groups in it, although nobody needs them."""
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))  # version 1 has both


def _control_groups(root: Path) -> list[tuple[Path, Path]]:
    """The files with limit and use of this process's memory groups and of all groups above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            home, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            home, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = home / path.strip("/")
        while folder.is_relative_to(home):
            found.append((folder / names[0], folder / names[1]))
            folder = folder.parent
    return found
