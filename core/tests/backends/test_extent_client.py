"""A host of extents and its clients, in shared memory and over the wire: rows come back, and nothing is left behind."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from dataplane_core.backends import ExtentClient, RefsGoneError, extent_client, read_stored
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    InvalidRequestError,
    StalePartitionError,
)
from dataplane_core.host_memory import Arena, copy_arrays
from dataplane_core.hosting import (
    Allocate,
    ExtentHost,
    ExtentService,
    Memory,
    Retain,
    Server,
    Session,
    TcpAddress,
    UnixAddress,
    extent_host,
    failure_of,
    listen_on,
    listen_unseen,
    new_token,
)
from dataplane_core.hosting.extent_host import Fetch, Fill, Find, Written
from dataplane_core.hosting.extents import Layout, Wanted
from dataplane_core.kept_extents import KeptExtents
from dataplane_core.ledger import commands
from dataplane_core.log import FolderLog
from dataplane_core.spec import FieldSpec, Ragged
from dataplane_testkit._timing import eventually

WAIT_S = 60.0
ARENA_BYTES = 32 << 20
SPECS = {
    "dense": FieldSpec("tensor", "float32", 1, (3,)),
    "scalar": FieldSpec("tensor", "bool", 0),
    "ragged": FieldSpec("tensor", "bfloat16", 1),
}
SLOTS = {name: slot for slot, name in enumerate(SPECS)}


class Unit:
    """A host of extents in this process. In a folder, its rows outlive it."""

    def __init__(self, size_bytes: int = ARENA_BYTES, folder: Path | None = None) -> None:
        (self.name, memory), self.token = listen_unseen(), new_token()
        wire = listen_on("127.0.0.1")
        self.port = wire.getsockname()[1]
        if folder is None:
            host = ExtentHost(ExtentService(Arena.create(size_bytes)))
        else:
            self.notes = FolderLog(folder / "notes")
            self.notes.begin()
            host = ExtentHost(KeptExtents(folder, size_bytes, self.notes), self.notes.commit_or_end)
        self.server = Server(host, memory, wire, token=self.token)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        self._watcher = self.session("memory")

    def session(self, path: str) -> Session:
        tcp = TcpAddress("127.0.0.1", self.port, self.token)
        address = UnixAddress(self.name, self.token) if path == "memory" else tcp
        watch = None if path == "memory" else lambda: str  # as units have, whose clients look after them
        return Session(address, ExtentHost.messages, soon(), failure_of("the unit", BackendUnavailableError), watch)

    def client(self, path: str, **options: bool) -> ExtentClient:
        return ExtentClient(self.session(path), **options)

    def end(self) -> None:
        self.server.close()
        self.thread.join(WAIT_S)
        self.notes.close()

    def memory(self):
        return self._watcher.call("memory", soon(), Memory())


def soon() -> float:
    return time.monotonic() + WAIT_S


@pytest.fixture
def unit():
    found = Unit()
    yield found
    found.server.close()
    found.thread.join(WAIT_S)


@pytest.fixture(params=["memory", "wire"])
def path(request):
    return request.param


def columns_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    values = torch.randn(sum(lengths), generator=generator).to(torch.bfloat16)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return {
        "dense": torch.randn(count, 2, 3, generator=generator),
        "scalar": torch.rand(count, generator=generator) < 0.5,
        "ragged": Ragged(values, offsets),
    }


def block(size, value=1):
    """The columns of a write of one row."""
    return [torch.full((1, size), value, dtype=torch.uint8)]


def get(unit, write_id, positions, specs=SPECS):
    """Rows of a write, as a ledger locates them."""
    slots = [SLOTS.get(name, 0) for name in specs]
    part = commands.Part(write_id, tuple(specs), tuple(slots), list(range(len(positions))), list(positions))
    return read_stored(specs, unit.get([part], specs, soon()), len(positions))


def put(client, write_id, columns):
    client.put({write_id: list(columns)}, soon())


def rows(column):
    return list(column.values.split(column.lengths.tolist()) if isinstance(column, Ragged) else column)


def assert_rows(found, columns, wanted):
    assert found.keys() == columns.keys()
    for name, column in columns.items():
        expected = rows(column)
        for row, index in zip(rows(found[name]), wanted, strict=True):
            assert row.dtype == expected[index].dtype
            assert torch.equal(row, expected[index])


@pytest.mark.parametrize(
    "lengths",
    [[5], [0], [0, 0, 0], [3, 0, 1, 7], list(range(200)), [300_000, 0, 1, 130_000]],
    ids=lambda lengths: f"{len(lengths)} rows of {sum(lengths)}",
)
def test_rows_come_back_bit_for_bit(unit, path, lengths):
    """Whole, in another order, some of them, and repeated ones."""
    client, columns = unit.client(path), columns_of(lengths)
    assert client.path == path
    put(client, 7, columns.values())
    count = len(lengths)
    random = np.random.default_rng(0).permutation(count).tolist()
    for wanted in (list(range(count)), random, random[: count // 2 + 1], [*random, *random[:2]]):
        assert_rows(get(client, 7, wanted), columns, wanted)
    one = get(client, 7, [count - 1], {"ragged": SPECS["ragged"]})
    assert torch.equal(rows(one["ragged"])[0], rows(columns["ragged"])[-1])


def test_a_full_host_says_so_and_leaves_nothing(unit, path):
    client = unit.client(path)
    half = block(ARENA_BYTES * 5 // 8, 0)
    put(client, 1, half)
    with pytest.raises(CapacityExceededError) as error:
        put(client, 2, half)
    assert error.value.retryable
    with pytest.raises(CapacityExceededError) as error:
        put(client, 3, block(2 * ARENA_BYTES, 0))
    assert not error.value.retryable
    client.drop([(1, 0)], soon())
    put(client, 4, half)


def begun(unit, path):
    """A put of 1 MiB of which nothing is written yet."""
    session = unit.session(path)
    layout = Layout([])
    layout.add_dense(1, 1 << 20, 1 << 20)
    wanted = Wanted(1, layout, 1)
    session.call("put", soon(), Allocate([wanted]))
    assert unit.memory().held_bytes >= 1 << 20
    return session, wanted


def test_a_put_ends_with_its_session_unless_it_is_written_whole(unit, path):
    client, columns = unit.client(path), columns_of([50_000])
    put(client, 7, columns.values())
    client.session.close()
    held = unit.memory().held_bytes
    session, _ = begun(unit, path)
    session.close()
    eventually(lambda: unit.memory()[1:3] == (held, 0), WAIT_S)
    assert_rows(get(unit.client(path), 7, [0]), columns, [0])


@pytest.mark.parametrize("breaks", [False, True])
def test_bytes_that_stop_in_the_middle_leave_nothing_once_the_put_is_dropped_or_its_connection_breaks(unit, breaks):
    """The memory may be another's then, and no late byte gets there."""
    session, _ = begun(unit, "wire")
    channel = session._take("fill", soon())
    channel.sendall(session._messages.encode_request(Fill(1)) + b"\7" * 1000)
    arena = unit.client("memory").arena
    eventually(lambda: arena.bytes[:1000].tobytes() == b"\7" * 1000, WAIT_S)
    other = unit.client("wire")
    if breaks:
        channel.close()
        eventually(lambda: unit.memory()[1:3] == (0, 0), WAIT_S)
        with pytest.raises(BackendUnavailableError):
            session.call("put", soon(), Fill(1), sources=[np.ones(1 << 20, dtype=np.uint8)])
        return
    other.drop([(1, 0)], soon())
    assert unit.memory()[1:3] == (0, 0)
    put(other, 2, block(1 << 20, 0))
    with contextlib.suppress(OSError):
        channel.sendall(b"\7" * 10_000)
    with contextlib.suppress(ConnectionResetError):
        assert channel.recv(1) == b""
    channel.close()
    found = get(other, 2, [0], {"x": FieldSpec("tensor", "uint8", 1)})
    assert not found["x"].any()


def test_memory_that_a_client_writes_to_is_nobody_elses_though_the_put_is_given_up(unit, monkeypatch):
    """A process that stood still for long goes on where it was."""
    client, others = unit.client("memory"), unit.client("memory")
    made = block(ARENA_BYTES * 5 // 8)

    def late(copies, threads, copied):
        others.drop([(1, 0)], soon())  # by another client, or another thread of this one
        client.drop([(1, 0)], soon())
        with pytest.raises(CapacityExceededError):
            put(others, 2, made)

    monkeypatch.setattr(extent_client, "copy_arrays", late)
    with pytest.raises(StalePartitionError, match="given up before it was written"):
        put(client, 1, made)
    monkeypatch.undo()
    eventually(lambda: unit.memory().pinned_bytes == 0, WAIT_S)
    put(others, 2, made)


def test_a_put_that_comes_after_its_drop_is_refused(unit, path, monkeypatch):
    """Requests over two connections may overtake one another. Ids are never used again."""
    client = unit.client(path)
    monkeypatch.setattr(extent_host, "_MOST_LATE", 2)
    client.drop([(4, 0), (5, 0), (6, 0)], soon())
    assert list(unit.server._host._late) == [5, 6]
    for size in (10, 1 << 20):
        with pytest.raises(BackendError, match="dropped before it came"):
            put(client, 5, block(size))
    assert unit.memory()[1:3] == (0, 0)


def test_requests_in_the_wrong_order_are_refused(unit):
    session, write = begun(unit, "memory")
    for request in (Allocate([write]), Allocate([write], data=[b"\0" * write.layout.size_bytes])):
        with pytest.raises(InvalidRequestError):
            session.call("bad", soon(), request)
    with pytest.raises(StalePartitionError):
        session.call("bad", soon(), Written(3))
    with pytest.raises(BackendUnavailableError):
        session.call("bad", soon(), Fill(3), sources=[np.zeros(100, dtype=np.uint8)])
    session.call("put", soon(), Written(1))
    with pytest.raises(InvalidRequestError):
        session.call("bad", soon(), Fetch([(1, [1], [0])]))
    for position in (1, -1):
        for read in (Fetch([(1, [0], [position])]), Find([(1, [position])], 1)):
            with pytest.raises(RefsGoneError):
                session.call("bad", soon(), read)
    with pytest.raises(StalePartitionError):
        session.call("put", soon(), Written(1))
    assert unit.memory().pinned_bytes == 0


def test_who_asks_again_before_it_has_taken_the_bytes_of_a_reply_is_served_no_more(unit):
    session = unit.session("wire")
    put(unit.client("memory"), 1, block(ARENA_BYTES // 2))  # more than a connection holds
    channel = session._take("fetch", soon())
    channel.sendall(2 * ExtentHost.messages.encode_request(Fetch([(1, [0], [0])])))
    eventually(lambda: unit.memory().pinned_bytes == 0, WAIT_S)
    channel.close()


def test_a_write_of_too_many_rows_is_refused(unit, path):
    with pytest.raises(InvalidRequestError, match="16777216"):
        put(unit.client(path), 1, [torch.zeros((1 << 24) + 1, dtype=torch.bool)])


# --- a host in a folder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1, 0, 4], [100_000, 2, 3]], ids=["small", "large"])
def test_rows_that_were_written_whole_come_back_and_those_that_do_not_exist_go(tmp_path, path, lengths):
    life, columns = Unit(folder=tmp_path), columns_of(lengths)
    client = life.client(path)
    for write_id in (1, 2, 3):
        put(client, write_id, columns.values())
    client.drop([(2, 0), (3, 0), (3, 1), (3, 2)], soon())
    client.session.call("begin", soon(), Allocate([Wanted(4, Layout([]), 3)]))
    life.end()
    with pytest.raises(BackendUnavailableError):
        get(client, 1, [0])
    life = Unit(folder=tmp_path)
    client = life.client(path)
    for write_id, wanted in ((1, [2, 1, 0]), (2, [2, 1])):
        assert_rows(get(client, write_id, wanted), columns, wanted)
    client.session.call("retain", soon(), Retain({1: [0, 1, 2], 2: [1, 2]}))
    assert_rows(get(client, 1, [0]), columns, [0])
    for gone in (2, 3, 4):
        with pytest.raises(RefsGoneError) as error:
            get(client, gone, [0])
        assert list(error.value.refs) == [(gone, 0)]
    put(client, 5, columns.values())
    client.session.call("retain", soon(), Retain({}))  # of a put that came since, it says nothing
    assert_rows(get(client, 5, [0]), columns, [0])
    life.end()


def test_a_writer_and_views_that_outlive_their_host_meet_no_bytes_of_others(tmp_path, monkeypatch):
    """It stops in the middle of its copy, the host ends, and the next one gives memory to others."""
    life, columns = Unit(folder=tmp_path), columns_of([100_000, 2, 3])
    late, viewer = life.client("memory"), life.client("memory", views=True)
    put(viewer, 9, columns.values())
    views = get(viewer, 9, range(3))
    stops, goes_on = threading.Event(), threading.Event()

    def copy_later(copies, threads, copied):
        stops.set()
        assert goes_on.wait(WAIT_S)
        copy_arrays(copies, threads)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patched:
        patched.setattr(extent_client, "copy_arrays", copy_later)
        writing = pool.submit(put, late, 1, columns_of([100_000, 2, 3], seed=1).values())
        assert stops.wait(WAIT_S)
        patched.undo()
        life.end()
        life = Unit(folder=tmp_path)
        client = life.client("memory")
        client.drop([(9, position) for position in range(3)], soon())
        for write_id in (2, 3, 4):
            put(client, write_id, columns_of([100_000, 2, 3], seed=2).values())
        goes_on.set()
        with pytest.raises(BackendUnavailableError):
            writing.result(WAIT_S)
    for write_id in (2, 3, 4):
        assert_rows(get(client, write_id, range(3)), columns_of([100_000, 2, 3], seed=2), range(3))
    assert_rows(views, columns, range(3))
    life.end()
