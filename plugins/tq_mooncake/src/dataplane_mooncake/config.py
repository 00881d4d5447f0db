"""The options of the ``tq_mooncake`` backend."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from dataplane_tq_simple.addresses import parse_announced
from dataplane_tq_simple.config import QueueConfig

__all__ = ["TQMooncakeConfig"]

_MIB: Final = 1024 * 1024
_OWN: Final = frozenset({"announce_address", "rdma_devices", "local_buffer_size_bytes"})


class TQMooncakeConfig(QueueConfig):
    """Where an instance lives, how its bytes travel, and how much memory it takes.

    An attaching client may set ``announce_address``, ``rdma_devices`` and ``local_buffer_size_bytes`` for itself; the
    rest, and what of these it does not set, it reads from the running instance.
    """

    protocol: Literal["tcp", "rdma"] = "tcp"
    """How rows travel. ``rdma`` needs its devices in every process; without them connecting fails, and nothing falls
    back to ``tcp``."""

    rdma_devices: tuple[str, ...] = ()
    """Names of the RDMA devices to use, as in ``/sys/class/infiniband``. Default: all of the node."""

    announce_address: str | None = None
    """The address under which this node is reached: an IP address of it, or a network (``10.1.0.0/16``) in which each
    node has one. Default: Ray's address of the node."""

    master_address: str | None = None
    """``host:port`` of a ``mooncake_master`` that runs already. Default: the bootstrapping client starts one of its
    own, on its node and free ports, and ends it."""

    segment_size_bytes: int = Field(default=2048 * _MIB, ge=16 * _MIB)
    """Mooncake's ``global_segment_size``: memory in which one storage unit holds rows. Over TCP it is touched as it
    fills; over RDMA all of it is pinned at the start."""

    local_buffer_size_bytes: int = Field(default=64 * _MIB, ge=4 * _MIB)
    """Memory of each client process through which rows travel, registered (and over RDMA pinned) once, when the first
    client of the process connects. A quarter of it carries one operation at a time; larger batches go in parts."""

    clients_per_node: int = Field(default=8, ge=0)
    """Client processes that a node is expected to run. It only enters the comparison of a node's memory with what
    units and clients will take, made before anything is allocated."""

    master_start_s: float = Field(default=30.0, gt=0)
    """How long a started ``mooncake_master`` may take until it answers, within the deadline of connecting."""

    def own_options(self) -> dict[str, Any]:
        """Those of the options that a client has to itself, as far as they are set."""
        return {name: getattr(self, name) for name in _OWN & self.model_fields_set}

    @field_validator("announce_address")
    @classmethod
    def _is_an_address_or_a_network(cls, value: str | None) -> str | None:
        if value is not None:
            parse_announced(value)
        return value

    @field_validator("master_address")
    @classmethod
    def _is_host_and_port(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(f"master_address {value!r} is not host:port.")
        return value

    @model_validator(mode="after")
    def _devices_are_for_rdma(self) -> Self:
        if self.rdma_devices and self.protocol != "rdma":
            raise ValueError(f"rdma_devices is {list(self.rdma_devices)}, but protocol is {self.protocol!r}.")
        return self
