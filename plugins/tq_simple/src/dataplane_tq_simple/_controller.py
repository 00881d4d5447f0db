"""The actor of the controller: a thread serves the ledger and the book of storage units, another one keeps the units.

If it keeps a journal, Ray starts it again where it died. It then has its ledger and its book of storage units from the
journal, another port and another token, which clients ask for over Ray.

Importing this module imports Ray.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane_core.errors import BackendUnavailableError, DataPlaneError, OperationTimeoutError, preview
from dataplane_core.hosting import (
    Drop,
    ExtentHost,
    Retain,
    Server,
    Session,
    TcpAddress,
    failure_of,
    listen_on,
    new_token,
)
from dataplane_core.spec import new_id
from dataplane_tq_simple._host import ControllerHost, make_ledger
from dataplane_tq_simple._messages import Started
from dataplane_tq_simple._ray import (
    NAMESPACE,
    alive_nodes,
    cause,
    data_plane_error,
    lookup,
    named_actors,
    nodes_for_units,
    own_address,
    remote,
    was_started_before,
)
from dataplane_tq_simple._storage_unit import StorageUnit, UnitOptions

_logger = logging.getLogger(__name__)

#: The notes of the journal: what attaching clients are told, and what the folders of units are marked with.
_DESCRIPTION_NOTE: Final = "description"
_IDENTITY_NOTE: Final = "identity"

#: Seconds between two looks at the storage units, and at the nodes.
_LOOK_S: Final = 0.1
_NODES_S: Final = 1.0
#: Seconds between two questions to a unit that Ray cannot reach.
_ASK_S: Final = 0.2
#: Seconds between two processes of a node if the first one ended before it served.
_CREATE_AGAIN_S: Final = 2.0
#: Seconds that a unit may take to drop rows, and after which one that failed is told again.
_RETAIN_S: Final = 10.0
_RETAIN_AGAIN_S: Final = 5.0
#: What Ray answers in the place of an actor that has ended. `ActorUnavailableError` is none of it.
_ENDED: Final = (
    ray.exceptions.RayActorError,
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.ActorUnschedulableError,
)


class Controller:
    """See above. ``units``: the options of those that it keeps, one on each node; None: it keeps none."""

    _description: Any = None  # what attaching clients are told
    _host: ControllerHost

    def __init__(
        self,
        *,
        journal: Path | None,
        capacity_bytes: int | None,
        sync: bool,
        durable: bool = False,
        units: UnitOptions | None = None,
    ) -> None:
        self._make_ledger = functools.partial(make_ledger, journal, capacity_bytes, sync, durable=durable)
        self._units = units
        if journal is not None and was_started_before():
            self._open(must_exist=True)
            description = self._host.noted(_DESCRIPTION_NOTE)
            if description is not None:
                self._description = msgspec.msgpack.decode(description)
            if units is not None:
                self._keeper(units).come_back()

    def start(self, within_s: float) -> tuple[TcpAddress, list[Started]]:
        """Makes the ledger and begins to answer. Then starts a storage unit on each node, and keeps one there from now
        on, if it keeps any. Returns `address`, and what the units say. Raises as `make_ledger` and `Keeper.begin`."""
        deadline = time.monotonic() + within_s
        self._open(must_exist=False)
        return self._address, [] if self._units is None else self._keeper(self._units).begin(deadline)

    def _open(self, *, must_exist: bool) -> None:
        self._host = ControllerHost(*self._make_ledger(must_exist=must_exist), has_units=self._units is not None)
        if not must_exist:  # a controller that dies before it is told of its clients must not look for those of before
            self._host.book.begin()
            if self._host.noted(_DESCRIPTION_NOTE) is not None:
                self._host.note(_DESCRIPTION_NOTE, None)
        ip, token = own_address(), new_token()
        listener = listen_on(ip)
        self._address = TcpAddress(ip, listener.getsockname()[1], token)
        server = Server(self._host, listener, token=token)
        threading.Thread(target=server.run, name="dataplane-ledger", daemon=True).start()

    def address(self) -> TcpAddress:
        """Where this process answers calls."""
        return self._address

    def store_config(self, conf: Any) -> None:
        """Keeps what attaching clients are told. A controller that is started again has it too."""
        self._host.note(_DESCRIPTION_NOTE, msgspec.msgpack.encode(conf))
        self._description = conf

    def get_config(self) -> Any:
        """What `store_config` was given, or None."""
        return self._description

    def _keeper(self, options: UnitOptions) -> Keeper:
        own = ray.get_runtime_context()
        name, instance = own.get_actor_name(), self._identity()
        follows = (name, own.get_actor_id()) if options.detached else None

        def create(actor: str, node: str) -> Any:
            unit = remote(StorageUnit).options(
                name=actor,
                namespace=NAMESPACE,
                num_cpus=options.num_cpus,
                memory=1,  # as little as can be: Ray is not to take a node with rows for idle
                lifetime="detached" if options.detached else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            return unit.remote(options, instance, follows)

        return Keeper(self._host, f"{name}/", create, options.node_wait_s)

    def _identity(self) -> str:
        """Identifies this instance, also in the processes that go on with it."""
        identity = self._host.noted(_IDENTITY_NOTE)
        if identity is None:
            identity = new_id().encode()
            self._host.note(_IDENTITY_NOTE, identity)
        return identity.decode()


# --- the units --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Process:
    """The process of a node's unit."""

    actor: Any = None  # None: it is to be created
    act_at: float = 0.0  # when it is created, asked or told next
    asked: Any = None  # to start; when it serves, to say when it ends. None: nothing
    started: Started | None = None  # what it said, if it serves
    settled: bool = False  # it serves, or cannot now: then rows that nobody serves may not come any more
    retain: bool = False  # it is to be told which of its rows exist


class Keeper:
    """Keeps a storage unit on each node of the cluster: starts them, and learns from Ray which have died.

    One thread of the controller judges for all clients, so they agree on which rows are lost.

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
        """Starts the thread. Returns when the units of all nodes serve. Raises why one of them cannot."""
        self.start()
        while time.monotonic() < deadline:
            if self._failure is not None:
                raise self._failure
            processes = list(self._processes.values())
            serving = [process.started for process in processes if process.started is not None]
            if processes and len(serving) == len(processes):
                return serving
            time.sleep(_LOOK_S)
        waiting = [node for node, process in list(self._processes.items()) if process.started is None]
        raise OperationTimeoutError(f"the storage units of nodes {preview(waiting)} did not start in time.")

    def come_back(self) -> None:
        """Takes over the units of the book, in a controller that was started again, and those that it does not know."""
        actors = {actor.removeprefix(self._prefix) for actor in named_actors(self._prefix)}
        for node in actors.union(self._book.nodes()):
            process = self._processes[node] = _Process(lookup(self._prefix + node))
            if process.actor is None:
                self._book.ended(node)
        self.start()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._keep, name="dataplane-units", daemon=True).start()

    def _keep(self) -> None:
        while True:
            try:
                self._look()
            except Exception:
                _logger.exception("watching the storage units failed; trying again")
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._alive, self._look_at = alive_nodes(), now + _NODES_S
            for node in nodes_for_units():
                self._processes.setdefault(node, _Process())
        asked = [process.asked for process in self._processes.values() if process.asked is not None]
        answered = ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else []
        for node, process in list(self._processes.items()):
            if process.asked in answered:
                self._hear(node, process)
            elif now < process.act_at:
                continue
            elif process.actor is None:
                self._create(node, process, now)
            elif process.asked is None:
                process.asked = process.actor.start.remote()
            elif process.started is not None and process.retain:
                self._retain(node, process, process.started)
        self._give_up(now)

    def _create(self, node: str, process: _Process, now: float) -> None:
        if node not in self._alive:
            self._book.left(node)
            del self._processes[node]
            return
        process.act_at = now + _CREATE_AGAIN_S
        with suppress(ValueError):  # Ray has not freed its name yet
            process.actor, process.act_at = self._create_actor(self._prefix + node, node), now

    def _hear(self, node: str, process: _Process) -> None:
        """Takes the answer of a process."""
        asked, process.asked = process.asked, None
        process.act_at = time.monotonic() + _ASK_S
        try:
            started = ray.get(asked, timeout=0)
        except ray.exceptions.ActorUnavailableError:
            return  # it may be starting, or its connection broke
        except _ENDED as error:
            what = f"the storage unit of node {node} did not start: {cause(error)}"
            hint = "dataplane-tq-simple must be installed, in this version, on every node of the cluster."
            self._ended(node, process, BackendUnavailableError(what, hint=hint))
        except ray.exceptions.RayTaskError as error:
            why = data_plane_error(error) or BackendUnavailableError(cause(error), retryable=False)
            self._ended(node, process, why)
        except ray.exceptions.RayError:
            return  # says nothing about the actor
        else:
            process.asked, process.act_at = process.actor.end.remote(), 0.0
            if process.started != started:
                process.started, process.settled, process.retain = started, True, started.kept
                self._book.started(started)

    def _ended(self, node: str, process: _Process, why: DataPlaneError) -> None:
        """A process has ended, or cannot serve, and then says why. The node gets another one."""
        with suppress(Exception):
            ray.kill(process.actor, no_restart=True)  # else Ray keeps its name
        self._book.ended(node)
        self._processes[node] = _Process()
        if process.started is None and node in self._alive:
            self._processes[node] = _Process(act_at=time.monotonic() + _CREATE_AGAIN_S, settled=True)
            _logger.warning("node %s has no storage unit that serves, and gets another one: %s", node, why)
            self._failure = self._failure or why
            if not why.retryable:
                self._book.waits(node, str(why))

    def _retain(self, node: str, process: _Process, started: Started) -> None:
        """Tells a unit that keeps rows which of those that an earlier process left there exist, and which were given up
        while nobody served them. It serves already."""
        rows, garbage = self._book.rows_on(node, self._host.garbage())
        address, deadline = TcpAddress(started.ip, started.port, started.secret), time.monotonic() + _RETAIN_S
        try:
            with closing(Session(address, ExtentHost.messages, deadline, failure_of("a storage unit"))) as session:
                session.call_all("retain", deadline, [Retain(rows), Drop(garbage)])
        except DataPlaneError as error:  # else what nobody can read would fill its memory
            process.act_at = time.monotonic() + _RETAIN_AGAIN_S
            _logger.warning("node %s keeps rows that nobody needs, and is told again: %s", node, error)
        else:
            process.retain = False
            self._host.collected(garbage)

    def _give_up(self, now: float) -> None:
        """Names the rows as lost for which the wait is over. Those of a unit that says why are waited for."""
        settled = all(process.settled for process in self._processes.values())
        before, self._awaited = self._awaited, {}
        for life, why in self._book.awaited().items():
            begins = why or not settled or life not in before
            self._awaited[life] = now + self._wait_s if begins else before[life]
            if settled and not why and now >= self._awaited[life]:
                self._book.give_up(life)
