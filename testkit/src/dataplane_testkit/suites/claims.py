"""What a claim gives: each ready sample once, in order; whole groups; batches of samplers and ranks."""

from __future__ import annotations

import pickle
from functools import partial

import torch

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError
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

    # --- the hook -----------------------------------------------------------------------------------------------------

    def test_claim_hook_never_waits(self, store: Store) -> None:
        partition = store.filled(1)
        for all_or_nothing in (True, False):
            ask = partial(store.hooks.within(600).claim, partition, 2, ["y"], all_or_nothing=all_or_nothing)
            assert list(bounded(ask, what="a claim hook with nothing to give").sample_ids) == []

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

    # --- samplers and ranks -------------------------------------------------------------------------------------------

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

    def test_the_end_is_the_same_for_all_ranks(self, store: Store) -> None:
        partition = store.filled(2, num_samples=2)
        claim = partial(store.claim, partition, 1, lease_s=_LONG_S, dp_size=2, blocking=True, timeout_s=30.0)
        first = [claim(dp_rank=rank, batch_index=0) for rank in (0, 1)]
        assert [meta.sample_ids for meta in first] == [["s0"], ["s1"]]
        assert claim(dp_rank=0, batch_index=1).size == 0
        store.client.nack(first[0])
        assert claim(dp_rank=1, batch_index=1).size == claim(dp_rank=0, batch_index=1).size == 0
        assert [claim(dp_rank=rank, batch_index=2).sample_ids for rank in (1, 0)] == [[], ["s0"]]
