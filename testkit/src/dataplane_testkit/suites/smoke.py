"""The simplest uses of a store: put and read a few rows and some hundreds of rows.

These tests run first, so that a basic fault is reported at once and not after minutes of slower tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch

from dataplane_core.errors import DataPlaneError
from dataplane_testkit._base import Suite
from dataplane_testkit._blobs import new_keys, of_all
from dataplane_testkit._columns import as_objects, check_column, ids, items_of, jagged
from dataplane_testkit._store import Store
from dataplane_testkit._timing import PROMPT_S

#: Rows of the larger tests. With so many rows, a store that loses one in a hundred is nearly always caught.
_ROWS: Final = 400
#: Rows of one put.
_STEP: Final = 100


#: A global state of torch -> how it is read, how it is set, and another value than the usual one.
_STATES: Final[Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]]] = {
    "device": (lambda: None, torch.set_default_device, "meta"),  # torch 2.7 cannot say that there is none
    "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "grad": (torch.is_grad_enabled, torch.set_grad_enabled, False),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "threads": (torch.get_num_threads, torch.set_num_threads, 3),
}


@contextmanager
def _state_of_torch(name: str) -> Iterator[None]:
    if name == "inference":
        with torch.inference_mode():
            yield
        return
    read, write, value = _STATES[name]
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _column(values: list[int]) -> torch.Tensor:
    return jagged([torch.full((value % 5,), value) for value in values])


def _put_hundreds(store: Store, partition: str) -> None:
    for start in range(0, _ROWS, _STEP):
        values = list(range(start, start + _STEP))
        store.put(partition, ids(_ROWS)[start : start + _STEP], x=torch.tensor(values), y=_column(values))


def _readable(store: Store, partition: str, names: list[str], fields: list[str]) -> None:
    """Asserts that rows can be read at all. Fails long before the client's own deadline."""
    try:
        store.hooks.within(PROMPT_S).get(partition, names, fields)
    except DataPlaneError as error:
        raise AssertionError(f"{len(names)} samples were put, and cannot be read: {error}") from error


class SmokeSuite(Suite, chapter="smoke"):
    """What every other test of the kit relies on."""

    def test_smoke_hundreds_of_blobs_come_back(self, store: Store) -> None:
        backend = store.blobs()
        blobs = {key: key.encode() * 3 for key in new_keys(_ROWS)}
        for key, data in blobs.items():
            backend.put(key, data)
        lost = [key for key, data in blobs.items() if backend.get(key) != data]
        assert not lost, f"{of_all(lost, blobs)} are lost: put returned, but get does not find them"
        backend.delete_many(list(blobs))

    def test_smoke_a_few_rows_go_in_and_out(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(3), [{"n": 0}, {"n": 1}, {"n": 2}], x=torch.arange(3), y=_column([7, 8, 9]))
        _readable(store, partition, ids(3), ["x", "y"])
        found = store.get(partition, ["s2", "s0", "s1"], "x", "y")
        assert found["x"].tolist() == [2, 0, 1]
        check_column(found["y"], list(_column([9, 7, 8]).unbind()))

    def test_smoke_hundreds_of_rows_go_in_and_out(self, store: Store) -> None:
        partition = store.register("x", "y")
        _put_hundreds(store, partition)
        _readable(store, partition, ids(_ROWS), ["x", "y"])
        order = list(range(_ROWS))[::-1]
        found = store.get(partition, [f"s{value}" for value in order], "x", "y")
        assert found["x"].tolist() == order
        check_column(found["y"], list(_column(order).unbind()))

    @pytest.mark.parametrize("state", [*_STATES, "inference", "compile"])
    def test_smoke_torchs_defaults_change_nothing(self, store: Store, state: str) -> None:
        partition = store.register("x", "y", "f", "o")
        columns = {
            "x": torch.arange(3),
            "y": _column([7, 8, 9]),
            "f": [[0.5], [1.5, 2.5], []],
            "o": as_objects(1, "a", {}),
        }

        def run() -> Any:
            store.client.put_samples(ids(3), partition, columns, tags=[{"n": 0}, {"n": 1}, {"n": 2}])
            return store.client.get_samples(["s2", "s0", "s1"], partition, list(columns))

        if state == "compile":
            found = torch.compile(run, backend="eager")()
        else:
            with _state_of_torch(state):
                found = run()
        for read in (found, store.get(partition, ["s2", "s0", "s1"], *columns)):
            assert read["x"].tolist() == [2, 0, 1]
            check_column(read["y"], list(_column([9, 7, 8]).unbind()))
            floats = [torch.tensor(row, dtype=torch.float32) for row in ([], [0.5], [1.5, 2.5])]
            check_column(read.get("f"), floats)
            assert items_of(read.get("o")) == [{}, 1, "a"]

    def test_smoke_hundreds_of_rows_are_claimed_once(self, store: Store) -> None:
        partition = store.register("x", "y", num_samples=_ROWS)
        _put_hundreds(store, partition)
        given: list[str] = []
        while meta := store.claim(partition, 64).sample_ids:
            given += meta
            assert len(given) <= _ROWS, f"claims gave {len(given)} samples of {_ROWS}"
        assert given == ids(_ROWS)
        assert store.client.check_consumption_status(partition, ["train"])

    def test_smoke_a_clear_takes_what_it_names(self, store: Store) -> None:
        partition = store.register("x", "y")
        _put_hundreds(store, partition)
        store.client.clear_samples([f"s{value}" for value in range(0, _ROWS, 2)], partition)
        rest = list(range(1, _ROWS, 2))
        _readable(store, partition, [f"s{value}" for value in rest], ["x"])
        assert store.get(partition, [f"s{value}" for value in rest])["x"].tolist() == rest
        assert not store.has(partition, "s0")
        assert not store.has(partition, f"s{_ROWS - 2}")
        store.client.clear_samples(None, partition)
        store.register("x", partition_id=partition)
        assert not store.has(partition, "s1")
        store.put(partition, ["s1"], x=torch.tensor([-1]))
        assert store.get(partition, ["s1"])["x"].tolist() == [-1]
