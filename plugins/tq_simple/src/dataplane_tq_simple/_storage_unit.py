"""The actor of a storage unit: rows in memory that its node shares, or in a folder.

Importing this module imports Ray.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

import ray

from dataplane_core.host_memory import Arena, memory_limit
from dataplane_core.hosting import (
    ExtentHost,
    ExtentService,
    KeptExtents,
    Server,
    check_extents,
    listen_on,
    listen_unseen,
    new_token,
)
from dataplane_core.log import NotesLog
from dataplane_core.spec import new_id
from dataplane_tq_simple._folders import folders_in, open_rows
from dataplane_tq_simple._messages import Started
from dataplane_tq_simple._ray import NAMESPACE, lookup, own_address

#: Seconds between two looks of a unit that no process owns whether its instance still runs.
_FOLLOW_S: Final = 1.0
#: The least memory of a unit whose size is not said.
_LEAST_BYTES: Final = 64 << 20


class UnitOptions(NamedTuple):
    """What the units of an instance are told."""

    size_bytes: int | None  # of a unit's memory; None: half of what its node has available
    touch_ahead_bytes: int  # made ready before they are used
    folder: str | None  # of the units on each node, in which they keep their rows
    sync: bool  # rows that are kept are on the disk before a put is answered
    num_cpus: float  # logical CPUs that Ray reserves for each
    detached: bool  # no process owns them: they outlive that of the controller, and end when it has ended for good
    node_wait_s: float  # for so many seconds, rows whose folder no unit has are waited for


class StorageUnit:
    """See above. Rows are served by a thread.

    Args:
        options: The options.
        instance: Identifies the instance, if it outlives its processes.
        follows: The name and the id of the actor of the controller, for a unit that no process owns.
    """

    def __init__(self, options: UnitOptions, instance: str = "", follows: tuple[str, str] | None = None) -> None:
        self._options = options
        self._instance = instance
        self._started: Started | None = None
        if follows is not None:
            own = ray.get_runtime_context().get_actor_name()
            threading.Thread(target=_follow, args=(own, *follows), name="dataplane-follow", daemon=True).start()

    def start(self, own: str = "", others: tuple[str, ...] = (), new: str = "") -> Started | None:
        """Serves rows, from the first call on that can. Tries again to open a folder that could not be opened.

        Args:
            own: The name of the folder that this node's unit had. ``""``: any that is there, or a new one.
            others: The names of those that are of other units: nodes may share a folder.
            new: The name of a new one.

        Returns:
            Where it is reached, and its life. None: ``own`` is not there.

        Raises:
            BackendUnavailableError: As `open_rows`.
        """
        if self._started is None:
            folder = self._options.folder
            if folder is None:
                extents = ExtentService(
                    Arena.create(self._options.size_bytes or _default_bytes()), self._options.touch_ahead_bytes
                )
                self._started = self._serve(new_id(), ExtentHost(extents), extents)
            else:
                units = Path(folder)
                names = [own] if own else [each for each in folders_in(units) if each not in others]
                if own and not units.joinpath(own).exists():
                    return None
                self._started = self._open(units, names, new)
        return self._started

    def _open(self, units: Path, names: list[str], new: str) -> Started:
        options = self._options

        def open_in(path: Path, notes: NotesLog) -> KeptExtents:
            size_bytes = options.size_bytes or check_extents(path, notes.notes) or _default_bytes()
            ahead = options.touch_ahead_bytes
            return KeptExtents(path, size_bytes, notes, sync=options.sync, touch_ahead_bytes=ahead)

        opened = open_rows(units, names, new, self._instance, open_in, sync=options.sync)
        try:
            host = ExtentHost(opened.extents, opened.notes.commit_or_end)
            return self._serve(opened.name, host, opened.extents)
        except BaseException:
            opened.close()  # it is tried again
            raise

    def _serve(self, token: str, host: ExtentHost, extents: ExtentService) -> Started:
        ip, node = own_address(), ray.get_runtime_context().get_node_id()
        (name, memory), wire, secret = listen_unseen(), listen_on(ip), new_token()
        server = Server(host, memory, wire, token=secret)
        threading.Thread(target=server.run, name="dataplane-rows", daemon=True).start()
        port, kept = wire.getsockname()[1], self._options.folder is not None
        return Started(token, ip, port, node, name, secret, extents.most_bytes, kept)


def _default_bytes() -> int:
    return max(memory_limit().available_bytes // 2, _LEAST_BYTES)


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
