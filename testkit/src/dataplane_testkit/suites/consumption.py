"""`check_consumption_status`: whether every task has been given every sample."""

from __future__ import annotations

import torch

from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._store import Store


def _consumed(store: Store, partition: str, *tasks: str) -> bool:
    return store.client.check_consumption_status(partition, list(tasks or ("train",)))


class ConsumptionSuite(Suite, chapter="consumption"):
    """Consumption status."""

    def test_an_empty_partition_is_not_consumed(self, store: Store) -> None:
        partition = store.register("x")
        assert not _consumed(store, partition)
        store.put(partition, ids(2), x=torch.arange(2))
        store.claim(partition, 2)
        assert _consumed(store, partition)
        store.client.clear_samples(ids(2), partition)
        assert not _consumed(store, partition)

    def test_every_sample_counts(self, store: Store) -> None:
        partition = store.filled(4, "x", "y")
        store.claim(partition, 2)
        assert not _consumed(store, partition)
        store.client.clear_samples(["s3"], partition)
        assert not _consumed(store, partition)
        store.client.clear_samples(["s2", "s0"], partition)
        assert _consumed(store, partition)
        store.put(partition, ["s0"], x=torch.arange(1))
        assert not _consumed(store, partition), "a sample that is written again is not consumed"
        store.claim(partition, 2)
        assert _consumed(store, partition)
        store.put(partition, ["s4"], y=torch.zeros(1))
        assert not _consumed(store, partition), "a new sample is not consumed"
        store.claim(partition, 1, "y")
        assert _consumed(store, partition)

    def test_every_task_counts(self, store: Store) -> None:
        partition = store.filled(2, tasks=["train", "eval"])
        store.claim(partition, 2)
        assert _consumed(store, partition, "train")
        assert not _consumed(store, partition, "train", "eval")
        store.claim(partition, 2, task="eval")
        assert _consumed(store, partition, "eval", "train")
        assert not _consumed(store, partition, "nobody")
        assert not _consumed(store, partition, "train", "nobody")
        assert not _consumed(store, store.new_id())

    def test_num_samples_must_be_written_and_consumed(self, store: Store) -> None:
        partition = store.register("x", num_samples=4)
        assert not _consumed(store, partition)
        store.put(partition, ids(2), x=torch.arange(2))
        store.claim(partition, 2)
        assert not _consumed(store, partition), "two of four samples are not written"
        assert not store.client.is_finished(partition, ["train"])
        store.put(partition, ["s2", "s3"], x=torch.arange(2))
        assert not _consumed(store, partition)
        store.claim(partition, 2)
        assert _consumed(store, partition)
        assert store.client.is_finished(partition, ["train"])

    def test_cleared_samples_count_as_written_and_consumed(self, store: Store) -> None:
        partition = store.filled(3, num_samples=4)
        store.client.clear_samples(ids(3), partition)
        assert not _consumed(store, partition)
        store.put(partition, ["s3"], x=torch.arange(1))
        assert not _consumed(store, partition)
        store.claim(partition, 1)
        assert _consumed(store, partition)
        store.client.clear_samples(["s3"], partition)
        assert _consumed(store, partition)

    def test_leased_samples_count_when_acked(self, store: Store) -> None:
        partition = store.filled(3)
        meta = store.claim(partition, 2, lease_s=600)
        store.claim(partition, 2)
        assert not _consumed(store, partition), "leased samples count before they are acked"
        store.client.ack(meta.slice(0, 1))
        assert not _consumed(store, partition)
        store.client.nack(meta.slice(1, 2))
        assert not _consumed(store, partition)
        store.client.ack(store.claim(partition, 2, lease_s=600))
        assert _consumed(store, partition)
