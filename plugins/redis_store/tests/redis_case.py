"""What the conformance kit needs to know of redis_store: by default, on a private server that syncs every write."""

import os
import signal
import time
import uuid
from typing import ClassVar

import pytest

from dataplane_core.codec import split_rows
from dataplane_redis import RedisBackend
from dataplane_redis._scripts import to_bytes, unpack_layout, unpack_rows
from dataplane_testkit import AuthorsClass


def _ask(backend, *words):
    """What the server replies to a command of the kit's own."""
    return backend._session.link.command("the kit's", time.monotonic() + 30, *words)


class RedisCase(AuthorsClass):
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

    def raw_get(self, backend, partition_id, sample_id, field):
        key, position, place = self._lies_at(backend, partition_id, sample_id, field)
        (cells,) = split_rows([_ask(backend, b"HGET", key, position)])
        return bytes(cells[place])

    def lose_payload(self, backend, partition_id, sample_id, field):
        key, position, _ = self._lies_at(backend, partition_id, sample_id, field)
        assert _ask(backend, b"HDEL", key, position) == 1

    def _lies_at(self, backend, partition_id, sample_id, field):
        """The hash of the put that wrote a cell, the row's field in it, and the cell's place in the row."""
        base = backend._session.base
        at = base + b":e:" + _ask(backend, b"HGET", base + b":p:" + to_bytes(partition_id), b"epoch") + b":"
        (refs,) = unpack_rows([_ask(backend, b"HGET", at + b"r", to_bytes(sample_id))])
        layouts = [unpack_layout(each) for each in _ask(backend, b"LRANGE", at + b"l", b"0", b"-1")]
        write, position, layout, _ = [ref for ref in refs if field in layouts[ref[2]]][-1]
        return b"%s:w:%s" % (base, write.hex().encode()), b"%d" % position, list(layouts[layout]).index(field)

    def held_bytes(self, backend):
        """What the server says its hashes of rows take."""
        keys = _ask(backend, b"KEYS", backend._session.base + b":w:*")
        return sum(_ask(backend, b"MEMORY", b"USAGE", key, b"SAMPLES", b"0") or 0 for key in keys)

    def restart(self, backend):
        os.kill(backend._server.pid, signal.SIGKILL)
        backend._server.launch(time.monotonic() + 20)
