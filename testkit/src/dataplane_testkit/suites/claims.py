"""Claims that wait: what they wait for, and who wakes them. Claims of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import ClaimTimeoutError, UnknownPartitionError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, Claim, ClaimRequest
from dataplane_testkit import _workers
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._hooks import Hooks
from dataplane_testkit._nursery import START_S
from dataplane_testkit._store import Store
from dataplane_testkit._timing import Background, bounded, eventually

#: Seconds of a lease that does not end during a test, of one that a test waits for, and of a timeout.
_LONG_S, _SHORT_S, _TIMEOUT_S = 600.0, 0.1, 0.05
#: Claims that know of no lease ask every 10 s.
_SOON_S: Final = 5.0

# --- scenes: a claim that waits, what ends its wait, and what it gets -------------------------------------------------


def _gives(waiting: Background, *sample_ids: str) -> None:
    assert waiting.result(what="a claim that can be answered").sample_ids == list(sample_ids)


def full_batch(store: Store) -> None:
    partition = store.register("x")
    waiting = store.waiting_claim(partition, 4)
    for sample_id in ids(4):
        assert waiting.running
        store.put(partition, [sample_id], x=torch.arange(1))
    _gives(waiting, *ids(4))


def last_field(store: Store) -> None:
    partition = store.filled(3, "x", "y", num_samples=3)
    store.put(partition, ["s0"], y=torch.zeros(1))
    waiting = store.waiting_claim(partition, 2, "x", "y")
    store.put(partition, ["s2"], y=torch.zeros(1))
    _gives(waiting, "s0", "s2")


def tail(store: Store) -> None:
    partition = store.filled(3, num_samples=5)
    store.client.clear_samples(["s1"], partition)
    store.put(partition, ["s1", "s3"], x=torch.arange(2))  # s1 was counted already
    waiting = store.waiting_claim(partition, 9)
    assert store.claim(partition, 1).sample_ids == ["s0"]
    store.put(partition, ["s4"], [{"n": 1}])  # all are written, but one is not ready
    assert waiting.running
    store.put(partition, ["s4"], x=torch.arange(1))
    _gives(waiting, "s2", "s1", "s3", "s4")
    _gives(store.waiting_claim(partition, 1))  # nothing is left


def finish(store: Store) -> None:
    partition = store.filled(1)
    waiting = store.waiting_claim(partition, 2)
    store.client.finish_partition(partition)
    _gives(waiting, "s0")


def cleared_partition(store: Store) -> None:
    partition = store.register("x")
    waiting = store.waiting_claim(partition, 1)
    store.client.clear_samples(None, partition)
    with store.refusal(UnknownPartitionError, partition):
        waiting.result(what="a claim of a partition that was cleared")


def whole_groups(store: Store) -> None:
    store.require(Capability.GROUPS)
    partition = store.filled(["a_g0", "a_g1", "b_g0", "c_g0"], group_size=2, num_samples=6)
    waiting = store.waiting_claim(partition, 4)
    store.put(partition, ["c_g1"], x=torch.arange(1))
    _gives(waiting, "a_g0", "a_g1", "c_g0", "c_g1")
    waiting = store.waiting_claim(partition, 2)
    store.client.clear_samples(["b_g0"], partition)
    store.put(partition, ["b_g1"], x=torch.arange(1))
    _gives(waiting)  # the last group is never given


def nack(store: Store) -> None:
    store.require(Capability.LEASES)
    partition = store.filled(1)
    held = store.claim(partition, 1, lease_s=_LONG_S)
    waiting = store.waiting_claim(partition, 1)
    store.client.nack(held)
    _gives(waiting, "s0")


def tail_beside_a_lease(store: Store) -> None:
    store.require(Capability.LEASES)
    partition = store.filled(2, num_samples=3)
    held = store.claim(partition, 1, lease_s=_LONG_S)
    waiting = store.waiting_claim(partition, 3)
    store.put(partition, ["s2"], x=torch.arange(1))
    _gives(waiting, "s1", "s2")
    _gives(store.waiting_claim(partition, 1))  # nothing is left
    store.client.nack(held)
    assert store.claim(partition, 1, blocking=True).sample_ids == ["s0"]


def end_of_a_lease(store: Store) -> None:
    store.require(Capability.LEASES)
    for lease_s in (_SHORT_S, _LONG_S):
        partition = store.filled(1)
        waiting = store.waiting_claim(partition, 2)
        held = store.claim(partition, 1, lease_s=lease_s)
        if lease_s == _LONG_S:
            store.client.renew(held, _SHORT_S)
        store.put(partition, ["s1"], x=torch.arange(1))
        _gives(waiting, "s0", "s1")


def tag(store: Store) -> None:
    store.require(Capability.TAG_FILTERS)
    partition = store.filled(1, tags=[{"version": 1}])
    waiting = store.waiting_claim(partition, 1, tag_filter={"version": (">=", 2)})
    store.put(partition, ["s0"], [{"version": 2}])
    _gives(waiting, "s0")


def reset(store: Store) -> None:
    store.require(Capability.CURSORS)
    partition = store.filled(1)
    store.claim(partition, 1)
    waiting = store.waiting_claim(partition, 1)
    store.client.reset_consumption(partition, "train")
    _gives(waiting, "s0")


SCENES = [full_batch, last_field, tail, finish, cleared_partition, whole_groups]
SCENES += [nack, tail_beside_a_lease, end_of_a_lease, tag, reset]
each_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)


@contextmanager
def _no_polls(store: Store, *, but_for_leases: bool = False) -> Iterator[list[str]]:
    """Claims that wait ask again only when they are woken, or when their time is over. Lists the tokens of all that
    asked. With ``but_for_leases``, they also ask when the store says that they should ask before long.
    """
    asked: list[str] = []

    def note(request: ClaimRequest, claim: Claim) -> Claim:
        asked.append(request.token)
        soon = but_for_leases and 0 < claim.ask_again_s < _SOON_S
        return claim if soon else replace(claim, ask_again_s=_LONG_S)

    with store.faults.after("claim", note):
        yield asked


def _have_ended(claims: list[Background], count: int) -> bool:
    return sum(not each.running for each in claims) == count


class ClaimSuite(Suite, chapter="claims"):
    """Claims that wait, and those of ranks."""

    def test_claim_hook_never_waits(self, store: Store) -> None:
        partition = store.filled(1)
        for all_or_nothing in (True, False):
            about = {"task_name": "train", "required_fields": ["y"], "batch_size": 2, "all_or_nothing": all_or_nothing}
            ask = partial(Hooks(store.backend, 600.0).ask, "claim", partition, **about)
            assert list(bounded(ask, what="a claim hook with nothing to give").sample_ids) == []

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

    def test_incomplete_groups_are_not_given(self, store: Store) -> None:
        partition = store.filled(["z_g1", "a_g0", "k_g0", "k_g1"], "x", "y", group_size=2)
        store.put(partition, ["z_g1", "a_g0", "k_g0"], y=torch.zeros(3))
        assert store.claim(partition, 8, "x", "y").sample_ids == []
        store.put(partition, ["z_g0"], x=torch.arange(1), y=torch.zeros(1))
        assert sorted(store.claim(partition, 8, "x", "y").sample_ids) == ["z_g0", "z_g1"]
        assert store.claim(partition, 8).sample_ids == ["k_g0", "k_g1"]

    def test_samples_match_the_filter(self, store: Store) -> None:
        tag_filter = {"version": (">=", 7), "split": "a"}
        tags: list[dict[str, Any]] = [{"version": 7, "split": "a"}, {"version": 6, "split": "a"}, {}, {"version": 8}]
        partition = store.filled(4, tags=tags)
        if store.declares(Capability.LISTING):
            assert store.client.list_samples(partition, tag_filter).sample_ids == ["s0"]
        if store.declares(Capability.CLAIMS):
            assert store.claim(partition, 9, tag_filter=tag_filter).sample_ids == ["s0"]
            assert store.claim(partition, 9).sample_ids == ["s1", "s2", "s3"], "samples that did not match are gone"

    @each_scene
    def test_a_claim_that_waits_is_answered(self, store: Store, scene: Callable[[Store], None]) -> None:
        scene(store)

    @each_scene
    def test_a_claim_that_waits_is_woken(self, store: Store, scene: Callable[[Store], None]) -> None:
        with _no_polls(store, but_for_leases=scene is end_of_a_lease):
            scene(store)

    # --- many that wait -----------------------------------------------------------------------------------------------

    def test_claims_with_many_filters_are_woken_when_they_need_not_wait(self, store: Store) -> None:
        partition = store.filled(["a"], "x", "y", num_samples=1, tags=[{"version": -1}])
        filters = [{"version": ("!=", number)} for number in range(24)]
        with _no_polls(store):
            claims = [store.waiting_claim(partition, 1, "y", tag_filter=each) for each in filters]
            store.client.clear_samples(["a"], partition)
            for claim in claims:
                _gives(claim)

    def test_only_as_many_are_woken_as_there_are_samples_for(self, store: Store) -> None:
        partition = store.register("x")
        with _no_polls(store) as asked:
            with store.refusal(ClaimTimeoutError):  # this claim is to be woken no more
                store.claim(partition, 1, blocking=True, timeout_s=_TIMEOUT_S)
            asked.clear()
            claims = [store.waiting_claim(partition, 1) for _ in range(8)]
            for number, sample_id in enumerate(ids(8), start=1):
                store.put(partition, [sample_id], x=torch.zeros(1))
                eventually(partial(_have_ended, claims, number), what="the end of one claim")
            assert len(asked) == 8 + 8, f"8 claims that 8 puts could answer one by one asked {len(asked)} times"
        assert sorted(each.result().sample_ids[0] for each in claims) == ids(8)

    def test_a_claim_of_a_killed_process_does_not_stop_the_next(self, store: Store, tmp_path: Path) -> None:
        partition = store.register("x")
        with _no_polls(store):
            worker = store.deployment.new_worker()
            try:
                worker.wait_ready()
                worker.start(_workers.claim_and_tell, partition, tmp_path / "asked")
                # in a process that has just started, on a loaded machine
                asked = (tmp_path / "asked").exists
                eventually(asked, START_S, "the first question of a claim in another process")
                claim = store.waiting_claim(partition, 1)
                worker.kill()
            finally:
                worker.close()
            # a store may notice the end only after the calls that come with it
            store.client.check_consumption_status(partition, ["train"])
            store.put(partition, ["a"], x=torch.zeros(1))
            _gives(claim, "a")
