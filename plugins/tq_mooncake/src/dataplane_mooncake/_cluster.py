"""The processes of an instance: TransferQueue's controller, the hosts of Mooncake's segments, and the master.

By default Mooncake keeps rows in segments of the clients. Here separate processes provide the segments, so a client
that ends or is killed takes no rows with it.

Importing this module imports Ray and TransferQueue.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

import numpy as np
import ray

from dataplane_core.errors import BackendUnavailableError
from dataplane_mooncake._ending import listening_ports
from dataplane_mooncake._master import Master, MasterKeeper
from dataplane_mooncake._store import StoreSettings, open_engine
from dataplane_mooncake.config import TQMooncakeConfig
from dataplane_mooncake.machine import (
    NodeMemory,
    available_memory_bytes,
    check_distributions,
    check_library,
    check_memory,
    check_rdma,
)
from dataplane_tq_simple._actors import get_within
from dataplane_tq_simple._cluster import Instance
from dataplane_tq_simple.addresses import announced_address

__all__ = ["MooncakeInstance", "SegmentHost", "check_machine", "this_nodes_address"]

_SIGN_BYTES: Final = 64


def check_machine(config: TQMooncakeConfig) -> None:
    """Checks what every process that loads Mooncake needs.

    Raises:
        ConfigError: Something is missing; the message names the command that repairs it.
    """
    check_distributions()
    check_library()
    if config.protocol == "rdma":
        check_rdma(config.rdma_devices)


def this_nodes_address(config: TQMooncakeConfig) -> str:
    """The address that this process announces. The process must be connected to Ray."""
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    return announced_address(
        config.announce_address, ray_ip=ray.util.get_node_ip_address().strip("[]"), num_nodes=num_nodes
    )


class SegmentHost:
    """A storage unit: a Ray actor that provides a segment of memory to Mooncake.

    Args:
        config: The options, as a dict.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = TQMooncakeConfig(**config)
        self._engine: Any = None

    def describe(self) -> dict[str, Any]:
        """Checks its machine. Returns its node, its address, and the memory available there in bytes.

        Raises:
            ConfigError: As `check_machine`; or other nodes cannot reach its address.
        """
        check_machine(self._config)
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "ip": this_nodes_address(self._config),
            "available_bytes": available_memory_bytes(),
        }

    def close(self) -> None:
        """Unmounts the segment and frees its memory. Has no effect if none is mounted."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def open(self, master: str, sign: str) -> tuple[str, str, list[int]]:
        """Mounts a segment.

        Args:
            master: ``host:port`` of the master.
            sign: The key of a row that it leaves in the store: the segment is mounted as long as the row exists.

        Returns:
            Its name, which a put may ask for; its endpoint, which identifies it as the place of a row; and the ports on
            which the engine listens for transfers.
        """
        config = self._config
        address = this_nodes_address(config)
        settings = StoreSettings(master, address, config.protocol, config.rdma_devices, 0, config.store_memcpy)
        others = listening_ports()
        self._engine = engine = open_engine(settings, segment_size_bytes=config.segment_size_bytes)
        ports = sorted(listening_ports() - others)
        name = engine.get_hostname()
        replicas = check_library().ReplicateConfig()
        replicas.preferred_segments = [name]
        replicas.with_hard_pin = True
        row = np.zeros(_SIGN_BYTES, dtype=np.uint8)
        engine.register_buffer(row.ctypes.data, row.nbytes)
        (code,) = engine.batch_put_from([sign], [row.ctypes.data], [row.nbytes], replicas)
        engine.unregister_buffer(row.ctypes.data)
        if code != 0:
            raise BackendUnavailableError(f"the segment {name} takes no rows (Mooncake's code {code}).")
        (replica,) = engine.get_replica_desc(sign)
        return name, replica.get_memory_descriptor().buffer_descriptor.transport_endpoint, ports


class MooncakeInstance(Instance):
    """An instance of ``tq_mooncake``.

    ``details`` holds ``master`` (host:port), ``prefix`` (of this instance's keys), ``segments`` (the units' segments by
    name, with their endpoints; None if the instance started the master), ``signs`` (keys of rows that exist while all
    segments are mounted; None if the instance did not start the master, and so does not start it again), and
    ``listening`` (the addresses and ports on which the units' engines listen).
    """

    prefix = "tqm-"
    distribution = "dataplane-mooncake"
    protocol = 4

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._master: Master | None = None
        self._keeper: MasterKeeper | None = None

    @property
    def master_pid(self) -> int | None:
        """Process id of the master, or None if this process did not start it."""
        return None if self._master is None else self._master.pid

    @classmethod
    def _unit_class(cls) -> type:
        return SegmentHost

    @classmethod
    def _unit_arguments(cls, config: TQMooncakeConfig) -> Mapping[str, Any]:
        return {"config": config.model_dump()}

    @staticmethod
    def ask_unit(handle: Any) -> Any:
        return handle.describe.remote()

    @staticmethod
    def _unit_address(answer: Any) -> tuple[str, int]:
        return answer["ip"], 0

    def _prepare(self, answers: Sequence[Any], deadline: float) -> None:
        """Checks that the memory suffices, starts the master, and has the units mount their segments."""
        config = self.config
        num_units = collections.Counter(answer["node"] for answer in answers)
        nodes = {
            answer["node"]: NodeMemory(f"node {answer['ip']}", answer["available_bytes"], num_units[answer["node"]])
            for answer in answers
        }
        check_memory(
            list(nodes.values()),
            segment_size_bytes=config.segment_size_bytes,
            local_buffer_size_bytes=config.local_buffer_size_bytes,
            clients_per_node=config.clients_per_node,
        )
        address = config.master_address
        try:
            if address is None:
                self._master = Master(this_nodes_address(config))
                self._master.start(min(deadline, time.monotonic() + config.master_start_s))
                address = self._master.address
            prefix = f"{config.instance}/{uuid4().hex}/"
            signs = [f"{prefix}~{unit.name}" for unit in self.units]
            mounted = self._mount(address, signs, deadline)
        except BaseException:
            self._stop_master()
            raise
        self.details = {
            "master": address,
            "prefix": prefix,
            "segments": None if self._master is not None else {name: endpoint for name, endpoint, _ in mounted},
            "signs": None if self._master is None else signs,
            "listening": self._listening(mounted),
        }

    def _mount(self, master: str, signs: Sequence[str], deadline: float) -> list[Any]:
        opening = [
            self._handles[unit.actor].open.remote(master, sign) for unit, sign in zip(self.units, signs, strict=True)
        ]
        return list(get_within(opening, "mount the segments", deadline))

    def _listening(self, mounted: Sequence[Any]) -> list[tuple[str, int]]:
        return [(unit.ip, port) for unit, (_, _, ports) in zip(self.units, mounted, strict=True) for port in ports]

    def publish(self, *, deadline: float) -> None:
        """Also starts the master again from now on, if this process has started it."""
        super().publish(deadline=deadline)
        if self._master is not None and self._keeper is None:
            self._keeper = MasterKeeper(self._master, self._unmount, self._mount_again, self.config.master_start_s)

    def refresh(self, *, deadline: float) -> None:
        """Asks the controller for the details anew: segments may have been mounted again."""
        description = get_within(self._handles[self.controller.actor].get_config.remote(), "ask for details", deadline)
        self.details = description["details"]

    def _unmount(self, deadline: float) -> None:
        closing = [self._handles[unit.actor].close.remote() for unit in self.units]
        get_within(closing, "unmount the segments of a dead master", deadline)

    def _mount_again(self, deadline: float) -> None:
        mounted = self._mount(self.details["master"], self.details["signs"], deadline)
        self.details = {**self.details, "listening": self._listening(mounted)}
        self.publish(deadline=deadline)

    def stop(self) -> None:
        """Ends the units, then the master."""
        if self._keeper is not None:
            self._keeper.stop()
        try:
            super().stop()
        finally:
            self._stop_master()

    def _stop_master(self) -> None:
        if self._master is not None:
            self._master.stop()
