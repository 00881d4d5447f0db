"""The folder of an instance, without Ray: what its units and its controller leave there."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from power_loss import survives_at_each_sync
from shm_case import rows_found
from tiers import in_long

from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, CapacityExceededError
from dataplane_core.hosting import ExtentHost, extent_host, extents
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec
from dataplane_tq_simple import _folders, _host
from dataplane_tq_simple._folders import open_unit
from dataplane_tq_simple._host import ControllerHost, make_ledger
from dataplane_tq_simple._messages import BeginNear, Started

X = {"x": FieldSpec("tensor", "uint8", 1)}
SIZE = 1 << 14  # so little that rows are moved to make room


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    for module in (_host, _folders):
        monkeypatch.setattr(module, "ENDING_S", 0.0)


class Life:
    """The processes of an instance with one unit, and what its clients do. Rows of equal length hold a number."""

    def __init__(self, folder, monkeypatch, *, sync=False):
        self._locks = []
        for module in (_host, _folders):
            monkeypatch.setattr(module, "lock_folder", self._lock)
        ledger, self._log = make_ledger(folder / "journal", None, sync, durable=True)
        self._opened = open_unit(folder / "unit", "identity", SIZE, sync=sync)
        self._controller = ControllerHost(ledger, self._log)
        self._unit = ExtentHost(self._opened.extents, self._opened.notes.commit_or_end)
        started = Started(self._opened.token, "10.0.0.1", 1, "node", size_bytes=SIZE, kept=True)
        book = self._controller.book
        book.begin()
        book.started(started)
        self._sessions = [host.begin_session() for host in (self._controller, self._unit)]
        garbage = self._controller.garbage()
        rows, here = book.rows_on("node", garbage)
        assert here == garbage
        self.tell_unit(extent_host.Retain(rows))
        self.tell_unit(extent_host.Drop(garbage))
        self._controller.collected(garbage)
        assert self._controller.garbage() == []

    def _lock(self, *args):
        self._locks.append(lock_folder(*args))
        return self._locks[-1]

    def kill(self):
        """As a SIGKILL of both: nothing is said, nothing is finished."""
        self._log.close()
        self._opened.notes.close()
        for lock in self._locks:
            os.close(lock)

    def register(self):
        self.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "e1"))

    def settled_together(self):
        return nullcontext()

    def call(self, command):
        reply = self._controller.answer(command, self._sessions[0])
        self._controller.settle()
        return reply

    def tell_unit(self, request):
        reply = self._unit.answer(request, self._sessions[1])
        self._unit.settle()
        return reply

    def put(self, ids, length, number, *, whole):
        layout = extents.Layout([])
        layout.add_dense(len(ids), length, length)
        write = commands.Write(list(X), [length] * len(ids))
        write_id = self.call(BeginNear(commands.BeginPut("p", ids, X, [write], ttl_s=60.0), "node", []))
        wanted, data = [extents.Wanted(write_id, layout, len(ids))], bytes([number]) * layout.size_bytes
        try:
            if whole:
                self.tell_unit(extent_host.Allocate(wanted, data=[data]))
            else:
                (offset,) = self.tell_unit(extent_host.Allocate(wanted))
                self._opened.extents.arena.bytes[offset : offset + len(data)] = memoryview(data)
                self.tell_unit(extent_host.Written(write_id))
        except CapacityExceededError:
            self.collect(self.call(commands.AbortPut(write_id)))
            raise
        self.collect(self.call(commands.CommitPut(write_id)))

    def clear(self, ids):
        self.collect(self.call(commands.ClearRequest("p", ids))[1])

    def collect(self, refs):
        if refs:
            self.tell_unit(extent_host.Drop(refs))
            self.call(commands.Collected(refs))

    def ids_there(self):
        if not self.call(commands.ListPartitionsRequest()):
            return set()
        return set(self.call(commands.ListRequest("p")).sample_ids)

    def read(self, ids):
        parts = self.call(commands.Locate("p", ids, ["x"])).parts if ids else []
        places = self.tell_unit(extent_host.Find([(part.write_id, list(part.positions)) for part in parts], 1))
        return [bytes(row) for row in rows_found(self._opened.extents.arena, parts, places, len(ids))]


lock_folder = _folders.lock_folder

AHEAD = {
    "nothing": (lambda path: False, 0.0),
    "the arena": (lambda path: path.name == "arena", 0.0),
    "the unit's notes": (lambda path: "notes" in path.parts, 0.0),
    "the controller's journal": (lambda path: "unit" not in path.parts, 0.0),
}


@pytest.mark.parametrize("ahead", [*in_long(*AHEAD), "a short run"])
def test_with_sync_at_commit_all_that_was_answered_survives_the_end_of_the_machines(tmp_path, monkeypatch, ahead):
    short = ahead == "a short run"
    looks = list(AHEAD.values()) if short else [AHEAD[ahead]]
    with monkeypatch.context() as patch:  # a folder without a journal is refused, and is one that no row was ever in
        survives_at_each_sync(
            monkeypatch,
            tmp_path / "kept",
            lambda folder, sync: Life(folder, patch, sync=sync),
            looks,
            num_steps=12 if short else 60,
            opens=False,
        )


def test_a_folder_that_is_damaged_in_use_or_of_another_instance(tmp_path, monkeypatch):
    locks = []
    monkeypatch.setattr(_folders, "lock_folder", lambda *args: locks.append(lock_folder(*args)))
    folder = tmp_path / "unit"

    def open_as(instance):
        opened = open_unit(folder, instance, SIZE)
        opened.notes.close()
        return opened.token

    def unlock():
        while locks:
            os.close(locks.pop())

    first = open_as("identity")
    with pytest.raises(AlreadyRunningError, match="is in use by process"):
        open_as("identity")
    unlock()
    assert open_as("identity") == first
    unlock()
    with pytest.raises(BackendUnavailableError, match="of an instance whose journal is not the one"):
        open_as("another")
    unlock()
    (folder / "arena").unlink()

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(path), None, str(target))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        said = set()
        for _ in range(2):
            with pytest.raises(BackendUnavailableError, match="No space left on device") as caught:
                open_as("identity")
            unlock()
            said.add(str(caught.value))
        assert len(said) == 1, "clients would be told something new again and again"
    assert open_as("identity") != first
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["damaged", "unit"]
    unlock()
