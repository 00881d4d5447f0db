"""The shims of examples/checker, and a Redis for them."""

import sys
import uuid
from pathlib import Path

import pytest

from dataplane_core import connect
from dataplane_redis._backend import private_url

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def redis_url():
    """The URL of a Redis server of its own."""
    namespace = f"checker-{uuid.uuid4().hex[:8]}"
    with connect({"backend": "redis_store", "options": {"server": "private", "namespace": namespace}}):
        yield private_url(namespace)


@pytest.fixture(scope="session")
def shims():
    """The folder of the shims."""
    return Path(__file__).parents[3] / "examples" / "checker"
