"""Keeps a storage unit on each node of the cluster, in a thread of the controller: starts them, learns who died.

The keeper has a session with each unit, over which nothing is sent: its end tells that the unit may have died. Then,
where Ray says that its node is gone, its actor is asked what it is. One thread judges for all clients, so they agree on
which rows are lost.

Importing this module imports Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import ray
import ray.exceptions

from dataplane_core.errors import BackendUnavailableError, DataPlaneError, OperationTimeoutError, preview
from dataplane_core.hosting import Drop, ExtentHost, Retain, Session, TcpAddress
from dataplane_core.spec import new_id
from dataplane_tq_simple._actors import alive_nodes, cause, data_plane_error, lookup, named_actors, nodes_for_units
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._host import ControllerHost

_logger = logging.getLogger(__name__)

#: Seconds between two looks at what changes, and where nothing does.
_BUSY_S: Final = 0.05
_IDLE_S: Final = 0.2
#: Seconds between two looks at the nodes.
_NODES_S: Final = 1.0
#: Seconds between two questions to a unit that does not serve.
_ASK_S: Final = 0.2
#: Seconds between two units of a node if the first one ended before it served.
_CREATE_AGAIN_S: Final = 1.0
#: Seconds after which a unit that failed to drop rows is told again.
_RETAIN_AGAIN_S: Final = 5.0
#: Seconds that a try to reach a unit may take, and that it may take to drop rows.
_REACH_S: Final = 0.5
_RETAIN_S: Final = 10.0
#: What Ray answers in the place of an actor that has ended. `ActorUnavailableError` is none of it.
_ENDED: Final = (
    ray.exceptions.RayActorError,
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.ActorUnschedulableError,
)


@dataclass(slots=True)
class _Watched:
    """A unit of a node.

    Attributes:
        node: Its node.
        handle: Its actor. None: it is to be created.
        create_at: When.
        new: The name of a folder that it may make.
        started: What it said, if it serves.
        session: The session with it. None: it may have died.
        asked: A question to it.
        ask_at: When it is asked next.
        settled: Whether it serves, or cannot now: then rows that nobody serves may not come any more.
        retain: Whether it is to be told which of its rows exist.
        retain_at: When.
    """

    node: str
    handle: Any = None
    create_at: float = 0.0
    new: str = field(default_factory=new_id)
    started: Started | None = None
    session: Session | None = None
    asked: Any = None
    ask_at: float = 0.0
    settled: bool = False
    retain: bool = False
    retain_at: float = 0.0


class Keeper:
    """See above.

    Args:
        host: Has the book, and knows which rows are garbage.
        prefix: What the actor names of the units start with.
        create: Creates the actor of a unit, by its name and the id of its node.
        wait_s: For so many seconds, rows that nobody serves are waited for.
    """

    def __init__(self, host: ControllerHost, prefix: str, create: Callable[[str, str], Any], wait_s: float) -> None:
        self._host = host
        self._book = host.book
        self._prefix = prefix
        self._create_unit = create
        self._wait_s = wait_s
        self._units: dict[str, _Watched] = {}
        self._alive: set[str] = set()  # nodes
        self._look_at = 0.0
        self._awaited: dict[int, float] = {}  # lives that nobody serves -> until when they are waited for
        self._failure: DataPlaneError | None = None

    def begin(self, deadline: float) -> list[Started]:
        """Starts the thread. Returns when the units of all nodes serve.

        Raises:
            DataPlaneError: One of them cannot.
            OperationTimeoutError: They did not start in time.
        """
        self.start()
        while time.monotonic() < deadline:
            if self._failure is not None:
                raise self._failure
            found = [each.started for each in list(self._units.values())]
            serving = [each for each in found if each is not None]
            if found and len(serving) == len(found):
                return serving
            time.sleep(_BUSY_S)
        waiting = [name for name, each in self._units.items() if each.started is None]
        raise OperationTimeoutError(f"{preview(waiting)} of {len(self._units)} storage units did not start in time.")

    def come_back(self) -> None:
        """Takes over the units of the book, in a controller that was started again."""
        for name, node in self._book.nodes().items():
            self._units[name] = _Watched(node, lookup(self._prefix + name))
            if self._units[name].handle is None:
                self._book.ended(name)
        # it may have died while it created one
        for actor in named_actors(self._prefix):
            if actor.removeprefix(self._prefix) not in self._units:
                with suppress(Exception):
                    ray.kill(lookup(actor), no_restart=True)
        self.start()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._keep, name="dataplane-units", daemon=True).start()

    def _keep(self) -> None:
        while True:
            try:
                busy = any(each.session is None or each.retain for each in self._units.values())
                time.sleep(_BUSY_S if busy else _IDLE_S)
                self._turn()
            except Exception:
                _logger.exception("watching the storage units failed; trying again")

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._alive, self._look_at = alive_nodes(), now + _NODES_S
            with_unit = {each.node for each in self._units.values()}
            for node in nodes_for_units():
                if node not in with_unit:
                    self._units[self._book.unit_on(node)] = _Watched(node)
        for name, unit in list(self._units.items()):
            self._listen(unit)
            if unit.handle is None:
                self._create(name, unit, now)
            elif unit.session is None:
                self._ask(name, unit, now)
            elif unit.retain and now >= unit.retain_at:
                self._retain(name, unit, unit.session)
        self._give_up(now)

    def _create(self, name: str, unit: _Watched, now: float) -> None:
        if unit.node not in self._alive:
            self._book.left(name)
            del self._units[name]
        elif now >= unit.create_at:
            unit.create_at = now + _CREATE_AGAIN_S
            with suppress(ValueError):  # Ray has not freed its name yet
                unit.handle = self._create_unit(self._prefix + name, unit.node)

    def _listen(self, unit: _Watched) -> None:
        """Notices that a unit may have died."""
        if unit.session is not None:
            try:
                unit.session.check("watch a storage unit")
            except DataPlaneError:
                unit.session = None
            else:
                if unit.node not in self._alive:
                    unit.session.close()
                    unit.session = None

    def _ask(self, name: str, unit: _Watched, now: float) -> None:
        """Asks a unit what it is."""
        if unit.asked is None:
            if now >= unit.ask_at:
                tokens = {each: self._book.token_of(each) for each in self._units}
                others = tuple(tokens[each] or other.new for each, other in self._units.items() if other is not unit)
                unit.asked, unit.ask_at = unit.handle.start.remote(tokens[name], others, unit.new), now + _ASK_S
            return
        if not ray.wait([unit.asked], timeout=0)[0]:
            return
        asked, unit.asked = unit.asked, None
        try:
            answer = ray.get(asked, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            return  # it may be starting
        except _ENDED as error:
            with suppress(Exception):
                ray.kill(unit.handle, no_restart=True)  # else Ray keeps its name
            self._book.ended(name)
            self._units[name] = _Watched(unit.node)
            if unit.started is None and unit.node in self._alive:
                self._units[name].create_at = unit.create_at
                self._fails(
                    name,
                    BackendUnavailableError(
                        f"{name} did not start on node {unit.node}: {cause(error)}",
                        hint="dataplane-tq-simple must be installed, in this version, on every node of the cluster.",
                    ),
                )
        except ray.exceptions.RayTaskError as error:
            self._fails(name, data_plane_error(error) or BackendUnavailableError(cause(error), retryable=False))
        except ray.exceptions.RayError:
            return  # says nothing about the actor
        else:
            if answer is None:  # its folder may come
                unit.settled = True
                self._book.waits(name, "")
            else:
                self._serves(name, unit, answer)

    def _fails(self, name: str, error: DataPlaneError) -> None:
        _logger.warning("%s does not serve, and is tried again: %s", name, error)
        self._units[name].settled = True
        self._failure = self._failure or error
        if not error.retryable:
            self._book.waits(name, str(error))

    def _serves(self, name: str, unit: _Watched, started: Started) -> None:
        address = _UnitAddress(started.ip, started.port, started.secret)
        if unit.node in self._alive:
            with suppress(DataPlaneError):  # it cannot be reached now
                unit.session = Session(address, ExtentHost.messages, time.monotonic() + _REACH_S)
        if unit.started != started:
            unit.started, unit.settled, unit.retain = started, True, started.kept
            self._book.started(name, started)

    def _retain(self, name: str, unit: _Watched, session: Session) -> None:
        """Tells a unit that keeps rows which of those that an earlier process left there exist, and which were given up
        while it was away. It serves already."""
        garbage = [ref for ref in self._host.garbage() if self._book.is_here(name, ref)]
        deadline = time.monotonic() + _RETAIN_S
        try:
            session.call("retain", deadline, Retain(self._book.rows_of(name)))
            session.call("drop", deadline, Drop(garbage))
        except DataPlaneError as error:  # else what nobody can read would fill its memory
            unit.retain_at = time.monotonic() + _RETAIN_AGAIN_S
            _logger.warning("%s keeps rows that nobody needs, and is told again: %s", name, error)
        else:
            unit.retain = False
            self._host.collected(garbage)

    def _give_up(self, now: float) -> None:
        """Names the rows as lost for which the wait is over. Those of a unit that says why are waited for."""
        awaited = self._book.awaited()
        until, settled = now + self._wait_s, all(each.settled for each in self._units.values())
        waits = {number: why or not settled for number, why in awaited.items()}
        self._awaited = {each: until if anew else self._awaited.get(each, until) for each, anew in waits.items()}
        for number, anew in waits.items():
            if not anew and now >= self._awaited[number]:
                self._book.give_up(number)


class _UnitAddress(TcpAddress):
    """Where a unit is reached."""

    def failure(self, what: str, error: Exception, *, connecting: bool) -> DataPlaneError:
        """As `Address.failure`."""
        return BackendUnavailableError(f"{what}: {error}")
