"""The options of the ``tq_mooncake`` backend."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from dataplane_core.config import SizeBytes
from dataplane_tq_simple import QueueConfig
from dataplane_tq_simple.addresses import parse_announced

_MIB: Final = 1024 * 1024
_OWN: Final = frozenset({"announce_address", "rdma_devices", "local_buffer_size_bytes"})


class TQMooncakeConfig(QueueConfig):
    """Where an instance runs, how its bytes are sent, and how much memory it takes.

    An attaching client may set ``announce_address``, ``rdma_devices`` and ``local_buffer_size_bytes`` for itself. All
    other options, and those of the three that it does not set, it reads from the running instance.
    """

    num_storage_units: int = Field(default=1, ge=1, le=1024)
    """Processes that hold the rows, on the nodes in turn."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    """How rows are sent. ``rdma`` needs RDMA devices in every process. Without them connecting fails; it does not fall
    back to ``tcp``."""

    rdma_devices: tuple[str, ...] = ()
    """Names of the RDMA devices to use, as in ``/sys/class/infiniband``. Default: all of the node."""

    announce_address: str | None = None
    """The address at which other nodes reach this node: one of its IP addresses, or a network (``10.1.0.0/16``) in
    which each node has one address. Default: Ray's address of the node."""

    segment_size_bytes: SizeBytes = Field(default=2048 * _MIB, ge=16 * _MIB)
    """Mooncake's ``global_segment_size``: memory in which one storage unit holds rows. Over TCP it takes
    physical memory as it fills; over RDMA all of it is pinned at the start."""

    local_buffer_size_bytes: SizeBytes = Field(default=64 * _MIB, ge=4 * _MIB)
    """Over RDMA, the transfer buffer of each client process. It is registered and pinned once, when the first client of
    the process connects. An operation uses a quarter of it; larger batches are sent in parts. Over TCP there is none:
    rows are sent from where they lie."""

    any_mooncake_version: bool = False
    """Whether a version of Mooncake with which the conformance tests did not pass, or did not run, is only a warning in
    the log. Otherwise it is refused."""

    master_start_s: float = Field(default=30.0, gt=0)
    """Seconds that a started ``mooncake_master`` may take until it answers, within the deadline of connecting."""

    @property
    def client_buffer_bytes(self) -> int:
        """Bytes of the transfer buffer of a client process; over TCP 0."""
        return self.local_buffer_size_bytes if self.protocol == "rdma" else 0

    def own_options(self) -> dict[str, Any]:
        """The options that a client sets for itself, and has set."""
        return {name: getattr(self, name) for name in _OWN & self.model_fields_set}

    @field_validator("announce_address")
    @classmethod
    def _is_an_address_or_a_network(cls, value: str | None) -> str | None:
        if value is not None:
            parse_announced(value)
        return value

    @model_validator(mode="after")
    def _devices_are_for_rdma(self) -> Self:
        if self.rdma_devices and self.protocol != "rdma":
            raise ValueError(f"rdma_devices is {list(self.rdma_devices)}, but protocol is {self.protocol!r}.")
        return self
