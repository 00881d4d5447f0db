"""The processes of an instance: the controller, the hosts of Mooncake's segments, and the master.

By default Mooncake keeps rows in segments of the clients. Here separate processes provide the segments, so a client
that ends or is killed takes no rows with it.

Importing this module imports Ray.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane_core.errors import BackendUnavailableError
from dataplane_core.host_memory import memory_limit
from dataplane_core.spec import new_id
from dataplane_mooncake._calls import listening_ports
from dataplane_mooncake._master import Master
from dataplane_mooncake._store import StoreSettings, endpoint_of, open_engine, pinned_in
from dataplane_mooncake.config import TQMooncakeConfig
from dataplane_mooncake.machine import check_machine, check_memory
from dataplane_tq_simple import Instance, get_within, lookup, nodes_for_units
from dataplane_tq_simple.addresses import announced_address

_logger = logging.getLogger(__name__)

_SIGN_BYTES: Final = 64
#: Seconds between two looks at the storage units, and after a failure.
_LOOK_S: Final = 0.25
_AGAIN_S: Final = 1.0
#: Seconds that the controller has to publish what changed.
_PUBLISH_S: Final = 30.0


class Described(NamedTuple):
    """What a storage unit says about itself."""

    life: str  # an id of its process
    node: str  # the id of its node
    ip: str
    available_bytes: int  # of the memory of its node


class Segment(NamedTuple):
    """A segment that a storage unit has mounted."""

    name: str  # a put may ask for it
    endpoint: str  # what Mooncake says of the rows in it
    listening: list[tuple[str, int]]  # where the unit listens for transfers


def this_nodes_address(config: TQMooncakeConfig) -> str:
    """The address that this process announces. The process must be connected to Ray."""
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    return announced_address(
        config.announce_address, ray_ip=ray.util.get_node_ip_address().strip("[]"), num_nodes=num_nodes
    )


class SegmentHost:
    """A storage unit: a Ray actor that provides a segment of memory to Mooncake."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = TQMooncakeConfig(**config)
        self._engine: Any = None
        self._life = new_id()

    def describe(self) -> Described:
        """Checks its machine, and describes itself. Raises as `check_machine` and `announced_address`."""
        check_machine(self._config)
        node = ray.get_runtime_context().get_node_id()
        return Described(self._life, node, this_nodes_address(self._config), memory_limit().available_bytes)

    def life(self) -> str:
        """The id of its process."""
        return self._life

    def open(self, master: str, sign: str, dead: Collection[str]) -> Segment:
        """Mounts a segment, instead of that of a try before.

        It leaves a row under the key ``sign``, which shows that the segment takes rows. It must not have one of the
        endpoints ``dead``: the master may still list segments of dead units there.
        """
        config = self._config
        address = this_nodes_address(config)
        settings = StoreSettings(master, address, config.protocol, config.rdma_devices, 0)
        if self._engine is not None:
            self._engine.close()
        others = listening_ports()
        self._engine = engine = open_engine(settings, segment_size_bytes=config.segment_size_bytes)
        listening = [(address, port) for port in sorted(listening_ports() - others)]
        name = engine.get_hostname()
        if name in dead:
            raise BackendUnavailableError(f"the segment got the endpoint {name} of a dead one.")
        row = np.zeros(_SIGN_BYTES, dtype=np.uint8)
        engine.register_buffer(row.ctypes.data, row.nbytes)
        (code,) = engine.batch_put_from([sign], [row.ctypes.data], [row.nbytes], pinned_in(name))
        engine.unregister_buffer(row.ctypes.data)
        if code != 0:
            raise BackendUnavailableError(f"the segment {name} takes no rows (Mooncake's code {code}).")
        return Segment(name, endpoint_of(engine.get_replica_desc(sign)), listening)


class MooncakeInstance(Instance):
    """An instance of ``tq_mooncake``.

    ``details`` holds ``master`` (host:port), ``prefix`` (of this instance's keys: another master may get the address of
    a dead one), ``segments`` (each `Segment` that is mounted, as a tuple), and ``dead`` (names and endpoints of the
    segments of dead units, which the master may still list).
    """

    prefix = "tqm-"
    distribution = "dataplane-mooncake-backend"
    protocol = 11

    def __init__(self, config: Any, controller: Any = None) -> None:
        super().__init__(config, controller)
        self._master: Master | None = None
        self._watch: UnitWatch | None = None
        self._mounted: dict[str, Segment] = {}  # by actor
        self._dead: set[str] = set()  # names and endpoints of segments of dead units
        self._lives: dict[str, str] = {}  # by actor: the id of its process

    @property
    def segments(self) -> list[Segment]:
        """The segments that are mounted, as far as this process knows. See `refresh`."""
        return msgspec.convert(self.details["segments"], list[Segment])

    @property
    def units(self) -> list[str]:
        """The names of the units' actors."""
        return [f"{self.controller_name(self.config)}/unit-{number}" for number in range(self.num_units(self.config))]

    def prepare(self, deadline: float) -> None:
        """Starts the units, checks their nodes' memory, starts the master, and has the units mount their segments."""
        config, nodes = self.config, nodes_for_units()
        units = [
            self.start_actor(
                unit,
                SegmentHost,
                {"config": config.model_dump()},
                deadline,
                num_cpus=config.unit_num_cpus,
                memory=1,  # Ray starts an actor that reserves nothing on any node, unless the strategy is strict
                max_restarts=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=True),
            )
            for number, unit in enumerate(self.units)
        ]
        answers = self.when_started([unit.describe.remote() for unit in units], deadline)
        self._check_memory(answers)
        self._master = Master(this_nodes_address(config))
        self._master.start(min(deadline, time.monotonic() + config.master_start_s))
        self.details = {"master": self._master.address, "prefix": f"{config.instance}/{new_id()}/"}
        self._mount(self.units, deadline)
        self._lives = dict(zip(self.units, [answer.life for answer in answers], strict=True))

    def _check_memory(self, answers: Sequence[Described]) -> None:
        num_units = collections.Counter(answer.node for answer in answers)
        for each in answers:
            check_memory(f"node {each.ip}", each.available_bytes, num_units[each.node], self.config)

    def _mount(self, actors: Sequence[str], deadline: float) -> None:
        """Has units mount new segments."""
        master, prefix, dead = self.details["master"], self.details["prefix"], sorted(self._dead)
        opening = [self._started[actor].open.remote(master, f"{prefix}~{new_id()}", dead) for actor in actors]
        self._mounted.update(zip(actors, get_within(opening, "mount the segments", deadline), strict=True))
        self._list_segments()

    def _list_segments(self) -> None:
        self.details = self.details | {"segments": [*map(tuple, self._mounted.values())], "dead": sorted(self._dead)}

    def publish(self, *, deadline: float) -> None:
        """Also watches the units from now on."""
        super().publish(deadline=deadline)
        if self._watch is None:
            self._watch = UnitWatch(self)

    def refresh(self, *, deadline: float) -> None:
        """Asks the controller for the details anew, since units may have died or come back. Does nothing in the
        process that watches them."""
        if self._watch is not None:
            return
        description = get_within(self.controller.get_config.remote(), "ask for details", deadline)
        self.details = description["details"]

    def watch_call(self, check_master: Callable[[], None]) -> CallWatch:
        """Watches the master and the units while a call takes long."""
        return CallWatch(self, check_master)

    # --- called by the watch -----------------------------------------------------------------------------------------

    def unit_died(self, actor: str, deadline: float) -> None:
        """Tells clients that the segment of a unit is gone. The master lists it for a while."""
        segment = self._mounted.pop(actor, None)
        if segment is not None:
            self._dead |= {segment.name, segment.endpoint}
            self._list_segments()
            self.publish(deadline=deadline)

    def unit_came_back(self, actor: str, deadline: float) -> None:
        """Has a unit that was started again mount a segment."""
        self.unit_died(actor, deadline)
        answer = get_within(self._started[actor].describe.remote(), "describe a storage unit", deadline)
        self._check_memory([answer])
        self._mount([actor], deadline)
        self.publish(deadline=deadline)

    def stop(self) -> None:
        """Ends the units, then the master."""
        if self._watch is not None:
            self._watch.stop()
        try:
            super().stop()
        finally:
            if self._master is not None:
                self._master.stop()


class UnitWatch:
    """Watches the storage units of an instance, in a thread of the process that bootstrapped it.

    A unit that died is started again by Ray. Then it mounts a new segment. Without the master all is lost, and the
    watch ends.
    """

    def __init__(self, instance: MooncakeInstance) -> None:
        self._instance = instance
        self._asked: dict[str, Any] = {}  # by actor
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of a tq_mooncake instance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Lets them be. Waits until a start under way has ended."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        failed = False
        while not self._stopped.wait(_AGAIN_S if failed else _LOOK_S):
            master = self._instance._master
            if master is not None and master.ended:
                _logger.error("the mooncake_master at %s died, and with it all rows: bootstrap again", master.address)
                return
            try:
                self._look()
                failed = False
            except Exception as error:
                failed = True
                _logger.warning("a storage unit died, and cannot be brought back: %s", error)

    def _look(self) -> None:
        if not ray.is_initialized():
            return
        for actor in self._instance._lives.keys() - self._asked.keys():
            self._asked[actor] = self._instance._started[actor].life.remote()
        answered, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        for actor in [actor for actor, ref in self._asked.items() if ref in answered]:
            try:
                life = ray.get(self._asked.pop(actor), timeout=0)
            except ray.exceptions.RayActorError:
                self._instance.unit_died(actor, time.monotonic() + _PUBLISH_S)
                continue
            except ray.exceptions.RayError:
                continue  # says nothing about the unit
            if life != self._instance._lives[actor]:
                self._instance.unit_came_back(actor, time.monotonic() + self._instance.config.master_start_s)
                self._instance._lives[actor] = life
                _logger.warning("a storage unit (%s) died, and was started again", actor)


class CallWatch:
    """While a call takes long, checks the master, and asks Ray which storage units are alive."""

    def __init__(self, instance: MooncakeInstance, check_master: Callable[[], None]) -> None:
        self._check_master = check_master
        self.asked: dict[str, Any] = {}  # by the units' names: questions without an answer
        self._alive: list[str] = []
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                actors = {f"storage {unit.rpartition('/')[2]}": lookup(unit) for unit in instance.units}
                self.asked = {name: actor.__ray_ready__.remote() for name, actor in actors.items() if actor is not None}

    def check(self) -> str:
        """Raises `BackendUnavailableError` if the master is dead. Does not block for long. As `describe`."""
        self._check_master()
        if self.asked and ray.is_initialized():
            answered, _ = ray.wait(list(self.asked.values()), num_returns=len(self.asked), timeout=0)
            for name in [name for name, ref in self.asked.items() if ref in answered]:
                with contextlib.suppress(ray.exceptions.RayError):  # it died: its segment is soon known to be gone
                    ray.get(self.asked[name], timeout=0)
                    self._alive.append(name)
                    del self.asked[name]
        return self.describe()

    def describe(self) -> str:
        """What is known about the units, as a sentence."""
        if self.asked:
            return f"The {', '.join(self.asked)} did not answer Ray either: stopped, overloaded, or not reachable."
        if not self._alive:
            return "Ray knows nothing about the storage units at the moment."
        return (
            f"The {', '.join(self._alive)} is alive, but busy with other requests or not reachable from this process."
        )
