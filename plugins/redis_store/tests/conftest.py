"""Servers that tests start with settings of their own, ended by process id."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
import redis

from dataplane_core.config import DataPlaneConfig
from dataplane_core.plugins import connect_backend
from dataplane_redis import RedisBackend


class Server:
    """A `redis-server` of a test's own, on TCP and a unix socket; as a node of a cluster with a bus port besides."""

    def __init__(self, *settings, cluster=False):
        self.folder = Path(tempfile.mkdtemp(prefix="dp-redis-"))
        self.port = _free_port()
        self.socket = self.folder / "redis.sock"
        self.bus_port = _free_port() if cluster else None
        self.settings = settings
        if cluster:
            node = ("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port), "--cluster-node-timeout", "1000")
            self.settings = (*node, *settings)
        self.process = None

    def start(self):
        base = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket), "--save", ""]
        base += ["--repl-diskless-sync-delay", "0"]
        words = ["redis-server", *base, "--dir", str(self.folder), *self.settings]
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        give_up = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(5)
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                if not probe.recv(64).startswith(b"-LOADING"):
                    return self
            assert time.monotonic() < give_up, "the server does not answer"
            assert self.process.poll() is None, "the server ended at its start"
            time.sleep(0.01)

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self):
        self.process.kill()
        self.process.wait()

    def admin(self, *words):
        """One command, past the backend."""
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            return client.execute_command(*words)

    def info(self, section):
        """What the server says of itself, past the backend."""
        return self.admin("INFO", section)

    def follow(self, primary):
        """Becomes a replica of another server, and returns once it has its data."""
        self.admin("REPLICAOF", "127.0.0.1", primary.port)
        _wait_until(lambda: self.info("replication").get("master_link_status") == "up")
        return self

    def take_over(self, primary):
        """Becomes the primary, at the socket of the one that died."""
        self.admin("REPLICAOF", "NO", "ONE")
        os.rename(self.socket, primary.socket)
        self.socket = primary.socket

    def end(self):
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _wait_until(condition, timeout_s=60.0):
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.02)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start_server():
    """Starts servers with further settings."""
    servers = []

    def start(*settings, cluster=False):
        servers.append(Server(*settings, cluster=cluster))
        return servers[-1].start()

    yield start
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
def plain():
    """One server without persistence for a module."""
    server = Server()
    try:
        yield server.start()
    finally:
        server.end()


@pytest.fixture
def connect():
    """Connects clients, closed at the end of the test."""
    clients = []

    def make(bootstrap=True, op_timeout_s=10.0, attach_wait_s=0.2, **options):
        options.setdefault("namespace", f"test-{uuid.uuid4().hex[:8]}")
        config = DataPlaneConfig(
            backend="redis_store", options=options, op_timeout_s=op_timeout_s, attach_wait_s=attach_wait_s
        )
        clients.append(connect_backend(RedisBackend, config, bootstrap=bootstrap))
        return clients[-1]

    yield make
    for client in reversed(clients):
        client.close()


@pytest.fixture
def scripts_of(monkeypatch):
    """Collects the replies to the scripts of a client; before that of number `act_at` is returned, `act` runs."""

    def collect(client, act_at=None, act=None):
        script, replies = client._backend._session.link.script, []

        def counted(*words, **more):
            replies.append(script(*words, **more))
            if len(replies) == act_at:
                act()
            return replies[-1]

        monkeypatch.setattr(client._backend._session.link, "script", counted)
        return replies

    return collect


@pytest.fixture
def at_once():
    """Runs a function in so many threads, to their end."""

    def run(act, count):
        threads = [threading.Thread(target=act) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)

    return run


@pytest.fixture
def wait_until():
    """Waits for a condition."""
    return _wait_until
