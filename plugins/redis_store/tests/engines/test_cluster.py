"""A Redis Cluster of several nodes: any node may be named, and the slot of a namespace is followed."""

from concurrent.futures import ThreadPoolExecutor

import torch
from redis.crc import key_slot
from redis_servers import wait_until

from dataplane_testkit import backend_of

SLOTS = 16384


def namespace_on(number, tag=""):
    """A namespace whose slot the master of that number serves."""
    third = SLOTS // 3 + 1
    return next(
        name
        for name in (f"n{i}{tag}" for i in range(10_000))
        if key_slot(b"dp:{%s}" % name.encode()) // third == number
    )


def write_and_read(client, values):
    client.register_partition("p", ["x"], None, ["train"])
    ids = [f"s{row}" for row in range(len(values))]
    client.put_samples(ids, "p", {"x": values})
    meta = client.claim_meta("p", "train", ["x"], len(values), lease_s=60)
    assert torch.equal(client.get_data(meta)["x"], values)
    client.ack(meta)
    client.clear_samples(None, "p")


def test_any_node_of_a_cluster_may_be_named(start_cluster, connect):
    nodes = start_cluster()
    for number in range(len(nodes)):
        for named in (nodes[0].url, f"unix://{nodes[1].socket}"):
            client = connect(url=named, namespace=namespace_on(number, "u" if named.startswith("unix") else "t"))
            write_and_read(client, torch.randn(64, 4096))  # beyond what travels inside a script
            write_and_read(client, torch.arange(2))
            key = backend_of(client)._session.base + b":instance"
            assert nodes[number].admin("EXISTS", key) == 1


def test_a_slot_that_moves_is_followed(start_cluster, connect, only_woken):
    nodes = start_cluster()
    namespace = namespace_on(0)
    client = connect(url=nodes[0].url, namespace=namespace, partition="p")
    values = torch.randn(64, 4096)
    client.put_samples([f"s{row}" for row in range(64)], "p", {"x": values})
    pool = ThreadPoolExecutor(1)
    waits = pool.submit(client.claim_meta, "p", "train", ["x"], 65, timeout_s=300.0)
    wait_until(lambda: nodes[0].admin("PUBSUB", "SHARDCHANNELS"))

    nodes[0].move_slot(key_slot(backend_of(client)._session.base), nodes[2], [nodes[1]])

    assert torch.equal(client.get_samples(["s1", "s63"], "p", ["x"])["x"], values[[1, 63]])
    wait_until(lambda: nodes[2].admin("PUBSUB", "SHARDCHANNELS"))
    client.put_samples(["last"], "p", {"x": values[:1]})
    assert waits.result(60).size == 65
    pool.shutdown()
    write_and_read(client, torch.randn(64, 4096))


def test_a_large_put_whose_slot_moves_before_its_commit_begins_again(start_cluster, connect, monkeypatch):
    nodes = start_cluster()
    nodes[0].admin("ACL", "SETUSER", "plain", "on", ">pw", "~*", "&*", "+@all", "-cluster|slots")
    nodes[1].admin("ACL", "SETUSER", "plain", "on", ">pw", "~*", "&*", "+@all", "-cluster|slots")
    # a client that may not ask for the slots keeps all payload with the ledger
    client = connect(url=f"redis://plain:pw@127.0.0.1:{nodes[0].port}/0", namespace=namespace_on(0), partition="p")
    write, met = backend_of(client)._write, []

    def moves_first(*args):
        if not met:
            met.append(1)
            nodes[0].move_slot(key_slot(backend_of(client)._session.base), nodes[1], [nodes[2]])
        return write(*args)

    monkeypatch.setattr(backend_of(client), "_write", moves_first)
    values = torch.randn(64, 4096)
    client.put_samples([f"s{row}" for row in range(64)], "p", {"x": values})
    assert met
    assert torch.equal(client.get_samples(["s1", "s63"], "p", ["x"])["x"], values[[1, 63]])
    client.clear_samples(None, "p")
    assert not nodes[1].admin("KEYS", backend_of(client)._session.base + b":w:*")


def test_nodes_that_came_later_are_asked_too_when_the_ledgers_node_is_gone(cluster, connect):
    client = connect(url=cluster[0].url)
    session = backend_of(client)._session
    slots = cluster[0].admin("CLUSTER", "SLOTS")
    backend_of(client)._payload.nodes.learn([[*slots[0], [b"127.0.0.1", 1, b"later", []]], *slots[1:]])
    assert ("127.0.0.1", 1) in session.link._nodes
