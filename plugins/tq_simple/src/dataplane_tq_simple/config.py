"""The options of the ``tq_simple`` backend."""

from __future__ import annotations

import os
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dataplane_core.backends import CapacityOptions
from dataplane_core.config import SizeBytes

__all__ = ["QueueConfig", "TQSimpleConfig"]


class QueueConfig(CapacityOptions):
    """Where an instance runs on Ray.

    The bootstrapping client sets all options. An attaching client needs only ``instance`` and, if Ray is not
    initialised in its process, ``ray_address``. It reads the rest from the running instance.
    """

    instance: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of this queue on its Ray cluster. Instances of different names share nothing."""

    ray_address: str | None = None
    """``host:port`` of the Ray cluster, or ``auto``. Default: the cluster that this process is connected to; else the
    environment variable ``RAY_ADDRESS``; else that of the instance's owner, if it is this user's on this host; a
    bootstrapping client instead starts a local Ray and ends it on close."""

    ray_num_cpus: int | None = Field(default=None, ge=0)
    """Logical CPUs of a local Ray started by this client. Default: what Ray counts on the machine."""

    controller_num_cpus: float = Field(default=0, ge=0)
    """Logical CPUs that Ray reserves for the controller. With 0, Ray schedules it even if no CPU is free."""

    unit_num_cpus: float = Field(default=0, ge=0)
    """Logical CPUs that Ray reserves for each storage unit."""

    journal: str | None = None
    """A folder that every node of the cluster sees. The controller records there what it does, so that Ray can start it
    again if it dies, and it goes on. Default: none; if the controller dies, the instance is lost."""

    journal_sync: bool = True
    """Whether the controller answers only when the disk has what it recorded. If not, the record survives the end of
    the process, but not that of its machine."""

    @field_validator("journal", "durable", check_fields=False)
    @classmethod
    def _is_an_absolute_folder(cls, value: str | None) -> str | None:
        if value is not None and not os.path.isabs(value):
            raise ValueError(f"{value!r} is not an absolute path")
        return value

    @field_validator("ray_address")
    @classmethod
    def _is_a_cluster_address(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("ray://"):
            raise ValueError(
                f"ray_address {value!r} names a Ray Client server, whose clients are outside the cluster and cannot "
                "reach the storage units. Expected host:port of the cluster (its GCS) or 'auto'; run this process on "
                "a node of the cluster."
            )
        return value


class TQSimpleConfig(QueueConfig):
    """The options of ``tq_simple``."""

    storage: Literal["memory", "transfer_queue"] = "memory"
    """Where the rows are: in the memory of storage units, one on each node; or in those of the TransferQueue that runs
    on the Ray cluster. An attaching client sets it too. The other options below are of ``memory`` alone."""

    unit_bytes: SizeBytes | None = Field(default=None, gt=0)
    """The memory that a storage unit may use. It is taken as it is needed. Default: enough for ``capacity_bytes``; if
    that is not set, half of what its node has available when it starts."""

    touch_ahead_bytes: SizeBytes = Field(default=64 << 20, ge=0)
    """Memory that a unit makes ready in the background before it is used. It starts with so much, and makes as much
    more ready whenever less than half of it is left."""

    durable: str | None = None
    """A folder on each node in which its storage unit keeps its rows, absolute. A unit that is started again brings
    them back. All processes may be killed at any moment, those of Ray too: who bootstraps the instance again
    with this folder has all that was committed. Without ``journal``, it is in this folder of the bootstrapping client's
    node, and the controller stays there."""

    sync: Literal["none", "commit"] = "none"
    """Only with ``durable``, of rows and of the journal. With ``commit``, a put, and each other call that changes
    something, returns when that is on the disk: it also survives the end of the machine."""

    node_wait_s: float = Field(default=120.0, ge=0)
    """Only with ``durable``. For so many seconds, rows whose node died are waited for. Then they are named as lost."""

    share_memory: bool = True
    """Whether this client shares the memory of the units on its node. If not, or where it cannot, rows go over the
    wire. An option of each client."""

    views: bool = False
    """Reads return tensors on a unit's memory itself where they can: of rows that one put wrote, in its order, on a
    unit whose memory this process shares. They take no copy and no memory. A write into such a tensor ends the process
    with SIGSEGV. As long as one of them lives, its put keeps its memory, even after a clear. Other reads return copies,
    as without this option. An option of each client."""

    copy_threads: int | None = Field(default=None, ge=1)
    """How many threads copy a large put or read in shared memory, with the one that calls. By default up to 4 of the
    cores that the process may use and that torch's threads do not hold. 1: the calling thread alone. An option of each
    client."""

    @model_validator(mode="before")
    @classmethod
    def _journal_by_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("durable") is not None and values.get("journal") is None:
            return {**values, "journal": values["durable"]}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sync != "none" and self.durable is None:
            raise ValueError("'sync' needs 'durable', a folder")
        for name in TQSimpleConfig.__annotations__.keys() - {"storage"} if self.storage == "transfer_queue" else ():
            if getattr(self, name) != TQSimpleConfig.model_fields[name].default:
                raise ValueError(f"{name!r} needs storage: memory")
        return self
