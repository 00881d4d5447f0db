"""Samplers and data-parallel ranks: which samples a claim gives, and to whom."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dataplane_core.client import stream
from dataplane_core.meta import KVBatchMeta
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._store import Store


def _put(store: Store, partition: str, lengths: list[int], first: int = 0) -> None:
    names = ids(first + len(lengths))[first:]
    store.put(partition, names, [{"input_lengths": each} for each in lengths], x=torch.arange(len(lengths)))


class SamplerSuite(Suite, chapter="samplers"):
    """Claims with a sampler or a rank."""

    def test_freshest_first(self, store: Store) -> None:
        partition = store.filled(6)
        store.put(partition, ["s0"], y=torch.zeros(1))  # its first write stays
        assert store.claim(partition, 2, sampler="freshest").sample_ids == ["s5", "s4"]
        assert store.claim(partition, 2).sample_ids == ["s0", "s1"]
        assert store.claim(partition, 9, sampler="freshest").sample_ids == ["s3", "s2"]

    def test_equal_ranks_get_equal_samples(self, store: Store) -> None:
        partition = store.filled(5, num_samples=5, tasks=["train", "other"])
        one, two = store.client, store.same_store_client()
        got = []
        for number, client in enumerate((one, two)):
            index = 0 if number and client is one else None  # with one client, the second asks for the same batch
            for rank in (0, 1):
                claimed = client.claim_meta(partition, "train", ["x"], 2, rank, timeout_s=10.0, batch_index=index)
                got.append(claimed.sample_ids)
        assert got == [["s0", "s1"], ["s2", "s3"]] * 2
        assert store.claim(partition, 2, task="other", dp_rank=0).sample_ids == ["s0", "s1"]
        last = one.claim_meta(partition, "train", ["x"], 2, 0, timeout_s=10.0)
        assert last.sample_ids == ["s4"]
        assert two.claim_meta(partition, "train", ["x"], 2, 0, timeout_s=10.0, batch_index=1).sample_ids == ["s4"]
        assert one.claim_meta(partition, "train", ["x"], 2, 1, timeout_s=10.0).size == 0

    def test_a_new_registration_begins_with_batch_0(self, store: Store) -> None:
        partition = store.register("x")
        for _ in range(2):
            store.put(partition, ids(4), x=torch.arange(4))
            first = store.claim(partition, 2, dp_rank=0)
            assert store.claim(partition, 2, dp_rank=0).sample_ids == ["s2", "s3"]
            again = store.claim(partition, 2, dp_rank=0, batch_index=0)
            assert again.sample_ids == first.sample_ids == ["s0", "s1"]
            store.register("x", partition_id=partition)

    def test_the_ranks_of_a_replica_share_a_lease(self, store: Store) -> None:
        partition = store.filled(2)
        metas = [store.claim(partition, 2, dp_rank=3, batch_index=0, lease_s=600.0) for _ in range(2)]
        assert metas[0] == metas[1]
        for meta in metas:
            store.client.ack(meta)
        assert store.client.check_consumption_status(partition, ["train"])

    def test_a_cleared_batch_is_refused_though_its_samples_are_written_anew(self, store: Store) -> None:
        partition = store.filled(4)
        assert store.claim(partition, 2, dp_rank=0).sample_ids == ["s0", "s1"]

        def refused() -> None:
            with store.refusal(ValueError, "cleared"):
                store.claim(partition, 2, dp_rank=0, batch_index=0)

        store.client.clear_samples(["s1"], partition)
        refused()
        store.client.clear_samples(["s0"], partition)
        refused()
        store.put(partition, ["s0", "s1"], x=torch.arange(2))
        refused()
        assert store.claim(partition, 4, dp_rank=0).sample_ids == ["s2", "s3", "s0", "s1"]
        refused()

    def test_balanced_ranks(self, store: Store) -> None:
        partition = store.register("x", num_samples=14)
        _put(store, partition, [100, 1, 1, 1, 1, 100, 1, 1, 1, 100, 100, 1])

        def claim(rank: int) -> list[str]:
            meta = store.client.claim_meta(
                partition, "train", ["x"], 3, rank, timeout_s=30.0, sampler="balanced", dp_size=4, batch_index=None
            )
            assert sum(meta.sequence_lengths or ()) == 102
            return meta.sample_ids

        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(claim, range(4)))
        assert sorted(each for part in parts for each in part) == sorted(ids(12))
        assert all(part == sorted(part, key=lambda each: int(each[1:])) for part in parts)
        _put(store, partition, [5, 5], first=12)
        rest = [store.claim(partition, 3, dp_rank=rank, sampler="balanced", dp_size=4).size for rank in range(4)]
        assert rest == [1, 1, 0, 0]

    def test_balanced_groups_stay_whole(self, store: Store) -> None:
        partition = store.register("x", group_size=2)
        names = [f"k{group}_g{member}" for group in range(4) for member in range(2)]
        lengths = [9, 9, 1, 1, 1, 1, 8, 9]
        store.put(partition, names, [{"input_lengths": each} for each in lengths], x=torch.arange(8))
        parts = [
            store.claim(partition, 4, dp_rank=rank, sampler="balanced", dp_size=2, blocking=True, timeout_s=10.0)
            for rank in range(2)
        ]
        assert [part.sample_ids for part in parts] == [names[:2] + names[4:6], names[2:4] + names[6:]]

    @pytest.mark.parametrize("sampler", ["first_write", "freshest", "balanced"])
    def test_ranks_get_equal_numbers_of_batches(self, store: Store, sampler: str) -> None:
        partition = store.register("x", "tokens", num_samples=5)
        columns = {"x": torch.arange(5.0), "tokens": [[1] * each for each in range(1, 6)]}
        store.client.put_samples(ids(5), partition, columns)
        sizes: list[list[int]] = []
        for rank in (1, 0):  # one after the other: the ranks need not ask at the same time
            batches = stream(
                store.same_store_client(),
                partition,
                "train",
                ["x", "tokens"],
                2,
                dp_rank=rank,
                dp_size=2,
                sampler=sampler,
            )
            sizes.append([])
            for batch in batches:
                assert len(batch.columns["x"]) == batch.meta.size
                assert (batch.columns["x"].dtype, batch.columns["tokens"].dtype) == (torch.float32, torch.int64)
                sizes[-1].append(batch.meta.size)
        assert sizes == [[2, 0], [2, 1]]
        assert store.client.check_consumption_status(partition, ["train"])

    def test_the_end_is_the_same_for_all_ranks(self, store: Store) -> None:
        partition = store.filled(2, num_samples=2)

        def claim(rank: int, batch_index: int) -> KVBatchMeta:
            return store.client.claim_meta(
                partition, "train", ["x"], 1, rank, lease_s=600.0, dp_size=2, batch_index=batch_index, timeout_s=30.0
            )

        first = [claim(rank, 0) for rank in (0, 1)]
        assert [meta.sample_ids for meta in first] == [["s0"], ["s1"]]
        assert claim(0, 1).size == 0
        store.client.nack(first[0])
        assert claim(1, 1).size == claim(0, 1).size == 0
        assert [claim(rank, 2).sample_ids for rank in (1, 0)] == [[], ["s0"]]
