"""Clients with small segments, that are closed at the end of a test or of a file."""

from contextlib import contextmanager

import pytest

from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_mooncake import TQMooncakeBackend


@pytest.fixture(scope="module", autouse=True)
def _address_of_no_node():
    """This process has an address that no node has, as the processes of its Ray, and a pool that mixes rows up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_TCP_BIND_ADDRESS", "169.254.7.7")
        patch.setenv("MC_TCP_ENABLE_CONNECTION_POOL", "1")
        yield


@contextmanager
def _connecting():
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


@pytest.fixture
def connect():
    """Connects clients, closed at the end of the test, the first one last."""
    with _connecting() as make:
        yield make


@pytest.fixture(scope="module")
def connect_for_all():
    """The same, at the end of the file."""
    with _connecting() as make:
        yield make
