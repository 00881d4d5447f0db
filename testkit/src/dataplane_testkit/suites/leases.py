"""Leases: samples that nobody settles go back to the pool, and two holders never both succeed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from dataplane_core.errors import LeaseExpiredError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability
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


class LeaseSuite(Suite, chapter="leases", proof=Capability.LEASES):
    """Claims with ``lease_s``, ack, nack, renew."""

    def test_leased_claims_carry_tokens(self, store: Store) -> None:
        """Contract: "tags and lease_tokens align 1:1 with the ids".

        Check first: Claim.lease_tokens must hold one str per id if the request has lease_s. Otherwise it must be None.
        """
        partition = store.filled(4)
        meta = store.claim(partition, 3, lease_s=_LONG_S)
        assert meta.lease_tokens is not None
        assert len(meta.lease_tokens) == 3
        assert all(isinstance(token, str) for token in meta.lease_tokens)
        assert store.claim(partition, 3).lease_tokens is None

    def test_unsettled_leases_go_back(self, store: Store) -> None:
        """Contract: "with lease_s, a claim that is neither acked nor renewed in time is handed out again."

        Check first: the claim hook itself must return samples with expired leases to the pool. No other call must be
        needed for it.
        """
        partition = store.filled(4)
        lost = store.claim(partition, 2, lease_s=_SHORT_S)
        _wait_out()
        again = store.claim(partition, 4, lease_s=_LONG_S)
        assert again.sample_ids == ids(4), "samples that went back to the pool lost their places in the order"
        assert again.lease_tokens is not None
        assert lost.lease_tokens is not None
        assert not set(again.lease_tokens) & set(lost.lease_tokens), "a lease token was used twice"

    def test_blocking_claims_wake_when_leases_run_out(self, store: Store) -> None:
        """Contract: "a claim that is neither acked nor renewed in time is handed out again."

        Check first: a claim that waits must get samples whose leases expire while it waits, also leases that were given
        after it asked.
        """
        partition = store.filled(1)
        waiting = store.waiting_claim(partition, 2)
        store.claim(partition, 1, lease_s=_SHORT_S)
        store.put(partition, ["s1"], x=torch.arange(1))
        assert waiting.result(30, "a claim of a sample whose lease has ended").sample_ids == ids(2)

    def test_acked_samples_never_go_back(self, store: Store) -> None:
        """Contract: "a claim that is neither acked nor renewed in time is handed out again."

        Check first: after an ack, the sample must never go back to the pool, also after the lease time is over.
        """
        partition = store.filled(4)
        _wait_out(_in_time(store, partition, store.client.ack))
        assert store.claim(partition, 4).size == 0

    def test_an_expired_ack_is_refused(self, store: Store) -> None:
        """Contract: "LeaseExpiredError names the ids whose token is no longer valid, so two holders never both
        succeed."

        Check first: ack must compare the lease token and the time. It must refuse an expired lease, even if no other
        consumer has claimed the sample since.
        """
        partition = store.filled(4)
        meta = store.claim(partition, 2, lease_s=_SHORT_S)
        _wait_out()
        with store.refusal(LeaseExpiredError, "'s0'") as caught:
            store.client.ack(meta)
        assert sorted(caught.value.sample_ids) == ["s0", "s1"]
        assert store.claim(partition, 4, lease_s=_LONG_S).sample_ids == ids(4), "a refused ack settled samples"

    def test_two_holders_never_both_succeed(self, store: Store) -> None:
        """Contract: "LeaseExpiredError names the ids whose token is no longer valid, so two holders never both
        succeed."

        Check first: every claim must give new lease tokens. ack, nack and renew must compare them.
        """
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
        """Contract: "Each of them changes all rows or none. LeaseExpiredError names the ids whose token is no longer
        valid".

        Check first: check all lease tokens of the request before any row is changed, in one atomic step.
        """
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
        """Contract: "nack(meta) gives them back: they can be claimed again at once." and "LeaseExpiredError names the
        ids whose token is no longer valid".

        Check first: when nack returns, its samples must be claimable again, at their old places in the order. Their old
        token must be refused from then on.
        """
        partition = store.filled(4)
        meta = store.claim(partition, 3, lease_s=_LONG_S)
        store.client.nack(meta.subset([0, 2]))
        with store.refusal(LeaseExpiredError):
            store.client.ack(meta.subset([0]))
        assert store.claim(partition, 4, lease_s=_LONG_S).sample_ids == ["s0", "s2", "s3"]

    def test_renew_extends_the_lease(self, store: Store) -> None:
        """Contract: "a claim that is neither acked nor renewed in time is handed out again."

        Check first: renew must set the end of the lease to lease_s seconds from now. The old end must no longer count.
        """
        partition = store.filled(4)
        renewed: list[KVBatchMeta] = []

        def renew_two(meta: KVBatchMeta) -> None:
            store.client.renew(meta.slice(0, 2), _LONG_S)
            renewed.append(meta.slice(0, 2))

        _wait_out(_in_time(store, partition, renew_two))
        assert store.claim(partition, 4, lease_s=_LONG_S).sample_ids == ["s2", "s3"]
        store.client.ack(renewed[0])

    def test_renew_may_shorten_the_lease(self, store: Store) -> None:
        """Hook spec: "Extend leases to lease_s seconds from now."

        Check first: renew must always set the new end of the lease. It must not keep the later one of the old and the
        new end.
        """
        partition = store.filled(4)
        meta = store.claim(partition, 2, lease_s=_LONG_S)
        store.client.renew(meta, _SHORT_S)
        _wait_out()
        with store.refusal(LeaseExpiredError):
            store.client.ack(meta)

    def test_acks_may_be_for_parts_of_claims(self, store: Store) -> None:
        """Contract: "A part of a claim can be acked."

        Check first: check the lease token of each sample on its own: one request may hold a part of a claim, and the
        tokens of several. The other samples of the claims must stay leased.
        """
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
        """Contract: "Acking again with the same token succeeds, since the first reply may have been lost." and
        "LeaseExpiredError names the ids whose token is no longer valid".

        Check first: the store must keep the token of an acked sample. A second ack with this token must succeed and
        change nothing. A nack or renewal must be refused, and must not bring the sample back.
        """
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
        """Contract: "Samples leased to another holder count as given. So once num_samples ids were written, a blocking
        claim does not wait for them: it returns the samples that are left, perhaps none."

        Check first: once num_samples ids were written, a blocking claim must not wait for samples that others hold on a
        lease.
        """
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
        """Contract: "Task: a named use of the samples, with its own cursor."

        Check first: the store must record leases per task. It must refuse a token of another task.
        """
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
        """Contract: "drops those rows with their tags and cursors".

        Check first: a clear must end the leases of its samples. An id that is written again is a new sample, and the
        old token must be refused.
        """
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
        """Hook spec: "The lease token of the samples that this claim hands out: random bits drawn by the client
        (new_id)."

        Check first: use the lease token of the request. Do not count them in the store: a store that is restored to an
        older state would give out the same tokens again.
        """
        partition = store.filled(4)
        drawn: list[str] = []
        with store.faults.before("claim", lambda request: drawn.append(request.token)):
            given = [store.claim(partition, 1, lease_s=_LONG_S).lease_tokens for _ in range(4)]
        assert given == [[token] for token in drawn]
        assert len(set(drawn)) == 4
