"""Servers that tests start with settings of their own, clients of them, and loads."""

import collections
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch

from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_redis import RedisBackend, _claims, _wakes
from dataplane_redis._acknowledged import Acknowledgements
from dataplane_testkit import backend_of

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


@pytest.fixture(scope="module")
def start_servers():
    """Starts servers with further settings, for a module."""
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


@pytest.fixture
def start_relay():
    """Starts relays to a port."""
    relays = []

    def start(port, delay_s=0.0):
        relays.append(Relay(port, delay_s))
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
def plain():
    """One server without persistence for a module."""
    with _starting() as start:
        yield start()


@pytest.fixture
def connect():
    """Connects clients, closed at the end of the test. They do not announce themselves: tests count and cut calls.

    A client registers a partition, if one is named, with the field "x" and the task "train".
    """
    clients = []

    def make(bootstrap=True, op_timeout_s=10.0, attach_wait_s=0.2, partition=None, **options):
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
def scripts_of(monkeypatch):
    """Collects the replies to the scripts of a client; before that of number `act_at` is returned, `act` runs."""

    def collect(client, act_at=None, act=None):
        script, replies = backend_of(client)._session.link.script, []

        def counted(*words, **more):
            replies.append(script(*words, **more))
            if len(replies) == act_at:
                act()
            return replies[-1]

        monkeypatch.setattr(backend_of(client)._session.link, "script", counted)
        return replies

    return collect


@pytest.fixture
def every_operation(monkeypatch):
    """Runs every operation of a client once and more, with puts and reads in one script and in several."""
    monkeypatch.setattr(_claims, "_COUNT_AFTER_S", 0.0)  # claims that wait tell the server at once

    def run(client, partition="p"):
        def columns(count, size):
            return {"x": torch.arange(count * size).view(count, size)}

        with contextlib.suppress(KeyError):
            client.list_samples("nobody's")
        client.register_partition(partition, ["x"], 12, ["train", "other"], grpo_group_size=2)
        client.register_partition(partition, ["x", "y"], 12, ["train"], grpo_group_size=2, if_exists="keep")
        ids = [f"q{row // 2}_g{row % 2}" for row in range(8)]
        client.put_samples(ids, partition, columns(8, 3), [{"v": row} for row in range(8)])
        client.put_samples(ids, partition, columns(8, 20_000), [{"w": row} for row in range(8)])
        same = torch.ones(1, 60_000).expand(2, -1)
        client.put_samples(ids[:2], partition, {"y": same})  # stored once
        assert client.get_samples(ids, partition, ["x"])["x"].shape == (8, 20_000)
        first = client.claim_meta(partition, "train", ["x"], 2, lease_s=60)
        client.renew(first, 60)
        client.nack(first)
        client.ack(client.claim_meta(partition, "train", ["x"], 2, lease_s=60))
        client.claim_meta(partition, "train", ["x"], 2, lease_s=60, tag_filter={"v": (">=", 4)})
        client.claim_meta(partition, "other", ["x"], 2)
        for tag_filter in (None, {"v": 99}):
            with pytest.raises(TimeoutError):
                client.claim_meta(partition, "other", ["x"], 8, timeout_s=0.1, tag_filter=tag_filter)
        client.reset_consumption(partition, "other", ids[:2])
        client.list_consumed(partition, "other")
        client.check_consumption_status(partition, ["train"])
        client.describe(partition)
        client.list_partitions()
        client.list_samples(partition, {"v": 1})
        client.list_fields(ids, partition)
        client.list_clients()
        client.ping()
        with tempfile.TemporaryDirectory() as folder:
            client.save(Path(folder) / "save", partitions=[partition])
        client.clear_samples(ids[2:4], partition)
        client.put_samples(["q9_g0", "q9_g1"], partition, columns(2, 3))
        client.clear_samples(None, partition)
        client.register_partition(partition, ["x"], None, ["train"])
        client.put_samples(["a", "b"], partition, columns(2, 20_000))
        client.clear_samples(["a"], partition)
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


@pytest.fixture
def start_load(python):
    """Starts processes with a load on partition "p", for the task "train"."""
    loads = []

    def start(url, namespace, name, wait_replicas=0):
        loads.append(Load(python, url, namespace, name, wait_replicas))
        return loads[-1]

    yield start
    for load in loads:
        load.kill()


@pytest.fixture
def check_told():
    """Compares what loads were told is done with what the store holds."""

    def check(client, told):
        """Returns the samples whose puts were lost and the acks that were lost. Each was named."""
        present = set(client.list_samples("p").sample_ids)
        lost_puts, lost_acks, acked = set(), collections.Counter(), collections.Counter()
        for each in told:
            for operation, ids in each["lost"]:
                lost_puts |= set(ids) if operation == "put_samples" else set()
                lost_acks += collections.Counter(ids if operation == "ack" else ())
            acked += collections.Counter(each["acked"])
        for each in told:
            for sample_id, number in each["committed"].items():
                is_present, is_lost = sample_id in present, sample_id in lost_puts
                assert is_present != is_lost, f"{sample_id}: present {is_present}, named lost {is_lost}; {told}"
                if sample_id in present:
                    found = client.get_samples([sample_id], "p", ["x"])["x"]
                    assert (found == number).all()
        assert set((acked - lost_acks).values()) <= {1}, "a sample was acked twice in silence"
        consumed = set(client.list_consumed("p", "train"))
        assert not [sample_id for sample_id in acked - lost_acks if sample_id not in consumed | lost_puts]
        return lost_puts, lost_acks

    return check


@pytest.fixture
def at_once():
    """Runs a function in so many threads, to their end."""

    def run(act, count):
        threads = [threading.Thread(target=act) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)

    return run


@pytest.fixture
def only_woken(monkeypatch):
    """Claims that will be woken never ask by themselves."""
    monkeypatch.setattr(_wakes, "_ASK_S", 1000.0)
    monkeypatch.setattr(_wakes, "_ASK_MOST_S", 1000.0)
    monkeypatch.setattr(_claims, "_LOOK_AGAIN_WOKEN_S", 1000.0)
    monkeypatch.setattr(_claims, "_COUNT_AFTER_S", 1000.0)


@pytest.fixture
def hardly_waits(monkeypatch):
    """In the block, servers wait for replicas for a moment only, however long the operation may take."""

    @contextlib.contextmanager
    def limit():
        wait = Acknowledgements.wait
        with monkeypatch.context() as patch:
            patch.setattr(Acknowledgements, "wait", lambda self, _: wait(self, time.monotonic() + 0.02))
            yield

    return limit
