from redis_case import RedisCase

from dataplane_testkit import BackendConformance


class TestRedis(RedisCase, BackendConformance):
    """redis_store keeps the whole contract."""
