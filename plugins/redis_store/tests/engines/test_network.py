"""The network is cut between two of three hosts: the server's, one with the owner, and one with another client."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis_servers import wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="not run: needs root and iproute2, for network namespaces"
)

_CLIENT = Path(__file__).parents[1] / "client.py"
_NUMBERS = itertools.count()


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """The server's host is this one. Each of the two others has a cable to it, and one to a switch between them."""

    def __init__(self):
        tag = f"{os.getpid() % 10_000:x}{next(_NUMBERS)}"
        self.names = [f"dp{tag}a", f"dp{tag}b"]
        self.net = f"10.{os.getpid() % 200 + 20}"
        self.switch = f"dp{tag}w"
        self.clients = []
        ip("link", "add", self.switch, "type", "bridge")
        ip("link", "set", self.switch, "up")
        for number, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            for cable, address in (("server", f"{self.net}.{number}.2/24"), ("other", f"{self.ledger_ip(number)}/24")):
                end = self._end(number, cable)
                ip("link", "add", end, "type", "veth", "peer", "name", cable, "netns", name)
                ip("-n", name, "addr", "add", address, "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
                if cable == "server":
                    ip("addr", "add", f"{self.net}.{number}.1/24", "dev", end)
                else:
                    ip("link", "set", end, "master", self.switch)
                self.plug(number, cable, "up")

    def _end(self, number, cable):
        return f"{self.names[number]}{cable[0]}"

    def plug(self, number, cable, state):
        """Unplugs a cable of a host at its other end ("down"), or plugs it in again ("up")."""
        ip("link", "set", self._end(number, cable), state)

    def ledger_ip(self, number):
        return f"{self.net}.9.{number + 1}"

    def connect(self, number, port):
        """A client on a host."""
        url = f"redis://{self.net}.{number}.1:{port}/0"
        options = json.dumps({"url": url, "namespace": "cut", "ledger_ip": self.ledger_ip(number)})
        words = ["ip", "netns", "exec", self.names[number], sys.executable, str(_CLIENT), options]
        self.clients.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert json.loads(self.clients[-1].stdout.readline()) == "connected"
        return self.clients[-1]

    def close(self):
        for client in self.clients:
            client.kill()
            client.communicate()
        for name in self.names:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                os.kill(int(pid), 9)
            ip("netns", "delete", name)
        ip("link", "delete", self.switch)


@pytest.fixture
def hosts():
    made = Hosts()
    yield made
    made.close()


def ask(client, *words, within_s=120.0):
    """What a client answers: ["ok", result, port of its owner], or ["error", type, retryable, message]."""
    client.stdin.write(json.dumps([within_s, *words]) + "\n")
    client.stdin.flush()
    return json.loads(client.stdout.readline())


@pytest.fixture
def clients(hosts, start_server):
    """One on the host of the owner, one on the other host, and the owner. Each client has put a sample."""
    server = start_server("--bind", "0.0.0.0", "--protected-mode", "no")
    near, far = (hosts.connect(number, server.port) for number in (0, 1))
    ask(near, "register")
    _, _, owner = ask(near, "put", "a")
    assert ask(far, "put", "b") == ["ok", None, owner]
    return near, far, owner


def test_a_client_that_does_not_reach_the_owner_starts_no_other(hosts, clients):
    near, far, owner = clients
    hosts.plug(1, "other", "down")
    for what, within_s in ((["put", "c"], 15.0), (["list"], 3.0)):  # in the first it could replace the owner
        kind, name, retryable, _ = ask(far, *what, within_s=within_s)
        assert (kind, name, retryable) == ("error", "OperationTimeoutError", True)
    assert ask(near, "put", "d") == ["ok", None, owner]
    hosts.plug(1, "other", "up")
    assert ask(far, "put", "e") == ["ok", None, owner]
    assert {*"abde"} <= {*ask(near, "list")[1]} <= {*"abcde"}


def test_an_owner_that_does_not_reach_the_server_is_replaced(hosts, clients):
    near, far, owner = clients
    hosts.plug(0, "server", "down")
    kind, _, new = ask(far, "put", "c")
    assert kind == "ok"
    assert new != owner
    kind, name, retryable, _ = ask(near, "put", "d", within_s=3.0)  # it does not reach the server either
    assert (kind, name, retryable) == ("error", "OperationTimeoutError", True)
    hosts.plug(0, "server", "up")
    assert ask(near, "put", "e") == ["ok", None, new]
    assert {*"abce"} <= {*ask(near, "list")[1]} <= {*"abcde"}

    def owners():
        pids = subprocess.run(["ip", "netns", "pids", hosts.names[0]], capture_output=True, text=True).stdout.split()
        return [pid for pid in pids if b"backends.owner" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    wait_until(lambda: not owners())
