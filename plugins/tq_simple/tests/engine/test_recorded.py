"""A controller's service with a journal, without Ray: it is made again from its folder, and calls are repeated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane_core.hosting import CallId
from dataplane_core.errors import BackendUnavailableError, DataPlaneError, InvalidRequestError
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec
from dataplane_tq_simple._book import LAYOUT_BITS, Started
from dataplane_tq_simple._errors import UnitsGoneError
from dataplane_tq_simple._recorded import PlacingRecordedService, RecordedService
from dataplane_tq_simple._sampler import UNITS, LedgerSampler, decode_reply, encode_call

X = {"x": FieldSpec("tensor", "int64", 1)}
IDS = [f"s{row}" for row in range(6)]


class Controller:
    """A controller's sampler, and one client."""

    def __init__(self, folder: Path, service: type[RecordedService] = PlacingRecordedService) -> None:
        self._factory: Callable[..., object] = functools.partial(service, folder, None, False)
        self._serial = self._num_puts = 0
        self.sampler = LedgerSampler(self._factory)
        self.sampler.book.begin("actor-", [(f"unit-{each}", f"actor-unit-{each}", started(each)) for each in range(3)])
        self.call("call", commands.Register("p", ["x"], None, ["t"], None, {}, "epoch"))

    def again(self, *running: str) -> None:
        """The process was killed. Now these actors run, or all of the book."""
        self.sampler = LedgerSampler(self._factory)
        self.sampler.open_again()
        self.sampler.book.come_back(running or self.sampler.book.actors().values())

    def call(self, method: str, *args: Any, again: bool = False) -> Any:
        """Calls, or repeats the newest call."""
        self._serial += not again
        executed, result, _ = decode_reply(
            self.sampler._answer(encode_call(method, args, None, CallId("me", 0, self._serial, 60.0)))
        )
        assert executed
        return result

    def begin(self, *, again: bool = False) -> int:
        self._num_puts += not again
        begin = commands.BeginPut("p", [f"{self._num_puts}{each}" for each in IDS], X, [10] * 6, ttl_s=60.0)
        return int(self.call("begin_put", begin, None, again=again))

    def put(self) -> int:
        write_id = self.begin()
        self.call("call", commands.CommitPut(write_id))
        return write_id

    def units(self) -> Any:
        return self.call(UNITS, "records")


def started(index: int, life: str = "a") -> Started:
    return Started(f"{index}{life}", "10.0.0.1", 1000 + index, f"n{index}")


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path / "journal")


def test_the_book_is_where_it_was(controller: Controller) -> None:
    first = controller.put()
    controller.sampler.book.ended("unit-0", "0a")
    controller.put()
    controller.sampler.book.started("unit-0", started(0, "b"))
    third = controller.begin()
    before, view = controller.units(), controller.call(UNITS, "view", -1)
    assert before[0][0].num_lost == 2
    assert sum(unit.num_rows for unit in before[0]) == 4 + 6 + 6

    controller.again()

    assert controller.units() == before
    after = controller.call(UNITS, "view", view.version)
    assert after.version > view.version, "clients ask again"
    assert after.layouts == view.layouts
    assert after.lives == view.lives
    controller.call("call", commands.CommitPut(third))
    fresh = controller.begin()
    number = fresh & ((1 << LAYOUT_BITS) - 1)
    assert number >= (third & ((1 << LAYOUT_BITS) - 1)) + 6, "no number is used twice"
    for write_id in (first, third):
        controller.call("call", commands.Collected([(write_id, row) for row in range(6)]))
    assert controller.units()[0][0].num_lost == 0


def test_the_number_of_a_layout_is_never_used_again(controller: Controller) -> None:
    """A client may still know what it was."""
    write_id = controller.put()
    for unit in range(3):
        controller.sampler.book.ended(f"unit-{unit}", f"{unit}a")
    controller.call("call", commands.Clear("p", None))
    controller.call("call", commands.Collected([(write_id, row) for row in range(6)]))
    view = controller.call(UNITS, "view", -1)
    assert write_id >> LAYOUT_BITS not in view.layouts
    controller.again()
    for unit in range(3):
        controller.sampler.book.started(f"unit-{unit}", started(unit, "b"))
    controller.call("call", commands.Register("p", ["x"], None, ["t"], None, {}, "epoch"))
    assert controller.begin() >> LAYOUT_BITS > write_id >> LAYOUT_BITS


@pytest.mark.parametrize("killed", [False, True])
def test_a_call_that_is_repeated_is_done_once(controller: Controller, killed: bool) -> None:
    def repeat(*call: Any) -> Any:
        if killed:
            controller.again()
        return controller.call(*call, again=True)

    begun = controller.begin()
    if killed:
        controller.again()
    assert controller.begin(again=True) == begun
    assert sum(unit.num_rows for unit in controller.units()[0]) == 6
    controller.call("call", commands.CommitPut(begun))
    add = (UNITS, "add_units", 2)
    assert controller.call(*add) == repeat(*add) == ["unit-3", "unit-4"]
    assert [unit.name for unit in controller.units()[0]] == [f"unit-{number}" for number in range(5)]
    remove = (UNITS, "remove_unit", "unit-1", True)
    assert controller.call(*remove) is repeat(*remove) is None
    with pytest.raises(InvalidRequestError):
        controller.call(UNITS, "remove_unit", "unit-9", False)
    with pytest.raises(InvalidRequestError):
        repeat(UNITS, "remove_unit", "unit-9", False)


@pytest.mark.parametrize("killed", [False, True])
def test_a_put_that_was_refused_is_refused_again(controller: Controller, killed: bool) -> None:
    """The refusal aborts the put. A repeated call does not take what the abort freed for a commit."""
    begun = controller.begin()
    controller.sampler.book.ended("unit-0", "0a")
    commit = commands.CommitPut(begun)
    with pytest.raises(UnitsGoneError):
        controller.call("call", commit)
    if killed:
        controller.again()
    with pytest.raises(DataPlaneError):
        controller.call("call", commit, again=True)
    assert controller.call("call", commands.ListSamples("p")).sample_ids == []


def test_units_that_end_or_start_while_no_controller_runs(controller: Controller) -> None:
    controller.put()
    controller.call(UNITS, "add_units", 1)
    controller.again("actor-unit-0", "actor-unit-1")
    found = {unit.name: unit.state for unit in controller.units()[0]}
    assert found == {"unit-0": "serving", "unit-1": "serving", "unit-2": "removed", "unit-3": "starting"}
    assert controller.sampler.book.new_unit() == ("unit-3", "actor-unit-3"), "it was never created"
    assert controller.units()[1] == ["unit-2: its actor ended"]


def test_without_units_the_ledger_numbers_writes(tmp_path: Path) -> None:
    controller = Controller(tmp_path / "journal", RecordedService)
    begin = commands.BeginPut("p", IDS, X, [10] * 6, ttl_s=60.0)
    first = controller.call("call", begin)
    controller.again()
    assert controller.call("call", begin, again=True) == first
    assert controller.call("call", begin) == first + 6


def test_a_folder_that_no_node_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="there is no folder"):
        Controller(tmp_path / "nowhere" / "journal")
    with pytest.raises(BackendUnavailableError, match=r"journal in /proc/.* cannot be opened"):
        RecordedService(Path("/proc/journal"), None, False)
    with pytest.raises(BackendUnavailableError, match="there is no journal"):
        RecordedService(tmp_path / "journal", None, False, must_exist=True)
