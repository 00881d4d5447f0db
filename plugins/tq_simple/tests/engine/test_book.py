"""The book of storage units alone: where puts are placed, what is lost, when a unit may end."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger import commands
from dataplane_tq_simple._book import SPREAD_BITS, Started, UnitBook, life_of
from dataplane_tq_simple._errors import UnitsGoneError


def started(index: int, life: str = "a", node: str = "n0") -> Started:
    return Started(f"{index}{life}", "10.0.0.1", 1000 + index, node)


@pytest.fixture
def book() -> UnitBook:
    book = UnitBook()
    book.begin("actor-", [(f"unit-{index}", f"actor-{index}", started(index, node=f"n{index}")) for index in range(3)])
    return book


def put(book: UnitBook, row_bytes: Sequence[int], node: str | None = None) -> int:
    write_id = book.place(len(row_bytes), sum(row_bytes), node)
    book.add([commands.Write(write_id, ["x"], list(row_bytes))])
    return write_id


def units_of(book: UnitBook, write_id: int, num_rows: int) -> Counter[str]:
    view = book.view()
    assert view is not None
    lives = [life_of(write_id + row, view.spreads[write_id >> SPREAD_BITS]) for row in range(num_rows)]
    return Counter(view.lives[life].unit for life in lives)


def held(book: UnitBook) -> dict[str, tuple[str, int, int, int]]:
    return {each.name: (each.state, each.num_rows, each.size_bytes, each.num_lost) for each in book.records()[0]}


def test_a_put_is_spread_over_all_units_that_hold_about_as_much(book: UnitBook) -> None:
    ids = [put(book, [10] * 6) for _ in range(3)]
    assert [units_of(book, each, 6) for each in ids] == [{"unit-0": 2, "unit-1": 2, "unit-2": 2}] * 3
    assert held(book)["unit-1"] == ("serving", 6, 60, 0)
    book.collected([(ids[0], row) for row in range(6)])
    assert {each[1:] for each in held(book).values()} == {(4, 40, 0)}


def test_a_new_unit_gets_more_until_it_holds_as_much_as_the_others(book: UnitBook) -> None:
    put(book, [1000] * 30)
    (name,) = book.add_units(1)
    assert not book.waiting(), "it is not created yet"
    assert book.new_unit() == (name, f"actor-{name}") == ("unit-3", "actor-unit-3")
    assert book.new_unit() is None
    assert book.waiting() == [(name, f"actor-{name}")]
    assert set(units_of(book, put(book, [10] * 8), 8)) == {"unit-0", "unit-1", "unit-2"}  # it is starting
    book.started(name, started(3))
    for _ in range(200):
        ids = put(book, [100] * 12)
        assert len(units_of(book, ids, 12)) >= 2, "half of the units take part, or one would be a bottleneck"
    sizes = [size for _, _, size, _ in held(book).values()]
    assert max(sizes) < 1.2 * min(sizes)


def test_spreads_stay_few_and_change_rarely_however_long_a_run_is() -> None:
    """Every client must learn each new one."""
    book, draw, held_now = UnitBook(), random.Random(0), deque[int]()
    book.begin("actor-", [(f"unit-{index}", f"actor-{index}", started(index)) for index in range(16)])
    first = book.view()
    for _ in range(20_000):
        held_now.append(put(book, [int(draw.lognormvariate(9, 1))]))
        if len(held_now) > 512:
            book.collected([(held_now.popleft(), 0) for _ in range(256)])
            view = book.view()
            assert view is not None
            assert len(view.spreads) < 100
    assert first is not None
    assert view.version - first.version < 1000
    assert {life for spread in view.spreads.values() for life in spread} == set(range(16))


def test_the_writers_node_comes_first(book: UnitBook) -> None:
    assert units_of(book, put(book, [1] * 5, node="n1"), 5) == {"unit-1": 5}
    assert set(units_of(book, put(book, [1] * 6, node="elsewhere"), 6)) == {"unit-0", "unit-1", "unit-2"}


def test_a_unit_that_ended_has_lost_its_rows_until_they_are_collected(book: UnitBook) -> None:
    before = put(book, [10] * 6)
    pending = put(book, [10] * 6)
    book.ended("unit-0", "0a")
    assert book.waiting() == [("unit-0", "actor-0")]
    with pytest.raises(UnitsGoneError, match="unit-0"):
        book.check(pending)
    assert set(units_of(book, put(book, [1] * 6), 6)) == {"unit-1", "unit-2"}
    book.started("unit-0", started(0, "b"))
    book.started("unit-0", started(0, "b"))  # is said twice
    book.ended("unit-0", "0a")  # is said late
    assert held(book)["unit-0"] == ("serving", 0, 0, 4)
    assert "unit-0" in units_of(book, put(book, [100] * 6), 6)
    view = book.view()
    assert view is not None
    assert Counter(life.alive for life in view.lives.values() if life.unit == "unit-0") == {True: 1, False: 1}
    book.collected([(write, row) for write in (before, pending) for row in range(6)])
    assert held(book)["unit-0"][3] == 0


def test_a_unit_that_is_started_unnoticed_has_lost_its_rows_too(book: UnitBook) -> None:
    write_id = put(book, [10] * 6)
    book.started("unit-0", started(0, "b"))
    with pytest.raises(UnitsGoneError):
        book.check(write_id)
    assert held(book)["unit-0"][3] == 2


def test_a_put_whose_unit_ends_while_it_is_begun_has_lost_it(book: UnitBook) -> None:
    write_id = book.place(6, 60, None)
    book.ended("unit-0", "0a")
    book.add([commands.Write(write_id, ["x"], [10] * 6)])
    with pytest.raises(UnitsGoneError, match="unit-0"):
        book.check(write_id)


def test_without_units_a_put_is_refused_and_may_be_tried_again(book: UnitBook) -> None:
    for index in range(3):
        book.ended(f"unit-{index}", f"{index}a")
    with pytest.raises(UnitsGoneError, match="starting") as error:
        book.place(1, 1, None)
    assert error.value.retryable


def test_a_unit_is_drained_when_all_that_is_left_is_garbage(book: UnitBook) -> None:
    write_id = put(book, [10] * 6)
    mine = [(write_id, row) for row in range(6) if units_of(book, write_id + row, 1) == {"unit-1": 1}]
    assert len(mine) == 2
    book.remove_unit("unit-1", now=False)
    assert set(units_of(book, put(book, [1] * 6), 6)) == {"unit-0", "unit-2"}
    assert book.removed(list) == []
    assert book.removed(lambda: mine[:1]) == []

    def nobody_collects_meanwhile() -> list[tuple[int, int]]:
        """What is counted as garbage and as collected would be counted twice, and the last row be lost."""
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(book.lock.acquire, blocking=False).result()
        return mine[:1]

    assert book.removed(nobody_collects_meanwhile) == []
    assert book.removed(lambda: mine) == ["actor-1"]
    assert "unit-1" not in {each.name for each in book.records()[0] if each.state != "removed"}
    book.started("unit-1", started(1, "b"))  # is said late
    assert [name for name, _, _ in book.live()] == ["unit-0", "unit-2"]


def test_a_unit_that_is_removed_now_has_lost_its_rows(book: UnitBook) -> None:
    write_id = put(book, [10] * 6)
    book.remove_unit("unit-1", now=True)
    assert book.removed(list) == ["actor-1"]
    assert held(book)["unit-1"] == ("removed", 0, 0, 2)
    book.collected([(write_id, row) for row in range(6)])
    assert "unit-1" not in held(book)


def test_the_last_unit_and_an_unknown_one_cannot_be_removed(book: UnitBook) -> None:
    with pytest.raises(InvalidRequestError, match=r"no storage unit 'unit-7'. Expected one of: unit-0, unit-1"):
        book.remove_unit("unit-7", now=True)
    for name in ("unit-0", "unit-1"):
        book.remove_unit(name, now=False)
    with pytest.raises(InvalidRequestError, match="only storage unit"):
        book.remove_unit("unit-2", now=False)


def test_what_is_gone_is_forgotten(book: UnitBook) -> None:
    for life in range(20):
        write_id = put(book, [10] * 6)
        book.started("unit-0", started(0, f"life {life}"))
        book.collected([(write_id, row) for row in range(6)])
    view = book.view()
    assert view is not None
    assert len(view.lives) <= 5
    assert len(view.spreads) <= 3
    assert book.view(view.version) is None
