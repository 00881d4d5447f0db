"""`clear_samples`: it deletes exactly the samples or the partition that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane_core.errors import UnknownPartitionError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids, jagged
from dataplane_testkit._store import Store


class ClearSuite(Suite, chapter="clear"):
    """Clears of samples and of partitions."""

    def test_cleared_rows_are_gone(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ids(5), x=torch.arange(5), y=jagged([torch.arange(index) for index in range(5)]))
        store.client.clear_samples(["s3", "nobody", "s0", "s3"], partition)
        store.client.clear_samples(["s3"], partition)
        store.client.clear_samples([], partition)
        for sample_id in ("s0", "s3"):
            for field in ("x", "y"):
                with store.refusal(KeyError, f"'{sample_id}'"):
                    store.get(partition, [sample_id], field)
        assert store.get(partition, ["s4", "s1", "s2"])["x"].tolist() == [4, 1, 2]
        if store.declares(Capability.LISTING):
            assert store.client.list_samples(partition).sample_ids == ["s1", "s2", "s4"]

    def test_cleared_tags_are_gone(self, store: Store) -> None:
        partition = store.register("x", "y")
        store.put(partition, ["tags"], [{"n": 1}])
        store.put(partition, ["x", "stays"], [{"n": 2}] * 2, x=torch.zeros(2))
        store.put(partition, ["y", "both"], [{"n": 3}] * 2, y=torch.zeros(2))
        store.put(partition, ["both"], x=torch.zeros(1))
        store.client.clear_samples(["x", "tags", "both", "y"], partition)
        store.put(partition, ["tags", "x", "y", "both"], [{}, {"new": 1}, {}, {}], x=torch.arange(4).float())
        assert store.tags_of(partition) == {"stays": {"n": 2}, "tags": {}, "x": {"new": 1}, "y": {}, "both": {}}
        assert not store.has(partition, "both", "y")

    def test_cleared_cursors_are_gone(self, store: Store) -> None:
        partition = store.filled(3)
        assert store.claim(partition, 2).sample_ids == ["s0", "s1"]
        store.client.clear_samples(["s0", "s1"], partition)
        assert store.claim(partition, 1).sample_ids == ["s2"]
        store.put(partition, ["s1", "s9"], x=torch.arange(2))
        assert store.claim(partition, 3).sample_ids == ["s1", "s9"]

    def test_ids_may_be_used_again(self, store: Store) -> None:
        partition, other = store.register("x", "y"), store.register("x")
        store.put(other, ids(3), x=torch.arange(3) + 100)
        for value in range(10):
            store.put(partition, ids(3), x=torch.full((3,), value))
            if value % 2:
                store.put(partition, ids(3), y=torch.full((3,), value))
            assert store.get(partition, ids(3))["x"].tolist() == [value] * 3
            assert store.has(partition, "s1", "y") == bool(value % 2)
            store.client.clear_samples(ids(3)[::-1], partition)
            store.put(partition, ["z"], x=torch.tensor([value]))
            store.client.clear_samples(["z"], partition)
        assert store.get(other, ids(3))["x"].tolist() == [100, 101, 102]

    def test_a_cleared_partition_is_gone(self, store: Store) -> None:
        partition = store.filled(3, tags=[{"old": 1}] * 3)
        store.client.clear_samples(None, partition)
        calls: list[tuple[Capability | None, Callable[[], Any]]] = [
            (None, lambda: store.get(partition, ["s0"])),
            (None, lambda: store.put(partition, ["s0"], x=torch.arange(1))),
            (None, lambda: store.put(partition, ["s0"], [{"n": 1}])),
            (Capability.CLAIMS, lambda: store.claim(partition, 1)),
            (Capability.LISTING, lambda: store.client.list_samples(partition)),
        ]
        for need, call in calls:
            if need is None or store.declares(need):
                with store.refusal(UnknownPartitionError, partition):
                    call()
        with pytest.raises(UnknownPartitionError):
            store.hooks.describe(partition)
        if store.declares(Capability.CLAIMS):
            assert not store.client.check_consumption_status(partition, ["train"])
        store.register("x", partition_id=partition)
        assert not store.has(partition, "s0")
        store.put(partition, ["s2"], x=torch.ones(1, 2))
        assert store.get(partition, ["s2"])["x"].tolist() == [[1.0, 1.0]]
        if store.declares(Capability.LISTING):
            assert store.tags_of(partition) == {"s2": {}}

    def test_other_partitions_stay(self, store: Store) -> None:
        base = store.new_id()
        first, second, third = (store.register("x", partition_id=base + end) for end in ("", "-2", "/x"))
        for place, partition in enumerate((first, second, third)):
            store.put(partition, ids(3), x=torch.arange(3) + 10 * place)
        assert store.get(first, ids(3))["x"].tolist() == [0, 1, 2]
        store.client.clear_samples(["s1"], first)
        store.register("x", partition_id=first)
        store.client.clear_samples(None, first)
        for place, partition in enumerate((second, third), start=1):
            assert store.get(partition, ids(3))["x"].tolist() == [10 * place + row for row in range(3)]

    def test_an_unknown_partition_is_nothing_to_do(self, store: Store) -> None:
        unknown = store.new_id()
        store.client.clear_samples(None, unknown)
        store.client.clear_samples(["a"], unknown)
        with store.refusal(KeyError, unknown):
            store.get(unknown, ["a"])

    def test_clear_hook_counts_its_rows(self, store: Store) -> None:
        partition = store.filled(5)
        assert store.hooks.clear(partition, ["s0", "nobody"]).num_samples == 1
        assert store.hooks.clear(partition, ["s0"]).num_samples == 0
        assert store.hooks.clear(partition, None).num_samples == 4
        assert store.hooks.clear(partition, None).num_samples == 0
