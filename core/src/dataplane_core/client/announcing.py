"""A client announces itself to the store: where it runs, its calls under way, the last of each kind, and its phases."""

from __future__ import annotations

import heapq
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from dataplane_core.spec import AnnounceRequest, CallInfo, ClaimRequest, ClientInfo, PhaseInfo, WorkInfo, new_id
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
#: What an announcement has at most: calls, work, fields of each; phases, and groups of all of them; letters of a name.
_MOST_CALLS: Final = 8
_MOST_WORK: Final = 64
_MOST_FIELDS: Final = 1024
_MOST_PHASES: Final = 64
_MOST_GROUPS: Final = 256
_MOST_LETTERS: Final = 80
#: How much work a client remembers that has ended.
_MOST_ENDED: Final = 16


class RunningCall(Struct, eq=False):
    """An operation that began now in this thread. Without a name, it is not listed."""

    operation: str
    partition_id: str = ""
    began_at: float = field(default_factory=time.monotonic)
    thread_id: int = field(default_factory=threading.get_ident)


class Work(Struct, eq=False):
    """Puts of certain fields, or claims for a task: the last one, and claims that wait. See `WorkInfo`."""

    operation: str
    partition_id: str
    task_name: str
    fields: tuple[str, ...]
    claim: ClaimRequest | None = None  # the last one
    waits: dict[str, float] = field(default_factory=dict)  # token of a claim under way -> its begin
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    served_at: float | None = None  # when a put was last written, or a claim was given samples

    def announced(self, now: float) -> WorkInfo:
        """As it is announced."""
        claim, ended_at, served_at, starts = self.claim, self.ended_at, self.served_at, list(self.waits.values())
        ranks = claim.dp_size or 1 if claim is not None and claim.sampler == "balanced" else 1
        return WorkInfo(
            operation=self.operation,
            partition_id=self.partition_id,
            task_name=self.task_name,
            fields=self.fields[:_MOST_FIELDS],
            tag_filter=None if claim is None else claim.tag_filter,
            batch_size=0 if claim is None else claim.batch_size * ranks,
            began_s=now - min(starts, default=self.began_at),
            ended_s=None if starts or ended_at is None else now - ended_at,
            served_s=None if served_at is None else now - served_at,
        )


class WorkLog:
    """What a client did last, of each kind. For any thread: it changes, and is copied, by single steps of C."""

    def __init__(self) -> None:
        self.waiting: dict[str, float] = {}  # token of each claim that is under way -> when it began
        self._work: dict[tuple[Any, ...], Work] = {}

    def begin(self, operation: str, partition_id: str, fields: Iterable[str] = (), task_name: str = "") -> Work:
        """A put, a claim or a registration begins."""
        kind = (operation, partition_id, task_name, tuple(fields))
        work = self._work.get(kind)
        if work is None:
            work = self._work.setdefault(kind, Work(*kind))  # another thread may do the same
            if len(self._work) > _MOST_ENDED:
                idle = [(other.began_at, kind) for kind, other in self._work.copy().items() if not other.waits]
                for _, oldest in heapq.nsmallest(len(idle) - _MOST_ENDED, idle):
                    self._work.pop(oldest, None)
        served_at, has_ended = work.served_at, work.ended_at is not None and not work.waits
        # a claim after one that ended in vain goes on waiting
        if not has_ended or (served_at is not None and served_at >= work.began_at):
            work.began_at = time.monotonic()
        return work

    def begin_claim(self, request: ClaimRequest) -> Work:
        """A claim is under way until `end_claim`."""
        work = self.begin("claim_meta", request.partition_id, request.required_fields, request.task_name)
        self.waiting[request.token] = time.monotonic()
        work.claim = request
        work.waits[request.token] = work.began_at
        return work

    def end_claim(self, work: Work, request: ClaimRequest) -> None:
        """A claim has ended."""
        self.waiting.pop(request.token, None)
        work.waits.pop(request.token, None)
        work.ended_at = time.monotonic()

    def announced(self, now: float) -> list[WorkInfo]:
        """As it is announced, what began last first."""
        last = heapq.nlargest(_MOST_WORK, list(self._work.values()), key=lambda work: work.began_at)
        return [work.announced(now) for work in last]


# --- phases -----------------------------------------------------------------------------------------------------------


class _Phase(Struct, eq=False):
    """A phase that began now, within others, outermost first."""

    name: str
    partition_id: str
    groups: list[str]
    around: tuple[_Phase, ...]
    began_at: float = field(default_factory=time.monotonic)
    has_ended: bool = False


#: The phases of this thread or task, of any client, outermost first. Some may have ended, if a task outlived them.
_WITHIN: Final[ContextVar[tuple[_Phase, ...]]] = ContextVar("_WITHIN", default=())


def _still_open() -> tuple[_Phase, ...]:
    return tuple(phase for phase in _WITHIN.get() if not phase.has_ended)


class Phases:
    """The phases of a client that have not ended. Any thread may use it: it changes by single steps of C."""

    def __init__(self) -> None:
        self._open: set[_Phase] = set()

    @contextmanager
    def within(self, name: str, partition_id: str, groups: list[str]) -> Iterator[None]:
        """While the ``with`` lasts, this thread or task is in a phase."""
        phase = _Phase(name[:_MOST_LETTERS], partition_id, groups[:_MOST_GROUPS], _still_open())
        try:
            self._open.add(phase)
            _WITHIN.set((*phase.around, phase))
            yield
        finally:
            self._open.discard(phase)
            phase.has_ended = True
            phase.around = ()  # else phases whose ends cross would hold each other
            # not reset: ends may cross, and a generator may be closed in another context than it was begun in
            _WITHIN.set(_still_open())

    def announced(self, now: float) -> list[PhaseInfo]:
        """As they are announced: those that no other one is within, what began first first."""
        phases = list(self._open)
        outer = {around for phase in phases for around in phase.around}
        inner = [phase for phase in phases if phase not in outer]
        infos, left = [], _MOST_GROUPS
        for phase in heapq.nsmallest(_MOST_PHASES, inner, lambda phase: phase.began_at):
            makers = (one for one in (phase, *reversed(phase.around)) if one.groups and not one.has_ended)
            maker = next(makers, phase)
            groups = maker.groups[:left]
            left -= len(groups)
            running_s = now - phase.began_at
            infos.append(PhaseInfo(phase.name, running_s, partition_id=maker.partition_id, groups=groups))
        return infos


# --- announcing -------------------------------------------------------------------------------------------------------


class Announcer:
    """Announces a client every ``period_s`` seconds, or less often if the store has many, in a thread of its own.

    A failed announcement is not repeated before the next one is due, and disturbs nothing else. The thread does not
    keep a client alive that nobody uses any longer.
    """

    def __init__(self, connection: Any, period_s: float) -> None:  # a Connection, which imports this module
        self._connection = weakref.ref(connection)
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

    def stop(self) -> None:
        """The client closes. Blocks at most until its backend has to be stopped."""
        connection = self._connection()
        until = math.inf if connection is None else connection.backend.stop_by
        self.end(until)
        # a short program that did something is known afterwards, though it was never listed
        if self._listed or (connection is not None and connection.work.announced(0.0)):
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
        connection = self._connection()
        if connection is None:
            self._stop.ring()
            return None
        deadline = min(time.monotonic() + _TIMEOUT_S, until)
        request = AnnounceRequest(client=describe_client(connection, self, period_s), ttl_s=ttl_s, deadline=deadline)
        try:
            num_clients: int = connection.call(request)
        except Exception:  # the operations of the client say what is wrong
            return None
        return num_clients


def describe_client(connection: Any, announcer: Announcer | None, period_s: float = 0.0) -> ClientInfo:
    """A client as it announces itself. Without an announcer, nobody knows its id."""
    now = time.monotonic()
    running = [call for call in list(connection.calls) if call.operation]
    first = heapq.nsmallest(_MOST_CALLS, running, key=lambda call: call.began_at)
    addresses = (getattr(middleware, "metrics_address", "") for middleware in connection.middleware)
    return ClientInfo(
        client_id="" if announcer is None else announcer.client_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        role=connection.config.role or program_name(),
        open_s=0.0 if announcer is None else now - announcer.opened_at,
        num_calls=len(running),
        calls=[CallInfo(call.operation, str(call.partition_id)[:_MOST_LETTERS], now - call.began_at) for call in first],
        metrics_address=next(filter(None, addresses), ""),
        period_s=period_s,
        work=connection.work.announced(now),
        phases=connection.phases.announced(now),
    )


def program_name() -> str:
    """What this process runs: the title that Ray gives to its workers, or the name of the script or module."""
    title = ""
    with suppress(OSError):
        title = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").partition("\0")[0]
    if not title.startswith("ray::"):
        script = Path(sys.argv[0] if sys.argv else "")
        title = script.parent.name if script.name == "__main__.py" else script.name
    return title[:_MOST_LETTERS] or "python"
