"""Puts that wait for room: first come, first served, within a bound."""

import subprocess
import threading
import time

import msgpack
import pytest
import torch
from redis_servers import wait_until

from dataplane_core.errors import CapacityExceededError, DataPlaneError, RoomTimeoutError
from dataplane_core.spec import CANCELLATION, Cancellation
from dataplane_redis import _puts
from dataplane_testkit import backend_of

_UNIT = 1000  # bytes
_HEAD = 16  # of these, of a cell besides its values


@pytest.fixture
def client(plain, connect):
    return connect(url=plain.url, capacity_bytes=100 * _UNIT, on_full="block", op_timeout_s=60.0, partition="p")


def put(client, name, units, partition="p"):
    columns = {"x": torch.ones(1, units * _UNIT - _HEAD, dtype=torch.uint8)}
    client.put_samples([name], partition, columns)


def put_by_thread(client, name, units, done):
    def run():
        put(client, name, units)
        done.append(name)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def line(client):
    session = backend_of(client)._session
    return session.command("test", time.monotonic() + 5, b"ZCARD", session.base + b":line")


def test_a_put_that_waits_gives_up_when_it_is_cancelled(client):
    put(client, "first", 80)
    told, cancellation = [], Cancellation()

    def run():
        CANCELLATION.set(cancellation)
        with pytest.raises(RoomTimeoutError) as caught:
            put(client, "second", 80)
        told.append(caught.value.outcome)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: line(client) == 1)
    cancellation.cancel()
    thread.join(30)
    assert (told, line(client)) == (["not_done"], 0)


def test_a_put_that_waits_when_the_capacity_is_lifted_goes_on(plain, connect):
    namespace = "lifted"
    owner = connect(url=plain.url, namespace=namespace, capacity_bytes=10 * _UNIT, op_timeout_s=60.0)
    waits = connect(url=plain.url, namespace=namespace, bootstrap=False, op_timeout_s=60.0)
    owner.register_partition("p", ["x"], None, ["train"])
    put(waits, "first", 8)
    owner.close()
    without = connect(url=plain.url, namespace=namespace, op_timeout_s=60.0)
    done = []
    thread = put_by_thread(waits, "second", 8, done)
    wait_until(lambda: line(waits) == 1)
    without.clear_samples(["first"], "p")
    thread.join(30)
    assert done == ["second"]
    assert without.describe("p").held_bytes == 8 * _UNIT


_WAITS = """
import sys, torch
from tensordict import TensorDict
from dataplane_core import connect
options = {"url": sys.argv[1], "namespace": sys.argv[2]}
client = connect({"backend": "redis_store", "options": options, "op_timeout_s": 60}, bootstrap=False)
client.put_samples(["large"], "p", {"x": torch.ones(1, 89_984, dtype=torch.uint8)})
"""


@pytest.fixture
def never_asks(monkeypatch):
    """A put that waits for room asks again only if it is woken."""
    monkeypatch.setattr(_puts, "_PAUSE_SHARE", 1e12)
    monkeypatch.setattr(_puts, "_PAUSE_S", 1e6)


def num_told(client):
    """How many puts the server will tell when there is room."""
    session = backend_of(client)._session
    waiting = session.command("test", time.monotonic() + 5, b"HVALS", session.base + b":waiting")
    return sum(msgpack.unpackb(each, raw=True)[4] != b"" for each in waiting)


@pytest.mark.parametrize("how", ["clear", "drop", "abort"])
def test_a_put_that_waits_is_woken_when_room_becomes_free(client, never_asks, how):
    client.register_partition("other", ["x"], None, ["train"])
    put(client, "old", 60, partition="other")
    done = []
    session = backend_of(client)._session
    if how == "abort":
        told = {"ids": ["begun"], "parts": [["", [40 * _UNIT], ""]], "tags": "", "known": b"", "request": ""}
        told |= {"mode": "begin", "name": "p", "epoch": "", "write": b"w" * 16, "ttl_s": 60.0}
        told |= {"capacity": 100 * _UNIT, "wait_s": 0.0}
        assert session.run("test", time.monotonic() + 5, "put", **told)[0] == b"ok"
    waiting = put_by_thread(client, "waits", 30 if how == "abort" else 50, done)
    wait_until(lambda: num_told(client) == 1)
    assert done == []
    if how == "clear":
        client.clear_samples(["old"], "other")
    elif how == "drop":
        client.register_partition("other", ["x"], None, ["train"])
    else:
        session.run("test", time.monotonic() + 5, "abort", write=b"w" * 16)
    waiting.join(60)
    assert done == ["waits"]


def test_all_puts_that_wait_are_woken_though_only_a_few_are_told_at_a_time(client, never_asks):
    put(client, "old", 100)
    done = []
    threads = [put_by_thread(client, f"waits{number}", 2, done) for number in range(40)]
    wait_until(lambda: line(client) == 40)
    client.clear_samples(["old"], "p")
    for thread in threads:
        thread.join(60)
    assert sorted(done) == sorted(f"waits{number}" for number in range(40))


def test_a_put_is_woken_when_the_one_before_it_gives_up(client, never_asks, monkeypatch):
    put(client, "old", 60)
    done, refused = [], []

    def give_up():
        try:
            put(client, "large", 90)
        except RoomTimeoutError:
            refused.append("large")

    first = threading.Thread(target=give_up)
    first.start()
    wait_until(lambda: num_told(client) == 1)
    (event,) = backend_of(client)._wakes._puts.values()
    second = put_by_thread(client, "second", 40, done)
    wait_until(lambda: num_told(client) == 2)
    events = backend_of(client)._wakes._puts.values()
    wait_until(lambda: all(each._cond._waiters for each in events))  # the patch is for what they do once woken
    monkeypatch.setattr(_puts, "_LAST_ASK_S", 1e6)
    event.set()
    first.join(60)
    second.join(60)
    assert (refused, done) == (["large"], ["second"])


def test_a_put_whose_client_lost_the_connection_on_which_it_listens_is_woken(client, plain, never_asks):
    put(client, "old", 60)
    done = []
    waiting = put_by_thread(client, "waits", 50, done)
    wait_until(lambda: num_told(client) == 1)
    lost = backend_of(client)._wakes._connection
    session = backend_of(client)._session
    session.command("test", time.monotonic() + 5, b"CLIENT", b"KILL", b"TYPE", b"pubsub")
    wait_until(lambda: backend_of(client)._wakes._connection not in (None, lost))
    client.clear_samples(["old"], "p")
    waiting.join(60)
    assert done == ["waits"]


def test_a_put_whose_client_was_killed_keeps_nobody_waiting_for_long(client, plain, python):
    put(client, "old", 60)
    words = ["-c", _WAITS, plain.url, client.config.options["namespace"]]
    with python.start(*words, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: line(client) == 1)
        process.kill()
    put(client, "small", 20)

    def is_forgotten():
        put(client, "probe", 1)
        client.clear_samples(["probe"], "p")
        return line(client) == 0

    wait_until(is_forgotten)


def test_a_put_that_waited_for_room_does_not_hold_it_for_longer(client, monkeypatch):
    """What a killed client's put holds is given up a fixed time after the put's deadline."""
    run, sent = backend_of(client)._session.run, []

    def noted(what, deadline, script, /, *rows, **asked):
        if script == "put":
            sent.append((asked["mode"], asked["ttl_s"]))
        return run(what, deadline, script, *rows, **asked)

    put(client, "old", 60)
    monkeypatch.setattr(backend_of(client)._session, "run", noted)
    done = []
    waiting = put_by_thread(client, "waits", 60, done)
    wait_until(lambda: line(client) == 1)
    client.clear_samples(["old"], "p")
    waiting.join(60)
    (mode, before), (mode_again, after) = sent  # the commit goes with the rows
    assert (mode, mode_again) == ("begin", "begin")
    assert after < before


def test_a_put_that_waited_and_is_refused_then_keeps_nobody_waiting(client):
    put(client, "old", 100)
    refused = []

    def put_stale(name, units):
        try:
            put(client, name, units)
        except DataPlaneError as error:
            refused.append(error)

    threads = [threading.Thread(target=put_stale, args=(f"stale{units}", units)) for units in (60, 90)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_until(lambda number=number: line(client) == number + 1)
    client.clear_samples(None, "p")
    for thread in threads:
        thread.join(30)
    assert len(refused) == 2
    assert line(client) == 0


def test_a_put_without_payload_can_be_given_up(client):
    write = b"w" * 16
    backend = backend_of(client)
    deadline = time.monotonic() + 5
    backend._session.command("test", deadline, b"ZADD", backend._session.base + b":pending", b"9e15", write)
    backend._session.command("test", deadline, b"HSET", backend._session.base + b":instance", b"r:" + write, b"0")
    assert backend._session.run("test", deadline, "abort", write=write)[0] == b"ok"


def test_a_row_that_no_value_can_hold_is_refused_before_it_is_sent(plain, connect, monkeypatch):
    monkeypatch.setattr(_puts, "_LARGE_ROW_BYTES", 1 << 20)
    client = connect(url=plain.url, partition="p")
    most = 2 << 20
    words = (b"CONFIG", b"SET", b"proto-max-bulk-len", b"%d" % most)
    assert backend_of(client)._session.command("test", time.monotonic() + 60, *words)
    with pytest.raises(CapacityExceededError, match=f"less than the server's proto-max-bulk-len, {most}") as told:
        put(client, "s", 3000)
    assert not told.value.retryable
    put(client, "s", 1500)
