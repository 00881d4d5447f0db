"""Storage units are listed, added and removed during a run."""

from __future__ import annotations

import torch

from dataplane_core.errors import InvalidRequestError, LostSamplesError
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._hooks import Hooks, backend_of
from dataplane_testkit._store import Store
from dataplane_testkit._timing import STARTS_S, eventually

_NUM_ROWS = 24


def _held(store: Store, name: str) -> int:
    """The rows that a unit holds; 0 if it is no longer listed."""
    return sum(each.num_rows for each in store.client.list_units() if each.name == name)


def _has_ended(store: Store, name: str) -> None:
    """Waits until a unit is no longer listed."""
    eventually(lambda: name not in {each.name for each in store.client.list_units()}, STARTS_S, "the end of the unit")


class UnitSuite(Suite, chapter="units"):
    """`list_units`, `add_units`, `remove_unit`."""

    def test_a_unit_that_is_added_gets_rows_and_is_drained(self, store: Store) -> None:
        partition = store.register("x")
        before = {each.name for each in store.client.list_units()}
        assert all(each.num_rows >= 0 and each.size_bytes >= 0 for each in store.client.list_units())
        (new,) = store.client.add_units(1)
        assert new.name not in before
        assert new.state == "serving"
        assert {each.name for each in Hooks(backend_of(store.same_store_client())).units()} == {*before, new.name}
        for number in range(20):
            store.put(partition, ids(_NUM_ROWS, f"put{number}-"), x=torch.arange(_NUM_ROWS))
            if held := _held(store, new.name):
                break
        assert held, "a new unit gets no rows"
        removed = store.client.remove_unit(new.name)
        assert removed is not None
        assert removed.state == "draining"
        store.put(partition, ids(_NUM_ROWS, "later"), x=torch.arange(_NUM_ROWS))
        assert _held(store, new.name) == held
        for each in range(number + 1):
            assert store.get(partition, ids(_NUM_ROWS, f"put{each}-"))["x"].tolist() == list(range(_NUM_ROWS))
            store.client.clear_samples(ids(_NUM_ROWS, f"put{each}-"), partition)
        _has_ended(store, new.name)
        assert store.get(partition, ids(_NUM_ROWS, "later"))["x"].tolist() == list(range(_NUM_ROWS))

    def test_a_unit_that_is_removed_now_loses_its_rows_and_no_others(self, store: Store) -> None:
        partition = store.register("x")
        (new,) = store.client.add_units(1)
        names = ids(10 * _NUM_ROWS)
        for first in range(0, len(names), _NUM_ROWS):
            store.put(partition, names[first : first + _NUM_ROWS], x=torch.arange(_NUM_ROWS))
        held = _held(store, new.name)
        assert held
        store.client.remove_unit(new.name, now=True)
        lost: list[str] = []
        for row, name in enumerate(names):
            try:
                assert store.get(partition, [name])["x"].item() == row % _NUM_ROWS
            except LostSamplesError as error:
                lost += error.missing_samples
        assert len(lost) == held
        store.client.clear_samples(lost, partition)
        store.put(partition, lost, x=torch.arange(len(lost)))
        assert store.get(partition, lost)["x"].tolist() == list(range(len(lost)))
        store.client.clear_samples(None, partition)
        _has_ended(store, new.name)

    def test_units_that_are_not_there_are_refused(self, store: Store) -> None:
        names = [each.name for each in store.client.list_units() if each.state == "serving"]
        for refused in ("no such unit", *(names if len(names) == 1 else ())):
            with store.refusal(InvalidRequestError):
                store.client.remove_unit(refused)
        with store.refusal(InvalidRequestError):
            store.client.add_units(0)
        assert [each.name for each in store.client.list_units() if each.state == "serving"] == names
