"""Plain Redis as a data plane written by hand: a hash for each sample, and for each task a list of what is ready."""

import redis

from dataplane_testkit import Shim


class RedisHash(Shim):
    """Commands of Redis only, no script and no transaction.

    Args:
        tasks: As for `Shim`.
        url: Of a Redis server that runs.
    """

    promises = dict.fromkeys(
        ("committed", "bits", "written", "latest", "cleared", "error"),
        "a command is carried out before its reply is sent, and no other client sees a part of it (redis.io)",
    )

    def __init__(self, tasks, url="redis://127.0.0.1:6379/0"):
        self.tasks, self.redis = tasks, redis.Redis.from_url(url)

    def put(self, partition, rows):
        for sample, cells in rows.items():
            before = {field.decode() for field in self.redis.hkeys(f"{partition}/{sample}")}
            for field, cell in cells.items():
                self.redis.hset(f"{partition}/{sample}", field, cell)
            self.redis.sadd(partition, sample)
            for task, needed in self.tasks.items():
                if set(needed) <= before | cells.keys() and not set(needed) <= before:  # it is ready now
                    self.redis.rpush(f"{partition}:{task}", sample)

    def get(self, partition, samples, fields):
        rows = {sample: self.redis.hmget(f"{partition}/{sample}", fields) for sample in samples}
        return {sample: {f: cell for f, cell in zip(fields, row, strict=True) if cell} for sample, row in rows.items()}

    def claim(self, partition, task, fields, limit, lease_s):
        given = self.redis.lrange(f"{partition}:{task}", 0, limit - 1)
        self.redis.ltrim(f"{partition}:{task}", len(given), -1)
        return [sample.decode() for sample in given]

    def list(self, partition):
        return [sample.decode() for sample in self.redis.smembers(partition)]

    def clear(self, partition, samples):
        for sample in samples:
            self.redis.delete(f"{partition}/{sample}")
            self.redis.srem(partition, sample)
            for task in self.tasks:
                self.redis.lrem(f"{partition}:{task}", 0, sample)
