"""What claims give, and which of those that wait are woken. What they wait for is in the chapter "machine"."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from dataplane_core.errors import ClaimTimeoutError
from dataplane_core.spec import Capability
from dataplane_testkit import _workers
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._hooks import Hooks
from dataplane_testkit._nursery import START_S
from dataplane_testkit._store import Store, no_polls
from dataplane_testkit._timing import Background, bounded, eventually

#: Seconds of a lease that does not end during a test, of one that a test waits for, and of a timeout.
_LONG_S, _SHORT_S, _TIMEOUT_S = 600.0, 0.1, 0.05


def _gives(waiting: Background, *sample_ids: str) -> None:
    assert waiting.result(what="a claim that can be answered").sample_ids == list(sample_ids)


def _have_ended(claims: list[Background], count: int) -> bool:
    return sum(not each.running for each in claims) == count


class ClaimSuite(Suite, chapter="claims"):
    """Claims that are answered at once, and those that wait."""

    def test_claim_hook_never_waits(self, store: Store) -> None:
        partition = store.filled(1)
        for all_or_nothing in (True, False):
            about = {"task_name": "train", "required_fields": ["y"], "batch_size": 2, "all_or_nothing": all_or_nothing}
            ask = partial(Hooks(store.backend, 600.0).ask, "claim", partition, **about)
            assert list(bounded(ask, what="a claim hook with nothing to give").sample_ids) == []

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

    # --- many that wait -----------------------------------------------------------------------------------------------

    def test_a_claim_that_waits_hears_when_leases_end(self, store: Store) -> None:
        with no_polls(store.client, but_for_leases=True):
            for lease_s in (_SHORT_S, _LONG_S):
                partition = store.filled(1)
                waiting = store.waiting_claim(partition, 2)
                held = store.claim(partition, 1, lease_s=lease_s)
                if lease_s == _LONG_S:
                    store.client.renew(held, _SHORT_S)
                store.put(partition, ["s1"], x=torch.arange(1))
                _gives(waiting, "s0", "s1")

    def test_claims_with_many_filters_are_woken_when_they_need_not_wait(self, store: Store) -> None:
        partition = store.filled(["a"], "x", "y", num_samples=1, tags=[{"version": -1}])
        filters = [{"version": ("!=", number)} for number in range(24)]
        with no_polls(store.client):
            claims = [store.waiting_claim(partition, 1, "y", tag_filter=each) for each in filters]
            store.client.clear_samples(["a"], partition)
            for claim in claims:
                _gives(claim)

    def test_only_as_many_are_woken_as_there_are_samples_for(self, store: Store) -> None:
        partition = store.register("x")
        with no_polls(store.client) as asked:
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
        with no_polls(store.client):
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
