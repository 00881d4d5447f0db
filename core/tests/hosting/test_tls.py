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
    listen_as,
    listen_on,
    new_certificate,
    new_socket_name,
    new_token,
    serve_tls,
)
from dataplane_core.ledger import LedgerService, commands

pytest.importorskip("cryptography", reason="not run: cryptography is optional; only a host behind TLS needs it")


class Address(TcpAddress):
    def failure(self, what, error, *, connecting):
        return BackendUnavailableError(f"{what}: {error}")


@pytest.fixture
def place():
    token, name, tcp = new_token(), new_socket_name(), listen_on("127.0.0.1")
    certificate, key = new_certificate("127.0.0.1")
    end = serve_tls(tcp, certificate, key, name)
    server = Server(LedgerHost(LedgerService()), listen_as(name), token=token)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield "127.0.0.1", tcp.getsockname()[1], token, certificate
    end()
    server.close()
    thread.join()


def test_calls_of_any_size_go_through(place):
    session = Session(Address(*place), Messages(), time.monotonic() + 60)
    session.call("register", time.monotonic() + 60, commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "e"))
    ids = [f"s{number:0100}" for number in range(20_000)]
    session.call("put", time.monotonic() + 60, commands.PutTags("p", ids, [{}] * len(ids)))
    assert session.call("list", time.monotonic() + 60, commands.ListRequest("p")).sample_ids == ids
    session.close()


def test_a_client_whose_host_is_gone_is_noticed():
    """By the kernel, as without TLS. Connections have what their listening socket has."""
    tcp = listen_on("127.0.0.1")
    end = serve_tls(tcp, *new_certificate("127.0.0.1"), new_socket_name())
    assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    end()


@pytest.mark.parametrize("certificate", ["", "another"])
def test_who_does_not_know_the_certificate_gets_no_answer(place, certificate):
    *known, _ = place
    other = certificate and new_certificate("127.0.0.1")[0]
    with pytest.raises(BackendUnavailableError):
        Session(Address(*known, other), Messages(), time.monotonic() + 60)
