"""Overwrites: the last committed write of a cell wins, and changes nothing else."""

from __future__ import annotations

import torch

from dataplane_testkit._base import Suite
from dataplane_testkit._columns import as_objects, check_column, ids, items_of, jagged
from dataplane_testkit._store import Store


class OverwriteSuite(Suite, chapter="overwrite"):
    """Puts of cells that are already produced."""

    def test_the_last_write_wins(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(3), [{"n": index} for index in range(3)], x=torch.arange(3), y=torch.arange(3))
        for value in range(5, 9):
            store.put(partition, ["s1"], x=torch.tensor([value]))
            assert store.get(partition, ids(3))["x"].tolist() == [0, value, 2]
        assert store.get(partition, ids(3), "y")["y"].tolist() == [0, 1, 2]
        assert store.tags_of(partition)["s1"] == {"n": 1}

    def test_an_overwrite_may_change_lengths(self, store: Store) -> None:
        partition = store.register("x", "o")
        rows = [torch.arange(3), torch.arange(0), torch.arange(5)]
        store.put(partition, ids(3), x=jagged(rows), o=as_objects([1], "long" * 100, None))
        rows[0], rows[2] = torch.arange(7) + 10, torch.arange(1) + 20
        store.put(partition, ["s2", "s0"], x=jagged([rows[2], rows[0]]), o=as_objects({"new": 1}, ""))
        found = store.get(partition, ids(3), "x", "o")
        check_column(found["x"], rows)
        assert items_of(found["o"]) == ["", "long" * 100, {"new": 1}]

    def test_one_put_may_overwrite_and_add(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ["a", "b"], [{"n": 1, "m": 1}] * 2, x=torch.tensor([1, 2]))
        store.put(partition, ["b", "c"], [{"n": 2}] * 2, x=torch.tensor([20, 30]), y=torch.tensor([200, 300]))
        assert store.get(partition, ["a", "b", "c"])["x"].tolist() == [1, 20, 30]
        assert store.get(partition, ["c", "b"], "y")["y"].tolist() == [300, 200]
        assert not store.has(partition, "a", "y")
        assert store.tags_of(partition) == {"a": {"n": 1, "m": 1}, "b": {"n": 2, "m": 1}, "c": {"n": 2}}

    def test_an_overwrite_gives_no_sample_again(self, store: Store) -> None:
        partition = store.filled(4)
        assert store.claim(partition, 2).size == 2
        store.put(partition, ["s0", "s3", "s1"], x=torch.arange(3) + 10)
        assert store.claim(partition, 4).sample_ids == ["s2", "s3"]
        assert store.client.check_consumption_status(partition, ["train"])
        store.put(partition, ids(4), x=torch.arange(4) + 20)
        assert store.claim(partition, 4).size == 0
        assert store.client.check_consumption_status(partition, ["train"])

    def test_a_refused_overwrite_changes_nothing(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(2), [{"n": 1}] * 2, x=torch.arange(2), y=torch.arange(2))
        with store.refusal(ValueError, "y"):
            store.put(partition, ids(2), [{"n": 2}] * 2, x=torch.arange(2) + 5, y=torch.zeros(2))
        assert store.get(partition, ids(2))["x"].tolist() == [0, 1]
        assert store.get(partition, ids(2), "y")["y"].tolist() == [0, 1]
        assert store.tags_of(partition) == {"s0": {"n": 1}, "s1": {"n": 1}}
