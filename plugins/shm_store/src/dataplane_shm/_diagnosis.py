"""What `dataplane doctor shm_store` checks: the system, the memory that may be used, the running store, and folders
that killed owners left.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dataplane_core.backends import Finding, Level
from dataplane_core.errors import DataPlaneError
from dataplane_core.host_memory import MemoryLimit, arena_bytes_for, memory_limit
from dataplane_core.hosting import Memory
from dataplane_core.kept_extents import ADDRESSES, check_extents
from dataplane_core.ledger import commands
from dataplane_core.log import FolderLog, LoggedLedger
from dataplane_core.ownership import PrivateFolder, is_open, owner_of
from dataplane_shm._opening import open_session
from dataplane_shm.config import ShmConfig, store_folder

_MIB: Final = 1 << 20
_JOURNAL: Final = "journal"
_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


def diagnose(config: ShmConfig, deadline: float) -> Iterator[Finding]:
    """Findings for these options; see `Backend.diagnose`."""
    if not hasattr(os, "memfd_create"):
        yield Finding.error("This system has no memfd_create, which shm_store needs.", "Use it on Linux.")
        return
    yield Finding.ok("This system has memfd_create.")
    yield from huge_pages()
    if config.durable is not None:
        yield from _durable(config.durable.absolute(), _capacity_bytes(config, memory_limit()))
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
    """Whether the system, whose files lie in ``root``, gives shared memory huge pages."""
    try:
        words = (root / _HUGE_PAGES).read_text().split()  # always within_size advise [never] deny force
    except OSError:
        yield Finding.ok("This system has no huge pages for shared memory.")
        return
    setting = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    what = f"Huge pages for shared memory are set to '{setting}'."
    hint = f"With 'advise', the store gets them. As root: echo advise > /{_HUGE_PAGES}"
    yield Finding(Level.OK, what, hint if setting in ("never", "deny") else None)


def _capacity_bytes(config: ShmConfig, limit: MemoryLimit) -> int:
    return config.capacity_bytes or limit.available_bytes // 2


def _new_store(config: ShmConfig) -> Iterator[Finding]:
    """Whether a store with these options can be started."""
    limit = memory_limit()
    capacity_bytes = _capacity_bytes(config, limit)
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
    arena_bytes = arena_bytes_for(capacity_bytes) * (1 if config.durable is None else ADDRESSES)
    allowed, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if allowed != resource.RLIM_INFINITY and allowed < arena_bytes:
        yield Finding.error(
            f"ulimit -f allows files of {allowed // _MIB} MiB. The store's memory counts as a file, of "
            f"{arena_bytes // _MIB} MiB.",
            "Run: ulimit -f unlimited. Or lower capacity_bytes.",
        )


def _durable(folder: Path, capacity_bytes: int) -> Iterator[Finding]:
    """What lies in a durable folder, how old it is, who has it open, and whether there is room for the capacity."""
    where, owner = f"The durable folder {folder}", owner_of(folder)
    who = ""
    if owner is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
        who = f"process {owner.pid} of host {owner.host}, since {since}"
    if is_open(folder):
        yield Finding.ok(f"{where} is open in {who or 'another process'}.")
        return
    try:
        names = set(os.listdir(folder)) - {"lock"} if folder.exists() else set()
        if _JOURNAL in names:
            last = f"It was last in {who}." if who else "Its file 'lock' does not say who had it last."
            yield Finding.ok(f"{where} is open in no process. {last} It holds {_contents(folder)}.")
        elif names:
            hint = "Name an empty folder, or one in which a store was."
            yield Finding.error(f"{where} holds {min(names)!r}, and no store.", hint)
        else:
            what = "is empty" if folder.exists() else "does not exist yet"
            yield Finding.ok(f"{where} {what}. A store that is bootstrapped begins there.")
        yield from _room(folder, capacity_bytes)
    except DataPlaneError as error:
        yield Finding.error(f"{where} cannot be read: {error.message}", error.hint)
    except OSError as error:
        yield Finding.error(f"{where} cannot be read: {error}")


def _contents(folder: Path) -> str:
    """What a folder holds that nobody has open, in words. It is not changed."""
    with tempfile.TemporaryDirectory() as copy:
        try:
            shutil.copytree(folder / _JOURNAL, Path(copy, _JOURNAL))
            log = FolderLog(Path(copy, _JOURNAL), sync=False)
            try:
                logged = LoggedLedger(log)
                names = logged.call(commands.ListPartitionsRequest())
                counts = {name: len(logged.call(commands.ListRequest(name)).sample_ids) for name in names}
                rows = logged.ledger.payload().values()
                size_bytes = sum(sizes[each] for sizes, positions in rows if sizes is not None for each in positions)
                check_extents(folder, log.notes)
            finally:
                log.close()
        except DataPlaneError as error:
            error.message = error.message.replace(copy, str(folder))
            raise
    held = ", ".join(f"{count} samples in '{name}'" for name, count in counts.items()) or "no partition"
    return f"{held}: {size_bytes // _MIB} MiB of rows"


def _room(folder: Path, capacity_bytes: int) -> Iterator[Finding]:
    """Whether the file system has room for the capacity, with what the arena has of it already. Raises `OSError`."""
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    system, arena = os.statvfs(there), folder / "arena"
    free_bytes = system.f_bavail * system.f_frsize
    taken_bytes = arena.stat().st_blocks * 512 if arena.exists() else 0
    if free_bytes + taken_bytes < capacity_bytes:
        yield Finding.warning(
            f"{free_bytes // _MIB} MiB are free on the file system of the durable folder {folder}, whose arena takes "
            f"{taken_bytes // _MIB} MiB. capacity_bytes is {capacity_bytes // _MIB} MiB. A put that gets no room is "
            "refused.",
            "Make room, lower capacity_bytes, or name a folder on another file system.",
        )


def _store(folder: PrivateFolder, deadline: float) -> Finding:
    """What the running store says about itself."""
    name = f"The store of namespace '{folder.path.name}'"
    if not folder.socket.exists():
        return Finding.warning(f"{name} is being started or ended.", "Run the doctor again.")
    try:
        session, about = open_session(folder, deadline)
        statistics = session.call("doctor", deadline, Memory())
    except DataPlaneError as error:
        hint = "Its owner still runs. Close the owner's client and bootstrap anew."
        return Finding.error(f"{name} does not answer: {error.message}", hint)
    clients = statistics.num_sessions - 1  # without this one
    return Finding.ok(
        f"{name} runs, with {clients} {'client' if clients == 1 else 'clients'}. Of its "
        f"{about.capacity_bytes // _MIB} MiB, {statistics.held_bytes // _MIB} MiB are held. "
        f"{statistics.pinned_bytes // _MIB} MiB are pinned by reads, views and puts. Its memory takes "
        f"{statistics.touched_bytes // _MIB} of at most {statistics.size_bytes // _MIB} MiB of the system."
    )
