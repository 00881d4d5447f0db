"""The shims of examples/checker, and a Redis for them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    """The URL of a Redis server of its own."""
    path = tmp_path_factory.mktemp("redis") / "redis.sock"
    words = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(path.parent)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        with redis.Redis(unix_socket_path=str(path)) as client:
            give_up = time.monotonic() + 60
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < give_up
                    time.sleep(0.01)
        yield f"unix://{path}"
        server.kill()


@pytest.fixture(scope="session")
def shims():
    """The folder of the shims."""
    return Path(__file__).parents[3] / "examples" / "checker"
