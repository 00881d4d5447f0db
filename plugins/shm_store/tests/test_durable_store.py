"""A store in a folder, in the ledger's process: what was committed comes back, and nothing else, whenever it ends."""

import os
import random
import shutil
from itertools import count

import pytest

from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, CapacityExceededError, CorruptDataError
from dataplane_core.hosting import KeptExtents, Layout
from dataplane_core.journal.file import JournalFile
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec
from dataplane_shm import _durable
from dataplane_shm._durable import DurableStore
from dataplane_shm._messages import Begin, Find

SPECS = {"x": FieldSpec("tensor", "uint8", 1)}
CAPACITY = 1 << 20


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(_durable, "_ENDING_S", 0.0)
    monkeypatch.setattr(_durable, "arena_bytes_for", lambda capacity_bytes: capacity_bytes)


class Life:
    """A life of the ledger's process, and what its clients do. Rows of equal length hold a number."""

    def __init__(self, folder, capacity_bytes=CAPACITY, **options):
        self.folder = folder
        self.store = DurableStore(folder, capacity_bytes, "raise", **{"sync": False, **options})
        self.session = self.store.begin_session()
        self.ids = count(1)

    def kill(self):
        """As a SIGKILL: nothing is said, nothing is finished. The journal writes nothing when it closes."""
        self.store._recorded.close()
        os.close(self.store._lock)

    def close(self):
        self.store.close()

    def call(self, request):
        reply = self.store.answer(request, self.session)
        self.store.settle()
        return reply

    def register(self, task="t"):
        self.call(commands.RegisterRequest("p", ["x"], None, [task], None, {}, "e1"))

    def begin(self, ids, length):
        layout = Layout([])
        layout.add_dense(len(ids), length, length)
        write_id = self.session.number << 40 | next(self.ids)
        put = commands.BeginPut(
            "p", ids, SPECS, [commands.Write(list(SPECS), [length] * len(ids))], write_id=write_id, ttl_s=30.0
        )
        (offset,) = self.call(Begin(put, [layout])).offsets
        return write_id, self.store._extents.arena.bytes[offset : offset + layout.size_bytes]

    def put(self, ids, length, number):
        write_id, data = self.begin(ids, length)
        data[:] = number
        self.call(commands.CommitPut(write_id))

    def clear(self, ids):
        self.call(commands.ClearRequest("p", ids))

    def ids_there(self):
        return list(self.call(commands.ListRequest("p")).sample_ids)

    def read(self, ids):
        """The bytes of each row; None for one that is lost."""
        if not ids:
            return []
        found = self.call(Find(commands.Locate("p", ids, ["x"]), 1))
        if found.gone:
            return [None if len(ids) == 1 else self.read([each])[0] for each in ids]
        rows = [None] * len(ids)
        for part in found.located.parts:
            place = found.places[part.write_id]
            (column,) = place.layout.columns
            for row, position in zip(part.rows, part.positions, strict=True):
                start = place.offset + column.start + position * column.step
                rows[row] = bytes(self.store._extents.arena.bytes[start : start + column.step])
        self.store._extents.release(self.session.holds, 1)
        return rows


def test_what_was_committed_comes_back_and_nothing_else(tmp_path):
    life = Life(tmp_path)
    life.register()
    life.put(["a", "b", "c"], 100, 1)
    life.clear(["b"])
    _, data = life.begin(["d"], 100)
    data[:] = 9
    life.kill()
    life = Life(tmp_path)
    assert life.ids_there() == ["a", "c"]
    assert life.read(["c", "a"]) == [bytes([1]) * 100] * 2
    life.put(["d"], 100, 2)
    assert life.read(["d"]) == [bytes([2]) * 100]
    life.close()


class KilledError(BaseException):
    """The process ends here."""


@pytest.fixture
def killer(monkeypatch):
    """Ends a process at a write into its journal: before it, or after it."""
    write = JournalFile._write
    at = [0]  # the number of half writes that are left until then; 0: never

    def tick():
        at[0] -= 1
        if at[0] == 0:
            raise KilledError

    def counted(self, frame, entry):
        tick()
        write(self, frame, entry)
        tick()

    monkeypatch.setattr(JournalFile, "_write", counted)
    return at


@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_is_killed_at_any_write_holds_what_a_dict_would(tmp_path, monkeypatch, killer, seed):
    """The store is nearly full all the time, so that extents are squeezed. A call that was cut off was done or not."""
    squeezed = []
    squeeze = KeptExtents._squeeze
    monkeypatch.setattr(KeptExtents, "_squeeze", lambda self, each: squeezed.append(squeeze(self, each)) or squeezed[-1])
    rng = random.Random(seed)
    model, names = {}, count()
    life = Life(tmp_path, CAPACITY // 16)
    life.register()
    refused = killed = 0
    for _ in range(120):
        if not rng.randrange(4):
            killer[0] = rng.randint(1, 12)
        new, gone = {}, []
        try:
            match rng.choice(["put", "put", "clear", "kill", "work", "close"]):
                case "put":
                    ids = [f"s{next(names)}" for _ in range(rng.randint(1, 12))]
                    length, number = rng.choice([8, 500, 3000]), rng.randrange(256)
                    new = dict.fromkeys(ids, bytes([number]) * length)
                    life.put(ids, length, number)
                    model.update(new)
                case "clear" if model:
                    gone = rng.sample(sorted(model), rng.randint(1, -(-len(model) // 4)))
                    life.clear(gone)
                    model = {each: data for each, data in model.items() if each not in gone}
                case "kill":
                    raise KilledError
                case "close" if not killer[0]:
                    life.close()
                    life = Life(tmp_path, CAPACITY // 16)
                case "work":
                    life.store.work_aside()
        except CapacityExceededError:
            refused += 1
        except KilledError:
            killer[0], killed = 0, killed + 1
            life.kill()
            life = Life(tmp_path, CAPACITY // 16)
            there = set(life.ids_there())
            if new and there.issuperset(new):
                model.update(new)
            if gone and there.isdisjoint(gone):
                model = {each: data for each, data in model.items() if each not in gone}
        assert sorted(life.ids_there()) == sorted(model)
        some = rng.sample(sorted(model), min(8, len(model)))
        assert life.read(some) == [model[each] for each in some]
    assert life.read(sorted(model)) == [model[each] for each in sorted(model)]
    assert refused and killed > 10 and any(squeezed)
    life.kill()
