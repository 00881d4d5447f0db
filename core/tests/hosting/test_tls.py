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
    listen_on,
    new_token,
    server as hosting_server,
)
from dataplane_core.hosting.server import behind_tls
from dataplane_core.ledger import LedgerService, commands

pytest.importorskip("cryptography", reason="not run: cryptography is optional; only a host behind TLS needs it")


def failure(what, error, connecting):
    return BackendUnavailableError(f"{what}: {error}")


@pytest.fixture
def place():
    token, tcp = new_token(), listen_on("127.0.0.1")
    listener, certificate, end = behind_tls(tcp)
    server = Server(LedgerHost(LedgerService()), listener, token=token)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield "127.0.0.1", tcp.getsockname()[1], token, certificate
    end()
    server.close()
    thread.join()


def test_calls_of_any_size_go_through(place):
    session = Session(TcpAddress(*place), Messages(), time.monotonic() + 60, failure)
    session.call("register", time.monotonic() + 60, commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "e"))
    ids = [f"s{number:0100}" for number in range(20_000)]
    session.call("put", time.monotonic() + 60, commands.PutTags("p", ids, [{}] * len(ids)))
    assert session.call("list", time.monotonic() + 60, commands.ListRequest("p")).sample_ids == ids
    session.close()


def test_a_client_whose_host_is_gone_is_noticed():
    """By the kernel, as without TLS. Connections have what their listening socket has."""
    tcp = listen_on("127.0.0.1")
    listener, _, end = behind_tls(tcp)
    assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    end()
    listener.close()


@pytest.mark.parametrize("certificate", ["", "another"])
def test_who_does_not_know_the_certificate_gets_no_answer(place, certificate):
    *known, _ = place
    listener, other, end = behind_tls(listen_on("127.0.0.1"))
    end()
    listener.close()
    with pytest.raises(BackendUnavailableError):
        Session(TcpAddress(*known, certificate and other), Messages(), time.monotonic() + 60, failure)


def test_who_connects_and_says_nothing_is_let_go_after_as_long_as_without_tls(monkeypatch):
    monkeypatch.setattr(hosting_server, "_GREETING_S", 0.2)
    tcp = listen_on("127.0.0.1")
    listener, _, end = behind_tls(tcp)
    with socket.create_connection(tcp.getsockname(), timeout=20.0) as silent:
        assert silent.recv(1) == b""
    end()
    listener.close()
