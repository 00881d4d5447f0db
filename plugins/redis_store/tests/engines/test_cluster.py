"""A Redis Cluster of several nodes: any node may be named, slots that move and primaries that are replaced."""

import pytest
import torch
from redis.crc import key_slot
from redis_servers import columns, wait_until

from dataplane_core.errors import BackendUnavailableError, ConfigError, OperationTimeoutError
from dataplane_redis.config import log_key


def row_keys(node, client):
    return node.admin("KEYS", f"dp:{client.config.options['namespace']}:r:*")


def of_log(nodes, client):
    """The nodes, that of the log first."""
    key = log_key(client.config.options["namespace"])
    return sorted(nodes, key=lambda node: key not in node.admin("KEYS", "dp:*:log"))


def test_any_node_may_be_named_and_rows_spread_over_all(cluster, connect):
    with pytest.raises(ConfigError, match="Expected its host and port"):
        connect(url=f"unix://{cluster[1].socket}")
    for named in cluster[:2]:
        client = connect(url=named.url, partition="p")
        values = torch.rand(9000, 8)
        ids = [f"s{row}" for row in range(9000)]
        client.put_samples(ids, "p", {"x": values})
        assert all(row_keys(node, client) for node in cluster)
        meta = client.claim_meta("p", "train", ["x"], 9000, lease_s=60)
        assert torch.equal(client.get_data(meta)["x"], values)
        client.ack(meta)
        client.clear_samples(None, "p")
        wait_until(lambda client=client: not any(row_keys(node, client) for node in cluster))


def test_slots_that_move_are_followed_also_while_they_move(start_cluster, connect):
    nodes = start_cluster()
    client = connect(url=nodes[0].url, partition="p")
    ids = [f"s{row}" for row in range(2000)]
    client.put_samples(ids, "p", columns(2000, 3, 1))
    for part in ("log", "r:"):
        pattern = f"dp:{client.config.options['namespace']}:{part}*"
        key = next(key for node in nodes for key in node.admin("KEYS", pattern))
        source = next(node for node in nodes if key in node.admin("KEYS", "*"))
        target, other = (node for node in nodes if node is not source)
        source.move_slot(key_slot(key), target, whole=False)
        try:
            assert (client.get_samples(ids, "p", ["x"])["x"] == 1).all()
            client.put_samples(["while"], "p", columns(1, 3, 2))
        finally:
            source.move_slot(key_slot(key), target, [other])
        assert (client.get_samples(["while"], "p", ["x"])["x"] == 2).all()
        client.put_samples(ids, "p", columns(2000, 3, 1))
        assert (client.get_samples(ids, "p", ["x"])["x"] == 1).all()
    assert client.claim_meta("p", "train", ["x"], 2001, lease_s=60).size == 2001


def test_a_put_whose_rows_a_node_does_not_take_shows_nothing(start_cluster, connect, told_in_time):
    nodes = start_cluster()
    client = connect(url=nodes[0].url, partition="p")
    silent = of_log(nodes, client)[-1]
    ids = [f"s{row}" for row in range(9000)]
    kinds = (OperationTimeoutError, BackendUnavailableError)
    with silent.stopped():
        error = told_in_time(lambda: client.put_samples(ids, "p", columns(9000)), kinds, "did not answer", 3.0)
    assert error.retryable
    assert client.list_samples("p").size == 0


def test_primaries_that_are_replaced_lose_nothing(start_cluster, chaos):
    nodes = start_cluster(num_replicas=3)

    def replace(client):
        ordered = of_log(nodes[:3], client)
        for primary in (ordered[1], ordered[0]):  # one with rows only, then that of the log
            number = nodes.index(primary)
            primary.kill()
            for node in nodes:
                if node.process.poll() is None:
                    node.notices_deaths()
            wait_until(lambda number=number: nodes[3 + number].info("replication")["role"] == "master")
            wait_until(lambda: all(node.is_in_cluster() for node in nodes if node.process.poll() is None))
            primary.start()
            wait_until(lambda primary=primary: primary.info("replication").get("master_link_status") == "up")

    verdict = chaos(replace, {"url": nodes[0].url, "wait_replicas": 1})
    assert verdict.passed, verdict
