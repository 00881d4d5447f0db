"""`Keeper` brings back what dies of an instance: the master, and the segments of storage units."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import ray
import ray.exceptions

from dataplane_mooncake._master import Master

_logger = logging.getLogger(__name__)

#: Seconds between two looks, and after a failure.
_LOOK_S: Final = 0.1
_AGAIN_S: Final = 1.0
#: Seconds between two questions to a storage unit.
_ASK_S: Final = 0.5
#: Seconds that the storage units have to let go of a dead master, and the controller to publish what changed.
_LET_GO_S: Final = 30.0


class Kept(Protocol):
    """What a `Keeper` asks of an instance."""

    def unmount_all(self, deadline: float) -> None:
        """Has all units let go of their segments. A dead unit counts as having done so."""

    def mount_all(self, deadline: float) -> None:
        """Has all units that had a segment mount a new one, at a master that knows of no others."""

    def unit_died(self, actor: str, deadline: float) -> None:
        """Tells clients that the segment of a unit is gone."""

    def unit_came_back(self, actor: str, deadline: float) -> None:
        """Has a unit that was started again mount a segment."""


class _Unit:
    """A storage unit: its handle, the id of its process, and a question to it."""

    def __init__(self, handle: Any, life: str) -> None:
        self.handle = handle
        self.life = life
        self.asked: Any = None
        self.ask_at = 0.0


class Keeper:
    """Watches the units and the master of an instance, in a thread of the process that bootstrapped it.

    A unit that died is started again by Ray. Then it mounts a new segment.

    A put that began with a dead master may still write, late, to memory that the new one has given to other rows. So
    the segments are unmounted and their memory is freed before the new master starts, and new ones are mounted: late
    writes find nobody.

    Args:
        instance: The instance, whose segments are mounted.
        master: A master that runs. None: it belongs to somebody else.
        units: Handle, and id of the process, of each unit; by actor.
        start_s: Seconds that the start of the master, and mounting, may take.
    """

    def __init__(
        self, instance: Kept, master: Master | None, units: Mapping[str, tuple[Any, str]], start_s: float
    ) -> None:
        self._instance = instance
        self._master = master
        self._units = {actor: _Unit(*unit) for actor, unit in units.items()}
        self._start_s = start_s
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
