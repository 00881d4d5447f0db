"""The actor of a storage unit: rows in memory that its node shares, or in a folder.

Importing this module imports Ray.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

import ray

from dataplane_core.host_memory import Arena
from dataplane_core.hosting import ExtentHost, ExtentService, Server, listen_on, listen_unseen, new_token
from dataplane_core.spec import new_id
from dataplane_tq_simple._folders import default_bytes, open_unit
from dataplane_tq_simple._messages import Started
from dataplane_tq_simple._ray import NAMESPACE, lookup, own_address

#: Seconds between two looks of a unit that no process owns whether its instance still runs.
_FOLLOW_S: Final = 1.0


class UnitOptions(NamedTuple):
    """What the units of an instance are told."""

    size_bytes: int | None  # of a unit's memory; None: half of what its node has available
    touch_ahead_bytes: int  # made ready before they are used
    folder: str | None  # on each node, in which its unit keeps its rows
    sync: bool  # rows that are kept are on the disk before a put is answered
    num_cpus: float  # logical CPUs that Ray reserves for each
    detached: bool  # no process owns them: they outlive that of the controller, and end when it has ended for good
    node_wait_s: float  # for so many seconds, rows whose folder no unit has are waited for


class StorageUnit:
    """See above. Rows are served by a thread.

    ``instance`` identifies the instance, if that outlives its processes. ``follows`` is the name and the id of the
    actor of the controller, for a unit that no process owns.
    """

    def __init__(self, options: UnitOptions, instance: str = "", follows: tuple[str, str] | None = None) -> None:
        self._options = options
        self._instance = instance
        self._started: Started | None = None
        if follows is not None:
            own = ray.get_runtime_context().get_actor_name()
            threading.Thread(target=_follow, args=(own, *follows), name="dataplane-follow", daemon=True).start()

    def start(self) -> Started:
        """Serves rows, from the first call on. Returns where, and which. Raises as `open_unit`: then this process is of
        no use."""
        if self._started is None:
            self._started = self._serve()
        return self._started

    async def end(self) -> None:
        """Returns never. So who waits for it learns that this process has ended."""
        await asyncio.Event().wait()

    def _serve(self) -> Started:
        options = self._options
        if options.folder is None:
            arena = Arena.create(options.size_bytes or default_bytes())
            token, extents = new_id(), ExtentService(arena, options.touch_ahead_bytes)
            host = ExtentHost(extents)
        else:
            token, extents, notes = open_unit(
                Path(options.folder),
                self._instance,
                options.size_bytes,
                sync=options.sync,
                touch_ahead_bytes=options.touch_ahead_bytes,
            )
            host = ExtentHost(extents, notes.commit_or_end)
        ip, node = own_address(), ray.get_runtime_context().get_node_id()
        (name, memory), wire, secret = listen_unseen(), listen_on(ip), new_token()
        server = Server(host, memory, wire, token=secret)
        threading.Thread(target=server.run, name="dataplane-rows", daemon=True).start()
        port, kept = wire.getsockname()[1], options.folder is not None
        return Started(token, ip, port, node, name, secret, extents.most_bytes, kept)


def _follow(own: str, controller: str, actor_id: str) -> None:
    """Ends a unit when the controller has ended for good. An actor that Ray starts again keeps its id."""
    num_missed = 0
    while num_missed < 2:
        time.sleep(_FOLLOW_S)
        try:
            actor = lookup(controller)
        except Exception:  # Ray does not answer: says nothing about the controller
            continue
        num_missed = 0 if actor is not None and actor._actor_id.hex() == actor_id else num_missed + 1
    ray.kill(ray.get_actor(own, namespace=NAMESPACE), no_restart=True)
