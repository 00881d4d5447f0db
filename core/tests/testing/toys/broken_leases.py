"""Backends that are wrong in one way each: in how leases end."""

from __future__ import annotations

from dataclasses import replace

from broken import Broken

from dataplane_core.errors import (
    LeaseExpiredError,
)
from dataplane_core.spec import SettleReply, new_id
from dataplane_noop import NoopBackend

BROKEN = Broken()
breaks = BROKEN.breaks


@breaks("test_unsettled_leases_go_back")
class LeasesNeverExpire(NoopBackend):
    """A crashed consumer keeps its samples for ever."""

    def claim(self, request):
        return super().claim(replace(request, lease_s=None if request.lease_s is None else 1e9))


@breaks("test_an_expired_ack_is_refused")
class AcceptsExpiredAcks(NoopBackend):
    """An ack always succeeds."""

    def ack(self, request):
        try:
            return super().ack(request)
        except LeaseExpiredError:
            return SettleReply(num_samples=len(request.sample_ids))


@breaks("test_two_holders_never_both_succeed")
class AcceptsAnyToken(NoopBackend):
    """Settles for whoever asks, by id."""

    def ack(self, request):
        holds = [
            row.holds[request.task_name].token
            for row in map(self._service._ledger._partitions[request.partition_id].rows.get, request.sample_ids)
        ]
        return super().ack(replace(request, lease_tokens=holds))

    def renew(self, request):
        return SettleReply(num_samples=len(request.sample_ids))


@breaks("test_settling_is_all_or_none")
class SettlesRowByRow(NoopBackend):
    """Gives back what it can before it refuses."""

    def nack(self, request):
        for sample_id, token in sorted(zip(request.sample_ids, request.lease_tokens, strict=True), reverse=True):
            super().nack(replace(request, sample_ids=[sample_id], lease_tokens=[token], request_id=new_id()))
        return SettleReply(num_samples=len(request.sample_ids))


@breaks("test_register_again_ends_leases")
class UsesTokensAgain(NoopBackend):
    """Tokens are numbered anew with every registration."""

    def register_partition(self, request):
        self._num_claims = 0
        return super().register_partition(request)

    def claim(self, request):
        self._num_claims += 1
        request.token = f"token {self._num_claims}"
        return super().claim(request)


@breaks("test_lease_tokens_are_those_that_the_claim_drew")
class CountsTokens(NoopBackend):
    """Lease tokens are numbered in the store, which forgets how far it had counted."""

    def claim(self, request):
        self.count = self.__dict__.get("count", 0) + 1
        request.token = f"1.{self.count}"
        return super().claim(request)
