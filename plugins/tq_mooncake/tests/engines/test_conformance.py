"""tq_mooncake against the contract, on a real Ray and a real master."""

import time
import urllib.request

import psutil
import pytest

from dataplane_core.codec import split_rows
from dataplane_core.ledger import commands
from dataplane_mooncake import TQMooncakeBackend
from dataplane_testkit import BackendConformance


class TestTQMooncake(BackendConformance):
    backend = "tq_mooncake"
    backend_class = TQMooncakeBackend

    @pytest.fixture
    def options(self, ray_address):
        return {
            "instance": "conformance",
            "ray_address": ray_address,
            "segment_size_bytes": 256 << 20,
            "master_start_s": 85,  # a busy machine may need long
            "local_buffer_size_bytes": 16 << 20,
        }

    def raw_get(self, backend, partition_id, sample_id, field):
        """The frame, straight from Mooncake."""
        deadline = time.monotonic() + 10
        (part,) = backend.call_ledger(deadline, commands.Locate(partition_id, [sample_id], [field])).parts
        handle = part.write_id + part.positions[0]
        ((*frames,),) = split_rows(backend._engine.get_rows([handle], deadline=deadline))
        return bytes(frames[part.slots[0]])

    def held_bytes(self, backend):
        """What the master says is allocated in the segments."""
        words = psutil.Process(backend._engine._instance.master_pid).cmdline()
        (port,) = (word.partition("=")[2] for word in words if word.startswith("--metrics_port="))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        (allocated,) = (line.split()[1] for line in lines if line.startswith("master_allocated_bytes "))
        return int(allocated)

    def conflicting_options(self, options):
        return {**options, "num_storage_units": 2}
