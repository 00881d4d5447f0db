"""A store in a folder, in the ledger's process: what was committed comes back, and nothing else, whenever it ends.

One file, since all of it acts through `Life`: a store that is killed and started again in this process.
"""

import errno
import os
import random
import shutil
from contextlib import contextmanager
from itertools import count

import pytest
from power_loss import survives_at_each_sync
from shm_case import rows_found

from dataplane_core.errors import BackendUnavailableError, CapacityExceededError, CorruptDataError
from dataplane_core.host_memory import Arena
from dataplane_core.host_memory.arena import Uses, extent_bytes
from dataplane_core.hosting import Allocate
from dataplane_core.hosting.extent_host import Find, Written
from dataplane_core.hosting.extents import Layout, RefsGoneError, Wanted
from dataplane_core.hosting.messages import Together
from dataplane_core.kept_extents import KeptExtents, digest_of
from dataplane_core.ledger import commands
from dataplane_core.log import FolderLog
from dataplane_core.spec import FieldSpec
from dataplane_shm import _durable
from dataplane_shm._durable import DurableStore

SPECS = {"x": FieldSpec("tensor", "uint8", 1)}
CAPACITY = 1 << 20


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(_durable, "_ENDING_S", 0.0)
    monkeypatch.setattr(_durable, "arena_bytes_for", lambda capacity_bytes: capacity_bytes)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


class Life:
    """A life of the ledger's process, and what its clients do. Rows of equal length hold a number."""

    def __init__(self, folder, capacity_bytes=CAPACITY, **options):
        self.folder = folder
        self.store = DurableStore(folder, capacity_bytes, "raise", **{"sync": False, **options})
        self.session = self.store.begin_session()
        self.ids = count(1)
        self.together = False

    def kill(self):
        """As a SIGKILL: nothing is said, nothing is finished. The log writes nothing when it closes."""
        self.store._log.close()
        os.close(self.store._lock)

    def close(self):
        self.store.close()

    def call(self, *requests):
        """The reply to the last of requests that are sent together."""
        pack = self.store.messages.encode_request
        replies = self.store.answer(Together([pack(each)[4:] for each in requests]), self.session)
        if not self.together:
            self.store.settle()
        return self.store.messages.decode_reply(requests[-1], replies[-1])

    @contextmanager
    def settled_together(self):
        """What is asked in this context is settled at its end, as requests are that come at the same time."""
        self.together = True
        yield
        self.together = False
        self.store.settle()

    def register(self, task="t"):
        self.call(commands.RegisterRequest("p", ["x"], None, [task], None, {}, "e1"))

    def put_of(self, ids, length):
        layout = Layout([])
        layout.add_dense(len(ids), length, length)
        write_id = self.session.number << 40 | next(self.ids)
        writes = [commands.Write(list(SPECS), [length] * len(ids))]
        put = commands.BeginPut("p", ids, SPECS, writes, write_id=write_id, ttl_s=30.0)
        return put, layout, [Wanted(write_id, layout, len(ids))]

    def begin(self, ids, length):
        put, layout, wanted = self.put_of(ids, length)
        (offset,) = self.call(put, Allocate(wanted))
        return put.write_id, self.store._extents.arena.bytes[offset : offset + layout.size_bytes]

    def put(self, ids, length, number, *, whole=False):
        if whole:
            put, layout, wanted = self.put_of(ids, length)
            data = bytes([number]) * layout.size_bytes
            self.call(put, Allocate(wanted, data=[data]), commands.CommitPut(put.write_id))
            return
        write_id, data = self.begin(ids, length)
        data[:] = number
        digests = None
        if self.store.about().syncs:  # as a client does
            arena = self.store._extents.arena
            start = data.ctypes.data - arena.address
            end = start + extent_bytes(len(data))
            arena.sync(start, end)
            digests = [digest_of(arena.bytes[start:end])]
        self.call(Written(write_id, digests), commands.CommitPut(write_id))

    def clear(self, ids):
        self.call(commands.ClearRequest("p", ids))

    def ids_there(self):
        if not self.call(commands.ListPartitionsRequest()):
            return []
        return list(self.call(commands.ListRequest("p")).sample_ids)

    def read(self, ids):
        """The bytes of each row; None for one that is lost."""
        if not ids:
            return []
        parts = self.call(commands.Locate("p", ids, ["x"])).parts
        try:
            places = self.call(Find([(part.write_id, part.positions) for part in parts], 1))
        except RefsGoneError:
            return [None if len(ids) == 1 else self.read([sample_id])[0] for sample_id in ids]
        rows = [bytes(row) for row in rows_found(self.store._extents.arena, parts, places, len(ids))]
        self.store._unpin(self.session, 1)
        return rows


@pytest.fixture
def life(folder):
    """The first life of the folder, with a partition."""
    life = Life(folder)
    life.register()
    return life


class KilledError(BaseException):
    """The process ends here."""


@pytest.fixture
def killer(monkeypatch):
    """Ends a process at a write into its log: before it, or after it."""
    write = FolderLog._write
    at = [0]  # the number of half writes that are left until then; 0: never

    def tick():
        at[0] -= 1
        if at[0] == 0:
            raise KilledError

    def counted(self, frame, frees):
        tick()
        write(self, frame, frees)
        tick()

    monkeypatch.setattr(FolderLog, "_write", counted)
    return at


@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_is_killed_at_any_write_holds_what_a_dict_would(folder, monkeypatch, killer, seed):
    """The store is nearly full all the time, so that extents are squeezed. A call that was cut off was done or not."""
    squeezed = []
    squeeze = KeptExtents._squeeze
    monkeypatch.setattr(
        KeptExtents, "_squeeze", lambda self, each: squeezed.append(squeeze(self, each)) or squeezed[-1]
    )
    rng = random.Random(seed)
    model, names = {}, count()
    life = Life(folder, CAPACITY // 16)
    life.register()
    refused = killed = 0
    for _ in range(120):
        if not rng.randrange(4):
            killer[0] = rng.randint(1, 12)
        new, gone = {}, []
        try:
            match rng.choice(["put", "put", "begin", "clear", "kill", "work", "close"]):
                case "put":
                    ids = [f"s{next(names)}" for _ in range(rng.randint(1, 12))]
                    length, number = rng.choice([8, 500, 3000]), rng.randrange(256)
                    new = dict.fromkeys(ids, bytes([number]) * length)
                    life.put(ids, length, number)
                    model.update(new)
                case "begin":  # and never committed: nothing of it may come back
                    life.begin([f"s{next(names)}"], rng.choice([8, 500]))[1][:] = 9
                case "clear" if model:
                    gone = rng.sample(sorted(model), rng.randint(1, -(-len(model) // 4)))
                    life.clear(gone)
                    model = {each: data for each, data in model.items() if each not in gone}
                case "kill":
                    raise KilledError
                case "close" if not killer[0]:
                    life.close()
                    life = Life(folder, CAPACITY // 16)
                case "work":
                    life.store.kept.work_aside()
        except CapacityExceededError:
            refused += 1
        except KilledError:
            killer[0], killed = 0, killed + 1
            life.kill()
            life = Life(folder, CAPACITY // 16)
            there = set(life.ids_there())
            if new and there.issuperset(new):
                model.update(new)
            if gone and there.isdisjoint(gone):
                model = {each: data for each, data in model.items() if each not in gone}
        assert sorted(life.ids_there()) == sorted(model)
        some = rng.sample(sorted(model), min(8, len(model)))
        assert life.read(some) == [model[each] for each in some]
    assert life.read(sorted(model)) == [model[each] for each in sorted(model)]
    assert refused
    assert killed > 10
    assert any(squeezed)
    life.kill()


# --- clients of the life before ---------------------------------------------------------------------------------------


def place_of(life, write_id):
    extent = life.store._extents._payloads[write_id].extent
    return extent.offset, extent.offset + extent.size_bytes


def test_room_that_views_of_the_life_before_held_is_there_again_when_they_have_ended(folder):
    capacity = CAPACITY // 64
    life = Life(folder, capacity)
    life.register()
    life.put(["viewed"], 9 << 10, 1)
    uses = Uses(life.store._extents.arena.fd)
    ((start, stop),) = (place_of(life, each) for each in life.store._extents._payloads)
    uses.begin(start, stop)
    life.clear(["viewed"])
    life.kill()
    life = Life(folder, capacity)
    with pytest.raises(CapacityExceededError, match="do not fit into the arena"):
        life.put(["large"], 9 << 10, 2)
    life.put(["small"], 64, 3)
    assert life.store._extents._extents.allocate(64).offset != start, "a view's place is not cut into pieces"
    uses.end(start)
    life.put(["large"], 9 << 10, 2)
    assert life.read(["small", "large"]) == [bytes([3]) * 64, bytes([2]) * (9 << 10)]
    life.kill()


def test_views_of_several_processes_stay_whatever_the_order_in_which_they_began(folder, monkeypatch):
    monkeypatch.setattr("dataplane_core.kept_extents._BLOCK", 4096)
    life = Life(folder)
    life.register()
    for each in range(3):
        life.put([f"s{each}"], 80 << 10, each + 1)
    arena = life.store._extents.arena
    places = sorted(place_of(life, each) for each in life.store._extents._payloads)
    holders = [Uses(arena.fd), Uses(arena.fd)]
    for holder, (start, stop) in zip(holders, (places[2], places[0]), strict=True):
        holder.begin(start, stop)
    life.clear([f"s{each}" for each in range(3)])
    life.kill()
    life = Life(folder)
    seen = [set(arena.bytes[start : start + (80 << 10)].tolist()) for start, _ in places]
    assert (seen[0], seen[2]) == ({1}, {3})
    assert seen[1] == {0}, "what nobody uses is given back"
    life.kill()


def disk_is_full(*_args, **_kwargs):
    raise BackendUnavailableError("the disk is full")


def test_damage_is_found_again_if_it_cannot_be_noted(life, folder, monkeypatch):
    life.put(["bad"], 100, 7)
    life.close()
    with (folder / "arena").open("r+b") as file:
        file.write(b"x")
    life = Life(folder)

    with monkeypatch.context() as patch:
        patch.setattr(life.store._log, "note", disk_is_full)
        assert not life.store.kept.work_aside(), "the server goes on"
        with pytest.raises(BackendUnavailableError):
            life.read(["bad"])
    assert life.read(["bad"]) == [None]
    life.kill()


# --- bad folders ------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_version_is_refused(folder, monkeypatch):
    Life(folder).close()
    monkeypatch.setattr("dataplane_core.kept_extents._VERSION", 2)
    with pytest.raises(CorruptDataError, match=r"is of version 1. Expected 2"):
        Life(folder)


def test_room_that_no_row_needs_goes_back_to_the_file_system(folder):
    life = Life(folder, 64 << 20)
    life.register()
    life.put(["a"], 8 << 20, 1)
    life.put(["b"], 8 << 20, 2)
    life.clear(["a"])
    life.close()
    assert (folder / "arena").stat().st_blocks * 512 >= 16 << 20
    life = Life(folder, 64 << 20)
    assert (folder / "arena").stat().st_blocks * 512 < 12 << 20
    assert life.read(["b"]) == [bytes([2]) * (8 << 20)]
    life.close()


def test_a_full_file_system_gets_back_what_is_cleared(folder, monkeypatch):
    life = Life(folder, 64 << 20)
    life.register()
    life.put(["a"], 8 << 20, 1)
    monkeypatch.setattr(Arena, "free_bytes", 0)
    life.clear(["a"])
    assert (folder / "arena").stat().st_blocks * 512 < 4 << 20
    life.close()


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_file_system_refuses_the_put_and_loses_nothing(life, folder, monkeypatch):
    life.put(["a"], 100, 1)
    with monkeypatch.context() as full:
        full.setattr(Arena, "free_bytes", 0)

        def refused(length):
            with pytest.raises(
                CapacityExceededError, match="the file system of the durable folder has no room"
            ) as caught:
                life.put(["b"], length, 2)
            assert caught.value.retryable

        full.setattr(KeptExtents, "_give_room", lambda _, each: no_space() if each.size_bytes > 1000 else None)
        refused(5000)
        refused(2000)
        life.put(["small"], 100, 3)  # one that is too large keeps no smaller one out
        full.setattr(KeptExtents, "_give_room", no_space)
        refused(100)
        size_bytes = journal_bytes(folder)
        for _ in range(20):  # none of them keeps room of the store, or takes any of the disk
            refused(CAPACITY // 10)
        assert journal_bytes(folder) == size_bytes
        life.clear(["a"])  # makes room in the arena
        refused(100)
        assert journal_bytes(folder) > size_bytes, "it was tried"
    life.put(["b"], 100, 2)
    assert life.ids_there() == ["small", "b"]
    assert life.read(["small", "b"]) == [bytes([3]) * 100, bytes([2]) * 100]
    life.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_put_whose_place_cannot_be_noted_is_not_committed_and_may_come_again(life, folder, monkeypatch, whole):
    with monkeypatch.context() as patch:
        patch.setattr(life.store._log, "note", disk_is_full)
        with pytest.raises(BackendUnavailableError):
            life.put(["a"], 100, 1, whole=whole)
    assert life.ids_there() == []
    life.call(commands.AbortPut(life.session.number << 40 | 1))
    life.put(["a"], 100, 2, whole=whole)
    life.kill()
    assert Life(folder).read(["a"]) == [bytes([2]) * 100]


def test_the_journal_has_room_when_the_arena_gets_none(life, folder, monkeypatch):
    monkeypatch.setattr(Arena, "free_bytes", 5 << 20)
    with pytest.raises(CapacityExceededError, match="of the durable folder has no room"):
        life.put(["a"], 100, 1)
    monkeypatch.setattr(Arena, "free_bytes", 9 << 20)
    life.put(["a"], 100, 1)
    life.close()


def journal_bytes(folder):
    return sum(each.stat().st_size for each in folder.glob("journal/*/journal"))


def test_any_byte_of_the_arena_may_be_damaged(life, folder):
    """A read gives what was put, or says that the row is lost: never other bytes."""
    wanted = {f"s{number}": bytes([number + 1]) * 700 for number in range(6)}
    for sample_id, row in wanted.items():
        life.put([sample_id], 700, row[0])
    life.close()
    found_lost = 0
    for at in range(0, 6 * 704, 13):
        with (folder / "arena").open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x10]))
        copy = folder.with_name("copy")
        shutil.copytree(folder, copy)
        life = Life(copy)
        rows = dict(zip(wanted, life.read(list(wanted)), strict=True))
        lost = [each for each, row in rows.items() if row is None]
        assert {each: row for each, row in rows.items() if row is not None}.items() <= wanted.items()
        assert len(lost) <= 1
        found_lost += len(lost)
        life.kill()
        shutil.rmtree(copy)
        with (folder / "arena").open("r+b") as file:
            file.seek(at)
            file.write(byte)
    assert found_lost > 300


def test_rows_without_a_digest_are_lost_with_the_memory_that_held_them(life, folder):
    """The machine was started again: what was not on the disk is gone, and nobody can say what is there."""
    life.put(["small"], 100, 1)
    life.put(["large"], 100_000, 2)
    life.kill()
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    life = Life(copy)
    assert life.ids_there() == ["small", "large"]
    assert life.read(["small", "large"]) == [bytes([1]) * 100, None]
    life.kill()
    life = Life(folder)  # the same file and the same machine: the process died, and nothing else
    assert life.read(["small", "large"]) == [bytes([1]) * 100, bytes([2]) * 100_000]
    life.close()
    shutil.rmtree(copy)
    shutil.copytree(folder, copy)  # it was closed, so all is digested: a folder may be moved
    life = Life(copy)
    assert life.read(["small", "large"]) == [bytes([1]) * 100, bytes([2]) * 100_000]
    life.kill()


# --- the end of the machine -------------------------------------------------------------------------------------------


#: What the disk has beside what was synced, and which part of that at its beginning it does not have.
AHEAD = {
    "nothing": (lambda path: False, 0.0),
    "arena": (lambda path: path.name == "arena", 0.0),
    "journal": (lambda path: path.name != "arena", 0.0),
    "the end of the journal": (lambda path: path.name != "arena", 0.5),
}


@pytest.mark.parametrize("ahead", AHEAD)
def test_with_sync_at_commit_all_that_was_answered_survives_the_end_of_the_machine(folder, monkeypatch, ahead):
    def start(folder, sync):
        return Life(folder, CAPACITY // 64, sync=sync)  # so little that rows are moved to make room

    survives_at_each_sync(monkeypatch, folder, start, [AHEAD[ahead]])
