"""A client announces itself to the store: where it runs, what it does, and what it waits for."""

from __future__ import annotations

import atexit
import heapq
import math
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from dataplane_core.backends import Backend
from dataplane_core.config import DataPlaneConfig
from dataplane_core.spec import AnnounceReply, AnnounceRequest, Bell, CallInfo, ClientInfo, new_id

#: Seconds after which a new client announces itself first. Short programs do not.
_FIRST_S: Final = 1.0
#: Seconds between two announcements of each client, per client of the store. All clients together then announce
#: themselves a hundred times per second at most.
_PER_CLIENT_S: Final = 0.01
#: A client is listed for this many periods after an announcement.
_PERIODS: Final = 3
#: Seconds that an announcement, and that of the end, may take.
_TIMEOUT_S: Final = 2.0
#: How many operations it names.
_MOST_CALLS: Final = 8
_MOST_LETTERS: Final = 80


class RunningCall:
    """An operation that began now in this thread. Without a name, it is not listed."""

    __slots__ = ("began_at", "operation", "partition_id", "thread_id")

    def __init__(self, operation: str, partition_id: str) -> None:
        self.operation = operation
        self.partition_id = partition_id
        self.began_at = time.monotonic()
        self.thread_id = threading.get_ident()


class _Client(Protocol):
    """What is used of a client."""

    _backend: Backend
    _calls: set[RunningCall]

    @property
    def config(self) -> DataPlaneConfig:
        """Its config."""

    @property
    def middleware(self) -> tuple[Any, ...]:
        """Its middleware."""

    def _call(self, operation: str, request: Any, reply_type: type[AnnounceReply]) -> AnnounceReply: ...


class Announcer:
    """Announces a client every ``period_s`` seconds, or less often if the store has many, in a thread of its own.

    A failed announcement is not repeated before the next one is due, and disturbs nothing else. The thread does not
    keep a client alive that nobody uses any longer.
    """

    def __init__(self, client: _Client, period_s: float) -> None:
        self._client = weakref.ref(client)
        self._pid = os.getpid()
        self._period_s = period_s
        self._client_id = new_id()
        self._opened_at = time.monotonic()
        self._listed = False
        self._stop = Bell()
        self._thread = threading.Thread(target=self._run, name="dataplane-announce", daemon=True)
        with suppress(RuntimeError):  # no more threads are allowed
            self._thread.start()
        _announcers.add(self)

    def stop(self) -> None:
        """The client closes. Blocks at most until its backend has to be stopped."""
        client = self._client()
        until = math.inf if client is None else client._backend.stop_by
        self.end(until)
        if self._listed:
            self._announce(ttl_s=0.0, until=until)

    def end(self, until: float = math.inf) -> None:
        """Ends the thread. A fork has none."""
        if self._pid == os.getpid() and self._thread.ident is not None:
            self._stop.ring()
            self._thread.join(min(_TIMEOUT_S, max(0.0, until - time.monotonic())))

    def _run(self) -> None:
        period_s = self._period_s
        pause_s = min(_FIRST_S, period_s)
        while not self._stop.wait(pause_s):
            num_clients = self._announce(ttl_s=_PERIODS * period_s + _TIMEOUT_S)
            self._listed = num_clients is not None
            pause_s = period_s = max(self._period_s, (num_clients or 0) * _PER_CLIENT_S)

    def _announce(self, ttl_s: float, until: float = math.inf) -> int | None:
        """Announces the client. Returns how many are listed, or None if it failed."""
        client = self._client()
        if client is None:
            self._stop.ring()
            return None
        deadline = min(time.monotonic() + _TIMEOUT_S, until)
        request = AnnounceRequest(client=self._describe(client), ttl_s=ttl_s, deadline=deadline)
        try:
            return client._call("announce", request, AnnounceReply).num_clients
        except Exception:  # the operations of the client say what is wrong
            return None

    def _describe(self, client: _Client) -> ClientInfo:
        now = time.monotonic()
        running = [call for call in list(client._calls) if call.operation]
        first = heapq.nsmallest(_MOST_CALLS, running, key=lambda call: call.began_at)
        return ClientInfo(
            client_id=self._client_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            role=client.config.role or program_name(),
            open_s=now - self._opened_at,
            num_calls=len(running),
            calls=[
                CallInfo(
                    operation=each.operation,
                    partition_id=str(each.partition_id)[:_MOST_LETTERS],
                    running_s=now - each.began_at,
                )
                for each in first
            ],
            metrics_address=next(
                filter(None, (getattr(each, "metrics_address", "") for each in client.middleware)), ""
            ),
        )


_announcers: weakref.WeakSet[Announcer] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """No thread may be in the code of an engine while the interpreter ends."""
    for each in list(_announcers):
        each.end()


def program_name() -> str:
    """What this process runs: the title that Ray gives to its workers, or the name of the script or module."""
    title = ""
    with suppress(OSError):
        title = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").partition("\0")[0]
    if not title.startswith("ray::"):
        script = Path(sys.argv[0] if sys.argv else "")
        title = script.parent.name if script.name == "__main__.py" else script.name
    return title[:_MOST_LETTERS] or "python"
