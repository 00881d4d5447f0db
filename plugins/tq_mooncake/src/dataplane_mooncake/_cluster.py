"""The processes of an instance: the controller, the hosts of Mooncake's segments, and the master. `Keeper`
brings back what dies of them.

By default Mooncake keeps rows in segments of the clients. Here separate processes provide the segments, so a client
that ends or is killed takes no rows with it.

Importing this module imports Ray.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import ray
import ray.exceptions

from dataplane_core.errors import BackendUnavailableError
from dataplane_core.host_memory import memory_limit
from dataplane_core.spec import new_id
from dataplane_mooncake._ending import listening_ports
from dataplane_mooncake._master import Master
from dataplane_mooncake._store import StoreSettings, endpoint_of, open_engine, pinned_in
from dataplane_mooncake.config import TQMooncakeConfig
from dataplane_mooncake.machine import NodeMemory, check_machine, check_memory
from dataplane_tq_simple.addresses import announced_address
from dataplane_tq_simple.engines import Instance, get_within

_logger = logging.getLogger(__name__)

_SIGN_BYTES: Final = 64
#: How often a storage unit may be given the endpoint of a dead one, before it is an error.
_NUM_OPENS: Final = 5
#: Seconds between two looks, and after a failure.
_LOOK_S: Final = 0.1
_AGAIN_S: Final = 1.0
#: Seconds between two questions to a storage unit.
_ASK_S: Final = 0.5
#: Seconds that the storage units have to let go of a dead master, and the controller to publish what changed.
_LET_GO_S: Final = 30.0


class Described(NamedTuple):
    """What a storage unit says about itself.

    Attributes:
        life: An id of its process.
        node: The id of its node.
        ip: Its address.
        available_bytes: The memory available there, in bytes.
    """

    life: str
    node: str
    ip: str
    available_bytes: int


class Segment(NamedTuple):
    """A segment that a storage unit has mounted.

    Attributes:
        name: Its name, which a put may ask for.
        endpoint: Identifies it as the place of a row.
        listening: Where the engine listens for transfers.
        sign: The key of a row in it: the segment is mounted as long as the row exists.
    """

    name: str
    endpoint: str
    listening: list[tuple[str, int]]
    sign: str


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
        self._life = new_id()

    def describe(self) -> Described:
        """Checks its machine, and describes itself.

        Raises:
            ConfigError: As `check_machine`; or other nodes cannot reach its address.
        """
        check_machine(self._config)
        node = ray.get_runtime_context().get_node_id()
        return Described(self._life, node, this_nodes_address(self._config), memory_limit().available_bytes)

    def life(self) -> str:
        """The id of its process."""
        return self._life

    def close(self) -> None:
        """Unmounts the segment and frees its memory. Has no effect if none is mounted."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def open(self, master: str, sign: str, dead: Collection[str]) -> Segment:
        """Mounts a segment, instead of one that is mounted.

        Args:
            master: ``host:port`` of the master.
            sign: The key of a row that it leaves in the store.
            dead: Endpoints that it must not have: the master may still list segments of dead units there.
        """
        config = self._config
        address = this_nodes_address(config)
        settings = StoreSettings(master, address, config.protocol, config.rdma_devices, 0, config.store_memcpy)
        self.close()
        row = np.zeros(_SIGN_BYTES, dtype=np.uint8)
        for _ in range(_NUM_OPENS):
            others = listening_ports()
            self._engine = engine = open_engine(settings, segment_size_bytes=config.segment_size_bytes)
            listening = [(address, port) for port in sorted(listening_ports() - others)]
            name = engine.get_hostname()
            if name not in dead:
                break
            self.close()
        else:
            raise BackendUnavailableError(f"a segment got the endpoint {name} of a dead one, {_NUM_OPENS} times.")
        engine.register_buffer(row.ctypes.data, row.nbytes)
        (code,) = engine.batch_put_from([sign], [row.ctypes.data], [row.nbytes], pinned_in(name))
        engine.unregister_buffer(row.ctypes.data)
        if code != 0:
            raise BackendUnavailableError(f"the segment {name} takes no rows (Mooncake's code {code}).")
        return Segment(name, endpoint_of(engine.get_replica_desc(sign)), listening, sign)


class MooncakeInstance(Instance):
    """An instance of ``tq_mooncake``.

    ``details`` holds ``master`` (host:port), ``prefix`` (of this instance's keys), ``owns_master`` (whether the
    instance started the master, and starts it again), ``segments`` (each `Segment` that is mounted, as a tuple), and
    ``dead`` (names and endpoints of segments of dead units, which the master may still list).
    """

    prefix = "tqm-"
    distribution = "dataplane-mooncake-backend"
    protocol = 9
    unit_class = SegmentHost

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._master: Master | None = None
        self._keeper: Keeper | None = None
        self._mounted: dict[str, Segment] = {}  # by actor
        self._dead: set[str] = set()  # names and endpoints of segments of dead units
        self._lives: dict[str, str] = {}  # by actor: the id of its process

    @property
    def master_pid(self) -> int | None:
        """Process id of the master, or None if this process did not start it."""
        return None if self._master is None else self._master.pid

    @property
    def segments(self) -> list[Segment]:
        """The segments that are mounted, as far as this process knows. See `refresh`."""
        return [Segment(*each) for each in self.details["segments"]]

    @classmethod
    def _unit_arguments(cls, config: TQMooncakeConfig) -> Mapping[str, Any]:
        return {"config": config.model_dump()}

    def _prepare(self, answers: Sequence[Described], deadline: float) -> None:
        """Checks that the memory suffices, starts the master, and has the units mount their segments."""
        config = self.config
        self._check_memory(answers)
        address = config.master_address
        try:
            if address is None:
                self._master = Master(this_nodes_address(config))
                self._master.start(min(deadline, time.monotonic() + config.master_start_s))
                address = self._master.address
            self.details = {
                "master": address,
                "prefix": f"{config.instance}/{new_id()}/",
                "owns_master": self._master is not None,
            }
            self._mount([unit.actor for unit in self.units], deadline)
        except BaseException:
            self._stop_master()
            raise
        self._lives = {unit.actor: answer.life for unit, answer in zip(self.units, answers, strict=True)}

    def _check_memory(self, answers: Sequence[Described]) -> None:
        num_units = collections.Counter(answer.node for answer in answers)
        nodes = {
            each.node: NodeMemory(f"node {each.ip}", each.available_bytes, num_units[each.node]) for each in answers
        }
        check_memory(list(nodes.values()), self.config)

    def _mount(self, actors: Sequence[str], deadline: float) -> None:
        """Has units mount new segments."""
        prefix, dead = self.details["prefix"], sorted(self._dead)
        opening = [
            self._handles[actor].open.remote(self.details["master"], f"{prefix}~{new_id()}", dead) for actor in actors
        ]
        self._mounted.update(zip(actors, get_within(opening, "mount the segments", deadline), strict=True))
        self._list_segments()

    def _list_segments(self) -> None:
        mounted = [tuple(each) for each in self._mounted.values()]
        self.details = {**self.details, "segments": mounted, "dead": sorted(self._dead)}

    def publish(self, *, deadline: float) -> None:
        """Also watches the units and the master from now on, and starts a master that dies again."""
        super().publish(deadline=deadline)
        if self._keeper is None:
            self._keeper = Keeper(self)

    def refresh(self, *, deadline: float) -> None:
        """Asks the controller for the details anew: segments may have been mounted, or their units died.

        Has no effect in the process that keeps them.
        """
        if self._keeper is not None:
            return
        description = get_within(self._controller.get_config.remote(), "ask for details", deadline)
        self.details = description["details"]

    def ask_units(self) -> dict[str, Any]:
        """Asks all units whether they live. Returns Ray references to the answers, by the units' names in messages."""
        return {unit.name: self._handles[unit.actor].__ray_ready__.remote() for unit in self.units}

    # --- called by the keeper ----------------------------------------------------------------------------------------

    def unmount_all(self, deadline: float) -> None:
        """Has all units let go of their segments. A dead unit counts as having done so."""
        closing = {actor: self._handles[actor].close.remote() for actor in self._mounted}
        for actor, ref in closing.items():
            try:
                get_within(ref, "unmount the segments of a dead master", deadline)
            except BackendUnavailableError as error:
                if not isinstance(error.__cause__, ray.exceptions.RayActorError):
                    raise
                del self._mounted[actor]

    def mount_all(self, deadline: float) -> None:
        """Has all units that had a segment mount a new one, at a master that knows of no others."""
        self._dead.clear()
        self._mount(list(self._mounted), deadline)
        self.publish(deadline=deadline)

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
        answer = get_within(self._handles[actor].describe.remote(), "describe a storage unit", deadline)
        self._check_memory([answer])
        self._mount([actor], deadline)
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


@dataclass(slots=True)
class _Unit:
    """A storage unit: its handle, the id of its process, and a question to it."""

    handle: Any
    life: str
    asked: Any = None
    ask_at: float = 0.0


class Keeper:
    """Watches the units and the master of an instance, in a thread of the process that bootstrapped it.

    A unit that died is started again by Ray. Then it mounts a new segment.

    A put that began with a dead master may still write, late, to memory that the new one has given to other rows. So
    the segments are unmounted and their memory is freed before the new master starts, and new ones are mounted: late
    writes find nobody.

    Args:
        instance: The instance, whose segments are mounted.
    """

    def __init__(self, instance: MooncakeInstance) -> None:
        self._instance = instance
        self._master = instance._master  # None: it belongs to somebody else
        self._units = {actor: _Unit(instance._handles[actor], life) for actor, life in instance._lives.items()}
        self._start_s = instance.config.master_start_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper of a tq_mooncake instance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Lets them be. Waits until a start under way has ended."""
        self._stopped.set()
        self._thread.join()

    def _keep(self) -> None:
        mounted, failed = True, False
        while not self._stopped.wait(_AGAIN_S if failed else _LOOK_S):
            what = "the storage units"
            try:
                if mounted and (self._master is None or not self._master.ended):
                    self._look_at_units()
                elif self._master is not None:
                    mounted, what = False, f"the mooncake_master at {self._master.address}"
                    self._bring_back(self._master)
                    mounted = True
                failed = False
            except Exception as error:
                failed = True
                _logger.warning("%s died, and cannot be brought back: %s", what, error)

    def _bring_back(self, master: Master) -> None:
        self._instance.unmount_all(time.monotonic() + _LET_GO_S)
        if self._stopped.is_set():
            return
        master.start_again(time.monotonic() + self._start_s)
        self._instance.mount_all(time.monotonic() + self._start_s)
        _logger.warning("the mooncake_master at %s died, and was started again", master.address)

    def _look_at_units(self) -> None:
        if not ray.is_initialized():
            return
        now = time.monotonic()
        for unit in self._units.values():
            if unit.asked is None and now >= unit.ask_at:
                unit.asked, unit.ask_at = unit.handle.life.remote(), now + _ASK_S
        asked = {actor: unit.asked for actor, unit in self._units.items() if unit.asked is not None}
        if not asked:
            return
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)
        for actor in [actor for actor, ref in asked.items() if ref in answered]:
            unit = self._units[actor]
            unit.asked = None
            try:
                life = ray.get(asked[actor], timeout=0)
            except ray.exceptions.RayActorError:
                self._instance.unit_died(actor, time.monotonic() + _LET_GO_S)
                continue
            except ray.exceptions.RayError:
                continue  # says nothing about the unit
            if life != unit.life:
                self._instance.unit_came_back(actor, time.monotonic() + self._start_s)
                unit.life = life
                _logger.warning("a storage unit (%s) died, and was started again", actor)
