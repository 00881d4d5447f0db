"""A controller's host, without Ray. With a journal, it is made again from its folder, and calls are repeated."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane_core.errors import (
    BackendUnavailableError,
    ContentGoneError,
    CorruptDataError,
    DataPlaneError,
    InvalidRequestError,
)
from dataplane_core.hosting import Client
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec
from dataplane_tq_simple._host import ControllerHost, UnitBook, make_ledger
from dataplane_tq_simple._messages import LIFE_BITS, BeginNear, Started, UnitRecords, UnitsGoneError, ViewUnits

X = {"x": FieldSpec("tensor", "int64", 1)}
IDS = [f"s{row}" for row in range(6)]


class Controller:
    """A controller's host, and one client."""

    def __init__(self, folder, num_units=3):
        self._folder = folder
        self._num_puts = 0
        self._client = Client(1)
        self.host = ControllerHost(*make_ledger(folder, None, False), has_units=num_units > 0)
        self.host.book.begin()
        for each in range(num_units):
            self.host.book.started(started(each))
        self.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "epoch"))

    def again(self):
        """The process was killed."""
        has_units = bool(self.host.book.nodes())
        self.host = ControllerHost(*make_ledger(self._folder, None, False, must_exist=True), has_units=has_units)

    def call(self, request):
        return self.host.answer(request, self._client)

    def begin(self, node="n0"):
        self._num_puts += 1
        begin = commands.BeginPut(
            "p", [f"{self._num_puts}{each}" for each in IDS], X, [commands.Write(list(X), [10] * 6)], ttl_s=60.0
        )
        return int(self.call(BeginNear(begin, node, [])))

    def put(self, node="n0"):
        write_id = self.begin(node)
        self.call(commands.CommitPut(write_id))
        return write_id

    def units(self):
        return self.call(UnitRecords())


def started(index, life="a"):
    return Started(f"{index}{life}", "10.0.0.1", 1000 + index, f"n{index}", size_bytes=1 << 30)


@pytest.fixture(params=[True, False], ids=["with a journal", "without"])
def either(request, tmp_path):
    return Controller(tmp_path / "journal" if request.param else None)


@pytest.fixture
def controller(tmp_path):
    return Controller(tmp_path / "journal")


def test_the_book_is_where_it_was(controller):
    first = controller.put()
    controller.host.book.ended("n0")
    controller.put("n1")
    controller.host.book.started(started(0, "b"))
    third = controller.begin("n2")
    before, view = controller.units(), controller.call(ViewUnits(-1))
    assert [(unit.num_rows, unit.num_lost, unit.num_starts) for unit in before] == [(0, 6, 2), (6, 0, 1), (6, 0, 1)]

    controller.again()

    assert controller.units() == before
    after = controller.call(ViewUnits(view.version))
    assert after.version > view.version, "clients ask again"
    assert after.lives == view.lives
    controller.call(commands.CommitPut(third))
    number = controller.begin() & ((1 << LIFE_BITS) - 1)
    assert number >= (third & ((1 << LIFE_BITS) - 1)) + 6, "no number is used twice"
    controller.call(commands.Collected([(first, row) for row in range(6)]))
    assert controller.units()[0].num_lost == 0


def test_a_book_of_another_version_is_refused():
    with pytest.raises(CorruptDataError, match="of another version"):
        UnitBook().restore(pickle.dumps({"units": []}), {})


def test_the_number_of_a_life_is_never_used_again(controller):
    """A client may still know what it was."""
    write_id = controller.put("n2")
    controller.host.book.ended("n2")
    controller.call(commands.ClearRequest("p", None))
    controller.call(commands.Collected([(write_id, row) for row in range(6)]))
    assert write_id >> LIFE_BITS not in controller.call(ViewUnits(-1)).lives
    controller.again()
    controller.host.book.started(started(2, "b"))
    controller.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "next"))
    assert controller.begin("n2") >> LIFE_BITS > write_id >> LIFE_BITS


@pytest.mark.parametrize("killed", [False, True])
def test_a_put_that_was_refused_is_refused_again(controller, killed):
    """The refusal aborts the put. A repeated call does not take what the abort freed for a commit."""
    begun = controller.begin()
    controller.host.book.ended("n0")
    commit = commands.CommitPut(begun)
    with pytest.raises(UnitsGoneError):
        controller.call(commit)
    if killed:
        controller.again()
    with pytest.raises(DataPlaneError):
        controller.call(commit)
    assert controller.call(commands.ListRequest("p")).sample_ids == []


def test_a_call_that_was_done_is_answered_though_the_book_cannot_be_saved(controller, monkeypatch):
    def save(*_):
        raise BackendUnavailableError("the journal's disk is full. Nothing was done.")

    monkeypatch.setattr(UnitBook, "save", save)
    assert controller.call(commands.ListPartitionsRequest()) == ["p"]
    with pytest.raises(BackendUnavailableError):
        controller.call(ViewUnits(-1))  # a controller that is started again would not know it


def test_the_ledger_numbers_writes_whose_rows_lie_elsewhere(tmp_path):
    begin = commands.BeginPut("p", IDS, X, [commands.Write(list(X), [10] * 6)], ttl_s=60.0)
    with pytest.raises(InvalidRequestError, match="places rows on units"):
        Controller(None).call(begin)
    controller = Controller(tmp_path / "journal", num_units=0)
    first = controller.call(begin)
    controller.again()
    assert controller.call(begin) == first + 6


def test_a_folder_that_no_node_has_is_refused(tmp_path):
    with pytest.raises(BackendUnavailableError, match="there is no folder"):
        Controller(tmp_path / "nowhere" / "journal")
    with pytest.raises(BackendUnavailableError, match=r"log in /proc/.* cannot be opened"):
        make_ledger(Path("/proc/journal"), None, False)
    with pytest.raises(BackendUnavailableError, match="there is no log"):
        make_ledger(tmp_path / "journal", None, False, must_exist=True)


def held(controller):
    return [(each.num_rows, each.num_lost) for each in controller.units()]


def test_rows_that_two_clients_report_as_deleted_are_counted_once(either):
    """A clear returns all rows that are free, also those that another client deletes at the same time."""
    either.put()
    either.put()
    first_ids, then_ids = ([f"{number}{each}" for each in IDS] for number in (1, 2))
    _, first = either.call(commands.ClearRequest("p", first_ids))
    _, second = either.call(commands.ClearRequest("p", then_ids[:3]))
    assert set(first) < set(second)
    for freed in (first, second):
        either.call(commands.Collected(freed))
    assert held(either) == [(3, 0), (0, 0), (0, 0)]


def test_rows_are_deleted_only_when_the_disk_knows_that_nobody_reads_them(controller, monkeypatch):
    """Else a machine that loses power then may have them in its journal, and nowhere else."""
    kept = []
    host = controller.host
    monkeypatch.setattr(host._log, "commit_or_end", lambda: kept.append(host._ledger.garbage()))
    write_id = controller.put()
    controller.call(commands.ClearRequest("p", None))
    rows = [(write_id, row) for row in range(6)]
    assert controller.host.garbage() == rows
    assert kept == [rows]
    controller.host.collected(rows)
    assert kept == [rows, []]
    controller.again()
    assert controller.host.garbage() == []
    assert held(controller) == [(0, 0)] * 3


def test_a_put_goes_to_its_own_node_while_that_has_room(either):
    """Else to the one with the most room."""

    def put(row_bytes, *full, node="n2"):
        before = [unit.num_rows for unit in either.units()]
        write = commands.Write(list(X), [row_bytes] * 6)
        either.call(BeginNear(commands.BeginPut("p", IDS, X, [write], ttl_s=60.0), node, list(full)))
        return [unit.num_rows - rows for unit, rows in zip(either.units(), before, strict=True)]

    assert put(100 << 20) == [0, 0, 6]
    assert put(100 << 20) == [6, 0, 0]
    assert put(10 << 20) == [0, 0, 6], "a smaller one fits"
    assert put(10 << 20, 2) == [0, 6, 0], "the unit says that it has no room"
    assert put(10 << 20, 0, 1, 2) == [0, 0, 6], "all say so"
    assert put(200 << 20) == [0, 6, 0], "none has room"
    assert put(1, node="of no unit") == [6, 0, 0]


def test_the_ledger_refuses_to_commit_a_put_that_lost_its_unit(either):
    kept, lost, elsewhere = either.begin(), either.begin(), either.begin("n2")
    either.call(commands.CommitPut(kept))
    either.host.book.ended("n0")
    with pytest.raises(UnitsGoneError, match="Nothing was written"):
        either.call(commands.CommitPut(lost))
    assert set(either.call(commands.ListRequest("p")).sample_ids) == {f"1{each}" for each in IDS}
    refs = either.call(commands.AbortPut(lost))
    assert len(refs) == 6
    either.call(commands.Collected(refs))
    either.call(commands.CommitPut(elsewhere))
    assert held(either) == [(0, 6), (0, 0), (6, 0)]
    either.call(commands.Collected([(kept, row) for row in range(6)]))
    assert held(either) == [(0, 0), (0, 0), (6, 0)]


def kept(unit):
    return started(unit)._replace(kept=True)


@pytest.fixture
def durable(either):
    """Of an instance whose units keep their rows."""
    for unit in range(3):
        either.host.book.started(kept(unit))
    return either


def test_no_put_relies_on_content_of_a_unit_that_has_ended(either):
    def begin(name, *brought):
        known = [] if brought else [ref]
        writes = [commands.Write(["x"], list(brought), [0], [bytes(16)] * len(brought), known)]
        put = commands.BeginPut("p", [name], X, writes, ttl_s=60.0)
        return either.call(BeginNear(put, "n0" if brought else "n1", []))

    either.call(commands.CommitPut(begin("a", 10)))
    (ref,) = either.call(commands.FindContent([bytes(16)])).values()
    relying = begin("b")
    either.host.book.ended("n0")
    for step in (lambda: either.call(commands.CommitPut(relying)), lambda: begin("c")):
        with pytest.raises(ContentGoneError):
            step()
    assert either.call(commands.FindContent([bytes(16)])) == {}
    either.host.book.started(started(0, "b"))
    either.call(commands.CommitPut(begin("d", 10)))
    (ref,) = either.call(commands.FindContent([bytes(16)])).values()
    either.call(commands.CommitPut(begin("e")))


def test_who_bootstraps_again_finds_what_it_finds(durable):
    """The units of the nodes may get other names than before. What no node has is lost when its wait is over."""
    first, second = durable.put("n0"), durable.put("n1")
    book = durable.host.book
    book.begin()
    assert len(book.awaited()) == 3
    for node, folder in (("m1", 1), ("m0", 2)):
        book.started(kept(folder)._replace(node=node))
    assert book.awaited() == {first >> LIFE_BITS: False}
    book.give_up(first >> LIFE_BITS)
    assert sum(each.num_lost for each in durable.units()) == 6
    assert sum(each.num_rows for each in durable.units()) == 6
    lives = durable.call(ViewUnits(-1)).lives
    assert first >> LIFE_BITS not in lives
    assert lives[second >> LIFE_BITS].node == "m1"


def test_who_waits_for_a_unit_that_cannot_open_its_folder_is_told_why():
    durable = Controller(None)
    book = durable.host.book
    for unit in range(3):
        book.started(kept(unit))
    for unit in range(3):
        book.ended(f"n{unit}")
    for unit, why in enumerate(["Permission denied", "No space left"]):
        book.waits(f"n{unit}", why)
        with pytest.raises(UnitsGoneError, match="are starting"):
            book.choose(1, 10, "n0")
    assert [life.why for life in durable.call(ViewUnits(-1)).lives.values()] == [
        "Permission denied",
        "No space left",
        "",
    ]
    book.waits("n2", "gone")
    assert set(book.awaited().values()) == {True}
    with pytest.raises(BackendUnavailableError) as refused:
        book.choose(1, 10, "n0")
    assert not refused.value.retryable
    assert "unit-0: Permission denied; unit-1: No space left; unit-2: gone" in str(refused.value)
    book.started(kept(2))
    assert durable.call(ViewUnits(-1)).lives[book.choose(1, 10, "n0") >> LIFE_BITS].unit == "unit-2"


def test_controllers_and_storage_units_do_without_torch():
    """It would take 345 MiB of each node's memory, twice."""
    code = "import sys, dataplane_tq_simple._controller as _; print(sorted({'torch', 'tensordict'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
