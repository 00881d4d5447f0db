"""What the conformance kit needs to know of redis_store: by default, on a private server that syncs every write."""

import os
import signal
import time
import uuid
from typing import ClassVar

import pytest
from stored_cells import StoresRows

from dataplane_redis import RedisBackend


def _soon():
    return time.monotonic() + 60


class RedisCase(StoresRows):
    backend = "redis_store"
    backend_class = RedisBackend
    most_copies: ClassVar = {
        "put_samples": (2.0, "cells go to the socket from where they lie; only what shares a packet is joined first")
    }

    @pytest.fixture(scope="class")
    @classmethod
    def namespace(cls):
        return f"kit-{uuid.uuid4().hex[:8]}"

    @pytest.fixture
    def options(self, namespace):
        return {"server": "private", "namespace": namespace, "appendonly": True, "appendfsync": "always"}

    def conflicting_options(self, options):
        return {**options, "capacity_bytes": 1 << 30}

    def nodes(self, backend):
        """Functions that ask each server that holds rows."""
        return [lambda *words: backend._link.command("the kit's", _soon(), b"", *words)]

    def held_bytes(self, backend):
        """The rows that the servers hold. The memory of a hash also depends on what it held before."""
        pattern = b"dp:%s:r:*" % backend.config.namespace.encode()
        return sum(
            len(row) for ask in self.nodes(backend) for key in ask(b"KEYS", pattern) for row in ask(b"HVALS", key)
        )

    def restart(self, backend):
        os.kill(backend._server.pid, signal.SIGKILL)
        backend._server.launch(_soon())
