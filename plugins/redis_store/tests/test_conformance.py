"""redis_store against the contract, on a private server whose every write is synced to disk."""

import os
import signal
import time
import uuid
from typing import ClassVar

import pytest

from dataplane_core.codec.frames import split_rows
from dataplane_core.testing import BackendConformance
from dataplane_redis import RedisBackend
from dataplane_redis._wire import to_bytes, unpack_layout, unpack_rows


@pytest.fixture(scope="module")
def namespace():
    return f"kit-{uuid.uuid4().hex[:8]}"


class TestRedis(BackendConformance):
    backend = "redis_store"
    backend_class = RedisBackend
    most_copies: ClassVar = {
        "put_samples": (2.0, "cells go to the socket from where they lie; only what shares a packet is joined first")
    }

    @pytest.fixture
    def options(self, namespace):
        return {"server": "private", "namespace": namespace, "appendonly": True, "appendfsync": "always"}

    def conflicting_options(self, options):
        return {**options, "capacity_bytes": 1 << 30}

    def raw_get(self, backend, partition_id, sample_id, field):
        def ask(*words):
            return backend._session.link.command("raw_get", time.monotonic() + 5, *words)

        base = backend._session.base
        at = base + b":e:" + ask(b"HGET", base + b":p:" + to_bytes(partition_id), b"epoch") + b":"
        (refs,) = unpack_rows([ask(b"HGET", at + b"r", to_bytes(sample_id))])
        layouts = [unpack_layout(each) for each in ask(b"LRANGE", at + b"l", b"0", b"-1")]
        write, position, layout, _ = [ref for ref in refs if field in layouts[ref[2]]][-1]
        (cells,) = split_rows([ask(b"HGET", b"%s:w:%s" % (base, write.hex().encode()), b"%d" % position)])
        return bytes(cells[layouts[layout].index(field)])

    def held_bytes(self, backend):
        """What the server says its hashes of rows take."""

        def ask(*words):
            return backend._session.link.command("held_bytes", time.monotonic() + 30, *words)

        keys = ask(b"KEYS", backend._session.base + b":w:*")
        return sum(ask(b"MEMORY", b"USAGE", key, b"SAMPLES", b"0") or 0 for key in keys)

    def restart(self, backend):
        os.kill(backend._server.pid, signal.SIGKILL)
        backend._server.launch(time.monotonic() + 20)
