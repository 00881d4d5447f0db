"""A Ray of the tests' own, and clients that are closed at their end."""

import os
import time
from pathlib import Path

import pytest

from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_mooncake import TQMooncakeBackend


@pytest.fixture(scope="module", autouse=True)
def _address_of_no_node():
    """This process has an address that no node has, as the processes of its Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_TCP_BIND_ADDRESS", "169.254.7.7")
        yield


@pytest.fixture
def connect():
    """Connects clients, closed at the end of the test, the first one last."""
    clients = []

    def make(bootstrap=True, op_timeout_s=90.0, **options):
        options.setdefault("segment_size_bytes", 16 << 20)
        options.setdefault("master_start_s", 85)  # a busy machine may need long
        options.setdefault("local_buffer_size_bytes", 4 << 20)
        config = DataPlaneConfig(backend="tq_mooncake", options=options, op_timeout_s=op_timeout_s)
        clients.append(connect_backend(TQMooncakeBackend, config, bootstrap=bootstrap))
        return clients[-1]

    yield make
    for client in reversed(clients):
        client.close()


@pytest.fixture(scope="session")
def runs():
    """Whether a process runs: ``runs(pid)``."""

    def ask(pid):
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (ProcessLookupError, FileNotFoundError):
            return False

    return ask


@pytest.fixture(scope="session")
def wait_until():
    """Waits for a condition: ``wait_until(condition)``."""

    def wait(condition, within_s=60.0):
        give_up = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < give_up, "the condition did not come true"
            time.sleep(0.02)

    return wait
