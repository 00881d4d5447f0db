"""A process of a run: bootstraps an instance, or puts, claims or reads again and again. Tests of deaths start it.

Usage: going_on.py ACT CONFIG RAY_ADDRESS ADDRESS_OF_THIS_HOST

ACT is ``own``, or one of what `Worker` does. It prints a line when it is connected. Then it answers each line of
standard input, a list in JSON, with one line.
"""

import json
import os
import sys
import threading
import time

import ray
import torch

from dataplane_core import connect
from dataplane_core.errors import DataPlaneError, LostSamplesError

ROWS = 6
NAMESPACE = "dataplane"
_REST_S = 0.02
#: Longer than any cut: a claim whose outcome stays unknown may have leased samples to nobody.
CLAIM_S = 180.0


def rows(ids):
    """The cells of samples: different ones have different cells."""
    return torch.tensor([[int(each.rpartition("-")[2]), len(each), *map(ord, each.rjust(12))] for each in ids])


def put(client, ids):
    """Puts samples."""
    client.put_samples(ids, "p", {"x": rows(ids)})


def read(client, ids):
    """Reads samples. Returns those that are lost; the others have the right cells."""
    try:
        got = client.get_samples(ids, "p", ["x"])["x"]
    except LostSamplesError as error:
        lost = list(error.missing_samples)
        rest = [each for each in ids if each not in lost]
        return lost + (read(client, rest) if rest else [])
    assert torch.equal(got, rows(ids)), f"wrong cells of {ids}"
    return []


class Worker:
    """Does one thing again and again, in a thread.

    Attributes:
        done: The samples that it put, or that it was given and acked, or read.
        rounds: How often it has done its thing.
        failure: Why it ended.
    """

    def __init__(self, client, act):
        self.done: list[str] = []
        self.rounds = 0
        self.failure: str | None = None
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(getattr(self, f"_{act}"),))
        self._thread.start()

    def _run(self, act):
        while not self._stop.is_set():
            try:
                act()
                self.rounds += 1
            except BaseException as error:
                self.failure = f"{type(error).__name__}: {error}"
                return
            time.sleep(_REST_S)

    def _try(self, call, *args, **options):
        """Makes a call until it is done, or until the end."""
        while True:
            try:
                return call(*args, **options)
            except DataPlaneError as error:
                if not error.retryable:
                    raise
                if self._stop.is_set():
                    return None

    def _put_there(self):
        self._put("t")

    def _put(self, prefix="a"):
        ids = [f"{prefix}{self.rounds}-{row}" for row in range(ROWS)]
        self.done += ids  # from now on it may be there
        self._try(put, self._client, ids)

    def _claim(self, task, lease_s):
        meta = self._try(self._client.claim_meta, "p", task, ["x"], ROWS, lease_s=lease_s, timeout_s=CLAIM_S)
        if meta is None:
            return
        self._try(read, self._client, list(meta.sample_ids))
        if lease_s is not None:
            try:
                self._try(self._client.ack, meta)
            except DataPlaneError as error:
                raise AssertionError(f"ack: {type(error).__name__}: {error}") from error
        self.done += meta.sample_ids

    def _lease(self):
        self._claim("leased", 600.0)

    def _take(self):
        self._claim("taken", None)

    def _read(self):
        known = set(self.done)
        ids = [each for each in self._try(self._client.list_samples, "p") or [] if each not in known][:50]
        if ids:
            self._try(read, self._client, ids)
            self.done += ids

    def state(self):
        """How far it is."""
        return {"rounds": self.rounds, "failure": self.failure}

    def so_far(self):
        """What is done."""
        return list(self.done)

    def stop(self):
        """Ends it."""
        self._stop.set()
        self._thread.join()
        return {"done": self.done, **self.state()}


class Owner:
    """Bootstraps an instance, and looks at it."""

    def __init__(self, client):
        self._client = client
        client.register_partition("p", ["x"], None, ["leased", "taken"], if_exists="keep")

    def put(self, ids):
        """Puts samples."""
        put(self._client, ids)

    def lost(self, ids):
        """Reads samples; those that are lost."""
        return read(self._client, ids)

    def samples(self):
        """All samples."""
        return list(self._client.list_samples("p"))

    def rest(self, task):
        """The samples that nobody was given."""
        return list(self._client.claim_meta("p", task, ["x"], 10**6, blocking=False).sample_ids)

    def states_of_units(self):
        """The states of the storage units."""
        return [each.state for each in self._client.list_units()]

    def controller(self):
        """The process id of the controller, and the address of its host."""
        (name,) = [each for each in _actors() if "/" not in each]
        handle = ray.get_actor(name, namespace=NAMESPACE)
        return ray.get(handle.__ray_call__.remote(_place), timeout=60)

    def num_nodes(self):
        """How many nodes Ray takes for alive."""
        return sum(each["Alive"] for each in ray.nodes())


def _place(_):
    return os.getpid(), ray.util.get_node_ip_address()


def _actors():
    return [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]


def main(act, config, ray_address, own_address):
    """The program."""
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints what it sees
    # Without the address, Ray takes the first raylet of this machine, which may be that of the other host.
    ray.init(address=ray_address, _node_ip_address=own_address, log_to_driver=False, logging_level="ERROR")
    with connect(json.loads(config), bootstrap=act == "own") as client:
        one = Owner(client) if act == "own" else Worker(client, act)
        print(json.dumps("connected"), file=answers, flush=True)
        for line in sys.stdin:
            method, *args = json.loads(line)
            if method == "close":
                break
            print(json.dumps(getattr(one, method)(*args)), file=answers, flush=True)
        if act != "own":
            one.stop()
    ray.shutdown()
    print(json.dumps("closed"), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
