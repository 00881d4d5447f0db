"""Guarantees, tested only where declared: durable, fenced, atomic_overwrite, no_pickle."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from dataplane_core.errors import DataPlaneError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, batch, ids, items_of, jagged, rows_of
from dataplane_testkit._profiles import by_profile
from dataplane_testkit._store import Store
from dataplane_testkit._timing import in_threads

_NAMES = ids(16)


def _overlap(store: Store, act: Callable[[str], None], check: Callable[[str], None]) -> None:
    """Repeats a put into 16 known samples, and each time runs ``act`` at another moment of the put."""

    def put(partition: str) -> float:
        start = time.monotonic()
        with contextlib.suppress(DataPlaneError):  # a put that overlaps a clear may fail
            store.put(partition, _NAMES, [{"new": 1}] * 16, y=torch.full((16, 64), 7))
        return time.monotonic() - start

    def act_after(partition: str, delay_s: float) -> None:
        time.sleep(delay_s)
        act(partition)

    put_s = 0.0
    rounds = by_profile(10, 40, 200)
    for number in range(rounds):
        partition = store.register("x", "y")
        store.put(partition, _NAMES, [{"old": 1}] * 16, x=torch.arange(16))
        delay_s = put_s * number / rounds
        took_s, _ = in_threads(partial(put, partition), partial(act_after, partition, delay_s))
        put_s = max(put_s, min(took_s, 0.1))
        check(partition)


def _whole_or_nothing(store: Store, partition: str) -> bool:
    """Asserts that the put of `_overlap` is there as a whole or not at all. Returns whether it is there."""
    there = [name for name in _NAMES if store.has(partition, name, "y")]
    assert there in ([], _NAMES), f"{len(there)} of 16 rows of a put that overlapped a clear are there"
    assert not any(store.has(partition, name, "x") for name in _NAMES), "cleared cells can be read again"
    return bool(there)


class GuaranteeSuite(Suite, chapter="guarantees"):
    """Capabilities that are guarantees, not operations."""

    def test_nothing_is_unpickled(self, store: Store) -> None:
        partition = store.register("x", "o")
        columns = {"x": jagged([torch.arange(2), torch.arange(5)]), "o": as_objects({"a": [1]}, torch.arange(3))}
        with _unpickling_is_reported() as calls:
            store.client.put_samples(ids(2), partition, batch(2, **columns), [{"n": 1}, {"n": 2}])
            store.get(partition, ids(2), "x", "o")
            if store.declares(Capability.CLAIMS):
                store.claim(partition, 2)
                store.client.check_consumption_status(partition, ["train"])
            if store.declares(Capability.LISTING):
                store.client.list_samples(partition)
            store.client.clear_samples(["s0"], partition)
        assert not calls, f"data was unpickled in {calls[0]}"

    def test_committed_puts_survive_a_crash(self, store: Store) -> None:
        partition = store.register("x", "o")
        store.put(partition, ids(50), [{"n": n} for n in range(50)], x=torch.arange(50), o=as_objects(*range(50)))
        given = store.claim(partition, 10).sample_ids if store.declares(Capability.CLAIMS) else []
        store.deployment.end_workers()  # a restart may replace files that the workers have open
        store.ask_author("restart")
        assert store.get(partition, ids(50))["x"].tolist() == list(range(50))
        if given:
            assert store.claim(partition, 50).sample_ids == ids(50)[10:], (
                "after the crash, claimed samples are given again, or others are lost"
            )

    @pytest.mark.parametrize("what", ["clear", "registration"])
    def test_puts_that_overlap_clears_are_whole_or_nothing(self, store: Store, what: str) -> None:
        def act(partition: str) -> None:
            if what == "clear":
                store.client.clear_samples(_NAMES, partition)
            else:
                store.client.register_partition(partition, ["x", "y"], None, ["train"])

        def check(partition: str) -> None:
            there = _whole_or_nothing(store, partition)
            if there and store.declares(Capability.LISTING):
                meta = store.client.list_samples(partition)
                assert meta.tags == [{"new": 1}] * 16, "a sample that was cleared has its old tags"

        _overlap(store, act, check)

    def test_reads_see_all_old_or_all_new_cells(self, store: Store) -> None:
        partition = store.register("x", "y", "o")
        names = ids(8)

        def write(value: int) -> None:
            rows = [torch.full((1 + (value + index) % 5,), value) for index in range(8)]
            store.put(partition, names, x=jagged(rows), y=torch.full((8,), value), o=as_objects(*[value] * 8))

        write(0)
        done = threading.Event()

        def writer() -> int:
            try:
                for value in range(1, by_profile(20, 80, 400)):
                    write(value)
            finally:
                done.set()
            return 0

        def reader() -> int:
            reads = 0
            while not done.is_set() or not reads:
                found = store.get(partition, names, "o", "x", "y")
                rows, values, items = rows_of(found["x"], 8), found["y"].tolist(), items_of(found["o"])
                for index in range(8):
                    seen = {values[index], items[index], *rows[index].tolist()}
                    assert len(seen) == 1, f"row {index} mixes the versions {sorted(seen)}"
                    assert len(rows[index]) == 1 + (values[index] + index) % 5
                reads += 1
            return reads

        in_threads(writer, reader, reader)


@contextmanager
def _unpickling_is_reported() -> Iterator[list[str]]:
    """Yields a list of the places that unpickle data in the block.

    It finds the functions of pickle wherever a module or a class refers to them: multiprocessing's connections and
    queues call an attribute of a class.
    """
    calls: list[str] = []

    def note() -> None:
        frame = sys._getframe(2)
        calls.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def reporting(original: Callable[..., Any]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            note()
            return original(*arguments, **options)

        return staticmethod(call)

    class Unpickler(pickle.Unpickler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            note()
            super().__init__(*arguments, **options)

    functions = {id(each): reporting(each) for each in (pickle.loads, pickle.load)}
    instead = {**functions, id(pickle.Unpickler): Unpickler}
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for owner in [*sys.modules.values(), *_classes()]:
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if id(value) in instead:
                    replaced.append((owner, name, value))
                    setattr(owner, name, instead[id(value)])
        yield calls
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)


def _classes() -> list[type]:
    """All classes of this process."""
    found: dict[int, type] = {id(object): object}
    last = [object]
    while last:
        last = [each for cls in last for each in type.__subclasses__(cls) if id(each) not in found]
        found.update({id(each): each for each in last})
    return list(found.values())
