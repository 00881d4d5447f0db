"""Servers that stop, die, fill up or forget; and what a client's memory takes."""

import contextlib
import os
import signal
import threading
import time
import tracemalloc

import pytest
import redis
import torch
from redis._parsers.base import BaseParser
from redis_servers import columns, wait_until

from dataplane_core.client.connection import LATEST_END
from dataplane_core.errors import (
    BackendUnavailableError,
    CapacityExceededError,
    DataPlaneError,
    LostReplyError,
    OperationTimeoutError,
)
from dataplane_redis._protocol import to_error
from dataplane_testkit import backend_of


@pytest.fixture
def client(plain, connect):
    return connect(url=plain.url, partition="p")


def test_a_server_that_forgot_its_scripts_is_told_them_again(plain, client):
    for size in (1, 100_000):
        plain.admin("SCRIPT", "FLUSH")
        client.put_samples(["a"], "p", columns(1, size))
        plain.admin("SCRIPT", "FLUSH")
        assert client.get_samples(["a"], "p", ["x"])["x"].shape == (1, size)
    plain.admin("SCRIPT", "FLUSH")
    assert client.claim_meta("p", "train", ["x"], 1).size == 1


def test_a_stopped_server_meets_the_deadline(start_server, connect, hurries):
    server = start_server()
    made = connect(url=server.url, op_timeout_s=60.0, partition="p")
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


def test_idle_connections_that_lead_nowhere_cost_one_timeout(plain, connect, start_relay, hurries):
    relay = start_relay(plain.port)
    made = connect(url=relay.url, op_timeout_s=60.0, partition="p")
    link = backend_of(made)._session.link
    held = [link._acquire("test", time.monotonic() + 5) for _ in range(4)]
    for each in held:
        link._release(each, True)
    relay.freeze()
    with hurries(1.0), pytest.raises(OperationTimeoutError):
        made.list_samples("p")
    assert made.list_samples("p").size == 0


def test_a_connection_that_takes_too_long_sends_nothing_after_the_deadline(plain, connect, start_relay, hurries):
    connect(url=plain.url, namespace="slow").register_partition("p", ["x"], None, ["train"])
    made = connect(url=plain.url, namespace="slow", bootstrap=False)
    made.list_samples("p")
    link = backend_of(made)._session.link
    link._idle.drop()
    link._pool.connection_kwargs["port"] = start_relay(plain.port, 0.7).port
    before = plain.num_calls()
    with hurries(1.0), pytest.raises(OperationTimeoutError):
        made.put_samples(["late"], "p", columns(1))
    assert plain.num_calls() == before


@pytest.mark.parametrize("size", [3, 100_000])
def test_what_a_server_refuses_was_not_done_and_the_error_names_the_put(start_server, connect, size):
    server = start_server()
    made = connect(url=server.url, partition="p")
    made.put_samples(["a"], "p", columns(1, size))
    held = made.claim_meta("p", "train", ["x"], 1, lease_s=600)
    server.admin("CONFIG", "SET", "min-replicas-to-write", 1)
    for _ in range(2):  # the second one also finds that the first was not undone
        with pytest.raises(
            BackendUnavailableError, match=r"put_samples\('p', 1 samples\) refused.* It was not done"
        ) as caught:
            made.put_samples(["b"], "p", columns(1, size))
        assert (caught.value.outcome, caught.value.retryable) == ("not_done", True)
    with pytest.raises(BackendUnavailableError, match=r"ack\('p', 'train', 1 samples\) refused.* It was not done"):
        made.ack(held)
    server.admin("CONFIG", "SET", "min-replicas-to-write", 0)
    made.ack(held)
    made.put_samples(["c"], "p", columns(1, size))
    assert made.list_samples("p").sample_ids == ["a", "c"]


@pytest.mark.parametrize(
    "refusal",
    [
        "LOADING Redis is loading the dataset in memory",
        "BUSY Redis is busy running a script.",
        "MISCONF Errors writing to the AOF file: No space left on device",
        "NOREPLICAS Not enough good replicas to write.",
        "READONLY You can't write against a read only replica.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "MOVED 3999 127.0.0.1:6381",
        "ASK 3999 127.0.0.1:6381",
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    ],
)
def test_a_command_that_was_refused_before_it_began_was_not_done(refusal):
    for error in (BaseParser.parse_error(refusal), redis.ResponseError(refusal)):
        assert to_error("put_samples('p')", "the server", error).outcome == "not_done"


def test_a_clear_of_which_a_part_is_done_may_have_been_done_or_not(start_server, connect, scripts_of):
    server = start_server()
    made = connect(url=server.url, partition="p")
    ids = [f"s{row}" for row in range(2500)]
    made.put_samples(ids, "p", tags=[{}] * len(ids))
    server.admin("CONFIG", "SET", "min-replicas-to-write", 1)
    with pytest.raises(BackendUnavailableError) as caught:
        made.clear_samples(ids, "p")
    assert caught.value.outcome == "not_done"
    server.admin("CONFIG", "SET", "min-replicas-to-write", 0)
    scripts_of(made, 1, lambda: server.admin("CONFIG", "SET", "min-replicas-to-write", 1))
    with pytest.raises(BackendUnavailableError) as caught:
        made.clear_samples(ids, "p")
    assert caught.value.outcome == "unknown"
    assert 0 < made.list_samples("p").size < len(ids)


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
        with contextlib.suppress(redis.RedisError):  # killed
            server.admin("EVAL", "while true do end", "0")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: is_busy(server))
        yield
    finally:
        server.admin("SCRIPT", "KILL")
        thread.join(20)


def test_a_server_busy_with_a_script_is_waited_for(start_server, connect, hurries, told_in_time):
    server = start_server()
    made = connect(url=server.url, op_timeout_s=60.0)
    hasty = connect(url=server.url)
    made.register_partition("p", ["x"], None, ["train"])
    made.put_samples(["a"], "p", columns(1, 100_000))
    done = []
    calls = (
        lambda: made.put_samples(["b"], "p", columns(1)),
        lambda: made.put_samples(["c"], "p", columns(1, 100_000)),
        lambda: made.get_samples(["a"], "p", ["x"]),
        lambda: made.claim_meta("p", "train", ["x"], 1),
        # the database is chosen when a connection opens
        lambda: connect(url=f"redis://127.0.0.1:{server.port}/1", op_timeout_s=60.0),
    )
    threads = [threading.Thread(target=lambda call=call: done.append(call())) for call in calls]
    with a_long_script(server):
        for thread in threads:
            thread.start()
        with hurries(1.0), pytest.raises(OperationTimeoutError) as caught:
            hasty.list_samples("p")
        assert caught.value.retryable
        busy = r"is busy with a script that takes long\..* It was not done"
        told_in_time(lambda: hasty.put_samples(["d"], "p", columns(1)), OperationTimeoutError, busy, 3.0)
        assert not done
    for thread in threads:
        thread.join(60)
    assert len(done) == len(calls)


@pytest.mark.parametrize("name", ["commands", "_fetch_once"])
def test_a_script_that_starts_between_two_steps_is_waited_for(start_server, connect, monkeypatch, name):
    server = start_server()
    made = connect(url=server.url, partition="p")
    made.put_samples(["a"], "p", columns(1, 100_000))
    link = backend_of(made)._session.link
    step, met = getattr(link, name), []

    def busy_at_first(what, deadline, packed, *count):
        if met or count[:1] == (1,):  # one script
            return step(what, deadline, packed, *count)
        met.append(name)
        with a_long_script(server):
            return step(what, deadline, packed, *count)

    monkeypatch.setattr(link, name, busy_at_first)
    made.put_samples(["b"], "p", columns(1, 100_000, 1))
    assert made.get_samples(["a", "b"], "p", ["x"])["x"].sum() == 100_000
    assert met == [name]


def test_a_server_killed_under_load_loses_nothing_committed(start_server, connect):
    server = start_server("--appendonly", "yes", "--appendfsync", "always")
    made = connect(url=server.url, op_timeout_s=60.0, partition="p")
    committed, tried, errors, done = [], [], [], threading.Event()

    def produce(worker):
        number = 0
        while not done.is_set():
            ids = [f"{worker}-{number}-{index}" for index in range(4)]
            tried.append(ids)
            try:
                made.put_samples(ids, "p", columns(4, 20_000 if worker % 2 else 3, number), [{"n": number}] * 4)
            except DataPlaneError as error:
                errors.append(error)
                time.sleep(0.01)
            else:
                committed.append((ids, number))
            number += 1

    threads = [threading.Thread(target=produce, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        goal = len(committed) + 12
        give_up = time.monotonic() + 60
        while len(committed) < goal and time.monotonic() < give_up:
            time.sleep(0.005)
        server.kill()
        server.start()
    done.set()
    for thread in threads:
        thread.join(120)
    assert len(committed) >= 36
    assert not [error for error in errors if isinstance(error, LostReplyError)]  # such puts were repeated
    for ids, number in committed:
        assert (made.get_samples(ids, "p", ["x"])["x"] == number).all()
    listed = made.list_samples("p")
    there = set(listed.sample_ids)
    assert all(len(there & set(ids)) in (0, 4) for ids in tried), "half a put is there"
    assert all(len(tags) == 1 for tags in listed.tags), "a sample came back without its tags"


def test_a_full_server_says_so_and_can_be_cleared(start_server, connect):
    server = start_server("--maxmemory", "12mb")
    made = connect(url=server.url, op_timeout_s=5.0, partition="p")
    written = []

    def fill():
        for number in range(100):
            made.put_samples([f"s{number}"], "p", columns(1, 60_000, number))
            written.append(number)

    with pytest.raises(CapacityExceededError, match="maxmemory"):
        fill()
    assert written
    for number in written:
        assert (made.get_samples([f"s{number}"], "p", ["x"])["x"] == number).all()
    made.clear_samples([f"s{number}" for number in written], "p")
    made.put_samples(["again"], "p", columns(1, 60_000))


def test_undoing_a_put_keeps_its_deadline_and_the_next_put_has_its_room(start_server, connect, monkeypatch, hurries):
    server = start_server()
    made = connect(url=server.url, op_timeout_s=60.0, capacity_bytes=20_000_000, partition="p")
    write, met, deadlines = backend_of(made)._write, [], []
    undo = backend_of(made)._undo

    def on_a_stopped_server(*args):
        if not met:
            met.append(1)
            os.kill(server.process.pid, signal.SIGSTOP)
        return write(*args)

    def noted(write, deadline):
        deadlines.append(deadline)
        return undo(write, deadline)

    monkeypatch.setattr(backend_of(made), "_write", on_a_stopped_server)
    monkeypatch.setattr(backend_of(made), "_undo", noted)
    try:
        with hurries(4.0):  # until it writes, too
            latest = LATEST_END.get()
            with pytest.raises(OperationTimeoutError):
                made.put_samples(["a"], "p", columns(1, 2_000_000))  # more than sockets hold
        assert deadlines == [latest]
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    made.put_samples(["b"], "p", columns(1, 2_000_000))
    assert made.list_samples("p").sample_ids == ["b"]
    made.clear_samples(["b"], "p")
    assert int(server.admin("HGET", backend_of(made)._session.base + b":instance", "held")) == 0


@pytest.mark.parametrize("num_samples", [None, 4])
def test_ids_that_were_cleared_are_kept_only_where_they_are_counted(plain, connect, num_samples):
    made = connect(url=plain.url, namespace=f"gone{num_samples}")
    made.register_partition("p", ["x"], num_samples, ["train"])
    made.put_samples(["a", "b"], "p", columns(2, 10))
    made.clear_samples(["a"], "p")
    made.put_samples(["a", "c", "d"], "p", columns(3, 10))
    names = {key.decode().rpartition(":")[2] for key in plain.admin("KEYS", f"dp:{{gone{num_samples}}}:*")}
    assert ("x" in names) == (num_samples is not None)
    assert made.claim_meta("p", "train", ["x"], 9, blocking=num_samples is not None).size == 4


def test_a_small_column_beside_a_large_one_comes_with_the_reply_of_one_script(plain, client):
    def read():
        scripts, rows = plain.num_calls(), plain.num_calls("hget")
        values = client.get_samples(ids, "p", ["x"])["x"].tolist()
        assert (plain.num_calls() - scripts, plain.num_calls("hget") - rows) == (1, len(ids))
        return values

    ids = ["a", "b", "c"]
    image = torch.rand(3, 100_000)
    client.register_partition("p", ["x", "image"], None, ["train"])
    client.put_samples(ids, "p", {"x": torch.arange(3), "image": image})
    client.get_samples(ids, "p", ["x"])  # the server has the script now
    assert read() == [0, 1, 2]
    client.put_samples(["b"], "p", {"x": torch.tensor([7])})
    assert read() == [0, 7, 2]
    assert torch.equal(client.get_samples(ids, "p", ["x", "image"])["image"], image)


def test_a_million_bytes_more_than_a_buffer_come_back_of_many_puts_in_any_order(client):
    ids = ["." * 65, *(f"s{number}" for number in range(40))]
    for number, each in enumerate(ids):
        client.put_samples([each], "p", columns(1, 10_000 + number, number))
    found = client.get_samples(ids[::-1], "p", ["x"])["x"]
    assert [int(row[0]) for row in found.unbind()] == list(range(40, -1, -1))


def test_client_memory_stays_under_two_and_a_half_payloads(client):
    payload = columns(256, 32_000)
    size = payload["x"].nbytes
    ids = [f"s{number}" for number in range(256)]
    client.put_samples(ids, "p", payload)
    client.get_samples(ids, "p", ["x"])
    tracemalloc.start()
    try:
        client.put_samples(ids, "p", payload)
        put_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        found = client.get_samples(ids, "p", ["x"])
        get_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(found["x"], payload["x"])
    assert put_peak < 2.5 * size, f"a put of {size} bytes took {put_peak}"
    assert get_peak < 2.5 * size, f"a get of {size} bytes took {get_peak}"
