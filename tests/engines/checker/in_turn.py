"""Two clients of a store that take turns in a fixed order, so that a race comes out the same each time."""

import threading
import uuid
from collections import deque
from contextlib import contextmanager, suppress

from dataplane_testkit.chaos import Event, History, Settings, judged
from dataplane_testkit.chaos.history import read_calls
from dataplane_testkit.chaos.shim import ShimClient
from dataplane_testkit.chaos.worker import BASE, Hands, Plan

#: Seconds that a client waits for its turn.
_WAIT_S = 60


def put(*names):
    return lambda client: client.write("p0", names, BASE)


def read(*names):
    return lambda client: client.read("p0", names, BASE)


def claim(count, task="once"):
    return lambda client: client.claim("p0", task, count)


class Killed(BaseException):
    """Ends a call as a kill does: its end is not written down."""


class Turns:
    """Who is next, such as "AAB": two requests of A, then one of B, then whoever comes.

    Args:
        order: The turns. Those of a client whose call has ended are dropped.
        cut: The client that is killed before its next request once the order is through.
    """

    def __init__(self, order="", cut=None):
        self._order, self._cut = deque(order), cut
        self._moved, self._mine = threading.Condition(), threading.local()

    def take(self):
        """Waits for this thread's turn, which lasts until it takes the next one or its call ends."""
        name = getattr(self._mine, "name", None)
        if name is None:
            return
        self._leave()
        with self._moved:
            assert self._moved.wait_for(lambda: not self._order or self._order[0] == name, _WAIT_S), self._order
            if self._order:
                self._mine.holds = True
            elif name == self._cut:
                raise Killed

    def _leave(self):
        if getattr(self._mine, "holds", False):
            self._mine.holds = False
            with self._moved:
                self._order.popleft()
                self._moved.notify_all()

    @contextmanager
    def of(self, name):
        """The calling thread is a client in the block."""
        self._mine.name = name
        try:
            yield
        finally:
            self._leave()
            self._mine.name = None
            with self._moved:
                self._order = deque(each for each in self._order if each != name)
                self._moved.notify_all()


class _InTurn:
    def __init__(self, shim, turns, name):
        self._shim, self._turns, self._name = shim, turns, name

    def __getattr__(self, operation):
        def call(*arguments):
            with self._turns.of(self._name):
                return getattr(self._shim, operation)(*arguments)

        return call


class Race:
    """Clients of a store whose calls are written down.

    Args:
        folder: Where their histories go.
        shims: Name -> the shim of a client. The first one, "audit", may have started the store.
    """

    def __init__(self, folder, **shims):
        self.turns = Turns()
        self._shims, self._killed = shims, set()
        settings = Settings(seed=0, schedule_s=0.0, lease_s=60.0, op_timeout_s=60.0)
        leases = "lease" in next(iter(shims.values())).promises
        self._plan = Plan(settings=settings, folder=folder, epoch_s=0.0, leases=leases, tags=False)
        self._hands, self._clients = {}, []
        mark = f"{uuid.uuid4().hex}-"
        for number, name in enumerate(shims, start=1):
            client = ShimClient(_InTurn(shims[name], self, name), mark, 120.0)
            self._clients.append(client)
            self._hands[name] = Hands(client, self._plan, name, number * 100)
            self._hands[name].listed("p0")  # a connection is opened by requests of its own

    def of(self, name):
        return self.turns.of(name)

    def __getitem__(self, name):
        return self._hands[name]

    def together(self, order, cut=None, **calls):
        """Lets clients make a call each at the same time, in this order of requests. Name -> what it does."""
        self.turns = Turns(order, cut)
        self._killed |= {cut} - {None}

        def run(name, act):
            with suppress(Killed):
                act(self._hands[name])

        threads = [threading.Thread(target=run, args=call) for call in calls.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.turns = Turns()

    def audit(self, *tasks):
        """Gives all that is left to the client "audit"."""
        for task in tasks:
            meta = self._hands["audit"].claim("p0", task, 64)
            if meta is not None and self._plan.lease_of(task) is not None:
                self._hands["audit"].settle("ack", meta)

    def stop(self):
        """Ends the histories."""
        for hands in self._hands.values():
            hands.close()

    def close(self):
        """Ends the histories and the clients, the audit's last: it may have started the store."""
        self.stop()
        for client in reversed(self._clients):
            client.__exit__()

    def rules(self):
        """The rules that the history breaks: those that the store promises, and the others."""
        calls = [call for name in self._shims for call in read_calls(self._plan.file_of(name), name)]
        audits = [call.begin_s for call in calls if call.process == "audit"]
        kills = [Event(kind="kill", process=name, begin_s=0.0, end_s=0.0) for name in self._killed]
        history = History(calls=tuple(calls), events=tuple(kills), audited_s=min(audits, default=0.0) - 1e-6)
        broken, seen = judged(history, next(iter(self._shims.values())).promises)
        return {each.rule for each, _ in broken}, {each.rule for each, _ in seen}
