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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

from dataplane_core.backends import Backend
from dataplane_core.client.phases import Phases
from dataplane_core.config import DataPlaneConfig
from dataplane_core.spec import (
    AnnounceRequest,
    CallInfo,
    ClientInfo,
    WorkInfo,
    new_id,
)
from dataplane_core.spec.requests import Request
from dataplane_core.spec.waking import Bell

#: Seconds after which a new client announces itself first. Short programs do not.
_FIRST_S: Final = 1.0
#: Seconds between two announcements of each client, per client of the store. All clients together then announce
#: themselves a hundred times per second at most.
_PER_CLIENT_S: Final = 0.01
#: A client is listed for this many periods after an announcement.
_PERIODS: Final = 3
#: Seconds that an announcement, and that of the end, may take.
_TIMEOUT_S: Final = 2.0
#: How many operations it names, how much of its work, and how many fields of each.
_MOST_CALLS: Final = 8
_MOST_WORK: Final = 64
_MOST_FIELDS: Final = 1024
_MOST_LETTERS: Final = 80
#: How much work a client remembers in which no claim waits.
_MOST_ENDED: Final = 16


class RunningCall:
    """An operation that began now in this thread. Without a name, it is not listed."""

    __slots__ = ("began_at", "operation", "partition_id", "thread_id")

    def __init__(self, operation: str, partition_id: str = "") -> None:
        self.operation = operation
        self.partition_id = partition_id
        self.began_at = time.monotonic()
        self.thread_id = threading.get_ident()


@dataclass(slots=True, eq=False)
class Work:
    """What a client does again and again: puts of certain fields, claims for a task, or clears. See `WorkInfo`."""

    operation: str
    partition_id: str
    task_name: str
    fields: tuple[str, ...]
    tag_filter: dict[str, tuple[str, Any]] | None = None
    batch_size: int = 0
    num_samples: int = 0
    began_at: float = field(default_factory=lambda: time.monotonic())  # tests replace it
    ended_at: float | None = None
    gap_s: float = 0.0
    unserved_since: float | None = None  # the begin of the first claim after the last one that was served
    turn: int = 0  # the higher, the later it was done last
    waits: dict[str, float] = field(default_factory=dict)  # token of a claim under way that waits -> its begin

    def end(self, num_samples: int) -> None:
        """One of the operations has put, given or cleared samples."""
        now = time.monotonic()
        if self.ended_at is not None:
            self.gap_s = max(self.gap_s, now - self.ended_at)
        self.ended_at = now
        self.unserved_since = None
        self.num_samples += num_samples

    def told(self, now: float) -> WorkInfo:
        """As it is announced."""
        unserved_since = self.unserved_since
        return WorkInfo(
            operation=self.operation,
            partition_id=self.partition_id,
            task_name=self.task_name,
            fields=self.fields[:_MOST_FIELDS],
            tag_filter=self.tag_filter,
            batch_size=self.batch_size,
            num_samples=self.num_samples,
            began_s=now - self.began_at,
            ended_s=None if self.ended_at is None else now - self.ended_at,
            longest_gap_s=self.gap_s,
            waits_s=max((now - since for since in list(self.waits.values())), default=None),
            unserved_s=None if unserved_since is None else now - unserved_since,
        )


class WorkLog:
    """What a client did last, of each kind. Any thread may use it: it changes by single steps of C."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Work] = {}
        self._turns = count(1)

    def of(self, operation: str, partition_id: str, task_name: str = "", fields: Iterable[str] = ()) -> Work:
        """The work that an operation belongs to. It counts as the last one then."""
        key = (operation, partition_id, task_name, tuple(fields))
        work = self._found.get(key) or self._found.setdefault(key, Work(*key))  # another thread may do the same
        work.turn = next(self._turns)
        if len(self._found) > _MOST_ENDED:
            ended = [(each.turn, key) for key, each in list(self._found.items()) if not each.waits]
            for _, oldest in heapq.nsmallest(len(ended) - _MOST_ENDED, ended):
                self._found.pop(oldest, None)
        return work

    def begin(self, operation: str, partition_id: str, fields: Iterable[str] = ()) -> Work:
        """An operation begins."""
        work = self.of(operation, partition_id, "", fields)
        work.began_at = time.monotonic()
        return work

    def told(self, now: float) -> list[WorkInfo]:
        """As it is announced, what began last first."""
        last = heapq.nlargest(_MOST_WORK, list(self._found.values()), key=lambda each: each.turn)
        return [each.told(now) for each in last]


class _Client(Protocol):
    """What is used of a client's connection."""

    config: DataPlaneConfig
    backend: Backend
    middleware: list[Any]
    calls: set[RunningCall]
    work: WorkLog
    phases: Phases

    def call(self, request: Request) -> Any: ...


class Announcer:
    """Announces a client every ``period_s`` seconds, or less often if the store has many, in a thread of its own.

    A failed announcement is not repeated before the next one is due, and disturbs nothing else. The thread does not
    keep a client alive that nobody uses any longer.
    """

    def __init__(self, client: _Client, period_s: float) -> None:
        self._client = weakref.ref(client)
        self._pid = os.getpid()
        self._period_s = period_s
        self.client_id = new_id()
        self.opened_at = time.monotonic()
        self._listed = False
        self.num_clients = 0  # of the store
        self._stop = Bell()
        self._thread = threading.Thread(target=self._run, name="dataplane-announce", daemon=True)
        with suppress(RuntimeError):  # no more threads are allowed
            self._thread.start()
        _announcers.add(self)

    def stop(self) -> None:
        """The client closes. Blocks at most until its backend has to be stopped."""
        client = self._client()
        until = math.inf if client is None else client.backend.stop_by
        self.end(until)
        # a short program that did something is known afterwards, though it was never listed
        if self._listed or (client is not None and client.work.told(0.0)):
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
            num_clients = self._announce(ttl_s=_PERIODS * period_s + _TIMEOUT_S, period_s=period_s)
            self._listed = num_clients is not None
            self.num_clients = num_clients or 0
            next_s = max(self._period_s, (num_clients or 0) * _PER_CLIENT_S)
            pause_s, period_s = min(period_s, next_s), next_s  # it is heard of again as soon as it has said

    def _announce(self, ttl_s: float, until: float = math.inf, period_s: float = 0.0) -> int | None:
        """Announces the client. Returns how many are listed, or None if it failed."""
        client = self._client()
        if client is None:
            self._stop.ring()
            return None
        deadline = min(time.monotonic() + _TIMEOUT_S, until)
        request = AnnounceRequest(client=describe_client(client, self, period_s), ttl_s=ttl_s, deadline=deadline)
        try:
            num_clients: int = client.call(request)
            return num_clients
        except Exception:  # the operations of the client say what is wrong
            return None


def describe_client(client: _Client, announcer: Announcer | None, period_s: float = 0.0) -> ClientInfo:
    """A client as it announces itself. Without an announcer, nobody knows its id."""
    now = time.monotonic()
    running = [call for call in list(client.calls) if call.operation]
    first = heapq.nsmallest(_MOST_CALLS, running, key=lambda call: call.began_at)
    return ClientInfo(
        client_id="" if announcer is None else announcer.client_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        role=client.config.role or program_name(),
        open_s=0.0 if announcer is None else now - announcer.opened_at,
        num_calls=len(running),
        calls=[
            CallInfo(
                operation=each.operation,
                partition_id=str(each.partition_id)[:_MOST_LETTERS],
                running_s=now - each.began_at,
            )
            for each in first
        ],
        metrics_address=next(filter(None, (getattr(each, "metrics_address", "") for each in client.middleware)), ""),
        period_s=period_s,
        work=client.work.told(now),
        phases=client.phases.told(now),
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
