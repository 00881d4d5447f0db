"""Servers that stop, refuse or are busy."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis_servers import LARGE, SMALL, Relay, columns, wait_until

from dataplane_core.errors import BackendUnavailableError, OperationTimeoutError
from dataplane_redis._link import Link


def test_a_stopped_server_meets_the_deadline(start_server, connect, hurries):
    server = start_server()
    made = connect(url=server.url, partition="p")
    made.put_samples(["a"], "p", columns(1))
    with server.stopped():
        for call in (
            lambda: made.put_samples(["b"], "p", columns(1)),
            lambda: made.put_samples(["c"], "p", columns(1, 4_000_000)),
            lambda: made.get_samples(["a"], "p", ["x"]),
            lambda: made.claim_meta("p", "train", ["x"], 1, timeout_s=0.5),
            lambda: connect(bootstrap=False, url=server.url, op_timeout_s=1.0),
        ):
            with hurries(1.0), pytest.raises(OperationTimeoutError) as caught:
                call()
            assert caught.value.retryable
    assert made.get_samples(["a"], "p", ["x"])["x"].tolist() == [[0]]


@pytest.fixture
def relay(plain):
    with Relay(plain.port) as relay:
        yield relay


def test_idle_connections_that_lead_nowhere_cost_one_timeout(connect, relay, hurries):
    made = connect(url=relay.url, partition="p")
    made.put_samples(["a"], "p", columns(1))
    relay.delay_s = 0.05  # so that each thread needs a connection of its own
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: made.get_samples(["a"], "p", ["x"]), range(16)))
    relay.freeze()
    assert len(relay.frozen) > 4, "there are several idle connections"
    with hurries(1.0), pytest.raises(OperationTimeoutError):
        made.get_samples(["a"], "p", ["x"])
    assert made.get_samples(["a"], "p", ["x"])["x"].tolist() == [[0]]
    wait_until(lambda: sum(end.fileno() >= 0 for end in relay.frozen) <= 2)  # both ends of the owner's connection


def test_a_connection_that_takes_too_long_sends_nothing_after_the_deadline(plain, relay):
    relay.delay_s = 0.7
    before = plain.num_calls("hset")
    with contextlib.closing(Link(relay.url)) as link, pytest.raises(OperationTimeoutError):
        link.command("put_samples", time.monotonic() + 1.0, b"late", b"HSET", b"late", b"0", b"x")
    with redis.Redis.from_url(relay.url) as later:
        later.ping()  # by then the relay has passed on what it had
    assert plain.num_calls("hset") == before


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_a_server_refuses_was_not_done(start_server, connect, size):
    server = start_server()
    made = connect(url=server.url, partition="p")
    made.put_samples(["a"], "p", columns(1, size))
    held = made.claim_meta("p", "train", ["x"], 1, lease_s=600)
    server.admin("CONFIG", "SET", "min-replicas-to-write", 1)
    with pytest.raises(BackendUnavailableError, match=r"takes no writes.* It was not done") as caught:
        made.put_samples(["b"], "p", columns(1, size))
    assert (caught.value.outcome, caught.value.retryable) == ("not_done", True)
    server.admin("CONFIG", "SET", "min-replicas-to-write", 0)
    made.ack(held)
    made.put_samples(["c"], "p", columns(1, size))
    assert made.list_samples("p").sample_ids == ["a", "c"]


def is_busy(server):
    with redis.Redis(unix_socket_path=str(server.socket)) as probe:
        try:
            return not probe.ping()
        except redis.ResponseError as error:
            return str(error).startswith("BUSY")


@contextlib.contextmanager
def a_long_script(server):
    """A script of somebody else's that runs until it is killed, and for which the server refuses other commands."""
    server.admin("CONFIG", "SET", "busy-reply-threshold", "10")

    def run():
        with contextlib.suppress(redis.RedisError):  # killed; after a timeout, redis-py would start another one
            server.admin("EVAL", "while true do end", "0", socket_timeout=None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: is_busy(server))
        yield
    finally:
        server.admin("SCRIPT", "KILL")
        thread.join(20)


def test_a_server_busy_with_a_script_is_waited_for(start_server, connect, told_in_time):
    server = start_server()
    made = connect(url=server.url, partition="p", op_timeout_s=300.0)
    made.put_samples(["a"], "p", columns(1, LARGE))
    calls = (
        lambda: made.put_samples(["b"], "p", columns(1)),
        lambda: made.put_samples(["c"], "p", columns(1, LARGE)),
        lambda: made.get_samples(["a"], "p", ["x"]),
        lambda: made.claim_meta("p", "train", ["x"], 1),
        # the database is chosen when a connection opens
        lambda: connect(url=f"redis://127.0.0.1:{server.port}/1", op_timeout_s=300.0),
    )
    with ThreadPoolExecutor(len(calls)) as pool:
        with a_long_script(server):
            waiting = [pool.submit(call) for call in calls]
            busy = "is busy with a script|did not answer in time|waits for the engine"
            told_in_time(lambda: made.put_samples(["d"], "p", columns(1)), OperationTimeoutError, busy, 3.0)
            assert not any(each.done() for each in waiting)
        for each in waiting:
            each.result(300)
