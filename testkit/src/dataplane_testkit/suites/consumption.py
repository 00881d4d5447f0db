"""`check_consumption_status`: whether every task has been given every sample."""

from __future__ import annotations

import torch

from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._marks import proves
from dataplane_testkit._store import Store


def _consumed(store: Store, partition: str, *tasks: str) -> bool:
    return store.client.check_consumption_status(partition, list(tasks or ("train",)))


class ConsumptionSuite(Suite, chapter="consumption", proof=Capability.CLAIMS):
    """Consumption status."""

    def test_an_empty_partition_is_not_consumed(self, store: Store) -> None:
        """Contract: "False while the partition holds no sample"

        Check first: the comparison of counts in the check_consumption hook. A partition without samples must not count
        as consumed.
        """
        partition = store.register("x")
        assert not _consumed(store, partition)
        store.put(partition, ids(2), x=torch.arange(2))
        store.claim(partition, 2)
        assert _consumed(store, partition)
        store.client.clear_samples(ids(2), partition)
        assert not _consumed(store, partition)

    def test_every_sample_counts(self, store: Store) -> None:
        """Contract: "whether every task has consumed every sample that the partition holds."

        Check first: compare the samples, not the number of claims. A sample that lacks the fields of the claims belongs
        to the partition too. A clear must remove a sample from both numbers: those that the partition holds, and those
        that the task has been given.
        """
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
        """Contract: "whether every task has consumed every sample that the partition holds." and "False while the
        partition holds no sample, and for an unknown task."

        Check first: the reply must be consumed=False if any of the tasks has not consumed everything, or is unknown.
        check_consumption must not raise for it.
        """
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
        """Contract: "With num_samples, it is false until that many distinct ids were written, whatever was consumed
        before."

        Check first: the check_consumption hook must compare the ids ever written with the num_samples of the
        registration. Else a consumer that is faster than its producer ends early.
        """
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
        """Contract: "Samples that were cleared then count as written and consumed, so that it is also true when all
        were cleared."

        Check first: with num_samples, a partition that holds no sample can be consumed. Compare the ids ever written
        with num_samples, and what each task has consumed with what is held.
        """
        partition = store.filled(3, num_samples=4)
        store.client.clear_samples(ids(3), partition)
        assert not _consumed(store, partition)
        store.put(partition, ["s3"], x=torch.arange(1))
        assert not _consumed(store, partition)
        store.claim(partition, 1)
        assert _consumed(store, partition)
        store.client.clear_samples(["s3"], partition)
        assert _consumed(store, partition)

    @proves(Capability.LEASES, Capability.CLAIMS)
    def test_leased_samples_count_when_acked(self, store: Store) -> None:
        """Contract: "A sample given under a lease counts once it is acked."

        Check first: a leased sample must count as consumed only after its ack.
        """
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
