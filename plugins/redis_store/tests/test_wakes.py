"""Claims that wait are woken by the server: whom a change wakes, and what happens to a wake whose client is gone."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from redis_servers import put, wait_until

from dataplane_core.errors import BackendUnavailableError, ClaimTimeoutError
from dataplane_redis import RedisBackend, RedisConfig, _wakes
from dataplane_testkit import backend_of

#: Seconds within which a claim must return, and its timeout, at which it would ask once more.
LONG_S = 60.0
TIMEOUT_S = 300.0


@pytest.fixture
def pool():
    """Ends after the clients are closed, so that claims that nobody woke have returned."""
    with ThreadPoolExecutor(32) as threads:
        yield threads


def waiting(server):
    """How many claims the server knows that wait, and how many of these it told to ask again."""
    lines = server.admin("KEYS", "*:wq:*")
    told = sum(server.admin("HLEN", key.replace(b":wq:", b":wk:")) - 1 for key in lines)
    return sum(server.admin("ZCARD", key) for key in lines), told


def listening(server):
    """The channels on which clients of a server listen."""
    return server.admin("PUBSUB", "SHARDCHANNELS", "dp:*")


@pytest.fixture
def wait_in_line(plain, pool):
    """Starts a claim of one sample or more, and returns once the server knows that it waits."""

    def start(client, batch_size=1, server=plain, **options):
        before, _ = waiting(server)
        options = {"timeout_s": TIMEOUT_S, **options}
        wakes, told = backend_of(client)._wakes, []
        wake, begins = wakes._wake, wakes._thread is None
        if begins:  # then those who wait are told to ask again, which may come after what the test does next
            wakes._wake = told.append
        claim = pool.submit(client.claim_meta, "p", "train", ["x"], batch_size, **options)
        wait_until(lambda: waiting(server)[0] == before + 1 and (told or not begins))
        wakes._wake = wake
        return claim

    return start


@pytest.fixture
def client(plain, pool, connect):
    plain.admin("FLUSHALL")
    return connect(url=plain.url)


# --- whom a change wakes ----------------------------------------------------------------------------------------------


def test_a_question_that_no_claim_asks_any_longer_leaves_nothing(plain, client, wait_in_line, only_woken):
    client.register_partition("p", ["x"], None, ["train"])
    claims = [wait_in_line(client), wait_in_line(client, 2), wait_in_line(client, 1, tag_filter={"v": 1})]
    with pytest.raises(ClaimTimeoutError):
        client.claim_meta("p", "train", ["x"], 9, timeout_s=0.3)
    keys = plain.admin("KEYS", "*:w[qk]:*")
    assert len(keys) == 6
    assert all(0 < plain.admin("PTTL", key) <= 120_000 for key in keys)  # if the client dies
    put(client, ["a", "b", "c"])
    put(client, ["d"], {"v": 1})
    for claim in claims:
        claim.result(LONG_S)
    assert plain.admin("KEYS", "*:w[qk]*") == []
    wait_in_line(client)
    client.register_partition("p", ["x"], None, ["other"])
    wait_until(lambda: plain.admin("KEYS", "*:w[qk]*") == [])


# --- a wake whose client is gone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, BackendUnavailableError("lost")], ids=str)
def test_a_claim_that_is_given_up_passes_its_wake_on(client, connect, plain, wait_in_line, only_woken, error):
    other = connect(bootstrap=False, url=plain.url, namespace=client.config.options["namespace"])
    client.register_partition("p", ["x"], None, ["train"])
    first = wait_in_line(other)
    second = wait_in_line(client)
    backend_of(other)._wakes._wake = lambda token: None  # it is told, and does not ask
    put(client, ["a"])
    assert waiting(plain) == (2, 1)
    session = backend_of(other)._session
    run, errors = session.run, [error] * (error is not None)

    def failing(what, deadline, script, *values, **more):
        if script == "leave" and errors:
            raise errors.pop()
        return run(what, deadline, script, *values, **more)

    session.run = failing
    (given_up,) = backend_of(other)._wakes._waiting
    backend_of(other)._wakes._end(given_up)
    assert second.result(LONG_S).sample_ids == ["a"]
    other.close()
    with pytest.raises(Exception, match="closed"):
        first.result(LONG_S)


def test_a_client_that_closes_no_longer_listens(plain, client, connect, wait_in_line, only_woken):
    other = connect(bootstrap=False, url=plain.url, namespace=client.config.options["namespace"])
    client.register_partition("p", ["x"], None, ["train"])
    put(client, ["first"])
    client.claim_meta("p", "train", ["x"], 1, timeout_s=TIMEOUT_S)
    assert listening(plain) == []  # it did not wait
    gone = wait_in_line(other)
    stays = wait_in_line(client)
    assert len(listening(plain)) == 2
    other.close()
    with pytest.raises(Exception, match="closed"):
        gone.result(LONG_S)
    wait_until(lambda: len(listening(plain)) == 1)
    put(client, ["a"])
    assert stays.result(LONG_S).sample_ids == ["a"]
    client.close()
    wait_until(lambda: listening(plain) == [])
    assert not [each for each in threading.enumerate() if each.name == "dataplane-redis-wakes"]


def test_a_fork_does_not_listen_for_its_parent(client, wait_in_line, only_woken):
    client.register_partition("p", ["x"], None, ["train"])
    claim = wait_in_line(client)
    wakes = backend_of(client)._wakes
    child = os.fork()
    if not child:  # if it kept the connection, the server would tell a parent that was killed
        os._exit(0 if wakes._connection._sock.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    put(client, ["a"])
    assert claim.result(LONG_S).sample_ids == ["a"]


# --- the connection ---------------------------------------------------------------------------------------------------


def test_a_connection_that_is_lost_is_made_again(plain, client, wait_in_line, only_woken):
    client.register_partition("p", ["x"], None, ["train"])
    claim = wait_in_line(client)
    plain.admin("CLIENT", "KILL", "TYPE", "pubsub")
    put(client, ["a"])  # nobody hears it
    assert claim.result(LONG_S).sample_ids == ["a"]
    claim = wait_in_line(client)
    put(client, ["b"])
    assert claim.result(LONG_S).sample_ids == ["b"]


def test_a_start_that_is_interrupted_is_made_again(plain, client, wait_in_line, only_woken, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name == "dataplane-redis-wakes":
            monkeypatch.undo()
            raise KeyboardInterrupt

    client.register_partition("p", ["x"], None, ["train"])
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.claim_meta("p", "train", ["x"], 1, timeout_s=TIMEOUT_S)
    claim = wait_in_line(client)
    put(client, ["a"])
    assert claim.result(LONG_S).sample_ids == ["a"]


def test_a_server_that_does_not_answer_is_noticed(plain, client, wait_in_line, only_woken, monkeypatch):
    monkeypatch.setattr(_wakes, "_CHECK_S", 0.2)
    client.register_partition("p", ["x"], None, ["train"])
    claim = wait_in_line(client)
    wakes = backend_of(client)._wakes
    first = wakes._connection
    with plain.stopped():
        wait_until(lambda: wakes._connection is None)
    wait_until(lambda: wakes._connection not in (None, first))
    put(client, ["a"])
    assert claim.result(LONG_S).sample_ids == ["a"]


def test_a_user_who_may_not_listen_asks(plain, client, connect, pool):
    namespace = client.config.options["namespace"]
    rights = (f"~dp:{{{namespace}}}*", "resetchannels", "+@all")
    plain.admin("ACL", "SETUSER", "mute", "on", ">secret", *rights)
    try:
        url = plain.url.replace("://", "://mute:secret@")
        mute = connect(bootstrap=False, url=url, namespace=namespace)
        client.register_partition("p", ["x"], None, ["train"])
        claims = [
            pool.submit(each.claim_meta, "p", "train", ["x"], 1, timeout_s=TIMEOUT_S) for each in (mute, client, mute)
        ]
        wait_until(lambda: waiting(plain)[0] == 1 and backend_of(mute)._wakes._refused)
        put(mute, ["a", "b", "c"])  # it may not send messages either
        assert {each.result(LONG_S).sample_ids[0] for each in claims} == {"a", "b", "c"}
        assert len(listening(plain)) == 1
        mute.close()
        for each, warns in ((url, True), (plain.url, False)):
            findings = RedisBackend.diagnose(RedisConfig(url=each, namespace=namespace), deadline=time.monotonic() + 20)
            assert any("not woken" in found.what and "+ssubscribe" in found.hint for found in findings) == warns
    finally:
        plain.admin("ACL", "DELUSER", "mute")


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [None, 2], ids=["rows", "groups"])
def test_no_claim_is_forgotten_among_many(plain, client, connect, pool, only_woken, group_size):
    clients = [client, connect(bootstrap=False, url=plain.url, namespace=client.config.options["namespace"])]
    ids = [f"q{row // 2}_g{row % 2}" for row in range(600)]
    client.register_partition("p", ["x", "y"], len(ids), ["train", "other"], grpo_group_size=group_size)

    def consume(number):
        chance = random.Random(number)
        mine, task = clients[number % 2], ("train", "other")[number // 2 % 2]
        options = {"tag_filter": {"v": (">=", 1)}} if number % 4 == 0 else {}
        fields, acked = (["x"], ["x", "y"])[number % 3 == 0], []
        while True:
            batch_size = 2 * chance.randint(1, 3)
            meta = mine.claim_meta("p", task, fields, batch_size, lease_s=300.0, timeout_s=TIMEOUT_S, **options)
            if not meta.size:
                return task, acked
            if chance.random() < 0.2:
                mine.nack(meta)
            else:
                mine.ack(meta)
                acked += meta.sample_ids

    def produce(number):
        chance = random.Random(100 + number)
        mine = ids[number::3]
        chance.shuffle(mine)
        while mine:
            some, mine = mine[:5], mine[5:]
            for field in ("x", "y"):
                columns = {field: torch.ones(len(some))}
                clients[number % 2].put_samples(some, "p", columns, [{"v": 1}] * len(some))

    consumers = [pool.submit(consume, number) for number in range(24)]
    for each in [pool.submit(produce, number) for number in range(3)]:
        each.result(LONG_S)
    given = {"train": [], "other": []}
    for task, acked in (each.result(LONG_S) for each in consumers):
        given[task] += acked
    assert {task: sorted(each) for task, each in given.items()} == {task: sorted(ids) for task in given}
    assert waiting(plain) == (0, 0)
