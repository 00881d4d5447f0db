"""Servers that tests start with settings of their own, and clients of them."""

import contextlib
import functools
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_redis import RedisBackend
from dataplane_testkit import AuthorsClass, Disturbance, Settings, run_chaos
from dataplane_testkit.chaos.worker import PARTITIONS

if str(Path(__file__).parent) not in sys.path:  # modules beside the tests can be imported by them
    sys.path.insert(0, str(Path(__file__).parent))

from redis_servers import Ended, Server, columns, wait_until


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
    """Starts servers with further settings, see `Server`; with ``sentinel=True``, sentinels that watch nothing yet."""
    with _starting() as start:
        yield start


def _cluster(start, num_replicas=0):
    """Three primaries, each with a third of the slots; then the replicas of the first ones."""
    nodes = [start(cluster=True) for _ in range(3 + num_replicas)]
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
def start_cluster(start_server):
    """Starts a cluster of a test's own, see `_cluster`."""
    return functools.partial(_cluster, start_server)


@pytest.fixture(scope="module")
def cluster(start_servers):
    """Three primaries for a module."""
    return _cluster(start_servers)


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
def chaos(connect, tmp_path):
    """What three processes see of a store to which something is done meanwhile: ``chaos(act, options)``.

    ``act`` gets a client of its own with a partition "own". It begins when the processes have put samples. When it is
    over, the store takes puts again. Further arguments are those of `Settings`.
    """

    def run(act, options, **settings):
        done = []

        def serves(client):
            with contextlib.suppress(BackendUnavailableError):
                return client.put_samples(["at the end"], "own", columns(1))

        class Redis(AuthorsClass):
            backend = "redis_store"

            def disturbances(self, backend):
                own = {**options, "namespace": backend.config.namespace}
                client = connect(**own, bootstrap=False, partition="own")

                @contextlib.contextmanager
                def once():
                    if not done and client.list_samples(PARTITIONS[0]).sample_ids:
                        act(client)
                        wait_until(lambda: serves(client))
                        done.append(client.clear_samples(None, "own"))
                    yield

                return {"act": Disturbance(once, lasts=False)}

        usual = {"schedule_s": 20.0, "every_s": 1.0, "op_timeout_s": 60.0, "faults": frozenset({"act"})}
        while not done:  # the machine was so busy that none of them made a call
            with contextlib.suppress(OperationTimeoutError):
                verdict = run_chaos(Redis(), options, replace(Settings.brief(), **usual | settings), folder=tmp_path)
        return verdict

    return run
