"""Calls that wait for replicas: a failover loses nothing that was acknowledged."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from redis_servers import LARGE, SMALL, columns, wait_until

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_redis._acknowledged import Acknowledgements
from dataplane_redis._protocol import pack


def calls(client, name, held):
    """What is acknowledged, by name; ``held`` are four claims with leases."""
    done, again, back, late = held
    return {
        "put": lambda: client.put_samples([f"{name}-small"], "p", columns(1, SMALL)),
        "large put": lambda: client.put_samples([f"{name}-large"], "p", columns(1, LARGE)),
        "tags": lambda: client.put_samples([f"{name}-small"], "p", tags=[{"v": name}]),
        "ack": lambda: client.ack(done),
        "ack again": lambda: client.ack(done),
        "renew": lambda: client.renew(again, 500),
        "nack": lambda: client.nack(back),
        "claim without a lease": lambda: client.claim_meta("p", "other", ["x"], 1, timeout_s=60),
        "cursor": lambda: client.reset_consumption("p", "third", ["s0"]),
        "register": lambda: client.register_partition(f"{name}-partition", ["x"], None, ["train"]),
        "extend": lambda: client.register_partition("p", ["x", name], None, ["train"], if_exists="keep"),
        "clear": lambda: client.clear_samples(late.sample_ids, "p"),
    }


def test_what_is_acknowledged_waits_for_replicas(start_server, connect, hardly_waits):
    primary = start_server()
    replica = start_server().follow(primary)
    options = {"url": primary.url, "namespace": "waits", "wait_replicas": 1}
    client = connect(**options)
    client.register_partition("p", ["x"], None, ["train", "other", "third"])
    client.put_samples([f"s{row}" for row in range(12)], "p", columns(12, SMALL))

    def held():
        return [client.claim_meta("p", "train", ["x"], 1, lease_s=600) for _ in range(4)]

    for name, call in calls(client, "one", held()).items():
        before = primary.num_calls("wait")
        call()
        assert primary.num_calls("wait") > before, name
    before = primary.num_calls("wait")
    client.get_samples(["one-large"], "p", ["x"])
    client.list_samples("p")
    some = held()
    assert primary.num_calls("wait") == before  # ack notices a claim that was lost, so it need not wait
    with replica.stopped(), hardly_waits():
        for name, call in calls(client, "two", some).items():
            with pytest.raises(OperationTimeoutError, match="made the change, but 0 of 1 replicas have it") as caught:
                call()
            assert caught.value.retryable, name
        assert client.get_samples(["two-small"], "p", ["x"])["x"].shape == (1, SMALL)  # the change was made
    again = calls(client, "two", some)
    for name in ("put", "large put", "ack"):
        again[name]()
    primary.kill()
    replica.take_over(primary)
    after = connect(bootstrap=False, namespace="waits", url=f"unix://{primary.socket}")
    assert after.get_samples(["one-large", "two-large"], "p", ["x"])["x"].shape == (2, LARGE)


def test_calls_that_change_nothing_do_not_wait_and_keep_their_connection(start_server, connect):
    primary = start_server()
    replica = start_server().follow(primary)
    client = connect(url=primary.url, wait_replicas=1, op_timeout_s=30, partition="p")
    client.put_samples(["a"], "p", columns(1, SMALL))
    assert client.claim_meta("p", "train", ["x"], 1, blocking=False).size == 1
    before = primary.info("stats")["total_connections_received"]
    with replica.stopped():
        assert client.claim_meta("p", "train", ["x"], 1, blocking=False).size == 0
        with pytest.raises(KeyError):
            client.put_samples(["a"], "nobody's", columns(1, SMALL))
        assert client.claim_meta("p", "train", ["x"], 1, blocking=False).size == 0
    admin_connections = 1  # of the question below
    assert primary.info("stats")["total_connections_received"] - before == admin_connections


def test_a_server_that_becomes_a_replica_while_it_waits_says_so(start_server, connect):
    primary, other = start_server(), start_server()
    client = connect(url=primary.url, wait_replicas=1, op_timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.register_partition, "p", ["x"], None, ["train"])
        wait_until(lambda: primary.info("clients")["blocked_clients"] == 1)
        primary.follow(other)
        with pytest.raises(BackendUnavailableError, match="it became a replica") as caught:
            waits.result(30)
    assert caught.value.retryable


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_put_whose_wait_is_not_allowed_says_that_it_was_done(start_server, connect, size):
    server = start_server()
    server.admin("ACL", "SETUSER", "hasty", "on", ">pw", "~*", "&*", "+@all", "-wait")
    other = connect(url=server.url, namespace="no-wait", partition="p")
    client = connect(
        url=f"redis://hasty:pw@127.0.0.1:{server.port}/0", namespace="no-wait", bootstrap=False, wait_replicas=1
    )
    with pytest.raises(BackendUnavailableError, match="made the change, but refuses to wait") as caught:
        client.put_samples(["a"], "p", columns(1, size))
    assert caught.value.outcome == "done"
    assert not caught.value.retryable
    assert other.list_samples("p").sample_ids == ["a"]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_put_whose_wait_was_refused_for_a_moment_is_repeated(start_server, connect, monkeypatch, size):
    primary = start_server()
    start_server().follow(primary)
    client = connect(url=primary.url, wait_replicas=1, op_timeout_s=30, partition="p")
    wait, refused = Acknowledgements.wait, []

    def refused_once(*args):
        if refused:
            return wait(*args)
        refused.append(1)
        return pack((b"EVAL", b"return redis.error_reply('BUSY Redis is busy running a script.')", b"0"))

    monkeypatch.setattr(Acknowledgements, "wait", refused_once)
    client.put_samples(["a"], "p", columns(1, size))
    assert refused
    assert client.get_samples(["a"], "p", ["x"])["x"].shape == (1, size)
