"""Interrupts at random moments of all calls of a client leave the store whole, and the client usable."""

import ctypes
import random
import signal
import sys
import threading
import uuid

import pytest
import torch
from dataplane_sqlite_example import SQLiteStore
from tiers import in_long

from dataplane_core import connect
from dataplane_core.backends import extent_client
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.host_memory import copying

#: Per partition, so that the checks stay short.
NUM_ROUNDS = 25


BYTES = {"capacity_bytes": 1 << 24}
#: A backend, and its options. With copy threads, these copy also a few bytes.
STORES = {
    "noop": ("noop", {}),
    "sqlite": ("sqlite_example", {}),
    "shm_store": ("shm_store", BYTES),
    "shm_store with copy threads": ("shm_store", {**BYTES, "copy_threads": 3}),
    "redis_store": ("redis_store", {}),
    "tq_simple": ("tq_simple", {"copy_threads": 3}),
    "tq_simple over the wire": ("tq_simple", {"copy_threads": 3, "share_memory": False}),
}


@pytest.fixture(params=STORES)
def client(request, tmp_path, monkeypatch):
    (backend, options), name = STORES[request.param], f"interrupts-{uuid.uuid4().hex[:8]}"
    if "copy_threads" in options:
        monkeypatch.setattr(extent_client, "_FEW_BYTES", 0)
        monkeypatch.setattr(copying, "_LEAST_BYTES", 8)
        monkeypatch.setattr(copying, "_PAGE", 8)
    if backend == "sqlite_example":
        options = {"path": str(tmp_path / "store")}
    elif backend == "tq_simple":
        options = {**options, "instance": name, "ray_address": request.getfixturevalue("ray_address")}
    elif backend != "noop":
        options = {**options, "namespace": name}
    # a call that is never answered lets the test time out
    config = DataPlaneConfig(backend=backend, options=options, op_timeout_s=300)
    opened = connect_backend(SQLiteStore, config) if backend == "sqlite_example" else connect(config)
    yield opened
    opened.close()


class Interrupts:
    """Raises in the main thread at random moments: as a signal does, and in turn as another thread does."""

    def __init__(self):
        self.moments = random.Random(0)
        self.count = 0
        self.never_began = set()  # threads whose start an interrupt cut off. CPython keeps them in `_limbo`

    def __call__(self, *_):
        self.count += 1
        # while a thread starts, CPython takes it for the one that started it, and its start would never end
        if self.count % 2 or threading._limbo.keys() - self.never_began:
            raise KeyboardInterrupt
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(KeyboardInterrupt)
        )

    def cut(self, work):
        """Repeats some work until it is cut off."""
        number, self.never_began = self.count, set(threading._limbo)
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** self.moments.uniform(-5.5, -2.2))
            while self.count == number:
                work()
            work()  # Python swallows what is raised in a `__del__`
        except KeyboardInterrupt:
            pass


@pytest.fixture
def interrupts(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # in pytest's, which takes longer, one could come too
    handler, limit = Interrupts(), signal.getitimer(signal.ITIMER_REAL)  # pytest's time limit
    before = signal.signal(signal.SIGALRM, handler)
    yield handler
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *limit)


class Run:
    """Puts, claims, acks and clears in one partition, and notes what was answered."""

    def __init__(self, client, partition_id):
        self.client, self.partition_id = client, partition_id
        self.begun = {}  # sample -> its value
        self.put = set()
        self.claimed = []
        self.acking, self.acked = set(), set()
        self.clearing, self.cleared = set(), set()
        client.register_partition(partition_id, ["x", "y"], None, ["t"])

    def work(self):
        client, number = self.client, len(self.begun)
        ids = [f"{number}", f"{number + 1}"]
        self.begun.update(dict.fromkeys(ids, number))
        columns = {"x": torch.full((2, 3), number), "y": [f"text {number}"] * 2}
        client.put_samples(ids, self.partition_id, columns)
        self.put.update(ids)
        meta = client.claim_meta(self.partition_id, "t", ["x", "y"], 2, blocking=False, lease_s=3600.0)
        self.claimed += meta.sample_ids
        self.acking.update(meta.sample_ids)
        client.ack(meta)
        self.acked.update(meta.sample_ids)
        if number % 4 == 0:
            self.clearing.update(meta.sample_ids)
            client.clear_samples(meta.sample_ids, self.partition_id)
            self.cleared.update(meta.sample_ids)

    def check(self):
        client = self.client
        assert not client._connection.calls
        held = set(client.list_samples(self.partition_id).sample_ids)
        assert self.put - self.clearing <= held <= self.begun.keys() - self.cleared
        for sample_id in self.begun.keys() - self.put:  # of a put that was cut off
            first = str(self.begun[sample_id])
            assert len(held & {first, str(int(first) + 1)}) in (0, 2) or first in self.clearing
        assert len(self.claimed) == len(set(self.claimed))
        found = client.describe(self.partition_id)
        (task,) = found.tasks.values()
        assert found.num_samples == len(held)
        assert task.num_ready + task.num_leased + task.num_consumed == len(held)
        assert len(self.acked & held) <= task.num_consumed <= len(self.acking & held)

    def check_values(self):
        """Every cell that is held is whole. What no claim was given comes now, and nothing else."""
        client = self.client
        held = client.list_samples(self.partition_id).sample_ids
        if held:
            columns = client.get_samples(held, self.partition_id, ["x", "y"])
            assert columns["x"].tolist() == [[self.begun[each]] * 3 for each in held]
            assert list(columns["y"]) == [f"text {self.begun[each]}" for each in held]
        (task,) = client.describe(self.partition_id).tasks.values()
        rest = client.claim_meta(self.partition_id, "t", ["x"], len(held) + 1, blocking=False)
        assert len(rest.sample_ids) == task.num_ready
        assert not self.acked.intersection(rest.sample_ids)


@pytest.mark.parametrize("count", [100, *in_long(pytest.param(20_000, marks=pytest.mark.timeout(7200)))])
def test_the_store_stays_whole_and_the_client_usable(client, interrupts, count, ray_server):
    for first in range(0, count, NUM_ROUNDS):
        run = Run(client, f"p{first}")
        for _ in range(NUM_ROUNDS):
            interrupts.cut(run.work)
            run.check()
        run.check_values()
        client.clear_samples(None, run.partition_id)
    client.close()
