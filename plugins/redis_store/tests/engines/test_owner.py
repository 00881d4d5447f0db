"""The private server, and the owner, whose ledger is in a log in Redis: they are killed, stopped and closed."""

import contextlib
import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from owners import owning
from redis_servers import LARGE, SMALL, columns, owner_pid, wait_until
from tiers import in_long

from dataplane_core import connect as connect_to
from dataplane_core.errors import BackendUnavailableError, CapacityExceededError
from dataplane_redis._server import PrivateServer, _folder
from dataplane_testkit import backend_of

# --- the private server -----------------------------------------------------------------------------------------------


def test_close_ends_the_server_and_leaves_no_folder(connect, runs):
    client = connect(server="private", namespace="life")
    pid, folder = backend_of(client)._server.pid, _folder("life").path
    assert runs(pid)
    assert folder.stat().st_mode & 0o077 == 0
    client.close()
    assert not runs(pid)
    assert not folder.exists()
    assert not folder.with_name(".life.lock").exists()


def test_a_server_that_was_killed_is_gone_for_good(connect, runs):
    owner = connect(server="private", namespace="killed")
    client = connect(bootstrap=False, server="private", namespace="killed", partition="p")
    client.put_samples(["a"], "p", columns(1))
    pid = backend_of(owner)._server.pid
    acts = (
        lambda: client.put_samples(["b"], "p", columns(1)),
        lambda: client.get_samples(["a"], "p", ["x"]),
        lambda: client.claim_meta("p", "train", ["x"], 1),
    )
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.claim_meta, "p", "train", ["x"], 2, timeout_s=300.0)
        wait_until(lambda: backend_of(client)._owner._session._waiting)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not runs(pid))
        for act in (*acts, lambda: waits.result(60)):
            with pytest.raises(BackendUnavailableError, match="has ended, and all that it held is gone") as caught:
                act()
            assert not caught.value.retryable
            assert "produce their samples again" in caught.value.hint


def test_a_server_with_too_many_connections_says_how_to_have_more(connect):
    owner = connect(server="private", namespace="many")
    owner.ping()
    link = backend_of(owner)._link
    link.command("test", time.monotonic() + 60, b"", b"CONFIG", b"SET", b"maxclients", b"1")
    with pytest.raises(BackendUnavailableError, match=r"takes no more connections: .*max number of clients") as caught:
        connect(bootstrap=False, server="private", namespace="many")
    assert "ulimit -n" in caught.value.hint


@pytest.fixture
def killed_owner(python, runs):
    """Namespace and server of an owner that was just killed."""
    namespace = f"orphan-{uuid.uuid4().hex[:8]}"
    options = {"server": "private", "namespace": namespace}
    with owning(python, {"backend": "redis_store", "options": options}, "backend._server.pid") as (_, pid):
        assert runs(int(pid))
    return namespace, int(pid)


def test_the_server_ends_with_an_owner_that_is_killed(killed_owner, runs):
    namespace, pid = killed_owner
    folder = _folder(namespace).path
    wait_until(lambda: not runs(pid) and not folder.exists() and not folder.with_name(f".{namespace}.lock").exists())


def test_the_next_owner_need_not_wait_for_one_that_was_killed(connect, killed_owner, runs):
    namespace, pid = killed_owner
    client = connect(server="private", namespace=namespace)
    wait_until(lambda: not runs(pid))
    client.register_partition("p", ["x"], None, ["train"])  # nothing removed what is the new owner's
    assert connect(bootstrap=False, server="private", namespace=namespace).list_samples("p").size == 0


# --- the owner --------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kills", [3, *in_long(200)])
def test_owners_that_are_killed_lose_nothing_and_no_call_fails(plain, chaos, kills):
    def kill(client):
        for number in range(kills):
            os.kill(owner_pid(client), signal.SIGKILL)
            client.put_samples([f"{number}"], "own", columns(1))

    verdict = chaos(kill, {"url": plain.url}, schedule_s=5.0 * kills)
    assert verdict.passed, verdict
    errors = {call.error_name for call in verdict.history.calls}
    assert not errors & {"BackendUnavailableError", "OperationTimeoutError"}


def test_an_owner_has_no_torch(plain, connect):
    """Which takes seconds to import, and 250 MB."""
    client = connect(url=plain.url, partition="p")
    client.put_samples(["a"], "p", columns(1))
    assert "torch" not in Path(f"/proc/{owner_pid(client)}/maps").read_text()


@pytest.fixture
def filled(start_server, connect):
    """A server, and a client with samples of two puts of which two are acked and one is leased."""
    server = start_server()
    client = connect(url=server.url, namespace="lost", partition="p")
    client.put_samples(["a", "b"], "p", columns(2, SMALL, 1))
    client.put_samples(["c", "d"], "p", columns(2, LARGE, 2))
    client.ack(client.claim_meta("p", "train", ["x"], 2, lease_s=600))
    return server, client, client.claim_meta("p", "train", ["x"], 1, lease_s=600)


@pytest.mark.parametrize("owner", ["lives", "dies too"])
@pytest.mark.parametrize("what", ["dp:lost:*", "dp:lost:log"])
def test_a_store_that_was_emptied_is_gone(filled, connect, what, owner):
    server, client, leased = filled
    pid = owner_pid(client)
    os.kill(pid, signal.SIGSTOP)
    server.admin("DEL", *server.admin("KEYS", what))
    os.kill(pid, signal.SIGCONT if owner == "lives" else signal.SIGKILL)

    def check():
        for call in (lambda: client.ack(leased), lambda: client.put_samples(["e"], "p", columns(1))):
            with pytest.raises(BackendUnavailableError, match="was emptied") as caught:
                call()
            assert not caught.value.retryable

    check()
    other = connect(url=server.url, namespace="lost", partition="q")
    with pytest.raises(KeyError, match="'p'"):  # the client works with the new store
        client.ack(leased)
    assert other.list_partitions() == ["q"]


def test_a_full_server_refuses_puts_alone(start_server, connect, hurries):
    server = start_server()
    client = connect(url=server.url, partition="p")
    ids, values = [f"s{number}" for number in range(20)], torch.rand(20, LARGE, dtype=torch.float64)
    client.put_samples(ids, "p", {"x": values})
    held = client.claim_meta("p", "train", ["x"], 2, lease_s=600)
    server.admin("CONFIG", "SET", "maxmemory", server.info("memory")["used_memory"] - (3 << 20))
    for size in (SMALL, LARGE):
        with hurries(2.0), pytest.raises(CapacityExceededError, match="maxmemory") as caught:
            client.put_samples(["late"], "p", columns(1, size))
        assert caught.value.outcome == "not_done"
    assert torch.equal(client.get_samples(ids, "p", ["x"])["x"], values)
    client.renew(held, 600)
    client.ack(held)
    client.nack(client.claim_meta("p", "train", ["x"], 2, lease_s=600))
    os.kill(owner_pid(client), signal.SIGKILL)
    client.ack(client.claim_meta("p", "train", ["x"], 2, lease_s=600))
    assert client.list_consumed("p", "train") == ids[:4]
    client.clear_samples(ids, "p")
    client.put_samples(["again"], "p", columns(1, SMALL))


# --- close, whose parts share one deadline ----------------------------------------------------------------------------


def test_close_ends_all_connections(start_server, connect):
    server = start_server()

    def connected():
        return server.info("clients")["connected_clients"]

    before = connected()
    client = connect(url=server.url, partition="p")
    link = backend_of(client)._link
    assert connected() > before
    client.close()
    wait_until(lambda: connected() == before)
    assert link.label  # it is still there, so nobody else has closed them


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("place", ["private", "server"])
def test_close_ends_calls_that_wait(place, how, start_server, monkeypatch):
    deadlines = []
    stop = PrivateServer.stop
    monkeypatch.setattr(PrivateServer, "stop", lambda self, until: (deadlines.append(until), stop(self, until)))
    server = start_server() if place == "server" else None
    options = {"namespace": f"close-{uuid.uuid4().hex[:8]}"} | ({"url": server.url} if server else {})
    client = connect_to({"backend": "redis_store", "options": options, "op_timeout_s": 60.0}, bootstrap=True)
    backend = backend_of(client)
    client.register_partition("p", ["x"], None, ["train"])
    pids = [owner_pid(client), backend._server.pid if server is None else server.process.pid]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.claim_meta, "p", "train", ["x"], 1, timeout_s=300.0)
        wait_until(lambda: backend._owner._session._waiting)
        try:
            for pid in pids:
                os.kill(pid, how)
            client._connection.config = client.config.model_copy(update={"op_timeout_s": 1.0})
            client.close()
            assert deadlines == ([] if server else [backend.stop_by])
            assert waits.exception(60) is not None
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
