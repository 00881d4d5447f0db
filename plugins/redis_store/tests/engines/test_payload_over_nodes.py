"""The payload of a store in a cluster lies on all nodes, and what nothing refers to any longer is deleted."""

import itertools
import signal
import textwrap
import time
import uuid

import pytest
import torch
from redis.crc import key_slot
from redis_servers import wait_until

from dataplane_core.errors import BackendUnavailableError, LostSamplesError, OperationTimeoutError, StalePartitionError
from dataplane_redis._payload import NUM_BUCKETS, Placing
from dataplane_redis._scripts import MARK
from dataplane_testkit import backend_of

#: Numbers in a row that is a group of its own: more than half of what a group may have.
WIDE = 20_000


@pytest.fixture
def namespace():
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def client(cluster, connect, namespace):
    return connect(url=cluster[0].url, namespace=namespace, partition="p")


def rows(count, value=0.0, size=WIDE):
    return {"x": torch.arange(float(count)).view(-1, 1).expand(-1, size) + value}


def names(count, prefix="s"):
    return [f"{prefix}{row}" for row in range(count)]


def payload_keys(nodes, namespace):
    """The keys of all rows that lie in slots other than the ledger's, per node."""
    pattern = Placing(namespace, NUM_BUCKETS).pattern()
    return [node.admin("KEYS", pattern) for node in nodes]


def num_keys(nodes, namespace):
    return sum(map(len, payload_keys(nodes, namespace)))


def sizes(nodes, namespace):
    """Bytes of the rows of each node, as the node says."""
    found = payload_keys(nodes, namespace)
    return [
        sum(node.admin("MEMORY", "USAGE", key, "SAMPLES", 0) for key in keys)
        for node, keys in zip(nodes, found, strict=True)
    ]


@pytest.mark.parametrize(("num_puts", "num_rows", "size"), [(4, 64, WIDE), (3, 2000, 512)])
def test_each_node_holds_as_much_as_another(cluster, client, namespace, num_puts, num_rows, size):
    for put in range(num_puts):
        client.put_samples(names(num_rows, f"{put}-"), "p", rows(num_rows, put, size))
    held = sizes(cluster, namespace)
    assert max(held) <= 1.15 * min(held), held
    assert sum(held) > 4 * num_puts * num_rows * size
    for put in range(num_puts):
        assert torch.equal(
            client.get_samples(names(num_rows, f"{put}-"), "p", ["x"])["x"], rows(num_rows, put, size)["x"]
        )

    client.put_samples(names(num_rows, "0-"), "p", rows(num_rows, 0.5, size))
    assert sum(sizes(cluster, namespace)) < 1.05 * sum(held), "overwritten rows stayed"
    client.clear_samples(names(num_rows // 2, "0-"), "p")
    assert sum(sizes(cluster, namespace)) < sum(held) * (1 - 0.4 / num_puts), "cleared rows stayed"
    client.clear_samples(None, "p")
    assert num_keys(cluster, namespace) == 0


def test_a_put_that_is_refused_leaves_nothing(cluster, client, namespace, connect, monkeypatch):
    payload = backend_of(client)._payload
    write, other = payload.write, connect(url=cluster[1].url, namespace=namespace, bootstrap=False)

    def overtaken(*args):
        write(*args)
        assert num_keys(cluster, namespace) > 0
        other.clear_samples(None, "p")

    monkeypatch.setattr(payload, "write", overtaken)
    with pytest.raises(StalePartitionError):
        client.put_samples(names(8), "p", rows(8))
    assert num_keys(cluster, namespace) == 0


def test_a_put_whose_rows_a_node_did_not_take_was_not_done(start_cluster, connect, namespace, told_in_time):
    nodes = start_cluster()
    client = connect(url=nodes[0].url, namespace=namespace, partition="p")
    hasty = connect(url=nodes[0].url, namespace=namespace, bootstrap=False)
    silent = next(node for node in nodes if not _serves(node, backend_of(client)._session.base))
    kinds = (OperationTimeoutError, BackendUnavailableError)
    with silent.stopped():
        error = told_in_time(lambda: hasty.put_samples(names(64), "p", rows(64)), kinds, r"It was not done\.", 3.0)
    assert error.outcome == "not_done"
    assert client.list_samples("p").size == 0


WRITER = """
    import os, signal, sys, torch
    from tensordict import TensorDict
    from dataplane_core import connect
    from dataplane_redis._nodes import Nodes
    from dataplane_redis._payload import Payload

    url, namespace, when = sys.argv[1:]
    write, exchange = Payload.write, Nodes.exchange

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def last_write(*args):
        write(*args)
        die()

    def first_exchange(*args, again, **more):
        if again:
            die()
        return exchange(*args, again=again, **more)

    if when == "before the commit":
        Payload.write = last_write
    else:
        Nodes.exchange = first_exchange
    config = {"backend": "redis_store", "options": {"url": url, "namespace": namespace}}
    client = connect(config, bootstrap=False)
    client.put_samples([f"d{row}" for row in range(8)], "p",
                       {"x": torch.ones(8, 20_000)})
"""


@pytest.mark.parametrize("when", ["before the commit", "before its rows stay"])
def test_what_a_killed_writer_left_is_deleted(cluster, client, namespace, python, when):
    died = python.run("-c", textwrap.dedent(WRITER), cluster[0].url, namespace, when, check=False)
    assert died.returncode == -signal.SIGKILL
    keys = [(node, key) for node, mine in zip(cluster, payload_keys(cluster, namespace), strict=True) for key in mine]
    assert len(keys) == 8
    ends = [node.admin("PTTL", key) for node, key in keys]
    assert all(end == -1 if when == "before the commit" else end > 0 for end in ends)
    session, deadline = backend_of(client)._session, time.monotonic() + 60
    for write in session.command("test", deadline, b"ZRANGE", session.base + b":pending", b"0", b"-1"):
        if write != MARK:
            session.command("test", deadline, b"ZADD", session.base + b":pending", b"0", write)  # its time is over
    for (node, key), end in zip(keys, ends, strict=True):
        if end > 0:
            node.admin("PEXPIRE", key, 1)

    def is_deleted():  # by the next calls of any client
        client.put_samples(["small"], "p", rows(1, size=1))
        return num_keys(cluster, namespace) == 0

    wait_until(is_deleted)
    assert client.list_samples("p").sample_ids == ["small"]
    assert client.describe("p").held_bytes < 1000


def test_what_the_ledger_does_not_know_is_deleted(cluster, connect, namespace):
    placing = Placing(namespace, NUM_BUCKETS)
    write = placing.new_spread_write(1, 1 << 20)
    (bucket,) = placing.buckets_of(write)
    key = placing.key_of(write, bucket)
    owner = next(node for node in cluster if _serves(node, key))
    owner.admin("HSET", key, 0, b"of a failed-over ledger")

    client = connect(url=cluster[0].url, namespace=namespace)
    session, deadline = backend_of(client)._session, time.monotonic() + 60
    client.register_partition("p", ["x"], None, ["train"])
    client.put_samples(names(8), "p", rows(8))
    session.command("test", deadline, b"HDEL", session.base + b":instance", b"swept")
    backend_of(client)._payload.look(deadline)
    assert session.command("test", deadline, b"ZRANGE", session.base + b":gone", b"0", b"-1") == [write, MARK]
    assert owner.admin("EXISTS", key) == 1  # the ledger may be one that was replaced a moment ago

    session.command("test", deadline, b"ZADD", session.base + b":gone", b"0", write)  # that moment is over
    backend_of(client)._payload.look(deadline)
    assert owner.admin("EXISTS", key) == 0
    assert torch.equal(client.get_samples(names(8), "p", ["x"])["x"], rows(8)["x"])


def test_a_look_at_what_the_ledger_does_not_know_is_made_again_if_it_failed(cluster, connect, namespace, monkeypatch):
    one = connect(url=cluster[0].url, namespace=namespace)
    two = connect(url=cluster[0].url, namespace=namespace, bootstrap=False)
    session, deadline = backend_of(one)._session, time.monotonic() + 60
    session.command("test", deadline, b"HDEL", session.base + b":instance", b"swept")
    looks = []

    def look(client, fails):
        def find(*_):
            looks.append(client)
            if fails:
                raise BackendUnavailableError("a node is down")
            return iter(())

        payload = backend_of(client)._payload
        monkeypatch.setattr(payload, "_find", find)
        payload.look(deadline)
        return payload

    failed = look(one, True)
    waits = look(two, False)  # another client looks, as far as it knows
    assert looks == [one]
    session.command("test", deadline, b"UNLINK", session.base + b":sweep")  # for so long it is believed
    waits.look(deadline)
    failed.look(deadline)
    waits.look(deadline)
    assert looks == [one, two]


def _serves(node, key):
    slot = key_slot(key)
    return any(
        first <= slot <= last and primary[1] == node.port for first, last, primary, *_ in node.admin("CLUSTER", "SLOTS")
    )


def test_a_read_that_meets_a_clear_or_an_overwrite(cluster, client, namespace, connect, scripts_of):
    other = connect(url=cluster[2].url, namespace=namespace, bootstrap=False)
    client.put_samples(names(8), "p", rows(8))
    scripts_of(client, act_at=1, act=lambda: other.put_samples(names(8), "p", rows(8, 7)))
    assert torch.equal(client.get_samples(names(8), "p", ["x"])["x"], rows(8, 7)["x"])

    scripts_of(other, act_at=1, act=lambda: client.clear_samples(names(4), "p"))
    with pytest.raises(KeyError, match="s0") as raised:
        other.get_samples(names(8), "p", ["x"])
    assert not isinstance(raised.value, LostSamplesError)


def test_a_slot_that_is_moving_and_one_that_has_moved(cluster, client, namespace):
    placing = backend_of(client)._payload.placing
    bucket = next(each for each in range(NUM_BUCKETS) if placing.slot_of(each) < 5000)  # served by the first node
    source, target, other = cluster
    placing._next = itertools.count(bucket)
    client.put_samples(names(4), "p", rows(4))
    source.move_slot(placing.slot_of(bucket), target, whole=False)
    try:
        assert torch.equal(client.get_samples(names(4), "p", ["x"])["x"], rows(4)["x"])
        placing._next = itertools.count(bucket)
        client.put_samples(names(4, "t"), "p", rows(4, 1))  # while the slot is between the nodes
    finally:
        source.move_slot(placing.slot_of(bucket), target, [other])
    assert torch.equal(client.get_samples(names(4), "p", ["x"])["x"], rows(4)["x"])
    assert torch.equal(client.get_samples(names(4, "t"), "p", ["x"])["x"], rows(4, 1)["x"])
    placing._next = itertools.count(bucket)
    client.put_samples(names(4, "u"), "p", rows(4, 2))
    client.clear_samples(None, "p")
    assert num_keys(cluster, namespace) == 0


@pytest.mark.timeout(400)
def test_failovers_and_moving_slots_under_load(start_cluster, start_load, connect, check_told, namespace):
    nodes = start_cluster(num_replicas=3)
    client = connect(url=nodes[0].url, namespace=namespace, wait_replicas=1, op_timeout_s=60.0, partition="p")
    placing = backend_of(client)._payload.placing
    loads = [start_load(nodes[0].url, namespace, f"l{number}", wait_replicas=1) for number in range(2)]

    def goes_on():
        before = [load.num_committed() for load in loads]
        wait_until(lambda: all(load.num_committed() > was + 10 for load, was in zip(loads, before, strict=True)))

    goes_on()
    ledger = next(number for number in range(3) if _serves(nodes[number], backend_of(client)._session.base))
    others = [number for number in range(3) if number != ledger]
    source, target = (nodes[number] for number in others)
    moved = [slot for slot in map(placing.slot_of, range(NUM_BUCKETS)) if slot * 3 // 16384 == others[0]][:20]
    for slot in moved:
        source.move_slot(slot, target, [nodes[ledger]])
    goes_on()
    for number in (others[0], ledger):  # one with payload only, then the ledger's
        nodes[number].kill()
        for node in nodes:
            if node.process.poll() is None:
                node.notices_deaths()
        wait_until(lambda number=number: nodes[3 + number].info("replication")["role"] == "master")
        wait_until(lambda: all(node.is_in_cluster() for node in nodes if node.process.poll() is None))
        nodes[number].start()
        wait_until(lambda number=number: nodes[number].info("replication").get("master_link_status") == "up")
        goes_on()
    told = [load.end() for load in loads]
    lost_puts, lost_acks = check_told(client, told)
    assert not lost_puts
    assert not lost_acks
    client.clear_samples(None, "p")
