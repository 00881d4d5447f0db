"""Clients of an instance that work while its processes are killed."""

import threading
from contextlib import suppress

import torch

from dataplane_core import connect
from dataplane_core.errors import MissingDataError
from dataplane_testkit._timing import eventually as _eventually

STARTS_S = 150.0
ROWS = 6
TASKS = ["taken", "leased"]


def put(client, ids, value=0):
    rows = torch.tensor([[int(each.rpartition("-")[2]) + value] * 50 for each in ids])
    client.put_samples(ids, "p", {"x": rows})


def right(client, ids, value=0):
    found = client.get_samples(ids, "p", ["x"])["x"]
    return found[:, 0].tolist() == [int(each.rpartition("-")[2]) + value for each in ids]


def eventually(holds, what):
    return _eventually(holds, STARTS_S, what)


class Load:
    """Clients that put, claim, claim with a lease, and read, each in a thread of its own, until the block ends.

    Attributes:
        first: Samples that were there before.
        last: Samples that are put at the end.
        written: Samples that were put in between.
        claimed: Samples that were claimed; of the leased ones, those that were acked.
        rounds: How often each has done its work.
    """

    def __init__(self, client, config):
        self._client, self._config = client, config
        self._stop = threading.Event()
        self._failures = []
        self.first = [f"a-{row}" for row in range(20)]
        self.last = [f"end-{row}" for row in range(2 * ROWS)]
        self.written = []
        self.claimed = {task: [] for task in TASKS}
        self.rounds = [0, 0, 0, 0]

    def __enter__(self):
        put(self._client, self.first)
        acts = (self._produce, self._take, self._lease, self._read)
        self._threads = [threading.Thread(target=self._run, args=each) for each in enumerate(acts)]
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, kind, *_):
        self._stop.set()
        put(self._client, self.last)  # for claims that wait
        for thread in self._threads:
            thread.join(STARTS_S)
        if kind is None:
            assert not self._failures
            for claimed in self.claimed.values():
                assert len(claimed) == len(set(claimed))
                assert set(claimed) <= {*self.first, *self.written, *self.last}

    def goes_on(self):
        """Waits until each did more."""
        seen = list(self.rounds)
        self.eventually(lambda: all(now > then + 3 for now, then in zip(self.rounds, seen, strict=True)), "a hang")

    def eventually(self, holds, what):
        found = eventually(lambda: holds() or self._failures, what)
        assert not self._failures
        return found

    def _run(self, number, act):
        try:
            with connect(self._config, bootstrap=False) as mine:
                while not self._stop.is_set():
                    act(mine, self.rounds[number])
                    self.rounds[number] += 1
        except BaseException as error:
            self._failures.append(error)

    def _produce(self, mine, turn):
        ids = [f"b{turn}-{row}" for row in range(ROWS)]
        put(mine, ids)
        self.written.extend(ids)
        self._stop.wait(0.02)

    def _claim(self, mine, task, lease_s):
        meta = mine.claim_meta("p", task, ["x"], ROWS, timeout_s=STARTS_S, lease_s=lease_s)
        try:
            assert right(mine, list(meta.sample_ids))
        except MissingDataError:
            for sample_id in meta.sample_ids:
                with suppress(MissingDataError):  # lost, or cleared by the test
                    assert right(mine, [sample_id])
        if lease_s is not None:
            mine.ack(meta)
        self.claimed[task].extend(meta.sample_ids)

    def _take(self, mine, turn):
        self._claim(mine, "taken", None)

    def _lease(self, mine, turn):
        self._claim(mine, "leased", 10 * STARTS_S)

    def _read(self, mine, turn):
        with suppress(MissingDataError):
            assert right(mine, [self.first[turn % len(self.first)]])
        self._stop.wait(0.01)
