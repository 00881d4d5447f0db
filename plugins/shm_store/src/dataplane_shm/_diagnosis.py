"""What `dataplane doctor shm_store` checks: the system, the memory that may be used, the running store, and folders
that killed owners left.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dataplane_core.backends import Finding, Level, PrivateFolder
from dataplane_core.errors import DataPlaneError
from dataplane_core.host_memory import arena_bytes_for, memory_limit
from dataplane_shm._messages import Status
from dataplane_shm._opening import open_store
from dataplane_shm.config import ShmConfig, store_folder

_MIB: Final = 1 << 20
_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


def diagnose(config: ShmConfig, deadline: float) -> Iterator[Finding]:
    """Findings for these options; see `Backend.diagnose`."""
    if not hasattr(os, "memfd_create"):
        yield Finding.error("This system has no memfd_create, which shm_store needs.", "Use it on Linux.")
        return
    yield Finding.ok("This system has memfd_create.")
    yield from huge_pages()
    if config.durable is not None:
        yield from _durable(config.durable)
    folder = store_folder(config.namespace)
    if folder.is_owned:
        yield _store(folder, deadline)
    else:
        yield from _new_store(config)
    home = folder.path.parent
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        if path.is_dir() and not store_folder(path.name).is_owned:
            yield Finding.warning(
                f"The folder {path} is left from an owner that was killed. It holds no data.",
                f"The next owner of namespace '{path.name}' removes it. Or run: rm -r {path}",
            )


def huge_pages(root: Path = Path("/")) -> Iterator[Finding]:
    """Whether the system gives shared memory huge pages.

    Args:
        root: Where ``sys`` lies.
    """
    try:
        words = (root / _HUGE_PAGES).read_text().split()  # always within_size advise [never] deny force
    except OSError:
        yield Finding.ok("This system has no huge pages for shared memory.")
        return
    setting = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    what = f"Huge pages for shared memory are set to '{setting}'."
    hint = f"With 'advise', the store gets them. As root: echo advise > /{_HUGE_PAGES}"
    yield Finding(Level.OK, what, hint if setting in ("never", "deny") else None)


def _new_store(config: ShmConfig) -> Iterator[Finding]:
    """Whether a store with these options can be started."""
    limit = memory_limit()
    capacity_bytes = config.capacity_bytes or limit.available_bytes // 2
    which = "capacity_bytes is" if config.capacity_bytes else "capacity_bytes is by default half of it,"
    what = (
        f"{limit.available_bytes // _MIB} MiB of memory are available, limited by {limit.source}. "
        f"{which} {capacity_bytes // _MIB} MiB."
    )
    if not capacity_bytes:
        yield Finding.error(f"{what} No store can be started.", "Free memory, raise the limit, or set capacity_bytes.")
    elif capacity_bytes > limit.most_bytes:
        yield Finding.error(f"{what} connect refuses more than there is in all.", "Lower capacity_bytes.")
    elif capacity_bytes > limit.available_bytes:
        yield Finding.warning(
            f"{what} The system kills processes if the store uses more than there is.", "Lower capacity_bytes."
        )
    else:
        yield Finding.ok(what)
    arena_bytes = arena_bytes_for(capacity_bytes)
    allowed, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if allowed != resource.RLIM_INFINITY and allowed < arena_bytes:
        yield Finding.error(
            f"ulimit -f allows files of {allowed // _MIB} MiB. The store's memory counts as a file, of "
            f"{arena_bytes // _MIB} MiB.",
            "Run: ulimit -f unlimited. Or lower capacity_bytes.",
        )


def _durable(folder: Path) -> Iterator[Finding]:
    """What lies in a durable folder, how old it is, and who has it open."""
    from dataplane_core.hosting import is_open, owner_of
    from dataplane_shm._durable import contents_of

    owner = owner_of(folder)
    if owner is None:
        where = "is empty" if folder.is_dir() else "does not exist yet"
        yield Finding.ok(f"The durable folder {folder} {where}. A store that is bootstrapped begins there.")
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    who = f"process {owner.pid} of host {owner.host}, since {since}"
    if is_open(folder):
        yield Finding.ok(f"The durable folder {folder} is open in {who}.")
        return
    try:
        found = contents_of(folder)
    except (DataPlaneError, OSError) as error:
        yield Finding.error(f"The durable folder {folder} cannot be read: {error}")
        return
    counts = ", ".join(f"{count} samples in '{name}'" for name, count in found.partitions.items()) or "no partition"
    yield Finding.ok(
        f"The durable folder {folder} is open in no process. It was last in {who}. It holds {counts}: "
        f"{found.size_bytes // _MIB} MiB of rows."
    )


def _store(folder: PrivateFolder, deadline: float) -> Finding:
    """What the running store says about itself."""
    name = f"The store of namespace '{folder.path.name}'"
    if not folder.socket.exists():
        return Finding.warning(f"{name} is being started or ended.", "Run the doctor again.")
    try:
        session, about, _ = open_store(folder, deadline)
        statistics = session.call("doctor", deadline, Status())
    except DataPlaneError as error:
        hint = "Its owner still runs. Close the owner's client and bootstrap anew."
        return Finding.error(f"{name} does not answer: {error.message}", hint)
    clients = statistics.num_sessions - 1  # without this one
    return Finding.ok(
        f"{name} runs, with {clients} {'client' if clients == 1 else 'clients'}. Of its "
        f"{about.capacity_bytes // _MIB} MiB, {statistics.held_bytes // _MIB} MiB are held. "
        f"{statistics.pinned_bytes // _MIB} MiB are pinned by reads, views and puts. Its memory takes "
        f"{statistics.touched_bytes // _MIB} of at most {statistics.arena_bytes // _MIB} MiB of the system."
    )
