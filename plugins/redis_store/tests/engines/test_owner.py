"""The owner, whose ledger is in a log in Redis: it is killed, its log is lost, and the server is full."""

import os
import signal
from pathlib import Path

import pytest
import torch
from redis_servers import LARGE, SMALL, columns, owner_pid
from tiers import in_long

from dataplane_core.errors import BackendUnavailableError, CapacityExceededError


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
