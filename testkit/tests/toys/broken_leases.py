"""Backends that are wrong in one way each: in how leases end."""

from __future__ import annotations

import time
from dataclasses import replace

from broken import Broken

from dataplane_core.errors import LeaseExpiredError
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


@breaks("test_acked_samples_never_go_back")
class AcksForAWhile(NoopBackend):
    """An ack is forgotten when the lease ends."""

    def ack(self, request):
        return SettleReply(num_samples=len(request.sample_ids))


@breaks("test_renew_extends_the_lease")
class RenewsNothing(NoopBackend):
    """A renewal succeeds, and the lease ends when it would have ended."""

    def renew(self, request):
        return SettleReply(num_samples=len(request.sample_ids))


def _renewal_makes_younger(renewed):
    """The hooks of a store in which the leases that a renewal names, or the others, are as old as the renewal."""

    def renew(self, request):
        self.renewed, self.renewed_at = set(request.sample_ids), time.monotonic()
        return NoopBackend.renew(self, request)

    def inspect_partition(self, request):
        found = NoopBackend.inspect_partition(self, request)
        lease = found.tasks["train"].oldest_lease
        if lease is None or (lease.sample_id in self.__dict__.get("renewed", ())) != renewed or not self.renewed_at:
            return found
        younger = replace(lease, held_s=time.monotonic() - self.renewed_at)
        return replace(found, tasks={"train": replace(found.tasks["train"], oldest_lease=younger)})

    return {"renew": renew, "inspect_partition": inspect_partition, "renewed_at": 0.0}


@breaks("test_a_renewal_of_a_part_changes_no_age[the_renewed_one]")
class RenewsAsIfGivenNow(NoopBackend):
    """A lease is as old as its last renewal."""

    locals().update(_renewal_makes_younger(renewed=True))


@breaks("test_a_renewal_of_a_part_changes_no_age[the_other_one]")
class RenewsTheRestAsIfGivenNow(NoopBackend):
    """A renewal of a part of a claim makes the other part a new claim."""

    locals().update(_renewal_makes_younger(renewed=False))


@breaks("test_lease_tokens_are_those_that_the_claim_drew")
class CountsTokens(NoopBackend):
    """Lease tokens are numbered in the store, which forgets how far it had counted."""

    def claim(self, request):
        self.count = self.__dict__.get("count", 0) + 1
        request.token = f"1.{self.count}"
        return super().claim(request)
