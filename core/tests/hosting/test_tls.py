"""A host behind TLS answers those who know its certificate, and nobody else."""

import socket
import threading
import time

import pytest

from dataplane_core.errors import BackendUnavailableError
from dataplane_core.hosting import (
    LedgerHost,
    Messages,
    Server,
    Session,
    TcpAddress,
    failure_of,
    listen_on,
    new_token,
    server as hosting_server,
)
from dataplane_core.hosting.server import new_tls
from dataplane_core.ledger import LedgerService, commands

pytest.importorskip("cryptography", reason="not run: cryptography is optional; only a host behind TLS needs it")


@pytest.fixture
def place():
    token, listener, (tls, certificate) = new_token(), listen_on("127.0.0.1"), new_tls("127.0.0.1")
    server = Server(LedgerHost(LedgerService()), listener, token=token, tls=tls)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield "127.0.0.1", listener.getsockname()[1], token, certificate
    server.close()
    thread.join()


def session(place):
    return Session(TcpAddress(*place), Messages(), time.monotonic() + 60, failure_of("the host"))


def test_calls_of_any_size_go_through(place):
    client = session(place)
    client.call("register", time.monotonic() + 60, commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "e"))
    ids = [f"s{number:0100}" for number in range(20_000)]
    client.call("put", time.monotonic() + 60, commands.PutTags("p", ids, [{}] * len(ids)))
    assert client.call("list", time.monotonic() + 60, commands.ListRequest("p")).sample_ids == ids
    client.close()


def test_a_client_that_reads_slowly_gets_all_and_others_do_not_wait_for_it(place):
    slow, other = session(place), session(place)
    slow.call("register", time.monotonic() + 60, commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "e"))
    ids = [f"s{number:0100}" for number in range(20_000)]
    slow.call("put", time.monotonic() + 60, commands.PutTags("p", ids, [{}] * len(ids)))
    channel = slow._take("list", time.monotonic() + 60)
    request = slow._messages.encode_request(commands.ListRequest("p"))
    channel.sendall(request * 5)
    assert other.call("list", time.monotonic() + 60, commands.ListRequest("p")).sample_ids == ids
    for _ in range(5):
        size = int.from_bytes(channel.recv(4), "little")
        while size:
            size -= len(channel.recv(size))
    channel.close()
    slow.close()
    other.close()


@pytest.mark.parametrize("certificate", ["", "another"])
def test_who_does_not_know_the_certificate_gets_no_answer(place, certificate):
    *known, _ = place
    _, other = new_tls("127.0.0.1")
    with pytest.raises(BackendUnavailableError):
        session((*known, certificate and other))


def test_who_connects_and_says_nothing_is_let_go_after_as_long_as_without_tls(monkeypatch):
    monkeypatch.setattr(hosting_server, "_GREETING_S", 0.2)
    listener, (tls, _) = listen_on("127.0.0.1"), new_tls("127.0.0.1")
    server = Server(LedgerHost(LedgerService()), listener, tls=tls)
    thread = threading.Thread(target=server.run)
    thread.start()
    with socket.create_connection(listener.getsockname(), timeout=60.0) as silent:
        assert silent.recv(1) == b""
    server.close()
    thread.join()
