"""The options of the ``shm_store`` backend, and where a store lies."""

from __future__ import annotations

from pydantic import Field

from dataplane_core.backends import CapacityOptions, PrivateFolder, SizeBytes

__all__ = ["ShmConfig", "store_folder"]


class ShmConfig(CapacityOptions):
    """Which store of this user on this host, how much memory it may use, and how reads return data.

    The bootstrapping client sets ``capacity_bytes``, ``on_full`` and ``touch_ahead_bytes``. An attaching client gets
    the first two from the store. ``capacity_bytes`` is by default half of the memory that is available when the store
    starts, on the machine and in the container.
    """

    namespace: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the store. Processes of the same user on this host that name it the same share it."""

    views: bool = False
    """Reads return tensors on the shared memory itself where they can: of rows that one put wrote, in its order. They
    take no copy and no memory. A write into such a tensor ends the process with SIGSEGV. As long as one of them lives,
    its put keeps its memory, even after a clear. Other reads return copies, as without this option."""

    touch_ahead_bytes: SizeBytes = Field(default=256 << 20, ge=0)
    """Memory that is made ready in the background before it is used. The store starts with it, and makes as much more
    ready whenever less than half of it is left."""

    copy_threads: int | None = Field(default=None, ge=1)
    """How many threads copy a large put or read, with the one that calls. By default up to 4 of the cores that the
    process may use and that torch's threads do not hold. 1: the calling thread alone."""


def store_folder(namespace: str) -> PrivateFolder:
    """The folder of the store of that name."""
    return PrivateFolder("shm", namespace, "ledger.sock")
