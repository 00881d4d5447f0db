"""The storage units of ``tq_simple``, and its instances.

Importing this module imports Ray.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray

from dataplane_core.errors import BackendUnavailableError, DataPlaneError
from dataplane_core.host_memory import Arena, arena_bytes_for, memory_limit
from dataplane_core.hosting import (
    Drop,
    ExtentHost,
    ExtentService,
    KeptExtentHost,
    Retain,
    Server,
    Session,
    UnixAddress,
    listen_as,
    listen_on,
    new_socket_name,
    new_token,
)
from dataplane_core.ledger import Ref
from dataplane_core.spec import new_id
from dataplane_tq_simple._actors import (
    NAMESPACE,
    get_within,
    lookup,
    nodes_for_units,
    on_nodes,
    own_address,
    was_started_before,
)
from dataplane_tq_simple._book import Started
from dataplane_tq_simple._cluster import Home, Instance
from dataplane_tq_simple._kept import Place, delete_place, open_place, places_in, units_of
from dataplane_tq_simple.config import TQSimpleConfig

#: Seconds between two looks of a unit that no process owns whether its instance still runs.
_FOLLOW_S: Final = 1.0
#: The least memory of a unit whose size is not said.
_LEAST_BYTES: Final = 64 << 20
#: Seconds that a unit may take to drop rows that do not exist any more.
_RETAIN_S: Final = 60.0


class StorageUnit:
    """An actor whose rows lie in memory that its node shares. A thread serves them.

    Each start is a new life of the unit, without rows, which has another secret. If it keeps its rows in a folder, its
    life goes on, with another secret.

    Args:
        size_bytes: The size of its memory; None: a share of what its node has available.
        share: How many units of a node share it.
        touch_ahead_bytes: Memory that is made ready before it is used.
        sync: Whether rows that it keeps are on the disk before a put is answered.
        place: Where it keeps its rows.
        follows: The name and the id of the actor of the controller, for a unit that no process owns: it ends when that
            actor has ended for good.
    """

    _new_name = ""  # of the place that it makes where it lacks its own

    def __init__(
        self,
        size_bytes: int | None,
        share: int,
        touch_ahead_bytes: int,
        sync: bool = False,
        place: Place | None = None,
        follows: tuple[str, str] | None = None,
    ) -> None:
        self._size_bytes, self._share = size_bytes, share
        self._touch_ahead_bytes = touch_ahead_bytes
        self._sync = sync
        self._place = place
        self._started: Started | None = None
        if place is None:
            self.describe()
        if follows is not None:
            own = ray.get_runtime_context().get_actor_name()
            threading.Thread(target=_follow, args=(own, *follows), name="dataplane-follow", daemon=True).start()

    def describe(self, *, place: str = "", anew: bool = True) -> Started | Place:
        """Where it is reached, and its life. Tries again to open a place that could not be opened, as `open_place`.

        Args:
            place: The name of the place of its life, which may have begun since this unit was created; ``""``: the one
                that it was created with.
            anew: Whether to begin a new life where this node lacks its place. If not, that place is the answer.
        """
        if self._started is None:
            if self._place is not None and place:
                self._place = self._place._replace(name=place, found=True)
            own = self._place
            if own is not None and self._is_elsewhere(own):
                if not anew:
                    return own
                # the rows of a place are where its name says so: two of one name would hide each other's
                self._new_name = self._new_name or new_id()
                own = own._replace(name=self._new_name, found=False)
            try:
                self._started = self._serve(own)
            except BaseException:
                if own is not None and own.name == self._new_name:  # else the next bootstrap would make a unit of it
                    delete_place(own)
                raise
            self._place = own
        return self._started

    def _serve(self, place: Place | None) -> Started:
        if place is None:
            arena = Arena.create(self._size_bytes or self._default_bytes())
            extents = ExtentService(arena, self._touch_ahead_bytes)
            return self._start_server(new_id(), ExtentHost(extents), extents, None, "")
        opened = open_place(
            place, self._size_bytes, self._default_bytes, sync=self._sync, touch_ahead_bytes=self._touch_ahead_bytes
        )
        try:
            host = KeptExtentHost(opened.extents, opened.notes.commit_or_end)
            return self._start_server(opened.token, host, opened.extents, opened.extents.work_aside, place.name)
        except BaseException:
            opened.close()  # it is tried again
            raise

    def _start_server(
        self, token: str, host: ExtentHost, extents: ExtentService, aside: Callable[[], bool] | None, place: str
    ) -> Started:
        ip, node = own_address(), ray.get_runtime_context().get_node_id()
        name, secret = new_socket_name(), new_token()
        wire = listen_on(ip)
        server = Server(host, listen_as(name), wire, token=secret, between=extents.touch_ahead, aside=aside)
        threading.Thread(target=server.run, name="dataplane-rows", daemon=True).start()
        return Started(token, ip, wire.getsockname()[1], node, name, secret, extents.most_bytes, place)

    def _is_elsewhere(self, place: Place) -> bool:
        """Whether Ray started this unit on a node that lacks its place."""
        was_there = place.found or was_started_before()
        return was_there and not Path(place.folder, place.name).exists()

    def _default_bytes(self) -> int:
        return max(memory_limit().available_bytes // (2 * self._share), _LEAST_BYTES)

    def retain(self, live: dict[int, list[int]], garbage: list[Ref]) -> None:
        """See `Retain`. Then drops the garbage, as for a client that clears it: also what may still be on its way."""
        started, deadline = self._started, time.monotonic() + _RETAIN_S
        if started is None:
            raise BackendUnavailableError("this process does not serve yet.")
        address = _Own(started.socket, token=started.secret)
        session = Session(address, ExtentHost.messages, deadline)
        try:
            session.call("retain", deadline, Retain(live))
            session.call("drop", deadline, Drop(garbage))
        finally:
            session.close()
            for descriptor in session.descriptors:
                os.close(descriptor)

    def discard(self) -> None:
        """Deletes what it keeps, before it is ended."""
        if self._place is not None:
            delete_place(self._place)


@dataclass(frozen=True, kw_only=True)
class _Own(UnixAddress):
    """The socket of this process."""

    token: bytes

    def failure(self, what: str, error: Exception, *, connecting: bool) -> DataPlaneError:
        """As `Address.failure`."""
        return BackendUnavailableError(f"{what}: the thread that serves rows does not answer: {error}")


def _follow(own: str, controller: str, actor_id: str) -> None:
    """Ends a unit when the controller has ended for good. An actor that Ray starts again keeps its id."""
    num_missed = 0
    while num_missed < 2:
        time.sleep(_FOLLOW_S)
        try:
            found = lookup(controller)
        except Exception:  # Ray does not answer: says nothing about the controller
            continue
        num_missed = 0 if found is not None and found._actor_id.hex() == actor_id else num_missed + 1
    ray.kill(ray.get_actor(own, namespace=NAMESPACE), no_restart=True)


class SimpleStorageInstance(Instance):
    """An instance of ``tq_simple``."""

    prefix = "tq-"
    distribution = "dataplane-tq-simple"
    protocol = 11
    unit_class = StorageUnit
    keeps_units = True

    @classmethod
    def _unit_arguments(cls, config: TQSimpleConfig) -> Mapping[str, Any]:
        size_bytes = config.unit_bytes
        if size_bytes is None and config.capacity_bytes is not None:
            size_bytes = arena_bytes_for(config.capacity_bytes)
        return {
            "size_bytes": size_bytes,
            "share": -(-config.num_storage_units // len(nodes_for_units())),
            "touch_ahead_bytes": config.touch_ahead_bytes,
            "sync": config.sync == "commit",
        }

    @classmethod
    def _homes_of_units(cls, config: TQSimpleConfig, identity: str | None, deadline: float) -> list[Home]:
        """As that of `Instance`. A node that has places gets a unit for each of them."""
        if config.durable is None:
            return super()._homes_of_units(config, identity, deadline)
        nodes, here = nodes_for_units(), ray.get_runtime_context().get_node_id()
        homes: list[Home] = []
        known: set[str] = set()
        asked = cls.places(config, [node for node in nodes if node != here])
        found = dict(zip(asked, get_within(list(asked.values()), "look for kept rows", deadline), strict=True))
        found[here] = places_in(units_of(config.durable, config.instance))
        for node in nodes:
            mine = [each for each in found[node] if each not in known]  # the nodes may share the folder
            known.update(mine)
            homes += [Home(node, each) for each in mine]
        while len(homes) < config.num_storage_units:
            homes.append(Home(min(nodes, key=lambda node: sum(home.node == node for home in homes))))
        return homes

    @classmethod
    def _arguments_at(cls, config: TQSimpleConfig, place: str | None, identity: str | None) -> Mapping[str, Any]:
        if config.durable is None or identity is None:
            return {}
        folder = str(units_of(config.durable, config.instance))
        return {"place": Place(folder, place or new_id(), identity, found=place is not None)}

    @classmethod
    def places(cls, config: TQSimpleConfig, nodes: Sequence[str]) -> dict[str, Any]:
        """As that of `Instance`."""
        return {} if config.durable is None else on_nodes(nodes, places_in, units_of(config.durable, config.instance))
