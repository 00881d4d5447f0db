"""The options of the ``shm_store`` backend, and where a store lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dataplane_core.backends import CapacityOptions
from dataplane_core.config import SizeBytes
from dataplane_core.ownership import PrivateFolder
from dataplane_shm._messages import SOCKET

__all__ = ["ShmConfig", "store_folder"]


class ShmConfig(CapacityOptions):
    """Which store of this user on this host, how much memory it may use, and how reads return data.

    The bootstrapping client sets all but ``views`` and ``copy_threads``. An attaching client gets ``capacity_bytes``
    and ``on_full`` from the store. ``capacity_bytes`` is by default half of the memory that is available when the store
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

    durable: Path | None = None
    """A folder in which the store outlives its processes. All of them may be killed at any moment: the next client that
    bootstraps a store with this folder has all that was committed, at once. Leases of before are over. One store at a
    time may use the folder. On tmpfs, it ends with the machine."""

    sync: Literal["none", "commit"] = "none"
    """Only with ``durable``. With ``commit``, a put, and each other call that changes something, returns when that is
    on the disk: it also survives the end of the machine. Calls that come together share a sync."""

    copy_threads: int | None = Field(default=None, ge=1)
    """How many threads copy a large put or read, with the one that calls. By default up to 4 of the cores that the
    process may use and that torch's threads do not hold. 1: the calling thread alone."""

    @field_validator("durable", mode="before")
    @classmethod
    def _named(cls, folder: Any) -> Any:
        if folder == "":
            raise ValueError("it names no folder")
        try:
            return Path(folder).expanduser() if isinstance(folder, (str, Path)) else folder
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sync != "none" and self.durable is None:
            raise ValueError("'sync' needs 'durable', a folder")
        return self


def store_folder(namespace: str) -> PrivateFolder:
    """The folder of the store of that name."""
    return PrivateFolder("shm", namespace, SOCKET)
