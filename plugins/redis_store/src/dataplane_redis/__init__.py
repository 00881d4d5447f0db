"""The Redis backend: `RedisBackend`."""

from dataplane_redis._backend import RedisBackend
from dataplane_redis._server import Durability
from dataplane_redis.config import RedisConfig

__all__ = ["Durability", "RedisBackend", "RedisConfig"]
