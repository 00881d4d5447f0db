"""The store in the ledger's process: what is in use keeps its place and bytes, the rest is room."""

import random

import numpy as np
import pytest
from shm_case import rows_found
from tiers import in_long

from dataplane_core.errors import CapacityExceededError, InvalidRequestError, StalePartitionError
from dataplane_core.host_memory import Arena
from dataplane_core.hosting import Allocate, ExtentService, Memory
from dataplane_core.hosting.extent_host import Find, Written
from dataplane_core.hosting.extents import Layout, Wanted
from dataplane_core.hosting.messages import Release
from dataplane_core.ledger import LedgerService, commands
from dataplane_core.spec import FieldSpec
from dataplane_shm._store import Store

SPECS = {"x": FieldSpec("tensor", "uint8", 1)}
ARENA = 1 << 16


class Clients:
    """A store and what its clients do, with rows of equal length that hold a number."""

    def __init__(self, capacity_bytes=None):
        self.now = 0.0
        self.arena = Arena.create(ARENA)
        self.extents = ExtentService(self.arena)
        self.store = Store(self.extents, LedgerService(capacity_bytes, clock=lambda: self.now))
        self.session = self.store.begin_session()
        self.pins = iter(range(1, 1 << 30))
        self.writes = iter(range(1, 1 << 30, 100))  # of several extents, each has an id
        self.call(commands.RegisterRequest("p", ["x"], None, [], None, {}, "e1"))

    def call(self, request):
        return self.store.answer(request, self.session)

    def begin(self, ids, length, ttl_s=30.0):
        layout = Layout([])
        layout.add_dense(len(ids), length, length)
        write_id, write = next(self.writes), commands.Write(list(SPECS), [length] * len(ids))
        self.call(commands.BeginPut("p", ids, SPECS, [write], write_id=write_id, ttl_s=ttl_s))
        (offset,) = self.call(Allocate([Wanted(write_id, layout, len(ids))]))
        return write_id, self.arena.bytes[offset : offset + layout.size_bytes]

    def begin_parts(self, sample_id, *sizes):
        """Begins a put of a sample with an extent for each of its columns, of so many bytes."""
        names = [f"f{index}" for index in range(len(sizes))]
        specs = dict.fromkeys(names, SPECS["x"])
        writes = [commands.Write((name,), [size]) for name, size in zip(names, sizes, strict=True)]
        put = commands.BeginPut("p", [sample_id], specs, writes, write_id=next(self.writes), ttl_s=30.0)
        self.call(put)
        wanted = [Wanted(write_id, Layout([]), 1) for write_id in put.by_id(put.write_id)]
        for each, size in zip(wanted, sizes, strict=True):
            each.layout.add_dense(1, size, size)
        return self.call(Allocate(wanted))

    def put(self, ids, length, number):
        write_id, data = self.begin(ids, length)
        data[:] = number
        self.call(Written(write_id))
        self.call(commands.CommitPut(write_id))

    def find(self, ids):
        """The pin, and the bytes of each row where they lie."""
        pin = next(self.pins)
        parts = self.call(commands.Locate("p", ids, ["x"])).parts
        found = self.call(Find([(part.write_id, part.positions) for part in parts], pin))
        rows = rows_found(self.arena, parts, found, len(ids))
        return pin, rows

    def clear(self, ids):
        self.call(commands.ClearRequest("p", ids))

    @property
    def status(self):
        return self.call(Memory())


@pytest.fixture
def clients():
    return Clients()


def test_an_abandoned_put_keeps_its_place_until_its_writer_says_that_it_stopped(clients):
    write_id, data = clients.begin(["a"], 1000, ttl_s=1.0)
    clients.now = 2.0
    clients.put(["b"], 1000, 3)
    data[:] = 9  # it still writes
    assert (clients.find(["b"])[1][0] == 3).all()
    clients.writes = iter([write_id])
    with pytest.raises(InvalidRequestError, match="begun before"):
        clients.begin(["c"], 64)
    clients.call(Written(write_id))
    with pytest.raises(StalePartitionError, match="abandoned"):
        clients.call(commands.CommitPut(write_id))
    assert clients.status.num_extents == 1


def test_room_is_not_searched_again_until_something_changed(clients, monkeypatch):
    for count in range(21):
        clients.put([f"n{count}"], 3000, 1)
    pin, _ = clients.find(["n3"])
    searches = []
    make_room = clients.extents._extents.make_room
    monkeypatch.setattr(
        clients.extents._extents, "make_room", lambda size, move: searches.append(size) or make_room(size, move)
    )
    for size in (5000, 6000, 5000):
        with pytest.raises(CapacityExceededError):
            clients.put(["large"], size, 1)
    assert searches == [5000]
    clients.clear(["n3", "n4"])
    clients.call(Release([pin]))
    clients.put(["large"], 5000, 1)


def test_a_put_of_several_extents_that_is_refused_leaves_the_room_to_others(clients):
    for sample_id in "abcd":
        clients.put([sample_id], ARENA // 4, 1)
    clients.clear(["a", "c"])
    for _ in range(2):
        with pytest.raises(CapacityExceededError):
            clients.begin_parts("large", ARENA // 6, ARENA * 3 // 8)
    clients.put(["fits"], ARENA * 7 // 16, 2)
    assert [row[0] for row in clients.find(["b", "d"])[1]] == [1, 1]


def test_a_put_of_several_extents_fits_wherever_their_bytes_do(clients):
    clients.put(["a"], ARENA * 3 // 16, 1)
    clients.put(["b"], ARENA * 7 // 16, 2)
    clients.clear(["a"])
    sizes = [ARENA * 5 // 16, ARENA * 7 // 32]
    first, second = clients.begin_parts("c", *sizes)
    (b,) = clients.find(["b"])[1]
    assert (b == 2).all()
    places = [range(first, first + sizes[0]), range(second, second + sizes[1])]
    assert first + sizes[0] <= second or second + sizes[1] <= first
    assert all(each.stop <= ARENA for each in places)
    clients.arena.bytes[first : first + sizes[0]] = clients.arena.bytes[second : second + sizes[1]] = 3
    assert (b == 2).all()


@pytest.mark.parametrize("seed", [0, 1, *in_long(*range(2, 30))])
def test_any_history_keeps_every_row(seed):
    draw, clients = random.Random(seed), Clients(capacity_bytes=ARENA * 3 // 4)
    rows, pinned = {}, []
    for step in range(500):
        choice = draw.random()
        if choice < 0.5:
            ids = [f"{step}.{i}" for i in range(draw.randrange(1, 9))]
            length, number = draw.randrange(1, 1200), draw.randrange(256)
            try:
                clients.put(ids, length, number)
            except CapacityExceededError:
                continue
            rows.update(dict.fromkeys(ids, (length, number)))
        elif choice < 0.75 and rows:
            gone = draw.sample(sorted(rows), min(len(rows), draw.randrange(1, 20)))
            clients.clear(gone)
            for each in gone:
                del rows[each]
        elif choice < 0.85 and rows:
            ids = draw.sample(sorted(rows), min(len(rows), 5))
            pinned.append((*clients.find(ids), [rows[each] for each in ids]))
        if pinned and draw.random() < 0.3:
            pin, data, expected = pinned.pop(draw.randrange(len(pinned)))
            assert [(len(row), set(row.tolist())) for row in data] == [(n, {number}) for n, number in expected]
            clients.call(Release([pin]))
    for sample_id, (length, number) in rows.items():
        pin, (row,) = clients.find([sample_id])
        clients.call(Release([pin]))
        np.testing.assert_array_equal(row, np.full(length, number, np.uint8))
    for pin, *_ in pinned:
        clients.call(Release([pin]))
    clients.clear(list(rows))
    assert (clients.status.pinned_bytes, clients.status.held_bytes, clients.status.num_extents) == (0, 0, 0)
