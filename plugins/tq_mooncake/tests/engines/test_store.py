"""Mooncake's traps, each made real on a master and segments of our own, and what holds instead."""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import mooncake.store  # loaded before anything is set for it, as connecting does
import numpy as np
import psutil
import pytest
import ray
import torch
from owners import owning

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    ClientClosedError,
    ConfigError,
    OperationTimeoutError,
)
from dataplane_core.ledger import commands
from dataplane_mooncake import _calls, _store
from dataplane_mooncake._store import Store, StoreSettings
from dataplane_testkit import backend_of
from dataplane_testkit._timing import eventually

MIB = 1 << 20


@pytest.fixture(scope="module")
def owner(connect_for_all, ray_address):
    """The client that bootstrapped an instance of two units of 16 MiB."""
    return connect_for_all(instance="store", num_storage_units=2, on_full="raise", ray_address=ray_address)


@pytest.fixture
def client(owner):
    """The owner, with an empty partition ``p``."""
    owner.register_partition("p", ["x"], None, ["train"])
    yield owner
    owner.clear_samples(None, "p")


def rows(num_rows, size_bytes, seed=0):
    """Rows of these many random bytes."""
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (num_rows, size_bytes), dtype=np.uint8))
    return {"x": values}


def ids(num_rows, name="s"):
    return [f"{name}{i}" for i in range(num_rows)]


# --- rows ------------------------------------------------------------------------------------------------------------


class Watched:
    """The real engine, that notes what is asked of it, and says of some transfers of rows that they failed.

    Attributes:
        fails: Tells of the name of a call, a row's number and how many there are the code with which it fails, or None.
    """

    def __init__(self, engine):
        self._engine = engine
        self.registered, self.num_registered, self.noted = {}, 0, []
        self.fails = lambda name, row, count: None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def register_buffer(self, address, size):
        self.registered[address] = size
        self.num_registered += 1
        return self._engine.register_buffer(address, size)

    def unregister_buffer(self, address):
        del self.registered[address]
        return self._engine.unregister_buffer(address)

    def batch_put_from(self, keys, starts, sizes, config):
        return self._transfer("put", self._engine.batch_put_from, (keys, starts, sizes), config)

    def batch_get_into(self, keys, starts, sizes):
        self.read_into = starts
        return self._transfer("get", self._engine.batch_get_into, (keys, starts, sizes))

    def _transfer(self, name, call, columns, *more):
        codes = [self.fails(name, row, len(columns[0])) for row in range(len(columns[0]))]
        reach = [row for row, code in enumerate(codes) if code is None]
        done = iter(call(*([column[row] for row in reach] for column in columns), *more))
        return [next(done) if code is None else code for code in codes]

    def batch_remove(self, *args):
        self.noted.append("delete")
        return self._engine.batch_remove(*args)

    def close(self):
        self.noted.append("close")
        return self._engine.close()


def no_reads(name, row, count):
    return -800 if name == "get" else None


def lease_ends_after_the_first(name, row, count):
    """As where all together take longer than a lease."""
    return -707 if name == "get" and row else None


@pytest.fixture
def watched(client, monkeypatch):
    (store,) = Store._shared.values()
    engine = Watched(store._engine)
    monkeypatch.setattr(store, "_engine", engine)
    return engine


def test_memory_of_a_transfer_is_registered_only_for_that_time(client, watched):
    client.put_samples(ids(300), "p", rows(300, 9000))
    watched.fails = no_reads
    with pytest.raises(BackendError, match="-800 for 256 keys"):
        client.get_samples(ids(300), "p", ["x"])
    assert watched.num_registered == 3  # 300 rows go in two transfers
    assert watched.registered == {}


def test_rows_whose_lease_ended_before_they_came_are_read_one_by_one(client, watched):
    client.put_samples(ids(3), "p", rows(3, 9000))
    watched.fails = lease_ends_after_the_first
    (store,) = Store._shared.values()
    keys = [key for name in ids(3) for key in backend_of(client)._keys(located(client, name))]
    found = [bytes(row) for row in store.get(_calls.Call(), keys)]
    watched.fails = lambda *_: None
    assert found[1:] == [bytes(row) for row in store.get(_calls.Call(), keys)][1:]


def test_bytes_that_come_late_get_into_nobodys_memory(client, watched):
    (store,) = Store._shared.values()
    client.put_samples(ids(2), "p", rows(2, MIB))
    keys = backend_of(client)._keys(located(client, "s0") + located(client, "s1"))
    watched.fails = no_reads
    with pytest.raises(_store.EngineError):
        store.get(_calls.Call(), keys)
    late = watched.read_into[0]
    watched.fails = lambda *_: None
    found = store.get(_calls.Call(), keys)
    expected = [bytes(row) for row in found]
    ctypes.memset(late, 7, MIB)
    assert [bytes(row) for row in found] == expected


def test_over_rdma_rows_go_through_a_buffer_that_is_registered_once(client, monkeypatch):
    """Here over TCP, for want of devices."""
    real = _store.open_engine
    monkeypatch.setattr(_store, "open_engine", lambda settings, **more: real(settings._replace(protocol="tcp"), **more))
    (other,) = Store._shared.values()
    store = Store(other.settings._replace(protocol="rdma"))
    store._engine = engine = Watched(store._engine)
    sizes = [100_000] * 64 + [5 * MIB]  # many parts of the buffer, and a row that is larger than one
    offsets = np.cumsum([0, *sizes])
    sent, keys = np.random.default_rng(0).bytes(offsets[-1]), ids(65, "buffered")
    try:
        store.put(_calls.Call(), keys, sent, offsets)
        assert b"".join(store.get(_calls.Call(), keys)) == sent
        store.delete(_calls.Call(), keys)
        assert engine.num_registered == 2  # the large row, each way
    finally:
        store._close(_calls.Call())


_READS_SIZES = """
import sys, zlib
from dataplane_core import connect
config = {"backend": "tq_mooncake", "op_timeout_s": 90, "options": {"instance": "sizes"}}
with connect(config, bootstrap=False) as client:
    ids = list(client.list_samples("p").sample_ids)
    for sample_id, row in zip(ids, client.get_samples(ids, "p", ["x"])["x"].unbind(), strict=True):
        print(sample_id, len(row), zlib.crc32(row.numpy()))
"""


def test_a_row_of_every_size_class_comes_back_whole_also_in_another_process(connect, ray_address, python):
    """Stored rows of exactly these sizes: some versions of Mooncake cut large ones short. A process of this host
    attaches with the instance's name alone."""
    client = connect(instance="sizes", ray_address=ray_address, segment_size_bytes=384 * MIB)
    client.register_partition("p", ["x"], None, ["train"])
    added = 32  # what a row of one cell takes beside the cell
    classes = [64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    sizes = [0, 1] + [each - added + near for each in classes for near in (-1, 0, 1)]
    values = np.random.default_rng(2).integers(0, 256, max(sizes) + len(sizes), dtype=np.uint8)
    cells = [torch.from_numpy(values[i : i + size]) for i, size in enumerate(sizes)]
    column = torch.nested.nested_tensor(cells, layout=torch.jagged)
    client.put_samples(ids(len(sizes)), "p", {"x": column})
    (replica,) = backend_of(client)._store._engine.get_replica_desc(
        *backend_of(client)._keys(located(client, f"s{len(sizes) - 2}"))
    )
    assert replica.get_memory_descriptor().buffer_descriptor.size == 64 * MIB
    got = client.get_samples(ids(len(sizes)), "p", ["x"])["x"].unbind()
    assert all(torch.equal(row, cell) for row, cell in zip(got, cells, strict=True))
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with python.start("-c", _READS_SIZES, stdout=subprocess.PIPE, text=True, env=env) as process:
        told = sorted(process.communicate(timeout=300)[0].splitlines())
    assert told == sorted(f"s{i} {len(cell)} {zlib.crc32(cell.numpy())}" for i, cell in enumerate(cells))


@pytest.mark.parametrize("code", [-800, -900], ids=["transfer", "master_not_reached"])
def test_rows_that_fail_are_tried_again(client, watched, code):
    """Every third row of the first put and of the first get."""
    broken = set()

    def fails(name, row, count):
        if name in broken or row % 3:
            return None
        if row == count - 1:
            broken.add(name)
        return code

    watched.fails = fails
    sent = rows(100, 64)
    client.put_samples(ids(100), "p", sent)
    assert torch.equal(client.get_samples(ids(100), "p", ["x"])["x"], sent["x"])
    assert broken == {"put", "get"}


@pytest.mark.parametrize("first", ["put", "get"])
def test_operations_succeed_after_all_connections_were_shut_down(client, first):
    (store,) = Store._shared.values()
    ports = {port for _, port in store._units}

    def has_many_connections():
        with ThreadPoolExecutor(8) as pool:  # as many connections as operations at the same time
            list(pool.map(lambda each: client.put_samples(ids(8, f"{each}-"), "p", rows(8, 50_000)), range(8)))
        found = psutil.Process().net_connections("tcp")
        return sum(bool(each.raddr) and each.raddr.port in ports for each in found) > 2

    eventually(has_many_connections, 60.0)
    with pytest.raises(OperationTimeoutError):
        _calls.bounded("late", lambda call: time.sleep(0.5), time.monotonic() + 0.1, hold=store.in_call)
    store.end_given_up()
    eventually(lambda: not store._ending, 60.0)
    operations = {
        "put": lambda: client.put_samples(ids(8), "p", rows(8, 1000)),
        "get": lambda: client.get_samples(ids(8, "0-"), "p", ["x"]),
    }
    operations.pop(first)()
    (other,) = operations.values()
    other()
    assert torch.equal(client.get_samples(ids(8, "0-"), "p", ["x"])["x"], rows(8, 50_000)["x"])


def test_a_process_has_one_engine_which_its_last_client_closes(client, connect, ray_address):
    others = [connect(bootstrap=False, instance="store", ray_address=ray_address) for _ in range(2)]
    stores = {id(backend_of(each)._store) for each in [client, *others]}
    assert len(stores) == 1
    others[0].put_samples(ids(4), "p", rows(4, 100))
    others[0].close()
    assert torch.equal(others[1].get_samples(ids(4), "p", ["x"])["x"], rows(4, 100)["x"])


def test_an_engine_stays_open_until_the_rows_of_a_put_that_was_given_up_are_deleted(
    client, connect, ray_address, monkeypatch
):
    monkeypatch.setattr(Store, "_shared", {})  # an engine of its own
    other = connect(bootstrap=False, instance="store", ray_address=ray_address)
    engine, store = backend_of(other), backend_of(other)._store
    noting, put, stored, go_on = Watched(store._engine), store.put, threading.Event(), threading.Event()

    def put_slowly(*args, **more):
        put(*args, **more)
        stored.set()
        go_on.wait(60)

    monkeypatch.setattr(store, "_engine", noting)
    monkeypatch.setattr(store, "put", put_slowly)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(engine.put_rows, [1 << 39], b"abc", np.array([0, 3]), deadline=time.monotonic() + 60)
        assert stored.wait(60)
        other.close()  # gives the put up
        with pytest.raises(ClientClosedError):
            putting.result()
        go_on.set()
    eventually(lambda: "close" in noting.noted, 60.0)
    assert noting.noted == ["delete", "close"]
    with pytest.raises(ClientClosedError):
        engine._run(store, "late", lambda _: None, time.monotonic() + 60)


def test_no_connections_are_ended_while_a_call_that_was_given_up_deletes_what_it_left(client, monkeypatch):
    store, ended = backend_of(client)._store, []
    undoing, go_on = threading.Event(), threading.Event()

    def work(call):
        while not call.given_up:
            time.sleep(0.005)

    def undo(_):
        undoing.set()
        go_on.wait(60)

    with pytest.raises(OperationTimeoutError):
        _calls.bounded("late", work, time.monotonic() + 0.1, undo=undo, hold=store.in_call)
    try:
        assert undoing.wait(60)
        monkeypatch.setattr(_store, "end_connections", lambda units: len(ended.append(units) or ended))
        store.end_given_up()
        eventually(lambda: not store._ending, 60.0)
    finally:
        go_on.set()
    assert ended == []


def test_a_client_does_not_wait_beyond_its_deadline_for_another_one_that_connects(monkeypatch):
    connecting, give_up = threading.Event(), threading.Event()

    def connect_to_nobody(settings, *, segment_size_bytes):
        connecting.set()
        give_up.wait(60)
        raise BackendUnavailableError("no master answers")

    monkeypatch.setattr(_store, "open_engine", connect_to_nobody)
    one, another = (StoreSettings(f"127.0.0.1:{port}", "127.0.0.1", "tcp", (), 0) for port in (1, 2))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(Store.acquire, one, [], deadline=time.monotonic() + 20)
        assert connecting.wait(60)
        for settings in (one, another):
            with pytest.raises(OperationTimeoutError):
                Store.acquire(settings, [], deadline=time.monotonic() + 0.1)
        assert not first.done()
        give_up.set()
        with pytest.raises(BackendUnavailableError, match="no master answers"):
            first.result()


# --- a full store ----------------------------------------------------------------------------------------------------


def test_a_full_store_says_so_leaks_nothing_and_takes_later_puts(client):
    """Again and again: what a refused put had stored already would soon leave no room."""
    for round_ in range(4):
        client.put_samples(ids(24, "a"), "p", rows(24, MIB))
        with pytest.raises(CapacityExceededError, match=r"2 segments of 16 MiB .* have no room"):
            client.put_samples(ids(24, "b"), "p", rows(24, MIB))
        assert set(client.list_samples("p").sample_ids) == set(ids(24, "a"))
        client.put_samples(ids(2, "c"), "p", rows(2, MIB, seed=round_))
        assert torch.equal(client.get_samples(ids(2, "c"), "p", ["x"])["x"], rows(2, MIB, seed=round_)["x"])
        client.clear_samples(ids(24, "a") + ids(2, "c"), "p")


# --- settings --------------------------------------------------------------------------------------------------------


def test_every_process_announces_its_nodes_address_whatever_it_inherited(client):
    """Ray's workers were started with another node's settings, and this process had loaded the library before."""
    here = ray.util.get_node_ip_address()
    assert mooncake.store.__name__ in sys.modules
    assert os.environ["MC_TCP_BIND_ADDRESS"] == here
    assert os.environ["MC_STORE_MEMCPY"] == "0"
    assert "MC_TCP_ENABLE_CONNECTION_POOL" not in os.environ
    assert backend_of(client)._store._engine.get_hostname().rpartition(":")[0] == here
    unit = ray.get_actor("tqm-store/unit-0", namespace="dataplane")
    inherited = ray.get(unit.__ray_call__.remote(lambda _: os.environ["MC_TCP_BIND_ADDRESS"]), timeout=60)
    assert inherited == here
    client.put_samples(["a"], "p", rows(1, 100))
    (key,) = backend_of(client)._keys(located(client, "a"))
    (replica,) = backend_of(client)._store._engine.get_replica_desc(key)
    endpoint = replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
    assert endpoint.rpartition(":")[0] == here


def located(client, sample_id):
    (part,) = backend_of(client).call_ledger(time.monotonic() + 60, commands.Locate("p", [sample_id], ["x"])).parts
    return [part.write_id + position for position in part.positions]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"segment_size_bytes": 1 << 50}, r"would need \d+ MiB, but has \d+ MiB available: 1 storage units"),
        ({"announce_address": "169.254.0.0/16"}, "fits 0 of this node's addresses"),
    ],
    ids=["memory", "address"],
)
def test_what_cannot_work_is_refused_before_anything_is_left_running(connect, ray_address, options, said, actors):
    with pytest.raises(ConfigError, match=said):
        connect(instance="refused", ray_address=ray_address, **options)
    eventually(lambda: not actors("tqm-refused"), 60.0)


# --- processes that stand still or die -------------------------------------------------------------------------------


def test_a_storage_unit_that_stands_still(client, connect, ray_address, stopped, pid_of, hurries, told_in_time):
    other_client = connect(bootstrap=False, instance="store", ray_address=ray_address)
    client.put_samples(ids(64), "p", rows(64, 1000))  # on both units
    one, other = (pid_of(f"tqm-store/unit-{number}") for number in range(2))
    with stopped(one), stopped(other):
        told_in_time(
            lambda: other_client.get_samples(ids(64), "p", ["x"]), OperationTimeoutError, "no answer within", 3.0
        )
        with hurries(3.0), pytest.raises(OperationTimeoutError):
            other_client.put_samples(ids(16, "late"), "p", rows(16, MIB // 2))
        eventually(lambda: not _calls._running, 30.0)  # the engine alone lets a transfer poll for a minute
        assert other_client.list_samples("p").size == 64  # the controller goes on
    assert torch.equal(client.get_samples(ids(64), "p", ["x"])["x"], rows(64, 1000)["x"])
    assert client.list_samples("p").size == 64
    client.clear_samples(ids(64), "p")

    # What the units carried out late was deleted: nearly all of their room can be had again.
    def fits():
        with contextlib.suppress(CapacityExceededError):
            client.put_samples(ids(28, "a"), "p", rows(28, MIB))
            return True

    eventually(fits, 60.0)


def test_a_killed_owner_leaves_neither_master_nor_units(ray_address, runs, actors, python):
    options = {"instance": "orphan", "ray_address": ray_address, "segment_size_bytes": 16 * MIB, "master_start_s": 85}
    config = {"backend": "tq_mooncake", "options": options, "op_timeout_s": 90}
    with owning(python, config, "backend._instance._master.pid") as (_, said):
        pid = int(said)
        assert runs(pid)
        assert actors("tqm-orphan")
    eventually(lambda: not runs(pid), 60.0)
    eventually(lambda: not actors("tqm-orphan"), 60.0)
