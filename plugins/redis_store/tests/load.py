"""A load of puts, claims, acks and listings that goes on through faults, and remembers what it was told is done.

As a program, ``load.py OPTIONS NAME``, it prints the number of committed samples for each line that it reads, and at
the end of its input what it was told, as JSON.
"""

import collections
import json
import sys
import threading

import torch

from dataplane_core import connect
from dataplane_core.errors import DataPlaneError

#: Seconds between two calls of a thread.
_PAUSE_S = 0.05


class Load:
    """Threads that put, claim, ack and list until they are told to end. Puts that fail are made again.

    Attributes:
        told: What it was told: ``committed`` (sample -> the number in it, of the puts that returned), ``claimed`` and
            ``acked`` (samples), ``halves`` (puts of two samples of which a listing showed one), ``errors`` (type,
            retryable and message).
    """

    def __init__(self, client, name):
        self.client, self.name = client, name
        self.told = {"committed": {}, "claimed": [], "acked": [], "halves": [], "errors": []}
        self._done = threading.Event()
        acts = [(self._put, 0), (self._put, 1), (self._take, 0), (self._take, 1), (self._look, 0)]
        self._threads = [threading.Thread(target=act, args=(number,)) for act, number in acts]
        for thread in self._threads:
            thread.start()

    def _attempt(self, call):
        """The reply in a list; or an empty one if it failed."""
        try:
            return [call()]
        except DataPlaneError as error:
            self.told["errors"].append((type(error).__name__, error.retryable, str(error)))
            self._done.wait(0.02)
            return []

    def _put(self, worker):
        number = 0
        while not self._done.is_set():
            number += 1
            ids = [f"{self.name}-{worker}-{number}-{row}" for row in range(2)]
            fields = {"x": torch.full((2, 40_000 if worker else 3), number)}
            while not self._attempt(lambda ids=ids, fields=fields: self.client.put_samples(ids, "p", fields)):
                if self._done.is_set():
                    return
            self.told["committed"].update(dict.fromkeys(ids, number))
            self._done.wait(_PAUSE_S)

    def _take(self, _):
        while not self._done.is_set():
            for meta in self._attempt(self._claim):
                self.told["claimed"] += meta.sample_ids
                if self._attempt(lambda meta=meta: self.client.ack(meta)):
                    self.told["acked"] += meta.sample_ids
            self._done.wait(_PAUSE_S)

    def _claim(self):
        return self.client.claim_meta("p", "train", ["x"], 2, lease_s=6000, blocking=False)

    def _look(self, _):
        while not self._done.is_set():
            for listed in self._attempt(lambda: self.client.list_samples("p")):
                pairs = collections.Counter(sample_id.rpartition("-")[0] for sample_id in listed.sample_ids)
                self.told["halves"] += [name for name, count in pairs.items() if count != 2]
            self._done.wait(10 * _PAUSE_S)

    def end(self):
        """Ends the threads."""
        self._done.set()
        for thread in self._threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in self._threads)


def main(options, name):
    """The load as a process."""
    config = {"backend": "redis_store", "options": json.loads(options), "op_timeout_s": 60}
    with connect(config, bootstrap=False) as client:
        load = Load(client, name)
        for _ in sys.stdin:
            print(len(load.told["committed"]), flush=True)
        load.end()
        print(json.dumps(load.told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
