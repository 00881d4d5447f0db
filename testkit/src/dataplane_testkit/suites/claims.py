"""What a claim gives: each ready sample once, in order; whole groups; batches of samplers and ranks."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch

from dataplane_core.client import DataPlaneClient, stream
from dataplane_core.errors import InvalidRequestError, UnknownPartitionError, UnknownTaskError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._store import Store
from dataplane_testkit._timing import bounded

_LONG_S = 600.0


class ClaimSuite(Suite, chapter="claims"):
    """Claims that do not wait, without leases and tag filters."""

    def test_each_sample_is_given_once(self, store: Store) -> None:
        partition = store.register("x", tasks=["train", "eval"])
        empty = store.claim(partition, 4)
        assert (empty.sample_ids, empty.tags, empty.size) == ([], [], 0)
        store.put(partition, ids(10), x=torch.arange(10))
        store.put(partition, ids(10), y=torch.zeros(10))
        given = [store.claim(partition, 4, *fields).sample_ids for fields in ("x", "y", "x", ["x", "y"])]
        assert given == [ids(10)[:4], ids(10)[4:8], ids(10)[8:], []]
        assert store.claim(partition, 10, task="eval").sample_ids == ids(10)

    def test_only_ready_samples_are_given(self, store: Store) -> None:
        partition = store.filled(5)
        for sample_id in ("s3", "s1"):
            store.put(partition, [sample_id], y=torch.zeros(1))
        assert store.claim(partition, 5, "x", "y").sample_ids == ["s1", "s3"]
        assert store.claim(partition, 5, "y", "x").size == 0
        store.put(partition, ["s4", "s0"], y=torch.zeros(2))
        assert store.claim(partition, 5, "x", "y").sample_ids == ["s0", "s4"]

    def test_claims_come_in_order_of_first_write(self, store: Store) -> None:
        partition = store.register("x")
        order = ["tagged", "z", "a", "m10", "m9", "b"]
        store.put(partition, ["tagged"], [{"n": 1}])
        store.put(partition, order[1:4], x=torch.arange(3))
        store.put(partition, order[4:], x=torch.arange(2))
        store.put(partition, ["tagged"], x=torch.arange(1))
        assert store.claim(partition, 2).sample_ids == order[:2]
        assert store.claim(partition, 9).sample_ids == order[2:]

    def test_claims_bring_tags(self, store: Store) -> None:
        partition = store.register("x")
        tags = [{"input_lengths": 5 + index, "n": str(index)} for index in range(4)]
        store.put(partition, ids(4), tags, x=torch.zeros(4, 1000))
        store.put(partition, ["s4"], [{"n": "4"}], x=torch.zeros(1, 1000))
        meta = store.claim(partition, 2)
        assert (meta.tags, meta.sequence_lengths) == (tags[:2], [5, 6])
        assert (meta.task_name, meta.fields, meta.lease_tokens) == ("train", ["x"], None)
        rest = store.claim(partition, 9)
        assert (rest.tags, rest.sequence_lengths) == ([*tags[2:], {"n": "4"}], None)
        data = pickle.dumps(rest)
        assert len(data) < 2000, "a meta holds more than names and tags"
        assert pickle.loads(data) == rest  # pickled by this process
        assert store.client.get_data(pickle.loads(data)).batch_size == torch.Size([3])

    def test_unknown_partition_or_task_is_refused(self, store: Store) -> None:
        partition, unknown = store.filled(1), store.new_id()
        for blocking in (False, True):
            with store.refusal(UnknownPartitionError, unknown):
                store.claim(unknown, 1, blocking=blocking, timeout_s=_LONG_S)
            with store.refusal(UnknownTaskError, "nobody"):
                store.claim(partition, 1, task="nobody", blocking=blocking, timeout_s=_LONG_S)

    # --- the hook -----------------------------------------------------------------------------------------------------

    def test_claim_hook_never_waits(self, store: Store) -> None:
        partition = store.filled(1)
        for all_or_nothing in (True, False):
            ask = partial(store.hooks.within(600).claim, partition, 2, ["y"], all_or_nothing=all_or_nothing)
            assert list(bounded(ask, what="a claim hook with nothing to give").sample_ids) == []

    def test_claim_hook_gives_all_or_nothing(self, store: Store) -> None:
        partition = store.filled(3, num_samples=4)
        given = []
        for batch_size, all_or_nothing in ((4, True), (2, True), (4, False), (1, True)):
            claim = store.hooks.claim(partition, batch_size, all_or_nothing=all_or_nothing)
            given.append((list(claim.sample_ids), claim.exhausted))
        assert given == [([], False), (["s0", "s1"], False), (["s2"], False), ([], False)]
        store.put(partition, ["s3"], x=torch.arange(1))
        for left in (["s3"], []):
            claim = store.hooks.claim(partition, 3, all_or_nothing=True)
            assert (list(claim.sample_ids), claim.exhausted) == (left, True)

    # --- groups -------------------------------------------------------------------------------------------------------

    def test_incomplete_groups_are_not_given(self, store: Store) -> None:
        partition = store.filled(["z_g1", "a_g0", "k_g0", "k_g1", "m_g0", "m_g1"], "x", "y", group_size=2)
        store.put(partition, ["z_g1", "a_g0", "k_g0", "m_g0", "m_g1"], y=torch.zeros(5))
        assert store.claim(partition, 8, "x", "y").sample_ids == ["m_g0", "m_g1"]
        for member in ("a_g1", "z_g0"):
            store.put(partition, [member], x=torch.arange(1), y=torch.zeros(1))
        assert sorted(store.claim(partition, 2, "x", "y").sample_ids) == ["z_g0", "z_g1"]
        assert sorted(store.claim(partition, 8, "x", "y").sample_ids) == ["a_g0", "a_g1"]
        assert store.claim(partition, 8).sample_ids == ["k_g0", "k_g1"]
        for blocking in (True, False):
            with store.refusal(InvalidRequestError, "3", "2"):
                store.claim(partition, 3, blocking=blocking)

    def test_large_groups_are_written_and_given_whole(self, store: Store) -> None:
        names = [f"q_g{number}" for number in range(9000)]
        partition = store.filled(names, group_size=9000)
        assert sorted(store.claim(partition, 9000, blocking=True).sample_ids) == sorted(names)
        assert store.get(partition, [names[-1], names[0]])["x"].tolist() == [8999, 0]

    def test_ids_that_fit_no_group_are_refused(self, store: Store) -> None:
        partition = store.register("x", group_size=2)
        store.put(partition, ["a_g0", "v_g1_gx", "v_g2_gx", "a_g1", "v_g1_g"], x=torch.arange(5))
        for wrong in (["b_g0", "lonely"], ["b_g0", "c_g0", "c_g1", "c_g2"], ["b_g0", "a_g7"]):
            with store.refusal(InvalidRequestError, wrong[-1].partition("_")[0]):
                store.put(partition, wrong, x=torch.arange(len(wrong)))
        assert not store.has(partition, "b_g0"), "a refused put wrote a row"
        store.put(partition, ["a_g1", "a_g0"], y=torch.arange(2))  # members that are known are no surplus
        assert store.claim(partition, 6).sample_ids == ["a_g0", "a_g1", "v_g1_gx", "v_g1_g"], "the last _g counts"

    def test_a_group_with_a_cleared_member_is_never_given(self, store: Store) -> None:
        partition = store.filled(["a_g0", "a_g1", "b_g0", "c_g0", "c_g1"], group_size=2)
        store.client.clear_samples(["a_g1", "b_g0"], partition)
        store.put(partition, ["a_g1", "b_g0", "b_g1"], x=torch.arange(3))
        assert store.claim(partition, 6).sample_ids == ["c_g0", "c_g1"]
        assert store.get(partition, ["a_g0", "b_g1"])["x"].tolist() == [0, 2]

    # --- samplers and ranks -------------------------------------------------------------------------------------------

    def test_freshest_first(self, store: Store) -> None:
        partition = store.filled(6)
        store.put(partition, ["s0"], y=torch.zeros(1))  # its first write stays
        assert store.claim(partition, 2, sampler="freshest").sample_ids == ["s5", "s4"]
        assert store.claim(partition, 2).sample_ids == ["s0", "s1"]
        assert store.claim(partition, 9, sampler="freshest").sample_ids == ["s3", "s2"]

    def test_equal_ranks_get_equal_samples(self, store: Store) -> None:
        partition = store.filled(5, num_samples=5)
        lease_s = _LONG_S if store.declares(Capability.LEASES) else None
        one, two = store.client, store.same_store_client()

        def batch(client: DataPlaneClient, rank: int, index: int | None) -> KVBatchMeta:
            about = (partition, "train", ["x"], 2, rank)
            return client.claim_meta(*about, timeout_s=10.0, batch_index=index, lease_s=lease_s)

        first = [batch(one, rank, None) for rank in (0, 1)]
        assert [meta.sample_ids for meta in first] == [["s0", "s1"], ["s2", "s3"]]
        assert [batch(two, rank, 0) for rank in (0, 1)] == first, "the same ranks got other samples or lease tokens"
        assert batch(one, 0, None).sample_ids == batch(two, 0, 1).sample_ids == ["s4"]
        assert batch(one, 1, None).sample_ids == []
        store.register(partition_id=partition)
        store.put(partition, ids(4), x=torch.arange(4))
        again = batch(one, 0, None)
        assert again.sample_ids == ["s0", "s1"]
        assert batch(two, 0, 0) == again, "a new registration does not begin with batch 0"

    def test_a_cleared_batch_is_refused_though_its_samples_are_written_anew(self, store: Store) -> None:
        partition = store.filled(4)
        first = partial(store.claim, partition, 2, dp_rank=0, batch_index=0)
        assert first().sample_ids == ["s0", "s1"]
        store.client.clear_samples(["s0"], partition)
        for _ in range(2):
            with store.refusal(ValueError, "cleared"):
                first()
            store.put(partition, ["s0"], x=torch.arange(1))
        assert store.claim(partition, 4, dp_rank=0).sample_ids == ["s2", "s3", "s0"]

    def test_balanced_ranks(self, store: Store) -> None:
        partition = store.register("x", num_samples=14)
        lengths = [100, 1, 1, 1, 1, 100, 1, 1, 1, 100, 100, 1, 5, 5]
        tags = [{"input_lengths": each} for each in lengths]
        store.put(partition, ids(12), tags[:12], x=torch.arange(12))
        parts = [store.claim(partition, 3, dp_rank=rank, sampler="balanced", dp_size=4) for rank in (2, 0, 3, 1)]
        assert [sum(part.sequence_lengths or ()) for part in parts] == [102] * 4
        assert sorted(each for part in parts for each in part.sample_ids) == sorted(ids(12))
        assert all(part.sample_ids == sorted(part.sample_ids, key=lambda each: int(each[1:])) for part in parts)
        store.put(partition, ["s12", "s13"], tags[12:], x=torch.arange(2))
        rest = [store.claim(partition, 3, dp_rank=rank, sampler="balanced", dp_size=4).size for rank in range(4)]
        assert rest == [1, 1, 0, 0]

    def test_balanced_groups_stay_whole(self, store: Store) -> None:
        names = [f"k{group}_g{member}" for group in range(4) for member in range(2)]
        partition = store.filled(
            names, group_size=2, tags=[{"input_lengths": each} for each in (9, 9, 1, 1, 1, 1, 8, 9)]
        )
        parts = [store.claim(partition, 4, dp_rank=rank, sampler="balanced", dp_size=2) for rank in range(2)]
        assert [part.sample_ids for part in parts] == [names[:2] + names[4:6], names[2:4] + names[6:]]

    @pytest.mark.parametrize("sampler", ["first_write", "freshest", "balanced"])
    def test_ranks_get_equal_numbers_of_batches(self, store: Store, sampler: str) -> None:
        partition = store.filled(5, "x", "o", num_samples=5)
        store.put(partition, ids(5), o=[[1] * each for each in range(5)])
        about = (partition, "train", ["x", "o"], 2)
        sizes = []
        for rank in (1, 0):  # one after the other: the ranks need not ask at the same time
            batches = stream(store.same_store_client(), *about, dp_rank=rank, dp_size=2, sampler=sampler)
            sizes.append([len(batch.columns["o"]) for batch in batches])
        assert sizes == [[2, 0], [2, 1]]
        assert store.client.check_consumption_status(partition, ["train"])

    def test_the_end_is_the_same_for_all_ranks(self, store: Store) -> None:
        partition = store.filled(2, num_samples=2)
        claim = partial(store.claim, partition, 1, lease_s=_LONG_S, dp_size=2, blocking=True, timeout_s=30.0)
        first = [claim(dp_rank=rank, batch_index=0) for rank in (0, 1)]
        assert [meta.sample_ids for meta in first] == [["s0"], ["s1"]]
        assert claim(dp_rank=0, batch_index=1).size == 0
        store.client.nack(first[0])
        assert claim(dp_rank=1, batch_index=1).size == claim(dp_rank=0, batch_index=1).size == 0
        assert [claim(dp_rank=rank, batch_index=2).sample_ids for rank in (1, 0)] == [[], ["s0"]]
