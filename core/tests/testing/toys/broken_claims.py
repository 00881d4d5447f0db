"""More backends that are wrong in one way each: in who a thing is, in the order of columns, in who gets the room, and
in what they say of a claim that waited in vain."""

from __future__ import annotations

from dataclasses import replace

from broken import breaks

from dataplane_core.errors import LostSamplesError, OperationTimeoutError
from dataplane_noop import NoopBackend


@breaks("test_the_epoch_is_the_one_that_the_registration_drew")
class CountsEpochs(NoopBackend):
    """Registrations are numbered in the store, which forgets how far it had counted."""

    def register_partition(self, request):
        self.count = self.__dict__.get("count", 0) + 1
        request.epoch = str(self.count)
        return super().register_partition(request)


@breaks("test_lease_tokens_are_those_that_the_claim_drew")
class CountsTokens(NoopBackend):
    """Lease tokens are numbered in the store, which forgets how far it had counted."""

    def claim(self, request):
        self.count = self.__dict__.get("count", 0) + 1
        request.token = f"1.{self.count}"
        return super().claim(request)


@breaks("test_middleware_may_add_its_column_first")
class PairsColumnsByTheirOrder(NoopBackend):
    """Joins the columns of a row in the order in which they come, and numbers them by the order of the specs."""

    def put_samples(self, request):
        request.columns = dict(zip(request.specs, request.columns.values(), strict=True))
        return super().put_samples(request)


def _without(**kept):
    def change(self, request):
        claim = NoopBackend.claim(self, request)
        return claim if claim.shortfall is None else replace(claim, shortfall=replace(claim.shortfall, **kept))

    return change


@breaks("test_a_timeout_says_who_holds_the_samples")
class ForgetsWhoHolds(NoopBackend):
    """Says that samples are leased, and not by whom."""

    claim = _without(leased=())


@breaks("test_a_timeout_counts_what_the_filter_passes_over")
class ForgetsTheFilter(NoopBackend):
    """Samples that do not match are not spoken of."""

    claim = _without(num_not_matching=0)


@breaks("test_a_timeout_names_groups_that_are_not_whole")
class ForgetsGroups(NoopBackend):
    """Says that samples wait for their groups, and not for which."""

    claim = _without(incomplete_groups={})


@breaks("test_lost_payload_is_named")
class TakesLossForHaste(NoopBackend):
    """Payload that is gone is taken for rows that others overwrite all the time."""

    def get_samples(self, request):
        try:
            return super().get_samples(request)
        except LostSamplesError as error:
            raise OperationTimeoutError("the rows were overwritten faster than they could be read.") from error


@breaks("test_a_large_put_is_not_starved_by_small_ones")
class GivesRoomToWhoeverAsks(NoopBackend):
    """Nobody queues for room."""

    def _put(self, request, row_bytes, ticket):
        return super()._put(request, row_bytes, None)

    def _ledger(self, deadline, method, *args, **kwargs):
        return None if method == "wait_for_room" else super()._ledger(deadline, method, *args, **kwargs)


@breaks("test_large_groups_are_written_and_given_whole")
class CutsLongLists(NoopBackend):
    """A call of the engine takes 8,000 rows; the rest is not claimed."""

    def claim(self, request):
        claim = super().claim(request)
        return replace(claim, sample_ids=claim.sample_ids[:8000], tags=claim.tags[:8000])
