"""GRPO groups: a claim gives whole groups only."""

from __future__ import annotations

import torch

from dataplane_core.errors import InvalidRequestError
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._marks import proves
from dataplane_testkit._store import Store
from dataplane_testkit._timing import bounded


def _group(name: str, size: int = 3) -> list[str]:
    return [f"{name}_g{index}" for index in range(size)]


class GroupSuite(Suite, chapter="groups", proof=Capability.GROUPS):
    """Claims of a partition with a group size."""

    def test_incomplete_groups_are_not_given(self, store: Store) -> None:
        """Contract: "with grpo_group_size g, a claim hands out whole groups only. A group is the g samples whose ids
        are equal up to the last _g."

        Check first: a group must become claimable when its last member is ready, not before.
        """
        partition = store.filled(["a_g0", "b_g0", "a_g1", "b_g1"], tasks=["train", "eval"], group_size=3)
        assert store.claim(partition, 6).size == 0
        store.put(partition, ["b_g2"], x=torch.zeros(1, dtype=torch.int64))
        assert store.claim(partition, 6).sample_ids == _group("b")
        store.put(partition, ["a_g2"], x=torch.zeros(1, dtype=torch.int64))
        assert sorted(store.claim(partition, 6).sample_ids) == _group("a")
        assert sorted(store.claim(partition, 6, task="eval").sample_ids) == [*_group("a"), *_group("b")]

    def test_groups_wait_for_every_required_field(self, store: Store) -> None:
        """Contract: "Hands out samples whose required fields are all produced".

        Check first: a group is ready when all its members have all required fields.
        """
        partition = store.filled(["a_g0", "a_g1", "b_g0", "b_g1"], "x", "y", group_size=2)
        store.put(partition, ["a_g0", "b_g1", "b_g0"], y=torch.zeros(3))
        assert store.claim(partition, 4, "x", "y").sample_ids == ["b_g0", "b_g1"]
        assert store.claim(partition, 4, "x").sample_ids == ["a_g0", "a_g1"]

    def test_claims_never_split_a_group(self, store: Store) -> None:
        """Contract: "whole groups only".

        Check first: a claim must give whole groups. The members of a group must be next to each other.
        """
        partition = store.register("x", group_size=2)
        order = ["a_g0", "b_g0", "c_g0", "c_g1", "b_g1", "a_g1"]
        store.put(partition, order, x=torch.arange(6))
        given = [store.claim(partition, 2).sample_ids for _ in range(3)]
        assert [sorted(pair) for pair in given] == [["a_g0", "a_g1"], ["b_g0", "b_g1"], ["c_g0", "c_g1"]]
        assert store.claim(partition, 2).size == 0

    def test_groups_come_in_order_of_first_write(self, store: Store) -> None:
        """Contract: "Samples come in order of first write, unless a sampler says otherwise."

        Check first: the place of a group in the order is the place of the member that was written first.
        """
        partition = store.filled(["z_g1", "a_g0"], group_size=2)
        store.put(partition, ["m_g0", "m_g1"], x=torch.arange(2))
        store.put(partition, ["a_g1"], x=torch.arange(1))
        store.put(partition, ["z_g0"], x=torch.arange(1))
        given = store.claim(partition, 6).sample_ids
        assert [name.partition("_")[0] for name in given] == ["z", "z", "a", "a", "m", "m"]

    def test_the_last_mark_counts(self, store: Store) -> None:
        """Contract: "A group is the g samples whose ids are equal up to the last _g."

        Check first: split the id at its last _g, but only if the registration has a group size.
        """
        partition = store.filled(["a_g0_g0", "a_g1_g0", "a_g0_g1", "v7_p3_gx", "v7_p3_g"], group_size=2)
        assert store.claim(partition, 4).sample_ids == ["a_g0_g0", "a_g0_g1", "v7_p3_gx", "v7_p3_g"]
        without = store.register("x")
        store.put(without, ["a_g0", "b", "a_g1", "a_g2"], x=torch.arange(4))
        assert store.claim(without, 3).sample_ids == ["a_g0", "b", "a_g1"]

    def test_ids_that_fit_no_group_are_refused(self, store: Store) -> None:
        """Contract: "A put with an id without _g, or with a surplus member of a group, raises ValueError."

        Check first: if the partition has a group size, the put_samples hook must check the ids before it stores
        anything. It must count the new members of the put itself too. A later put of a known member is not a surplus.
        """
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
        """Contract: "A group with a cleared member is never given."

        Check first: a clear of a member must close its group for good, whether the group was complete or not. Writing
        the member again must not open it.
        """
        partition = store.filled(["a_g0", "a_g1", "b_g0", "c_g0", "c_g1"], group_size=2)
        store.client.clear_samples(["a_g1", "b_g0"], partition)
        store.put(partition, ["a_g1", "b_g0", "b_g1"], x=torch.arange(3))
        assert store.claim(partition, 6).sample_ids == ["c_g0", "c_g1"]
        assert store.claim(partition, 2).size == 0
        assert store.get(partition, ["a_g0", "b_g1"])["x"].tolist() == [0, 2]

    def test_batch_sizes_are_multiples(self, store: Store) -> None:
        """Contract: "A batch_size that is not a multiple of g raises ValueError."

        Check first: the claim hook must raise InvalidRequestError if batch_size is not a multiple of the group size.
        """
        partition = store.register("x", group_size=3)
        for blocking in (True, False):
            with store.refusal(InvalidRequestError, "4", "3"):
                store.claim(partition, 4, blocking=blocking)

    def test_blocking_claims_wait_for_whole_groups(self, store: Store) -> None:
        """Contract: "A blocking claim waits until batch_size samples are ready".

        Check first: members of incomplete groups must not count as ready.
        """
        partition = store.filled(["a_g0", "a_g1", "b_g0", "c_g0"], group_size=2)
        waiting = store.waiting_claim(partition, 4)
        with store.refusal(TimeoutError):
            store.claim(partition, 4, blocking=True, timeout_s=0.05)
        assert waiting.running
        store.put(partition, ["c_g1"], x=torch.arange(1))
        assert waiting.result(what="a claim of two whole groups").sample_ids == ["a_g0", "a_g1", "c_g0", "c_g1"]

    def test_the_tail_has_whole_groups(self, store: Store) -> None:
        """Contract: "the samples left for the task may be fewer than batch_size. Then the claim waits until all of
        these are ready, and returns them."

        Check first: a group with a cleared member can never be given. A claim must not wait for it.
        """
        partition = store.filled(["a_g0", "a_g1", "b_g0", "b_g1", "c_g0", "c_g1"], group_size=2, num_samples=6)
        store.client.clear_samples(["b_g0"], partition)
        meta = bounded(lambda: store.claim(partition, 6, blocking=True, timeout_s=60), what="a claim of the tail")
        assert meta.sample_ids == ["a_g0", "a_g1", "c_g0", "c_g1"]
        meta = bounded(lambda: store.claim(partition, 2, blocking=True, timeout_s=60), what="a claim of nothing")
        assert meta.size == 0

    @proves(Capability.GROUPS, Capability.LEASES)
    def test_groups_are_settled_as_a_whole(self, store: Store) -> None:
        """Contract: "In a partition with groups, a group is acked, nacked and renewed as a whole (ValueError
        otherwise)."

        Check first: before any row is changed, compare the rows of the request with those of the group that the task
        holds. A consumer may settle some groups of a claim and keep the others.
        """
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
