"""Deletes payload that nothing refers to any longer.

On one server, that is what dropped registrations leave, in parts. In a cluster, scripts cannot reach the payload, so
the ledger lists what clients must delete: rows that were overwritten or cleared, and rows of puts that were not
committed. The client whose call listed something deletes it. If it dies before, another client does: each looks after
its puts and clears, and when it announces itself.

After a failover the ledger may lack puts that had been committed. A client that meets another history of the ledger's
server then compares all payload with the ledger. One client per history does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final

from dataplane_core.errors import DataPlaneError
from dataplane_redis._payload import Payload
from dataplane_redis._session import Session

__all__ = ["Litter"]

_log = logging.getLogger("dataplane_redis")

#: Writes of dropped registrations that one script deletes; in a cluster, entries that a client gets at a time.
_COLLECT_WRITES: Final = 10_000
_COLLECT_ENTRIES: Final = 1000
#: Seconds that deleting may take at most within another call.
_DELETE_S: Final = 5.0
#: Writes that one script looks up.
_LOOK_WRITES: Final = 500


class Litter:
    """What one client deletes."""

    def __init__(self, session: Session, payload: Payload) -> None:
        self._session = session
        self._payload = payload
        self._swept = ""  # the history in which payload was compared with the ledger

    def collect(self, left: int, deadline: float) -> None:
        """Deletes what is left, in parts. If it fails, a later call deletes the rest.

        Args:
            left: Whether something is left, as the last script said.
            deadline: On `time.monotonic`'s clock, in seconds.
        """
        until = min(deadline, time.monotonic() + _DELETE_S)
        is_spread = self._session.placing.is_spread
        count = _COLLECT_ENTRIES if is_spread else _COLLECT_WRITES
        deleted: list[bytes] = []
        with contextlib.suppress(DataPlaneError), self._session.quietly():  # the call that left it has done its work
            while left or deleted:
                _, left, given = self._session.run("collect", until, "collect", count, deleted)
                deleted = self._payload.delete(given, until) if given else []

    def look(self, deadline: float) -> None:
        """Collects what others left, in a cluster. After a failover, also looks for payload that the ledger lacks."""
        if not self._session.placing.is_spread:
            return
        self.collect(1, deadline)
        told = self._session.acknowledgements
        history = "" if told is None else told.history
        if history and history != self._swept:
            with contextlib.suppress(DataPlaneError), self._session.quietly():
                self._sweep(history, deadline)

    def _sweep(self, history: str, deadline: float) -> None:
        """Has payload deleted that the ledger does not know. If this fails, or while another client does it, the next
        call asks again."""
        state = self._session.run("sweep", deadline, "sweep", "begin", history, [])[1]
        if state == b"later":
            return
        if state == b"look":
            count = 0
            for writes in self._payload.find("sweep", deadline):
                found = sorted(writes)
                for first in range(0, len(found), _LOOK_WRITES):
                    some = found[first : first + _LOOK_WRITES]
                    count += self._session.run("sweep", deadline, "sweep", "look", history, some)[1]
            if count:
                _log.warning("the ledger does not know %d writes that nodes hold: they are deleted soon", count)
            self._session.run("sweep", deadline, "sweep", "end", history, [])
        self._swept = history
