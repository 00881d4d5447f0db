"""tq_mooncake against the contract, on a real Ray and a real master."""

import urllib.request

import psutil
import pytest
from stored_cells import StoresRows

from dataplane_mooncake import TQMooncakeBackend
from dataplane_testkit import AuthorsClass, BackendConformance, Settings, run_chaos


def options_of(instance, ray_address):
    sizes = {"segment_size_bytes": 256 << 20, "local_buffer_size_bytes": 16 << 20}
    # a busy machine may need long for a master
    return {"instance": instance, "ray_address": ray_address, "master_start_s": 85, **sizes}


class TestTQMooncake(StoresRows, BackendConformance):
    backend = "tq_mooncake"
    backend_class = TQMooncakeBackend

    @pytest.fixture
    def options(self, ray_address):
        return options_of("conformance", ray_address)

    def held_bytes(self, backend):
        """What the master says is allocated in the segments."""
        words = psutil.Process(backend._instance._master.pid).cmdline()
        (port,) = (word.partition("=")[2] for word in words if word.startswith("--metrics_port="))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        (allocated,) = (line.split()[1] for line in lines if line.startswith("master_allocated_bytes "))
        return int(allocated)

    def conflicting_options(self, options):
        return {**options, "num_storage_units": 2}


class TQMooncake(AuthorsClass):
    backend = "tq_mooncake"


def test_a_random_history_keeps_the_contract(ray_address, tmp_path):
    """Of processes that are killed and stopped."""
    options = options_of("random", ray_address)
    verdict = run_chaos(TQMooncake(), options, Settings.brief(), folder=tmp_path)
    assert verdict.passed, verdict
