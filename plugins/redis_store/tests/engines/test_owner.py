"""The owner, whose ledger is in a log in Redis: it is killed, stopped, started twice, and its log is lost."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from redis_servers import LARGE, SMALL, columns, num_owners, owner_pid, wait_until
from tiers import in_long

from dataplane_core.errors import BackendUnavailableError, CapacityExceededError, LostSamplesError
from dataplane_core.hosting import Messages, Session
from dataplane_core.spec import ClaimRequest, ClearRequest, ListRequest
from dataplane_testkit import backend_of


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kills", [5, *in_long(200)])
def test_owners_that_are_killed_under_load_lose_nothing_and_no_call_fails(plain, connect, start_loads, kills):
    client = connect(url=plain.url, partition="p")
    loads, pids = start_loads(client, 3), set()
    for _ in range(kills):
        pid = owner_pid(client)
        pids.add(pid)
        os.kill(pid, signal.SIGKILL)
        loads.go_on()
    lost, errors = loads.end()
    assert (len(pids), lost, errors) == (kills, set(), [])


def test_an_owner_has_no_torch(plain, connect):
    """Which takes seconds to import, and 250 MB."""
    client = connect(url=plain.url, partition="p")
    client.put_samples(["a"], "p", columns(1))
    assert "torch" not in Path(f"/proc/{owner_pid(client)}/maps").read_text()


def test_an_owner_that_was_stopped_past_its_lease_never_answers(plain, connect, runs):
    one = connect(url=plain.url, namespace="stopped", partition="p")
    two = connect(url=plain.url, namespace="stopped", bootstrap=False)
    one.put_samples(["a"], "p", columns(1, SMALL, 1))
    old = owner_pid(one)
    own, late_s = backend_of(one)._owner._session, time.monotonic() + 300
    sessions = [Session(own._address, Messages(), late_s, own._fail) for _ in range(3)]
    claim = ClaimRequest("p", "train", ["x"], 1, all_or_nothing=True, lease_s=60.0)
    asked = (ListRequest("p"), claim, ClearRequest("p", ["a"]))
    with ThreadPoolExecutor(4) as pool:
        waits = pool.submit(two.claim_meta, "p", "train", ["x"], 2, timeout_s=300.0)
        wait_until(lambda: backend_of(two)._owner._session._waiting)
        os.kill(old, signal.SIGSTOP)
        try:
            late = [
                pool.submit(session.call, "test", late_s, command)
                for session, command in zip(sessions, asked, strict=True)
            ]
            one.put_samples(["b"], "p", columns(1, SMALL, 2))
            assert owner_pid(one) != old
        finally:
            os.kill(old, signal.SIGCONT)
        for each in late:
            with pytest.raises(BackendUnavailableError):
                each.result(60)
        wait_until(lambda: not runs(old))
        assert waits.result(60).sample_ids == ["a", "b"]
    for session in sessions:
        session.close()


def test_of_owners_that_are_started_at_once_one_stays(plain, connect):
    with ThreadPoolExecutor(4) as pool:
        clients = list(pool.map(lambda _: connect(url=plain.url, namespace="once"), range(4)))
        clients[0].register_partition("p", ["x"], None, ["train"])
        for number in range(3):
            ids = [f"{number}-{row}" for row in range(4)]
            list(pool.map(lambda pair: pair[0].put_samples([pair[1]], "p", columns(1)), zip(clients, ids, strict=True)))
            assert {owner_pid(client) for client in clients} == {owner_pid(clients[0])}
            assert set(ids) <= set(clients[number].list_samples("p").sample_ids)
            wait_until(lambda: num_owners() == 1)
            os.kill(owner_pid(clients[0]), signal.SIGKILL)


def test_a_server_that_is_killed_under_load_loses_nothing_that_it_synced(start_server, connect, start_loads):
    server = start_server("--appendonly", "yes", "--appendfsync", "always")
    client = connect(url=server.url, partition="p")
    loads = start_loads(client)
    for kills_owner in (False, True, False):
        if kills_owner:
            os.kill(owner_pid(client), signal.SIGKILL)
        server.kill()
        server.start()
        loads.go_on()
    lost, errors = loads.end()
    assert not lost
    assert all(retryable for _, retryable, _ in errors), errors


@pytest.fixture
def filled(start_server, connect):
    """A server, and a client with samples of two puts of which two are acked and one is leased."""
    server = start_server()
    client = connect(url=server.url, namespace="lost", partition="p")
    client.put_samples(["a", "b"], "p", columns(2, SMALL, 1))
    client.put_samples(["c", "d"], "p", columns(2, LARGE, 2))
    client.ack(client.claim_meta("p", "train", ["x"], 2, lease_s=600))
    return server, client, client.claim_meta("p", "train", ["x"], 1, lease_s=600)


def test_rows_that_the_server_lost_are_named(filled):
    server, client, leased = filled
    server.admin("DEL", *server.admin("KEYS", "dp:lost:r:*"))
    client.ack(leased)
    assert client.list_consumed("p", "train") == ["a", "b", "c"]
    with pytest.raises(LostSamplesError, match="'a'"):
        client.get_samples(["a", "d"], "p", ["x"])
    client.put_samples(["a", "d"], "p", columns(2, SMALL, 7))
    assert (client.get_samples(["a", "d"], "p", ["x"])["x"] == 7).all()


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


def test_a_server_that_evicts_shows_nothing_wrong(start_server, connect):
    server = start_server("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    client = connect(url=server.url, allow_eviction=True, partition="p")
    ids, lost = [f"s{number}" for number in range(100)], 0
    for act in ("put", "get"):
        for number, name in enumerate(ids):
            values = torch.arange(20_000.0).view(1, -1) * (number + 0.5)
            try:
                if act == "put":
                    client.put_samples([name], "p", {"x": values})
                else:
                    assert torch.equal(client.get_samples([name], "p", ["x"])["x"], values)
            except LostSamplesError:
                lost += 1
            except BackendUnavailableError as error:  # it evicted the log
                lost += "was emptied" in str(error)
    assert server.info("stats")["evicted_keys"]
    assert lost


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
