"""Servers that tests start with settings of their own, clients of them, and loads."""

import collections
import contextlib
import functools
import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import LostSamplesError
from dataplane_redis import RedisBackend

if str(Path(__file__).parent) not in sys.path:  # modules beside the tests can be imported by them
    sys.path.insert(0, str(Path(__file__).parent))

from redis_servers import Ended, Relay, Server, wait_until


@contextlib.contextmanager
def _starting():
    servers = []

    def start(*settings, **options):
        for _ in range(2):
            servers.append(Server(*settings, **options))
            with contextlib.suppress(Ended):  # another process took the port meanwhile
                return servers[-1].start()
        servers.append(Server(*settings, **options))
        return servers[-1].start()

    try:
        yield start
    finally:
        for server in servers:
            server.end()


@pytest.fixture
def start_server():
    """Starts servers with further settings."""
    with _starting() as start:
        yield start


def _cluster(start, num_replicas=0, settings=()):
    """Three primaries, each with a third of the slots; then the replicas of the first ones."""
    nodes = [start(*settings, cluster=True) for _ in range(3 + num_replicas)]
    third = 16384 // 3 + 1
    for number, node in enumerate(nodes):
        if number < 3:
            node.admin("CLUSTER", "ADDSLOTSRANGE", number * third, min(16384, (number + 1) * third) - 1)
        node.admin("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].bus_port)
    ids = [node.admin("CLUSTER", "MYID") for node in nodes]
    wait_until(lambda: all(name in node.admin("CLUSTER", "NODES") for node in nodes for name in ids))
    for number, replica in enumerate(nodes[3:]):
        replica.admin("CLUSTER", "REPLICATE", ids[number])
    for replica in nodes[3:]:
        wait_until(lambda replica=replica: replica.info("replication").get("master_link_status") == "up")
    wait_until(lambda: all(node.admin("CLUSTER", "NODES").count(b"slave") == num_replicas for node in nodes))
    wait_until(lambda: all(node.is_in_cluster() for node in nodes))
    return nodes


@pytest.fixture(scope="module")
def start_servers():
    """Starts servers with further settings, for a module."""
    with _starting() as start:
        yield start


@pytest.fixture
def start_relay():
    """Starts relays to a port."""
    relays = []

    def start(port):
        relays.append(Relay(port))
        return relays[-1]

    yield start
    for relay in relays:
        relay.close()


@pytest.fixture
def start_cluster(start_server):
    """Starts a cluster of a test's own, see `_cluster`."""
    return functools.partial(_cluster, start_server)


@pytest.fixture(scope="module")
def cluster(start_servers):
    """Three primaries for a module."""
    return _cluster(start_servers)


@pytest.fixture
def start_sentinel():
    """Starts sentinels that watch nothing yet."""
    with _starting() as start:
        yield functools.partial(start, sentinel=True)


@pytest.fixture(scope="module")
def plain(start_servers):
    """One server without persistence for a module."""
    return start_servers()


@pytest.fixture
def connect():
    """Connects clients, closed at the end of the test. They do not announce themselves: tests count and cut calls.

    A client registers a partition, if one is named, with the field "x" and the task "train".
    """
    clients = []

    def make(bootstrap=True, op_timeout_s=60.0, attach_wait_s=0.2, partition=None, **options):
        options.setdefault("namespace", f"test-{uuid.uuid4().hex[:8]}")
        config = DataPlaneConfig(
            backend="redis_store",
            options=options,
            op_timeout_s=op_timeout_s,
            attach_wait_s=attach_wait_s,
            announce_s=None,
        )
        clients.append(connect_backend(RedisBackend, config, bootstrap=bootstrap))
        if partition is not None:
            clients[-1].register_partition(partition, ["x"], None, ["train"])
        return clients[-1]

    yield make
    for client in reversed(clients):
        client.close()


@pytest.fixture
def every_operation():
    """Has a client send Redis every command that it may send."""

    def run(client, partition="p"):
        ids = [f"s{row}" for row in range(8)]
        client.register_partition(partition, ["x"], None, ["train"])
        for size in (3, 20_000):
            client.put_samples(ids, partition, {"x": torch.ones(8, size)})
            assert client.get_samples(ids, partition, ["x"])["x"].shape == (8, size)
        client.ack(client.claim_meta(partition, "train", ["x"], 2, lease_s=60))
        client.clear_samples(None, partition)

    return run


class Load:
    """A process with a load, see load.py."""

    def __init__(self, python, *words):
        program = Path(__file__).with_name("load.py")
        self.process = python.start(program, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def num_committed(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self):
        """What the load was told."""
        self.process.stdin.close()
        told = json.loads(self.process.stdout.readline())
        assert self.process.wait(60) == 0
        return told

    def kill(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class Loads:
    """Processes with a load on partition "p" of a client, which is not used meanwhile."""

    def __init__(self, client, loads):
        self.client, self._loads = client, loads

    def go_on(self, more=5):
        """Returns when each put so many more samples."""
        goals = [load.num_committed() + more for load in self._loads]
        wait_until(
            lambda: all(load.num_committed() >= goal for load, goal in zip(self._loads, goals, strict=True)), 120.0
        )

    def end(self):
        """Ends them. Checks that nothing was lost that they were told is done, nothing was given twice, and nothing
        half shown. Returns the samples whose rows are named as lost, and all errors."""
        told = [load.end() for load in self._loads]
        present = set(self.client.list_samples("p").sample_ids)
        committed = {sample_id: number for each in told for sample_id, number in each["committed"].items()}
        assert committed
        assert not committed.keys() - present, "acknowledged puts are lost"
        lost = set()
        for sample_id, number in committed.items():
            try:
                assert (self.client.get_samples([sample_id], "p", ["x"])["x"] == number).all()
            except LostSamplesError:
                lost.add(sample_id)
        pairs = collections.Counter(sample_id.rpartition("-")[0] for sample_id in present)
        assert set(pairs.values()) <= {2}, "half a put is there"
        assert not [each["halves"] for each in told if each["halves"]], "half a put was shown"
        claimed = collections.Counter(sample_id for each in told for sample_id in each["claimed"])
        assert set(claimed.values()) <= {1}, "a sample was given twice"
        acked = {sample_id for each in told for sample_id in each["acked"]}
        assert acked
        assert acked <= set(self.client.list_consumed("p", "train")), "acks are lost"
        return lost, [error for each in told for error in each["errors"]]


@pytest.fixture
def start_loads(python):
    """Starts processes with a load on the partition "p" of a client, for the task "train"."""
    loads = []

    def start(client, count=2):
        options = {**client.config.options, "url": str(client.config.options["url"])}
        mine = [Load(python, json.dumps(options), f"load{number}") for number in range(count)]
        loads.extend(mine)
        made = Loads(client, mine)
        made.go_on()
        return made

    yield start
    for load in loads:
        load.kill()
