"""Watches the storage units of an instance, in a thread of the controller: learns who died, starts and ends units.

The keeper has a session with each unit, over which nothing is sent: the end of its connection tells at once that the
unit may have died. It has if nobody listens at its address any more, or if its actor, which Ray starts again, says that
it is another life. One thread judges for all clients, so they agree on which rows are lost.

Importing this module imports Ray.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import ray
import ray.exceptions

from dataplane_core.errors import BackendUnavailableError, DataPlaneError
from dataplane_core.hosting import ExtentHost, Session, TcpAddress
from dataplane_core.ledger import Ref
from dataplane_tq_simple._actors import cause, data_plane_error, lookup, named_actors, nodes_for_units
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._host import ControllerHost
from dataplane_tq_simple._kept import Place
from dataplane_tq_simple.addresses import refuses

_logger = logging.getLogger(__name__)

#: Seconds between two looks at what changes, and where nothing does.
_BUSY_S: Final = 0.05
_IDLE_S: Final = 0.2
#: Seconds between two questions to a unit that does not run.
_ASK_S: Final = 0.2
#: Seconds between two questions to the nodes for the place of a unit, and between two tries to start it.
_SEARCH_S: Final = 1.0
#: Seconds after which a unit that failed to drop rows is told again.
_RETAIN_AGAIN_S: Final = 5.0
#: Seconds that a try to reach a unit may take.
_REACH_S: Final = 0.5
#: Seconds that a unit may take to delete what it keeps.
_DISCARD_S: Final = 5.0
#: What Ray answers in the place of an actor that it does not start again. `ActorUnavailableError` is none of it.
_GIVEN_UP: Final = (
    ray.exceptions.RayActorError,
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.ActorUnschedulableError,
)


@dataclass(slots=True)
class _Ear:
    """The connection to a life of a unit."""

    actor: str
    started: Started
    session: Session | None = None
    suspect: bool = False

    def hang_up(self) -> None:
        """Ends the session."""
        if self.session is not None:
            self.session.close()
            self.session = None


@dataclass(slots=True)
class _Asked:
    """A question to the actor of a unit."""

    handle: Any = None
    ref: Any = None
    ask_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Search:
    """A search for the node that has the place of a unit. It lasts until the unit serves.

    Attributes:
        place: The name of the place.
        give_up: When the unit begins without it.
        looks: Whether nodes are to be asked. Not while the unit is being started on the one that has it.
        asked: Nodes by the references to their answers.
        ask_at: When they are asked next, or the unit is created without it.
        node: The node that has it.
        num_begun: How often the unit was created without it.
        why: What Ray said when it gave the unit up last.
    """

    place: str
    give_up: float
    looks: bool = True
    asked: dict[Any, str] = field(default_factory=dict)
    ask_at: float = field(default_factory=time.monotonic)
    node: str | None = None
    num_begun: int = 0
    why: str = ""


@dataclass(slots=True)
class _Retained:
    """A unit that is to be told which of its rows exist, or is told so now; and which garbage it is to drop."""

    started: Started
    garbage: dict[Ref, Ref] = field(default_factory=dict)
    ref: Any = None
    tell_at: float = field(default_factory=time.monotonic)


class Keeper:
    """See above.

    Args:
        host: Has the book, and knows which rows are garbage.
        prefix: What the actor names of the units start with.
        create: Creates the actor of a unit, by its name, the id of its node, and its place. Its creator owns it.
        places: If units keep rows: asks nodes for the places that lie there. See `Instance.places`.
        wait_s: Seconds that a unit waits for a node with its place.
    """

    def __init__(
        self,
        host: ControllerHost,
        prefix: str,
        create: Callable[..., Any],
        places: Callable[[Sequence[str]], dict[str, Any]] | None,
        *,
        wait_s: float,
    ) -> None:
        self._host = host
        self._prefix = prefix
        self._create_unit = create
        self._places = places
        self._wait_s = wait_s
        self._book = host.book
        self._ears: dict[str, _Ear] = {}
        self._asked: dict[str, _Asked] = {}
        self._searches: dict[str, _Search] = {}
        self._to_retain: dict[str, _Retained] = {}
        self._handles: dict[str, Any] = {}  # by actor; Ray ends an actor that this created when its handle is gone

    def begin(self, units: list[tuple[str, str, Started]]) -> None:
        """Takes over the units that run, and starts the thread."""
        self._handles = {actor: lookup(actor) for _, actor, _ in units}
        self._book.begin(self._prefix, units)
        self._begin_to_retain(units)
        self._start()

    def come_back(self) -> None:
        """Goes on with the units of the book, in a controller that was started again."""
        found = {actor: lookup(actor) for actor in named_actors(self._prefix)}
        running = {actor: handle for actor, handle in found.items() if handle is not None}
        self._book.come_back(running)
        mine = set(self._book.actors().values())
        self._handles = {actor: handle for actor, handle in running.items() if actor in mine}
        for actor in running.keys() - mine:  # the controller died while it created or ended this one
            ray.kill(running[actor], no_restart=True)
        # the controller may have died before it told one that had come back
        self._begin_to_retain(self._book.live())
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._keep, name="dataplane-units", daemon=True).start()

    def _keep(self) -> None:
        while True:
            try:
                self._wait()
                self._book.changed.clear()
                self._listen()
                self._judge()
                self._ask()
                self._search()
                self._retain()
                self._create()
                self._end_removed()
            except Exception:
                _logger.exception("watching the storage units failed; trying again")
                time.sleep(_IDLE_S)

    def _wait(self) -> None:
        """Waits a moment, and for what changes in the book."""
        busy = self._asked or self._to_retain or not self._ears
        self._book.changed.wait(_BUSY_S if busy else _IDLE_S)

    def _listen(self) -> None:
        """Connects to new lives, and hangs up on ended ones."""
        live = {name: (actor, started) for name, actor, started in self._book.live()}
        for name, ear in list(self._ears.items()):
            if name not in live or live[name][1] != ear.started:
                ear.hang_up()
                del self._ears[name]
        for name, (actor, started) in live.items():
            if name not in self._ears:
                self._ears[name] = _Ear(actor, started)
            ear = self._ears[name]
            if ear.session is not None:
                try:
                    ear.session.check("watch a storage unit")
                except DataPlaneError:
                    ear.suspect = True
                    ear.hang_up()
            if ear.session is None and not ear.suspect:
                ear.session = _session_with(started)
                ear.suspect = ear.session is None

    def _judge(self) -> None:
        """Finds out whether the suspects have ended."""
        for name, ear in self._ears.items():
            if not ear.suspect:
                continue
            if refuses(ear.started.ip, ear.started.port, _REACH_S):  # else only Ray can tell
                ear.suspect = False
                self._book.ended(name, ear.started)

    def _ask(self) -> None:
        """Asks the actors of suspects, and of units that are starting, what they are now."""
        actors = dict(self._book.waiting()) | {name: ear.actor for name, ear in self._ears.items() if ear.suspect}
        for name in actors:
            self._asked.setdefault(name, _Asked())
        now = time.monotonic()
        for name, asked in list(self._asked.items()):
            if name not in actors:
                del self._asked[name]
            elif asked.ref is None:
                handle, place = self._handles.get(actors[name]), self._book.place_of(name)
                if handle is None and place:  # it ended, or was ended, and was not created again
                    self._look_for(name, place)
                elif now >= asked.ask_at and handle is not None:
                    search = self._searches.get(name)
                    anew = search is not None and now >= search.give_up
                    asked.handle, asked.ref = handle, handle.describe.remote(place=place, anew=anew)
                    asked.ask_at = now + _ASK_S
            elif ray.wait([asked.ref], timeout=0)[0]:
                ref, asked.ref = asked.ref, None
                asked.ask_at = now + _ASK_S
                if asked.handle is self._handles.get(actors[name]):  # else another one was created in its place
                    self._hear(name, actors[name], ref)

    def _hear(self, name: str, actor: str, ref: Any) -> None:
        """What the actor of a unit answered, or Ray in its place."""
        try:
            answer: Started | Place | ray.exceptions.RayError = ray.get(ref, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            return  # it may be starting
        except (*_GIVEN_UP, ray.exceptions.RayTaskError) as error:
            answer = error
        except ray.exceptions.RayError:
            return  # says nothing about the actor
        ear = self._ears.get(name)
        if isinstance(answer, Started):
            self._searches.pop(name, None)
            if ear is not None and ear.started == answer:
                ear.suspect = False
            self._book.started(name, answer)
            if ear is None or ear.started != answer:
                self._begin_to_retain([(name, actor, answer)])
            return
        if ear is not None:  # this is another process, which does not serve
            self._book.ended(name, ear.started)
        if isinstance(answer, Place):
            self._look_for(name, answer.name)
            return
        if isinstance(answer, _GIVEN_UP):
            del self._handles[actor]
            if not self._book.place_of(name):
                self._book.failed(name, cause(answer))
            else:  # its place is looked for, as after the end of a node
                _logger.warning("%s ended for good, and is created again: %s", name, cause(answer))
                self._look_for(name, self._book.place_of(name), cause(answer))
            return
        self._searches.pop(name, None)  # it is tried again where it is; if it moves, its place is looked for anew
        known = data_plane_error(answer)
        if (known is None or not known.retryable) and not self._book.waits(name, cause(answer)):
            self._book.failed(name, cause(answer))
            ray.kill(self._handles.pop(actor), no_restart=True)

    def _look_for(self, name: str, place: str, why: str = "") -> None:
        """Begins to look for the place of a unit, or goes on with it. ``why``: what Ray said when it gave it up."""
        search = self._searches.get(name)
        why = why or ("" if search is None else search.why)
        has_rows = self._book.waits(name, why)
        if search is None:
            search = self._searches[name] = _Search(place, time.monotonic() + (self._wait_s if has_rows else 0.0))
        search.looks, search.why = True, why

    def _search(self) -> None:
        """Looks for nodes that have the places of units which run elsewhere or nowhere, and moves the units there."""
        for name, search in list(self._searches.items()):
            actor = self._book.actors().get(name)
            if actor is None or self._places is None:
                del self._searches[name]
                continue
            if not search.looks:
                continue
            for ref in [each for each in search.asked if ray.wait([each], timeout=0)[0]]:
                node = search.asked.pop(ref)
                with suppress(ray.exceptions.RayError):  # the node ends
                    if search.place in ray.get(ref, timeout=0):
                        search.node = node
            now, runs = time.monotonic(), self._handles.get(actor)
            due = now >= search.ask_at
            if due and now >= search.give_up and search.node is None and not runs:  # if it runs, it begins there
                search.node = self._emptiest_node(search.num_begun)  # where it failed before, it may fail again
                search.num_begun += 1
            if search.node is not None:
                if runs:
                    ray.kill(runs, no_restart=True)
                    del self._handles[actor]
                with suppress(ValueError):  # Ray has not freed its name yet
                    self._handles[actor] = self._create_unit(actor, search.node, place=search.place)
                    search.looks, search.node, search.asked, search.ask_at = False, None, {}, now + _SEARCH_S
            elif due and now < search.give_up:
                search.ask_at = now + _SEARCH_S
                asked = self._places([node for node in nodes_for_units() if node not in search.asked.values()])
                search.asked.update((ref, node) for node, ref in asked.items())

    def _begin_to_retain(self, units: list[tuple[str, str, Started]]) -> None:
        self._to_retain |= {name: _Retained(started) for name, _, started in units if started.kept}

    def _retain(self) -> None:
        """Tells units that keep rows which of those that an earlier process left there exist, and which were given up
        while it was away. They serve already."""
        live = {name: (actor, started) for name, actor, started in self._book.live()}
        for name, each in list(self._to_retain.items()):
            actor, started = live.get(name, ("", None))
            if started != each.started:
                del self._to_retain[name]
            elif each.ref is None:
                if time.monotonic() >= each.tell_at:
                    each.garbage = self._book.here(name, self._host.garbage())
                    garbage = list(each.garbage.values())
                    each.ref = self._handles[actor].retain.remote(self._book.rows_of(name), garbage)
            elif ray.wait([each.ref], timeout=0)[0]:
                ref, each.ref, each.tell_at = each.ref, None, time.monotonic() + _RETAIN_AGAIN_S
                try:
                    ray.get(ref)
                    self._host.collected(list(each.garbage))
                    del self._to_retain[name]
                except ray.exceptions.RayError as error:  # else what nobody can read would fill its memory
                    _logger.warning("%s keeps rows that nobody needs; telling it again: %s", name, cause(error))

    def _create(self) -> None:
        """Creates the units that were asked for, on the nodes with the fewest units."""
        while (new := self._book.new_unit()) is not None:
            name, actor = new
            try:
                self._handles[actor] = self._create_unit(actor, self._emptiest_node())
            except Exception as error:
                _logger.exception("creating %s failed", actor)
                self._book.failed(name, f"{type(error).__name__}: {error}")

    def _emptiest_node(self, num_before: int = 0) -> str:
        """The node with the fewest units after so many others."""
        count = collections.Counter(started.node for _, _, started in self._book.live())
        nodes = sorted(nodes_for_units(), key=lambda each: count[each])
        return nodes[num_before % len(nodes)]

    def _end_removed(self) -> None:
        """Ends the units that are drained."""
        for actor in self._host.end_removed():
            handle = self._handles.pop(actor, None)
            if handle is not None:  # it may have been removed before it was created
                if self._places is not None:
                    ray.wait([handle.discard.remote()], timeout=_DISCARD_S)
                ray.kill(handle, no_restart=True)


def _session_with(started: Started) -> Session | None:
    """A session with a unit, or None if it cannot be reached now."""
    address = _UnitAddress(started.ip, started.port, started.secret)
    try:
        return Session(address, ExtentHost.messages, time.monotonic() + _REACH_S)
    except DataPlaneError:
        return None


class _UnitAddress(TcpAddress):
    """Where a unit is reached."""

    def failure(self, what: str, error: Exception, *, connecting: bool) -> DataPlaneError:
        """As `Address.failure`."""
        return BackendUnavailableError(f"{what}: {error}")
