"""A controller's host, without Ray. With a journal, it is made again from its folder, and calls are repeated."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataplane_core.errors import BackendUnavailableError, DataPlaneError, InvalidRequestError
from dataplane_core.hosting import CallId, ClaimOrWait, Client
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec
from dataplane_tq_simple import _book
from dataplane_tq_simple._book import SPREAD_BITS, Spread, Started, UnitBook
from dataplane_tq_simple._errors import UnitsGoneError
from dataplane_tq_simple._host import ControllerHost, make_ledger
from dataplane_tq_simple._messages import AddUnits, BeginNear, RemoveUnit, UnitRecords, ViewUnits

X = {"x": FieldSpec("tensor", "int64", 1)}
IDS = [f"s{row}" for row in range(6)]


class Controller:
    """A controller's host, and one client."""

    def __init__(self, folder, num_units=3):
        self._folder = folder
        self._serial = self._num_puts = 0
        self._client = Client(1)
        self.host = ControllerHost(make_ledger(folder, None, False))
        self.host.book.begin(
            "actor-", [(f"unit-{each}", f"actor-unit-{each}", started(each)) for each in range(num_units)]
        )
        self.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "epoch"))

    def again(self, *running):
        """The process was killed. Now these actors run, or all of the book."""
        self.host = ControllerHost(make_ledger(self._folder, None, False, must_exist=True))
        self.host.book.come_back(running or self.host.book.actors().values())

    def call(self, request, *, again=False):
        """Calls, or repeats the newest call."""
        self._serial += not again
        return self.host.answer(request, self._client, CallId("me", 0, self._serial, 60.0))

    def begin(self, *, again=False):
        self._num_puts += not again
        begin = commands.BeginPut(
            "p", [f"{self._num_puts}{each}" for each in IDS], X, [commands.Write(list(X), [10] * 6)], ttl_s=60.0
        )
        return int(self.call(BeginNear(begin, None, []), again=again))

    def put(self):
        write_id = self.begin()
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
    controller.host.book.ended("unit-0", started(0))
    controller.put()
    controller.host.book.started("unit-0", started(0, "b"))
    third = controller.begin()
    before, view = controller.units(), controller.call(ViewUnits(-1))
    assert before[0][0].num_lost == 2
    assert sum(unit.num_rows for unit in before[0]) == 4 + 6 + 6

    controller.again()

    assert controller.units() == before
    after = controller.call(ViewUnits(view.version))
    assert after.version > view.version, "clients ask again"
    assert after.spreads == view.spreads
    assert after.lives == view.lives
    controller.call(commands.CommitPut(third))
    fresh = controller.begin()
    number = fresh & ((1 << SPREAD_BITS) - 1)
    assert number >= (third & ((1 << SPREAD_BITS) - 1)) + 6, "no number is used twice"
    for write_id in (first, third):
        controller.call(commands.Collected([(write_id, row) for row in range(6)]))
    assert controller.units()[0][0].num_lost == 0


def test_the_number_of_a_spread_is_never_used_again(controller):
    """A client may still know what it was."""
    write_id = controller.put()
    for unit in range(3):
        controller.host.book.ended(f"unit-{unit}", started(unit))
    controller.call(commands.ClearRequest("p", None))
    controller.call(commands.Collected([(write_id, row) for row in range(6)]))
    view = controller.call(ViewUnits(-1))
    assert write_id >> SPREAD_BITS not in view.spreads
    controller.again()
    for unit in range(3):
        controller.host.book.started(f"unit-{unit}", started(unit, "b"))
    controller.call(commands.RegisterRequest("p", ["x"], None, ["t"], None, {}, "epoch"))
    assert controller.begin() >> SPREAD_BITS > write_id >> SPREAD_BITS


@pytest.mark.parametrize("killed", [False, True])
def test_a_call_that_is_repeated_is_done_once(controller, killed):
    def repeat(request):
        if killed:
            controller.again()
        return controller.call(request, again=True)

    begun = controller.begin()
    if killed:
        controller.again()
    assert controller.begin(again=True) == begun
    assert sum(unit.num_rows for unit in controller.units()[0]) == 6
    controller.call(commands.CommitPut(begun))
    add = AddUnits(2)
    assert controller.call(add) == repeat(add) == ["unit-3", "unit-4"]
    assert [unit.name for unit in controller.units()[0]] == [f"unit-{number}" for number in range(5)]
    remove = RemoveUnit("unit-1", True)
    assert controller.call(remove) is repeat(remove) is None
    with pytest.raises(InvalidRequestError):
        controller.call(RemoveUnit("unit-9", False))
    with pytest.raises(InvalidRequestError):
        repeat(RemoveUnit("unit-9", False))


@pytest.mark.parametrize("killed", [False, True])
def test_a_put_that_was_refused_is_refused_again(controller, killed):
    """The refusal aborts the put. A repeated call does not take what the abort freed for a commit."""
    begun = controller.begin()
    controller.host.book.ended("unit-0", started(0))
    commit = commands.CommitPut(begun)
    with pytest.raises(UnitsGoneError):
        controller.call(commit)
    if killed:
        controller.again()
    with pytest.raises(DataPlaneError):
        controller.call(commit, again=True)
    assert controller.call(commands.ListRequest("p")).sample_ids == []


def test_a_call_that_was_done_is_answered_though_the_book_cannot_be_saved(controller, monkeypatch):
    def save(*_):
        raise BackendUnavailableError("the journal's disk is full. Nothing was done.")

    monkeypatch.setattr(UnitBook, "save", save)
    assert controller.call(commands.ListPartitionsRequest()).partition_ids == ["p"]
    with pytest.raises(BackendUnavailableError):
        controller.call(ViewUnits(-1))  # a controller that is started again would not know it


def test_a_claim_that_waits_is_woken_also_where_a_journal_is_kept(controller):
    woken = []
    client = Client(2)
    client.wake = lambda token: woken.append(token) or True
    waits = commands.ClaimRequest("p", "t", ["x"], 6, all_or_nothing=True, lease_s=None, token="k")
    assert not controller.host.answer(ClaimOrWait(waits), client).answered
    controller.put()
    assert woken == ["k"]
    assert len(controller.host.answer(ClaimOrWait(waits), client).sample_ids) == 6


def test_units_that_end_or_start_while_no_controller_runs(controller):
    controller.put()
    controller.call(AddUnits(1))
    controller.again("actor-unit-0", "actor-unit-1")
    found = {unit.name: unit.state for unit in controller.units()[0]}
    assert found == {"unit-0": "serving", "unit-1": "serving", "unit-2": "removed", "unit-3": "starting"}
    assert controller.host.book.new_unit() == ("unit-3", "actor-unit-3"), "it was never created"
    assert controller.units()[1] == ["unit-2: its actor ended"]


def test_the_ledger_numbers_writes_whose_rows_lie_elsewhere(tmp_path):
    begin = commands.BeginPut("p", IDS, X, [commands.Write(list(X), [10] * 6)], ttl_s=60.0)
    with pytest.raises(InvalidRequestError, match="places rows on units"):
        Controller(None).call(begin)
    controller = Controller(tmp_path / "journal", num_units=0)
    first = controller.call(begin)
    controller.again()
    assert controller.call(begin, again=True) == first
    assert controller.call(begin) == first + 6


def test_a_folder_that_no_node_has_is_refused(tmp_path):
    with pytest.raises(BackendUnavailableError, match="there is no folder"):
        Controller(tmp_path / "nowhere" / "journal")
    with pytest.raises(BackendUnavailableError, match=r"journal in /proc/.* cannot be opened"):
        make_ledger(Path("/proc/journal"), None, False)
    with pytest.raises(BackendUnavailableError, match="there is no journal"):
        make_ledger(tmp_path / "journal", None, False, must_exist=True)


def held(controller):
    return [(each.num_rows, each.num_lost) for each in controller.units()[0]]


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
    assert held(either) == [(1, 0)] * 3
    either.call(RemoveUnit("unit-1", False))
    assert either.host.end_removed() == [], "one of its rows is left"
    _, last = either.call(commands.ClearRequest("p", then_ids[3:]))
    either.call(commands.Collected(last))
    assert either.host.end_removed() == ["actor-unit-1"]


def test_rows_are_deleted_only_when_the_disk_knows_that_nobody_reads_them(controller, monkeypatch):
    """Else a machine that loses power then may have them in its journal, and nowhere else."""
    kept = []
    journal = controller.host._journal
    monkeypatch.setattr(journal.file, "commit_or_end", lambda: kept.append(journal.garbage()))
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
    """Then to others that have room for it; a put that none has room for is dealt out over all."""

    def put(row_bytes, *full):
        before = [unit.num_rows for unit in either.units()[0]]
        write = commands.Write(list(X), [row_bytes] * 6)
        either.call(BeginNear(commands.BeginPut("p", IDS, X, [write], ttl_s=60.0), "n2", list(full)))
        return [unit.num_rows - rows for unit, rows in zip(either.units()[0], before, strict=True)]

    assert put(100 << 20) == [0, 0, 6]
    assert put(100 << 20) == [3, 3, 0]
    assert put(10 << 20) == [0, 0, 6], "a smaller one fits"
    assert put(10 << 20, 2) == [3, 3, 0], "the unit says that it has no room"
    assert put(10 << 20, 0, 1, 2) == [0, 0, 6], "all say so"
    assert put(200 << 20) == [2, 2, 2]


def test_rows_are_dealt_out_in_blocks_and_found_again():
    for num_lives, shift, num_rows, number in itertools.product((1, 2, 3), (0, 1, 4), (1, 7, 100), (0, 5)):
        spread = Spread(tuple(range(10, 10 + num_lives)), shift)
        write_id = 3 << SPREAD_BITS | number
        held = {
            life: [row for run in runs for row in range(*run)] for life, runs in spread.runs(write_id, num_rows).items()
        }
        assert sorted(row for rows in held.values() for row in rows) == list(range(num_rows))
        wanted = random.Random(num_rows).sample(range(num_rows), min(num_rows, 9))
        found = spread.split(write_id, wanted)
        assert sorted(index for pairs in found.values() for index, _ in pairs) == list(range(len(wanted)))
        for life, pairs in found.items():
            for index, there in pairs:
                assert spread.life_of(write_id, wanted[index]) == life
                assert held[life][there] == wanted[index]


def test_the_ledger_refuses_to_commit_a_put_that_lost_a_unit(either):
    kept, lost = either.begin(), either.begin()
    near = either.call(
        BeginNear(commands.BeginPut("p", IDS, X, [commands.Write(list(X), [10] * 6)], ttl_s=60.0), "n2", [])
    )
    assert [unit.num_rows for unit in either.units()[0]] == [4, 4, 10]
    either.call(commands.CommitPut(kept))
    either.host.book.ended("unit-0", started(0))
    with pytest.raises(UnitsGoneError, match="Nothing was written"):
        either.call(commands.CommitPut(lost))
    assert set(either.call(commands.ListRequest("p")).sample_ids) == {f"1{each}" for each in IDS}
    refs = either.call(commands.AbortPut(lost))
    assert len(refs) == 6
    either.call(commands.Collected(refs))
    either.call(commands.CommitPut(near))  # it has no row on the unit that ended
    either.call(commands.Collected([(kept, row) for row in range(6)]))
    assert held(either) == [(0, 0), (0, 0), (6, 0)]


def test_a_place_that_is_served_under_another_name_is_of_that_unit_alone():
    """Who bootstraps again may name the units of the places in another order than before."""
    kept = [started(unit)._replace(place=f"place-{unit}") for unit in range(3)]
    controller = Controller(None)
    book = controller.host.book
    for unit in range(3):
        book.started(f"unit-{unit}", kept[unit])
    controller.put()
    book.started("unit-0", kept[1])
    book.started("unit-1", kept[0])
    assert [(each.state, each.num_lost) for each in controller.units()[0]] == [("serving", 0)] * 3


def test_the_rows_of_a_unit_are_listed_while_others_are_answered(monkeypatch):
    controller = Controller(None)
    book = controller.host.book
    writes = [controller.put() for _ in range(6)]
    monkeypatch.setattr(_book, "_PORTION", 2)
    held, split = [], Spread.split

    def is_held():
        if book.lock.acquire(blocking=False):
            book.lock.release()
            return False
        return True

    def listing(self, write_id, positions):
        with ThreadPoolExecutor(1) as other:
            held.append(other.submit(is_held).result())
            if write_id == writes[0]:  # meanwhile rows come and go, of this portion and of a later one
                gone = [(each, row) for each in (writes[1], writes[4]) for row in range(6)]
                controller.call(commands.Collected(gone))
                controller.put()
        return split(self, write_id, positions)

    monkeypatch.setattr(Spread, "split", listing)
    found = {unit: book.rows_of(f"unit-{unit}") for unit in range(3)}
    assert held
    assert not any(held), "nobody is answered while it lists"
    left = [each for each in writes if each not in (writes[1], writes[4])]
    for write_id in left:
        assert sum(len(each.get(write_id, ())) for each in found.values()) == 6
    assert not any(writes[4] in each for each in found.values())


def test_who_waits_for_a_unit_that_cannot_open_its_folder_is_told_why():
    controller = Controller(None)
    book = controller.host.book
    kept = [started(unit)._replace(place=f"place-{unit}") for unit in range(3)]
    for unit in range(3):
        book.started(f"unit-{unit}", kept[unit])
    write_id = controller.put()
    for unit in range(3):
        book.ended(f"unit-{unit}", kept[unit])
    for unit, why in enumerate(["Permission denied", "No space left"]):
        assert book.waits(f"unit-{unit}", why), "it tries again"
        with pytest.raises(UnitsGoneError, match="are starting"):
            book.place(1, 10, None)
    assert sorted(life.why for life in controller.call(ViewUnits(-1)).lives.values()) == [
        "",
        "No space left",
        "Permission denied",
    ]
    book.waits("unit-2", "gone")
    with pytest.raises(BackendUnavailableError) as refused:
        book.place(1, 10, None)
    assert not refused.value.retryable
    assert "unit-0: Permission denied; unit-1: No space left; unit-2: gone" in str(refused.value)
    book.started("unit-2", kept[2])
    assert sorted(life.why for life in controller.call(ViewUnits(-1)).lives.values() if life.served) == [""]
    assert book.place(1, 10, None) > write_id
    controller.call(AddUnits(1))
    assert not book.waits("unit-3", "Permission denied"), "it has no rows"
