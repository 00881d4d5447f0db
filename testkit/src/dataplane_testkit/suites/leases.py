"""Leases: samples that nobody settles go back to the pool, and two holders never both succeed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from dataplane_core.errors import LeaseExpiredError
from dataplane_core.meta import KVBatchMeta
from dataplane_testkit._base import Suite
from dataplane_testkit._columns import ids
from dataplane_testkit._store import Store
from dataplane_testkit._timing import bounded

#: The duration of a lease that does not expire during a test, and of one that a test waits for.
_LONG_S = 600.0
_SHORT_S = 0.1


def _wait_out(lease_s: float = _SHORT_S) -> None:
    """Waits until every lease of this time that was taken before this call has expired on every clock."""
    time.sleep(lease_s + 0.05)


def _in_time(store: Store, partition: str, settle: Callable[[KVBatchMeta], None]) -> float:
    """Claims four samples with a short lease, and settles them while it lasts. Returns the lease in seconds.

    On a machine that stands still, the lease may end first. The next try then has a longer one.
    """
    for lease_s in (_SHORT_S, 1.0, 10.0):
        began = time.monotonic()
        meta = store.claim(partition, 4, lease_s=lease_s)
        assert meta.sample_ids == ids(4)
        try:
            settle(meta)
            return lease_s
        except LeaseExpiredError:
            assert time.monotonic() - began >= 0.9 * lease_s, "a lease ended long before its time"
            _wait_out(lease_s)
    raise AssertionError("this machine is too busy: no lease could be settled in time")


def _settlers(store: Store) -> list[Callable[[KVBatchMeta], None]]:
    """ack, nack, renew."""
    return [store.client.ack, store.client.nack, partial(store.client.renew, lease_s=_LONG_S)]


class LeaseSuite(Suite, chapter="leases"):
    """Claims with ``lease_s``, ack, nack, renew."""

    def test_leased_claims_carry_tokens(self, store: Store) -> None:
        partition = store.filled(4)
        meta = store.claim(partition, 3, lease_s=_LONG_S)
        assert meta.lease_tokens is not None
        assert len(meta.lease_tokens) == 3
        assert all(isinstance(token, str) for token in meta.lease_tokens)
        assert store.claim(partition, 3).lease_tokens is None

    def test_unsettled_leases_go_back(self, store: Store) -> None:
        partition = store.filled(4)
        lost = store.claim(partition, 2, lease_s=_SHORT_S)
        _wait_out()
        again = store.claim(partition, 4, lease_s=_LONG_S)
        assert again.sample_ids == ids(4), "samples that went back to the pool lost their places in the order"
        assert again.lease_tokens is not None
        assert lost.lease_tokens is not None
        assert not set(again.lease_tokens) & set(lost.lease_tokens), "a lease token was used twice"

    def test_blocking_claims_wake_when_leases_run_out(self, store: Store) -> None:
        partition = store.filled(1)
        waiting = store.waiting_claim(partition, 2)
        store.claim(partition, 1, lease_s=_SHORT_S)
        store.put(partition, ["s1"], x=torch.arange(1))
        assert waiting.result(30, "a claim of a sample whose lease has ended").sample_ids == ids(2)

    def test_acked_samples_never_go_back(self, store: Store) -> None:
        partition = store.filled(4)
        _wait_out(_in_time(store, partition, store.client.ack))
        assert store.claim(partition, 4).size == 0

    def test_an_expired_ack_is_refused(self, store: Store) -> None:
        partition = store.filled(4)
        meta = store.claim(partition, 2, lease_s=_SHORT_S)
        _wait_out()
        with store.refusal(LeaseExpiredError, "'s0'") as caught:
            store.client.ack(meta)
        assert sorted(caught.value.sample_ids) == ["s0", "s1"]
        assert store.claim(partition, 4, lease_s=_LONG_S).sample_ids == ids(4), "a refused ack settled samples"

    def test_two_holders_never_both_succeed(self, store: Store) -> None:
        partition = store.filled(4)
        first = store.claim(partition, 4, lease_s=_SHORT_S)
        _wait_out()
        second = store.claim(partition, 4, lease_s=_LONG_S)
        assert second.sample_ids == first.sample_ids
        for settle in _settlers(store):
            with store.refusal(LeaseExpiredError):
                settle(first)
        store.client.ack(second)
        with store.refusal(LeaseExpiredError):
            store.client.nack(first)
        assert store.client.check_consumption_status(partition, ["train"])

    def test_settling_is_all_or_none(self, store: Store) -> None:
        partition = store.filled(4)
        held = store.claim(partition, 2, lease_s=_LONG_S)
        lost = store.claim(partition, 2, lease_s=_SHORT_S)
        _wait_out()
        both = held.concat(lost)
        for settle in _settlers(store):
            with store.refusal(LeaseExpiredError) as caught:
                settle(both)
            assert sorted(caught.value.sample_ids) == ["s2", "s3"], (
                "LeaseExpiredError does not name exactly the ids whose tokens are invalid"
            )
        assert store.claim(partition, 4, lease_s=_LONG_S).sample_ids == ["s2", "s3"], (
            "a refused nack returned samples to the pool"
        )
        store.client.ack(held)

    def test_nack_gives_back_at_once(self, store: Store) -> None:
        partition = store.filled(4)
        meta = store.claim(partition, 3, lease_s=_LONG_S)
        store.client.nack(meta.subset([0, 2]))
        with store.refusal(LeaseExpiredError):
            store.client.ack(meta.subset([0]))
        assert store.claim(partition, 4, lease_s=_LONG_S).sample_ids == ["s0", "s2", "s3"]

    def test_renew_extends_the_lease(self, store: Store) -> None:
        partition = store.filled(4)
        renewed: list[KVBatchMeta] = []

        def renew_two(meta: KVBatchMeta) -> None:
            store.client.renew(meta.slice(0, 2), _LONG_S)
            renewed.append(meta.slice(0, 2))

        _wait_out(_in_time(store, partition, renew_two))
        assert store.claim(partition, 4, lease_s=_LONG_S).sample_ids == ["s2", "s3"]
        store.client.ack(renewed[0])

    def test_renew_may_shorten_the_lease(self, store: Store) -> None:
        partition = store.filled(4)
        meta = store.claim(partition, 2, lease_s=_LONG_S)
        store.client.renew(meta, _SHORT_S)
        _wait_out()
        with store.refusal(LeaseExpiredError):
            store.client.ack(meta)

    def test_acks_may_be_for_parts_of_claims(self, store: Store) -> None:
        partition = store.filled(4)
        first, second = (store.claim(partition, 2, lease_s=_LONG_S) for _ in range(2))
        store.client.ack(second.subset([1]).concat(first.subset([1])))
        assert not store.client.check_consumption_status(partition, ["train"])
        assert store.claim(partition, 4).size == 0
        store.client.nack(second.subset([0]))
        assert store.claim(partition, 4).sample_ids == ["s2"]
        store.client.ack(first.subset([0]))
        assert store.client.check_consumption_status(partition, ["train"])

    def test_acking_again_succeeds(self, store: Store) -> None:
        partition = store.filled(4)
        meta = store.claim(partition, 4, lease_s=_LONG_S)
        with store.faults.error_after("ack", ConnectionError("the reply was lost")), pytest.raises(RuntimeError):
            store.client.ack(meta)
        store.client.ack(meta)
        store.client.ack(meta.subset([2, 1]))
        for settle in _settlers(store)[1:]:
            with store.refusal(LeaseExpiredError):
                settle(meta)
        assert store.client.check_consumption_status(partition, ["train"])
        assert store.claim(partition, 4).size == 0

    def test_leased_samples_count_as_given(self, store: Store) -> None:
        partition = store.filled(4, num_samples=4)
        held = store.claim(partition, 3, lease_s=_LONG_S)
        rest = bounded(partial(store.claim, partition, 2, blocking=True, timeout_s=60), what="a claim of the tail")
        assert rest.sample_ids == ["s3"]
        assert (
            bounded(partial(store.claim, partition, 2, blocking=True, timeout_s=60), what="a claim of nothing").size
            == 0
        )
        store.client.nack(held)
        assert store.claim(partition, 3, blocking=True).sample_ids == ids(3)

    def test_each_task_leases_on_its_own(self, store: Store) -> None:
        partition = store.filled(2, tasks=["train", "eval"])
        train = store.claim(partition, 2, lease_s=_LONG_S)
        evaluation = store.claim(partition, 2, task="eval", lease_s=_LONG_S)
        assert train.sample_ids == evaluation.sample_ids
        store.client.nack(train)
        evaluation.task_name = "train"
        with store.refusal(LeaseExpiredError):
            store.client.ack(evaluation)
        assert store.claim(partition, 2).size == 2
        assert store.claim(partition, 2, task="eval").size == 0

    def test_cleared_samples_end_their_leases(self, store: Store) -> None:
        partition = store.filled(2)
        meta = store.claim(partition, 2, lease_s=_LONG_S)
        store.client.clear_samples(["s0"], partition)
        with store.refusal(LeaseExpiredError) as caught:
            store.client.ack(meta)
        assert list(caught.value.sample_ids) == ["s0"]
        store.put(partition, ["s0"], x=torch.tensor([7]))
        with store.refusal(LeaseExpiredError):
            store.client.ack(meta.subset([0]))
        assert store.claim(partition, 2).sample_ids == ["s0"]
        store.client.ack(meta.subset([1]))

    def test_lease_tokens_are_those_that_the_claim_drew(self, store: Store) -> None:
        partition = store.filled(4)
        drawn: list[str] = []
        with store.faults.before("claim", lambda request: drawn.append(request.token)):
            given = [store.claim(partition, 1, lease_s=_LONG_S).lease_tokens for _ in range(4)]
        assert given == [[token] for token in drawn]
        assert len(set(drawn)) == 4
