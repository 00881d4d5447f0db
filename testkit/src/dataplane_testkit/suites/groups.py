"""GRPO groups: a claim gives whole groups only."""

from __future__ import annotations

import torch

from dataplane_core.errors import InvalidRequestError
from dataplane_testkit._base import Suite
from dataplane_testkit._store import Store
from dataplane_testkit._timing import bounded


def _group(name: str, size: int = 3) -> list[str]:
    return [f"{name}_g{index}" for index in range(size)]


class GroupSuite(Suite, chapter="groups"):
    """Claims of a partition with a group size."""

    def test_incomplete_groups_are_not_given(self, store: Store) -> None:
        partition = store.filled(["a_g0", "b_g0", "a_g1", "b_g1"], tasks=["train", "eval"], group_size=3)
        assert store.claim(partition, 6).size == 0
        store.put(partition, ["b_g2"], x=torch.zeros(1, dtype=torch.int64))
        assert store.claim(partition, 6).sample_ids == _group("b")
        store.put(partition, ["a_g2"], x=torch.zeros(1, dtype=torch.int64))
        assert sorted(store.claim(partition, 6).sample_ids) == _group("a")
        assert sorted(store.claim(partition, 6, task="eval").sample_ids) == [*_group("a"), *_group("b")]

    def test_groups_wait_for_every_required_field(self, store: Store) -> None:
        partition = store.filled(["a_g0", "a_g1", "b_g0", "b_g1"], "x", "y", group_size=2)
        store.put(partition, ["a_g0", "b_g1", "b_g0"], y=torch.zeros(3))
        assert store.claim(partition, 4, "x", "y").sample_ids == ["b_g0", "b_g1"]
        assert store.claim(partition, 4, "x").sample_ids == ["a_g0", "a_g1"]

    def test_claims_never_split_a_group(self, store: Store) -> None:
        partition = store.register("x", group_size=2)
        order = ["a_g0", "b_g0", "c_g0", "c_g1", "b_g1", "a_g1"]
        store.put(partition, order, x=torch.arange(6))
        given = [store.claim(partition, 2).sample_ids for _ in range(3)]
        assert [sorted(pair) for pair in given] == [["a_g0", "a_g1"], ["b_g0", "b_g1"], ["c_g0", "c_g1"]]
        assert store.claim(partition, 2).size == 0

    def test_groups_come_in_order_of_first_write(self, store: Store) -> None:
        partition = store.filled(["z_g1", "a_g0"], group_size=2)
        store.put(partition, ["m_g0", "m_g1"], x=torch.arange(2))
        store.put(partition, ["a_g1"], x=torch.arange(1))
        store.put(partition, ["z_g0"], x=torch.arange(1))
        given = store.claim(partition, 6).sample_ids
        assert [name.partition("_")[0] for name in given] == ["z", "z", "a", "a", "m", "m"]

    def test_the_last_mark_counts(self, store: Store) -> None:
        partition = store.filled(["a_g0_g0", "a_g1_g0", "a_g0_g1", "v7_p3_gx", "v7_p3_g"], group_size=2)
        assert store.claim(partition, 4).sample_ids == ["a_g0_g0", "a_g0_g1", "v7_p3_gx", "v7_p3_g"]
        without = store.register("x")
        store.put(without, ["a_g0", "b", "a_g1", "a_g2"], x=torch.arange(4))
        assert store.claim(without, 3).sample_ids == ["a_g0", "b", "a_g1"]

    def test_ids_that_fit_no_group_are_refused(self, store: Store) -> None:
        partition = store.register("x", "y", group_size=2)
        with store.refusal(InvalidRequestError, "lonely", "_g"):
            store.put(partition, ["b_g0", "lonely"], x=torch.arange(2))
        with store.refusal(InvalidRequestError, "'a'"):
            store.put(partition, ["b_g0", "a_g0", "a_g1", "a_g2"], x=torch.arange(4))
        assert not store.has(partition, "b_g0"), "a refused put wrote a row"
        store.put(partition, ["a_g0", "a_g1"], x=torch.arange(2))
        with store.refusal(ValueError, "'a'"):
            store.put(partition, ["a_g7"], x=torch.arange(1))
        store.put(partition, ["a_g1", "a_g0"], y=torch.arange(2))
        assert store.claim(partition, 2, "x", "y").size == 2

    def test_a_group_with_a_cleared_member_is_never_given(self, store: Store) -> None:
        partition = store.filled(["a_g0", "a_g1", "b_g0", "c_g0", "c_g1"], group_size=2)
        store.client.clear_samples(["a_g1", "b_g0"], partition)
        store.put(partition, ["a_g1", "b_g0", "b_g1"], x=torch.arange(3))
        assert store.claim(partition, 6).sample_ids == ["c_g0", "c_g1"]
        assert store.claim(partition, 2).size == 0
        assert store.get(partition, ["a_g0", "b_g1"])["x"].tolist() == [0, 2]

    def test_batch_sizes_are_multiples(self, store: Store) -> None:
        partition = store.register("x", group_size=3)
        for blocking in (True, False):
            with store.refusal(InvalidRequestError, "4", "3"):
                store.claim(partition, 4, blocking=blocking)

    def test_blocking_claims_wait_for_whole_groups(self, store: Store) -> None:
        partition = store.filled(["a_g0", "a_g1", "b_g0", "c_g0"], group_size=2)
        waiting = store.waiting_claim(partition, 4)
        with store.refusal(TimeoutError):
            store.claim(partition, 4, blocking=True, timeout_s=0.05)
        assert waiting.running
        store.put(partition, ["c_g1"], x=torch.arange(1))
        assert waiting.result(what="a claim of two whole groups").sample_ids == ["a_g0", "a_g1", "c_g0", "c_g1"]

    def test_the_tail_has_whole_groups(self, store: Store) -> None:
        partition = store.filled(["a_g0", "a_g1", "b_g0", "b_g1", "c_g0", "c_g1"], group_size=2, num_samples=6)
        store.client.clear_samples(["b_g0"], partition)
        meta = bounded(lambda: store.claim(partition, 6, blocking=True, timeout_s=60), what="a claim of the tail")
        assert meta.sample_ids == ["a_g0", "a_g1", "c_g0", "c_g1"]
        meta = bounded(lambda: store.claim(partition, 2, blocking=True, timeout_s=60), what="a claim of nothing")
        assert meta.size == 0

    def test_groups_are_settled_as_a_whole(self, store: Store) -> None:
        partition = store.filled(["a_g0", "a_g1", "b_g0", "b_g1"], group_size=2)
        meta = store.claim(partition, 4, lease_s=600)
        part = meta.subset([0, 1, 2])
        with store.refusal(ValueError, "'b'"):
            store.client.ack(part)
        with store.refusal(ValueError, "'b'"):
            store.client.nack(part)
        with store.refusal(ValueError, "'b'"):
            store.client.renew(part, 60)
        store.client.ack(meta.slice(2, 4))
        store.client.nack(meta.slice(0, 2))
        assert store.claim(partition, 4, lease_s=600).sample_ids == ["a_g0", "a_g1"]
