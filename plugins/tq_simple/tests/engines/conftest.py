"""What is left in a ledger that tells who has been there, and backends without a client."""

import time
from contextlib import contextmanager

import pytest

from dataplane_core.ledger import commands
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig


@pytest.fixture(scope="session")
def note():
    """Registers a partition of that name, and lists all: ``note(engine, name)``."""

    def leave(engine, name, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        engine.call(commands.RegisterRequest(name, ["x"], None, [], None, {}, name), deadline)
        return list(engine.call(commands.ListPartitionsRequest(), deadline))

    return leave


@pytest.fixture(scope="session")
def opened():
    """``with opened(instance=...) as backend``: a backend that is started with these options, without a client."""

    @contextmanager
    def started(bootstrap=True, **options):
        backend = TQSimpleBackend(TQSimpleConfig(**options))
        try:
            backend.start(bootstrap=bootstrap, deadline=time.monotonic() + 240.0)
            yield backend
        finally:
            backend.stop()

    return started
