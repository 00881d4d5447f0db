"""Servers that come back from an older state, empty or replaced: nothing is given twice, no foreign bytes are read."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis_servers import LARGE, SMALL, columns, wait_until

from dataplane_core.errors import (
    AlreadyRunningError,
    BackendUnavailableError,
    LeaseExpiredError,
    MissingDataError,
    StalePartitionError,
    UnknownPartitionError,
)
from dataplane_redis import Acknowledged, LostCallsError, _acknowledged
from dataplane_testkit import backend_of


def comes_back(server):
    """Kills a server, which then starts again from its snapshot."""
    server.kill()
    server.start()


def between_begin_and_rows(client, monkeypatch, act):
    """Calls `act` once, when a put has reserved and not yet written."""
    write, met = backend_of(client)._write, []

    def wrapped(*args):
        if not met:
            met.append(1)
            act()
        return write(*args)

    monkeypatch.setattr(backend_of(client), "_write", wrapped)


@pytest.fixture
def pair(start_server, connect):
    """Two clients of one server, and a partition with one sample."""
    server = start_server()
    one = connect(url=server.url, namespace="history")
    two = connect(url=server.url, namespace="history", bootstrap=False)
    one.register_partition("p", ["x"], None, ["train"])
    one.put_samples(["a"], "p", columns(1, SMALL, 1))
    return server, one, two


def test_two_holders_never_both_ack_after_a_rollback(pair):
    server, one, two = pair
    server.admin("SAVE")
    lost = one.claim_meta("p", "train", ["x"], 1, lease_s=600)
    comes_back(server)
    found = two.claim_meta("p", "train", ["x"], 1, lease_s=600)
    assert lost.sample_ids == found.sample_ids == ["a"]
    assert lost.lease_tokens != found.lease_tokens
    with pytest.raises(LeaseExpiredError):
        one.ack(lost)
    with pytest.raises(LeaseExpiredError):
        one.nack(lost)
    with pytest.raises(LeaseExpiredError):
        one.renew(lost, 600)
    two.ack(found)
    assert two.check_consumption_status("p", ["train"])


def test_a_put_that_a_rollback_undid_writes_over_nobody(pair, monkeypatch):
    server, one, two = pair
    server.admin("SAVE")

    def others_come_first():
        comes_back(server)
        two.put_samples(["b"], "p", columns(1, LARGE, 2))

    between_begin_and_rows(one, monkeypatch, others_come_first)
    with pytest.raises(StalePartitionError):
        one.put_samples(["c"], "p", columns(1, LARGE, 3))
    assert (two.get_samples(["b"], "p", ["x"])["x"] == 2).all()
    assert one.list_samples("p").sample_ids == ["a", "b"]
    one.put_samples(["c"], "p", columns(1, LARGE, 3))
    assert (two.get_samples(["b", "c"], "p", ["x"])["x"][:, 0]).tolist() == [2, 3]


@pytest.mark.parametrize("cleared", [False, True])
def test_a_put_whose_begin_is_in_the_snapshot_is_judged_by_what_came_after(pair, monkeypatch, cleared):
    server, one, two = pair

    def others_come_first():
        server.admin("SAVE")
        two.put_samples(["lost"], "p", columns(1, SMALL, 5))  # takes the number that "a" gets below
        comes_back(server)
        with pytest.raises(LostCallsError, match=r"put_samples\('p': 'lost'\)"):
            two.list_samples("p")
        if cleared:
            two.clear_samples(["a"], "p")
            two.put_samples(["a"], "p", columns(1, SMALL, 2))

    between_begin_and_rows(one, monkeypatch, others_come_first)
    if cleared:
        with pytest.raises(StalePartitionError, match="'a' was cleared"):
            one.put_samples(["a"], "p", columns(1, LARGE, 3))
    else:
        one.put_samples(["a"], "p", columns(1, LARGE, 3))
    found = two.get_samples(["a"], "p", ["x"])["x"]
    assert found.shape == (1, SMALL if cleared else LARGE)
    assert (found == (2 if cleared else 3)).all()


def calls(client, meta):
    """Every operation, by name."""
    return {
        "put": lambda: client.put_samples(["z"], "p", columns(1, SMALL, 9)),
        "large put": lambda: client.put_samples(["z"], "p", columns(1, LARGE, 9)),
        "tags": lambda: client.put_samples(["z"], "p", tags=[{"v": 1}]),
        "get": lambda: client.get_samples(["a"], "p", ["x"]),
        "claim": lambda: client.claim_meta("p", "train", ["x"], 1, timeout_s=20),
        "look": lambda: client.claim_meta("p", "train", ["x"], 1, blocking=False),
        "ack": lambda: client.ack(meta),
        "nack": lambda: client.nack(meta),
        "renew": lambda: client.renew(meta, 60),
        "list": lambda: client.list_samples("p"),
        "status": lambda: client.check_consumption_status("p", ["train"]),
        "clear": lambda: client.clear_samples(["a"], "p"),
        "drop": lambda: client.clear_samples(None, "p"),
        "register": lambda: client.register_partition("p", ["x"], None, ["train"]),
        "partitions": client.list_partitions,
        "ping": client.ping,
    }


@pytest.mark.parametrize("bootstrapped", [False, True])
def test_a_store_that_was_emptied_is_not_the_one_that_a_client_knew(pair, connect, bootstrapped):
    server, one, two = pair
    meta = two.claim_meta("p", "train", ["x"], 1, lease_s=600)
    server.admin("FLUSHALL")
    if bootstrapped:
        other = connect(url=server.url, namespace="history", partition="p")
        other.put_samples(["a"], "p", columns(1, SMALL, 4))
    for client in (one, two):
        for name, call in calls(client, meta).items():
            with pytest.raises(StalePartitionError, match="no longer holds the store") as caught:
                call()
            assert not caught.value.retryable, name
    if bootstrapped:
        again = connect(url=server.url, namespace="history", bootstrap=False)
        assert again.list_samples("p").sample_ids == ["a"]
        assert again.get_samples(["a"], "p", ["x"])["x"].tolist() == [[4] * SMALL]
        one.close()  # is not the owner of this one
        connect(url=server.url, namespace="history", bootstrap=False)
    else:
        with pytest.raises(BackendUnavailableError, match="holds no instance"):
            connect(url=server.url, namespace="history", bootstrap=False)
        assert server.admin("DBSIZE") == 0


def test_a_put_that_meets_an_emptied_store_writes_nothing(pair, connect, monkeypatch):
    server, one, _ = pair

    def others_come_first():
        server.admin("FLUSHALL")
        other = connect(url=server.url, namespace="history", partition="p")
        other.put_samples(["a"], "p", columns(1, LARGE, 4))

    between_begin_and_rows(one, monkeypatch, others_come_first)
    with pytest.raises(StalePartitionError, match="no longer holds the store"):
        one.put_samples(["a"], "p", columns(1, LARGE, 9))
    again = connect(url=server.url, namespace="history", bootstrap=False)
    assert (again.get_samples(["a"], "p", ["x"])["x"] == 4).all()


@pytest.mark.parametrize("tag_filter", [None, {"v": 1}])
def test_a_claim_that_waits_meets_an_emptied_store(pair, tag_filter):
    server, one, _ = pair
    before = server.num_calls()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(one.claim_meta, "p", "train", ["x"], 2, timeout_s=60, tag_filter=tag_filter)
        wait_until(lambda: server.num_calls() > before)
        server.admin("FLUSHALL")
        with pytest.raises(StalePartitionError, match="no longer holds the store"):
            waits.result(40)


def test_a_replica_that_lost_its_tail_gives_nothing_twice(start_server, connect):
    primary, replica = start_server(), start_server()
    replica.admin("REPLICAOF", "127.0.0.1", primary.port)
    url = f"unix://{primary.socket}"
    one = connect(url=url, namespace="history", partition="p")
    one.put_samples(["a"], "p", columns(1, SMALL, 1))
    primary.replicate_to(replica)
    replica.admin("REPLICAOF", "127.0.0.1", "1")  # nobody there: what comes now does not reach it
    lost = one.claim_meta("p", "train", ["x"], 1, lease_s=600)
    one.put_samples(["b"], "p", columns(1, LARGE, 2))
    one.register_partition("q", ["x"], None, ["train"])
    primary.kill()
    replica.admin("REPLICAOF", "NO", "ONE")
    os.rename(replica.socket, primary.socket)  # the address is that of the new primary
    two = connect(url=url, namespace="history", bootstrap=False)
    found = two.claim_meta("p", "train", ["x"], 1, lease_s=600)
    assert found.sample_ids == ["a"]
    with pytest.raises(LostCallsError, match="lacks 2 calls of this client") as caught:
        one.ack(lost)
    assert caught.value.calls == (
        Acknowledged("put_samples", "p", sample_ids=["b"]),
        Acknowledged("register_partition", "q"),
    )
    assert caught.value.complete
    with pytest.raises(LeaseExpiredError):  # the loss is told once; later calls work with what is there
        one.ack(lost)
    two.ack(found)
    with pytest.raises(MissingDataError):
        one.get_samples(["b"], "p", ["x"])
    with pytest.raises(UnknownPartitionError):
        one.get_samples(["b"], "q", ["x"])


def test_a_server_that_gets_its_first_replica_lost_nothing(pair, start_server, monkeypatch):
    """It begins another history then, which connections that are in use have not met."""
    server, one, _ = pair
    history = server.info("replication")["master_replid"]
    link = backend_of(one)._session.link
    acquire = link._acquire

    def replica_joins(what, deadline):  # the put has its connection, and was not sent yet
        connection = acquire(what, deadline)
        monkeypatch.setattr(link, "_acquire", acquire)
        start_server().follow(server)
        with ThreadPoolExecutor(1) as another:
            assert another.submit(one.list_samples, "p").result().sample_ids == ["a"]  # on a new connection
        return connection

    monkeypatch.setattr(link, "_acquire", replica_joins)
    one.put_samples(["b"], "p", columns(1, SMALL, 2))
    assert server.info("replication")["master_replid"] != history
    one.put_samples(["c"], "p", columns(1, SMALL, 3))
    assert one.list_samples("p").sample_ids == ["a", "b", "c"]


def test_lost_calls_that_a_client_no_longer_remembers(start_server, connect, monkeypatch):
    monkeypatch.setattr(_acknowledged, "_MAX_CALLS", 2)
    primary, replica = start_server(), start_server()
    replica.admin("REPLICAOF", "127.0.0.1", primary.port)
    client = connect(url=f"unix://{primary.socket}", partition="p")
    primary.replicate_to(replica)
    replica.admin("REPLICAOF", "127.0.0.1", "1")
    for name in "abc":
        client.put_samples([name], "p", columns(1, SMALL, 1))
    primary.kill()
    replica.take_over(primary)
    with pytest.raises(LostCallsError, match="also lacks older ones") as caught:
        client.list_samples("p")
    assert [each.sample_ids for each in caught.value.calls] == [["b"], ["c"]]
    assert not caught.value.complete


@pytest.fixture
def loses_a_call(monkeypatch):
    """The server of a client went back behind one of its calls, after the client ran a script so often."""

    def prepare(client, name, count):
        session, met = backend_of(client)._session, []
        run = session.run

        def counted(what, deadline, script, *words, **more):
            reply = run(what, deadline, script, *words, **more)
            met.append(script)
            if script == name and met.count(name) == count:
                session.acknowledgements._lost.append(Acknowledged("put_samples", "p", sample_ids=["lost"]))
            return reply

        monkeypatch.setattr(session, "run", counted)

    return prepare


@pytest.mark.parametrize("whole", [False, True])
def test_a_clear_that_has_begun_goes_on_and_the_next_call_tells_of_losses(pair, loses_a_call, whole):
    _, one, two = pair
    ids = [f"s{row}" for row in range(2500)]
    one.put_samples(ids, "p", columns(2500, SMALL, 1))
    loses_a_call(one, "clear", 1)
    one.clear_samples(None if whole else ids, "p")
    assert two.list_partitions() == ([] if whole else ["p"])
    if not whole:
        assert two.list_samples("p").sample_ids == ["a"]
    with pytest.raises(LostCallsError, match="'lost'"):
        one.list_partitions()


def test_a_clear_of_many_samples_leaves_other_calls_remembered(pair, monkeypatch):
    monkeypatch.setattr(_acknowledged, "_MAX_SAMPLES", 6000)
    server, one, _ = pair
    server.admin("SAVE")
    ids = [f"s{row}" for row in range(5000)]
    one.put_samples(["b"], "p", columns(1, SMALL, 1))
    one.clear_samples(ids, "p")
    comes_back(server)
    with pytest.raises(LostCallsError) as caught:
        one.list_samples("p")
    assert caught.value.complete
    assert caught.value.calls[0] == Acknowledged("put_samples", "p", sample_ids=["b"])
    assert sorted(each for call in caught.value.calls[1:] for each in call.sample_ids) == sorted(ids)


def test_a_client_that_takes_an_instance_over_keeps_what_it_is(plain, connect):
    one = connect(url=plain.url, namespace="kept", capacity_bytes=100_000)
    attached = connect(url=plain.url, namespace="kept", bootstrap=False)
    one.register_partition("p", ["x"], None, ["train"])
    two = connect(url=plain.url, namespace="kept", capacity_bytes=100_000)  # equal options
    one.close()  # is no longer the owner
    attached.put_samples(["a"], "p", columns(1, SMALL, 1))
    with pytest.raises(RuntimeError, match="100000 bytes"):  # the capacity is the instance's
        attached.put_samples(["b"], "p", columns(1, LARGE, 1))
    with pytest.raises(AlreadyRunningError, match=r"HDEL 'dp:\{kept\}:instance' owner"):
        connect(url=plain.url, namespace="kept", capacity_bytes=1 << 30)
    two.close()
    with pytest.raises(BackendUnavailableError, match="holds no instance"):
        connect(url=plain.url, namespace="kept", bootstrap=False)
    attached.put_samples(["b"], "p", columns(1, SMALL, 1))  # nobody ended it
    three = connect(url=plain.url, namespace="kept", capacity_bytes=1 << 30)
    assert three.list_samples("p").sample_ids == attached.list_samples("p").sample_ids == ["a", "b"]


def test_a_registration_says_what_it_drops(plain, connect, caplog):
    driver, rank = (connect(url=plain.url, namespace="twice", bootstrap=first) for first in (True, False))
    driver.register_partition("p", ["x"], None, ["train", "score"])
    driver.put_samples(["a", "b", "c"], "p", columns(3, SMALL, 1))
    driver.claim_meta("p", "train", ["x"], 2)
    rank.register_partition("p", ["x"], None, ["train"])
    assert "dropped 3 samples, 3 of them not consumed by 'score': process " in caplog.text
    with pytest.raises(MissingDataError) as caught:
        driver.get_samples(["a"], "p", ["x"])
    assert "registered the partition again" in caught.value.hint
