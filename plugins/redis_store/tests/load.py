"""A load of puts, claims and acks that goes on through failovers, and remembers what it was told is done.

As a program, ``load.py URL NAMESPACE NAME WAIT_REPLICAS``, it prints the number of committed samples for each line that
it reads, and at the end of its input what it was told, as JSON.
"""

import json
import sys
import threading

import torch

from dataplane_core import connect
from dataplane_core.errors import DataPlaneError
from dataplane_redis import LostCallsError

#: Seconds between two calls of a thread. A client remembers a thousand calls: those of a failover while the old primary
#: goes on, of about ten seconds, must be fewer.
_PAUSE_S = 0.05
SMALL, LARGE = 3, 40_000  # a put in one script, and one in several


class Load:
    """Threads that put, claim and ack until they are told to end. Calls that fail are made again.

    Attributes:
        committed: Sample -> the number in it, of the puts that returned.
        acked: The samples whose ack returned.
        lost: (operation, its samples) of the calls that the client said were lost.
        errors: The types and messages of all errors.
    """

    def __init__(self, client, name):
        self.client, self.name = client, name
        self.committed, self.acked, self.lost, self.errors = {}, [], [], []
        self._done = threading.Event()
        self._threads = [threading.Thread(target=act, args=(i,)) for act in (self._put, self._take) for i in range(2)]
        for thread in self._threads:
            thread.start()

    def _attempt(self, call):
        """The reply in a list; or an empty one if it failed."""
        try:
            return [call()]
        except DataPlaneError as error:
            self.errors.append((type(error).__name__, error.retryable, str(error)))
            if isinstance(error, LostCallsError):
                self.lost += [(each.operation, list(each.sample_ids)) for each in error.calls]
            self._done.wait(0.02)
            return []

    def _put(self, worker):
        number = 0
        while not self._done.is_set():
            number += 1
            ids = [f"{self.name}-{worker}-{number}-{row}" for row in range(2)]
            fields = {"x": torch.full((2, LARGE if worker else SMALL), number)}
            while not self._attempt(lambda ids=ids, fields=fields: self.client.put_samples(ids, "p", fields)):
                if self._done.is_set():
                    return
            self.committed.update(dict.fromkeys(ids, number))
            self._done.wait(_PAUSE_S)

    def _take(self, _):
        while not self._done.is_set():
            for meta in self._attempt(self._claim):
                if self._attempt(lambda meta=meta: self.client.ack(meta)):
                    self.acked += meta.sample_ids
            self._done.wait(_PAUSE_S)

    def _claim(self):
        return self.client.claim_meta("p", "train", ["x"], 2, lease_s=600, timeout_s=5)

    def end(self):
        """Ends the threads."""
        self._done.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)

    def told(self):
        """What it was told, as plain values."""
        return {"committed": self.committed, "acked": self.acked, "lost": self.lost, "errors": self.errors}


def main(url, namespace, name, wait_replicas):
    """The load as a process."""
    options = {"url": url, "namespace": namespace, "wait_replicas": int(wait_replicas)}
    config = {"backend": "redis_store", "options": options, "op_timeout_s": 60}
    with connect(config, bootstrap=False) as client:
        load = Load(client, name)
        for _ in sys.stdin:
            print(len(load.committed), flush=True)
        load.end()
        for _ in range(2):  # what was lost is told by the next call
            load._attempt(lambda: client.list_samples("p"))
        print(json.dumps(load.told()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
