"""Keeps a storage unit on each node of the cluster, in a thread of the controller: starts them, learns who died.

The keeper has a session with the process of each unit, over which nothing is sent: its end tells that the process may
have died. Then, or where Ray says that its node is gone, its actor is asked what it is. One thread judges for all
clients, so they agree on which rows are lost.

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
from dataplane_tq_simple._host import ControllerHost
from dataplane_tq_simple._messages import Started
from dataplane_tq_simple._ray import alive_nodes, cause, data_plane_error, lookup, named_actors, nodes_for_units

_logger = logging.getLogger(__name__)

#: Seconds between two looks at what changes, and where nothing does.
_BUSY_S: Final = 0.05
_IDLE_S: Final = 0.2
#: Seconds between two looks at the nodes.
_NODES_S: Final = 1.0
#: Seconds between two questions to a process that does not serve.
_ASK_S: Final = 0.2
#: Seconds between two processes of a node if the first one ended before it served.
_CREATE_AGAIN_S: Final = 1.0
#: Seconds after which a process that failed to drop rows is told again.
_RETAIN_AGAIN_S: Final = 5.0
#: Seconds that a try to reach a process may take, and that it may take to drop rows.
_REACH_S: Final = 0.5
_RETAIN_S: Final = 10.0
#: What Ray answers in the place of an actor that has ended. `ActorUnavailableError` is none of it.
_ENDED: Final = (
    ray.exceptions.RayActorError,
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.ActorUnschedulableError,
)


@dataclass(slots=True)
class _Process:
    """The process of a node's unit."""

    handle: Any = None  # its actor; None: it is to be created
    act_at: float = 0.0  # when it is created, asked or told next
    new: str = field(default_factory=new_id)  # the name of a folder that it may make
    started: Started | None = None  # what it said, if it serves
    session: Session | None = None  # None: it may have died
    asked: Any = None  # a question to it
    settled: bool = False  # it serves, or cannot now: then rows that nobody serves may not come any more
    retain: bool = False  # it is to be told which of its rows exist


class Keeper:
    """See above.

    Args:
        host: Has the book, and knows which rows are garbage.
        prefix: What the actor names of the units start with. The id of the node follows.
        create: Creates the actor of a unit, by its name and the id of its node.
        wait_s: For so many seconds, rows that nobody serves are waited for.
    """

    def __init__(self, host: ControllerHost, prefix: str, create: Callable[[str, str], Any], wait_s: float) -> None:
        self._host = host
        self._book = host.book
        self._prefix = prefix
        self._create_actor = create
        self._wait_s = wait_s
        self._processes: dict[str, _Process] = {}  # by the id of the node
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
            found = [each.started for each in list(self._processes.values())]
            serving = [each for each in found if each is not None]
            if found and len(serving) == len(found):
                return serving
            time.sleep(_BUSY_S)
        waiting = [node for node, each in self._processes.items() if each.started is None]
        raise OperationTimeoutError(f"the storage units of nodes {preview(waiting)} did not start in time.")

    def come_back(self) -> None:
        """Takes over the units of the book, in a controller that was started again, and those that it does not know."""
        actors = {actor.removeprefix(self._prefix) for actor in named_actors(self._prefix)}
        for node in actors.union(self._book.nodes()):
            self._processes[node] = _Process(lookup(self._prefix + node))
            if self._processes[node].handle is None:
                self._book.ended(node)
        self.start()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._keep, name="dataplane-units", daemon=True).start()

    def _keep(self) -> None:
        while True:
            try:
                busy = any(each.session is None or each.retain for each in self._processes.values())
                time.sleep(_BUSY_S if busy else _IDLE_S)
                self._turn()
            except Exception:
                _logger.exception("watching the storage units failed; trying again")

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._alive, self._look_at = alive_nodes(), now + _NODES_S
            for node in nodes_for_units():
                if node not in self._processes:
                    self._processes[node] = _Process()
        for node, process in list(self._processes.items()):
            if process.session is not None:
                self._listen(node, process, process.session)
            if process.asked is not None:
                self._hear(node, process)
            elif now < process.act_at:
                continue
            elif process.handle is None:
                self._create(node, process, now)
            elif process.session is None:
                self._ask(node, process, now)
            elif process.retain:
                self._retain(node, process, process.session)
        self._give_up(now)

    def _create(self, node: str, process: _Process, now: float) -> None:
        if node not in self._alive:
            self._book.left(node)
            del self._processes[node]
            return
        process.act_at = now + _CREATE_AGAIN_S
        with suppress(ValueError):  # Ray has not freed its name yet
            process.handle, process.act_at = self._create_actor(self._prefix + node, node), now

    def _listen(self, node: str, process: _Process, session: Session) -> None:
        """Notices that a process may have died."""
        with suppress(DataPlaneError):
            session.check("watch a storage unit")
            if node in self._alive:
                return
        session.close()
        process.session, process.act_at = None, 0.0

    def _ask(self, node: str, process: _Process, now: float) -> None:
        """Asks a process what it is."""
        tokens = {each: self._book.token_on(each) for each in self._processes}
        others = tuple(tokens[each] or other.new for each, other in self._processes.items() if each != node)
        process.asked, process.act_at = process.handle.start.remote(tokens[node], others, process.new), now + _ASK_S

    def _hear(self, node: str, process: _Process) -> None:
        """Takes the answer of a process that was asked."""
        if not ray.wait([process.asked], timeout=0)[0]:
            return
        asked, process.asked = process.asked, None
        try:
            answer = ray.get(asked, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            return  # it may be starting
        except _ENDED as error:
            self._died(node, process, error)
        except ray.exceptions.RayTaskError as error:
            process.settled = True
            self._fails(node, data_plane_error(error) or BackendUnavailableError(cause(error), retryable=False))
        except ray.exceptions.RayError:
            return  # says nothing about the actor
        else:
            if answer is None:  # its folder may come
                process.settled = True
                self._book.waits(node, "")
            else:
                self._serves(node, process, answer)

    def _died(self, node: str, process: _Process, error: Exception) -> None:
        with suppress(Exception):
            ray.kill(process.handle, no_restart=True)  # else Ray keeps its name
        self._book.ended(node)
        self._processes[node] = _Process()
        if process.started is None and node in self._alive:
            self._processes[node] = _Process(act_at=time.monotonic() + _CREATE_AGAIN_S, settled=True)
            self._fails(
                node,
                BackendUnavailableError(
                    f"the storage unit of node {node} did not start: {cause(error)}",
                    hint="dataplane-tq-simple must be installed, in this version, on every node of the cluster.",
                ),
            )

    def _fails(self, node: str, error: DataPlaneError) -> None:
        _logger.warning("node %s has no storage unit that serves, and is tried again: %s", node, error)
        self._failure = self._failure or error
        if not error.retryable:
            self._book.waits(node, str(error))

    def _serves(self, node: str, process: _Process, started: Started) -> None:
        address = TcpAddress(started.ip, started.port, started.secret)
        if node in self._alive:
            with suppress(DataPlaneError):  # it cannot be reached now
                process.session = Session(address, ExtentHost.messages, time.monotonic() + _REACH_S, _failure)
        if process.started != started:
            process.started, process.settled, process.retain = started, True, started.kept
            process.act_at = 0.0
            self._book.started(started)

    def _retain(self, node: str, process: _Process, session: Session) -> None:
        """Tells a unit that keeps rows which of those that an earlier process left there exist, and which were given up
        while nobody served them. It serves already."""
        rows, garbage = self._book.rows_on(node, self._host.garbage())
        deadline = time.monotonic() + _RETAIN_S
        try:
            session.call("retain", deadline, Retain(rows))
            session.call("drop", deadline, Drop(garbage))
        except DataPlaneError as error:  # else what nobody can read would fill its memory
            process.act_at = time.monotonic() + _RETAIN_AGAIN_S
            _logger.warning("node %s keeps rows that nobody needs, and is told again: %s", node, error)
        else:
            process.retain = False
            self._host.collected(garbage)

    def _give_up(self, now: float) -> None:
        """Names the rows as lost for which the wait is over. Those of a unit that says why are waited for."""
        settled = all(each.settled for each in self._processes.values())
        before, self._awaited = self._awaited, {}
        for life, why in self._book.awaited().items():
            anew = why or not settled or life not in before
            self._awaited[life] = now + self._wait_s if anew else before[life]
            if settled and not why and now >= self._awaited[life]:
                self._book.give_up(life)


def _failure(what: str, error: Exception, connecting: bool) -> DataPlaneError:
    return BackendUnavailableError(f"{what}: {error}")
