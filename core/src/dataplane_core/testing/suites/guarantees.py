"""Guarantees, tested only where declared: durable, fenced, atomic_overwrite, no_pickle."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dataplane_core.capabilities import Capability
from dataplane_core.errors import DataPlaneError
from dataplane_core.testing._base import Suite, proves
from dataplane_core.testing._columns import as_objects, batch, ids, jagged, rows_of
from dataplane_core.testing._profiles import is_long
from dataplane_core.testing._store import Store, not_run
from dataplane_core.testing._timing import in_threads

__all__ = ["GuaranteeSuite"]


class GuaranteeSuite(Suite, chapter="guarantees"):
    """What a backend promises beyond the operations."""

    @proves(Capability.NO_PICKLE)
    def test_nothing_is_unpickled(self, store: Store) -> None:
        """Contract: "Core and its codec never unpickle. A backend whose transport does lacks no_pickle".

        Check first: the transport and the storage of the engine; multiprocessing and Ray both unpickle.
        """
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
        assert not calls, f"unpickled in {calls[0]}"

    @proves(Capability.DURABLE)
    def test_committed_puts_survive_a_crash(self, store: Store) -> None:
        """Contract: "Guarantees, tested only where declared: scope (process, host, cluster), durable, fenced,
        atomic_overwrite, no_pickle."

        Check first: a committed put survives the death of the store's processes: the engine's persistence is on, and
        synchronous; restart kills with -9, not politely.
        """
        partition = store.register("x", "o")
        store.put(partition, ids(50), [{"n": n} for n in range(50)], x=torch.arange(50), o=as_objects(*range(50)))
        given = store.claim(partition, 10).sample_ids if store.declares(Capability.CLAIMS) else []
        try:
            store.case.restart(store.backend)
        except NotImplementedError:
            not_run("the author's class supplies no restart")
        assert store.get(partition, ids(50))["x"].tolist() == list(range(50))
        if given:
            assert store.claim(partition, 50).sample_ids == ids(50)[10:], "claims were forgotten or lost in the crash"

    @proves(Capability.FENCED)
    def test_puts_that_overlap_clears_are_whole_or_nothing(self, store: Store) -> None:
        """Contract: "A put that overlaps a clear or a re-registration of the same sample is safe only with fenced".

        Check first: the commit checks, atomically, that the rows and the registration are those that the put began
        with.
        """
        names = ids(16)
        for number in range(150 if is_long() else 30):
            partition = store.register("x", "y")
            store.put(partition, names, [{"old": 1}] * 16, x=torch.arange(16))

            def put(partition: str = partition) -> bool:
                try:
                    store.put(partition, names, [{"new": 1}] * 16, y=torch.full((16, 64), 7))
                except DataPlaneError:
                    return False
                return True

            def clear(partition: str = partition, order: int = 1 if number % 2 else -1) -> bool:
                store.client.clear_samples(names[::order], partition)
                return True

            in_threads(put, clear)
            there = [name for name in names if store.has(partition, name, "y")]
            assert there in ([], names), f"{len(there)} of 16 rows of a put that overlapped a clear are there"
            assert not any(store.has(partition, name, "x") for name in names), "cleared cells came back"
            if there and store.declares(Capability.LISTING):
                meta = store.client.list_samples(partition)
                assert meta.tags == [{"new": 1}] * 16, "a cleared sample came back with its old tags"

    @proves(Capability.FENCED)
    def test_puts_that_overlap_a_registration_are_whole_or_nothing(self, store: Store) -> None:
        """Contract: "A put that overlaps a clear or a re-registration of the same sample is safe only with fenced".

        Check first: a put belongs to the registration that it began in; it commits there or fails.
        """
        names = ids(16)
        for _ in range(150 if is_long() else 30):
            partition = store.register("x", "y")
            store.put(partition, names, x=torch.arange(16))

            def put(partition: str = partition) -> bool:
                try:
                    store.put(partition, names, [{"new": 1}] * 16, y=torch.full((16, 64), 7))
                except DataPlaneError:
                    return False
                return True

            def register(partition: str = partition) -> bool:
                store.client.register_partition(partition, ["x", "y"], None, ["train"])
                return True

            in_threads(put, register)
            there = [name for name in names if store.has(partition, name, "y")]
            assert there in ([], names), f"{len(there)} of 16 rows of a put that overlapped a registration are there"
            assert not any(store.has(partition, name, "x") for name in names), (
                "rows of the earlier registration are back"
            )

    @proves(Capability.ATOMIC_OVERWRITE)
    def test_reads_see_all_old_or_all_new_cells(self, store: Store) -> None:
        """Contract: "a read that overlaps an overwrite may mix old and new cells unless atomic_overwrite."

        Check first: a read takes, per sample, all its cells from one committed state.
        """
        partition = store.register("x", "y", "o")
        names = ids(8)

        def write(value: int) -> None:
            rows = [torch.full((1 + (value + index) % 5,), value) for index in range(8)]
            store.put(partition, names, x=jagged(rows), y=torch.full((8,), value), o=as_objects(*[value] * 8))

        write(0)
        done = threading.Event()

        def writer() -> int:
            try:
                for value in range(1, 400 if is_long() else 80):
                    write(value)
            finally:
                done.set()
            return 0

        def reader() -> int:
            reads = 0
            while not done.is_set() or not reads:
                found = store.get(partition, names, "o", "x", "y")
                rows, values, items = rows_of(found["x"], 8), found["y"].tolist(), found["o"].tolist()
                for index in range(8):
                    seen = {values[index], items[index], *rows[index].tolist()}
                    assert len(seen) == 1, f"row {index} mixes the versions {sorted(seen)}"
                    assert len(rows[index]) == 1 + (values[index] + index) % 5
                reads += 1
            return reads

        in_threads(writer, reader, reader)


@contextmanager
def _unpickling_is_reported() -> Iterator[list[str]]:
    """Yields the places that unpickle in the block, wherever they imported the functions to."""
    calls: list[str] = []

    def reporting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            calls.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return original(*arguments, **options)

        return call

    originals: list[Any] = [pickle.loads, pickle.load, pickle.Unpickler]
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for module in list(sys.modules.values()):
            for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else []:
                if any(value is original for original in originals) and module is not sys.modules[__name__]:
                    replaced.append((module, name, value))
                    setattr(module, name, reporting(value))
        yield calls
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
