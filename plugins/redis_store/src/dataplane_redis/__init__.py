"""The Redis backend: `RedisBackend`."""

from dataplane_redis._acknowledged import Acknowledged, LostCallsError
from dataplane_redis._backend import RedisBackend
from dataplane_redis._server import Durability
from dataplane_redis.config import RedisConfig

__all__ = ["Acknowledged", "Durability", "LostCallsError", "RedisBackend", "RedisConfig"]
