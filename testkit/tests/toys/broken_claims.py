"""Backends that are wrong in one way each: in what a claim gives, and what it says when it waited in vain."""

from __future__ import annotations

import time
from dataclasses import replace

from broken import Broken

from dataplane_core.errors import UnknownPartitionError
from dataplane_core.ledger import commands
from dataplane_core.spec import Claim, ConsumptionReply, FieldsRequest, SettleReply
from dataplane_noop import NoopBackend

BROKEN = Broken()
breaks = BROKEN.breaks


@breaks("test_each_sample_is_given_once")
class ClaimsTwice(NoopBackend):
    """Forgets what it gave."""

    def claim(self, request):
        claim = super().claim(replace(request, lease_s=request.lease_s or 1e-9))
        return claim if request.lease_s else replace(claim, lease_tokens=None)


@breaks("test_many_claimers_get_each_sample_once[alone]")
class ClaimsInTwoSteps(NoopBackend):
    """Looks first and marks later, so that two claimers see the same sample."""

    def claim(self, request):
        given = self.__dict__.setdefault("given", {}).setdefault((request.partition_id, request.task_name), [])
        partition = self._service._ledger._partitions[request.partition_id]
        ready = [each for each in list(partition.rows) if each not in given][: request.batch_size]
        time.sleep(0.001)
        whole = partition.info.num_samples is not None and len(partition.rows) >= partition.info.num_samples
        if request.all_or_nothing and len(ready) < request.batch_size and not whole:
            return Claim()
        given.extend(ready)
        return Claim(sample_ids=ready, tags=[{}] * len(ready), exhausted=whole and not ready)


@breaks("test_claim_hook_gives_all_or_nothing")
class LosesTheTail(NoopBackend):
    """The last, smaller batch is never handed out."""

    def register_partition(self, request):
        return super().register_partition(replace(request, num_samples=None))


@breaks("test_claims_come_in_order_of_first_write")
class ClaimsByName(NoopBackend):
    """Sorts by id."""

    def claim(self, request):
        claim = super().claim(request)
        order = sorted(range(len(claim.sample_ids)), key=lambda place: claim.sample_ids[place])
        return replace(
            claim,
            sample_ids=[claim.sample_ids[place] for place in order],
            tags=[claim.tags[place] for place in order],
        )


@breaks("test_claims_bring_tags")
class ClaimsWithoutTags(NoopBackend):
    """Tags are left behind."""

    def claim(self, request):
        claim = super().claim(request)
        return replace(claim, tags=[{} for _ in claim.sample_ids])


@breaks("test_claim_hook_never_waits")
class WaitsInsideTheClaim(NoopBackend):
    """Blocks in the hook until its deadline."""

    def claim(self, request):
        while True:
            claim = super().claim(request)
            if claim.sample_ids or claim.exhausted or time.monotonic() >= request.deadline:
                return claim
            time.sleep(0.01)


@breaks("test_incomplete_groups_are_not_given")
class SplitsGroups(NoopBackend):
    """Takes no notice of the group size."""

    def register_partition(self, request):
        return super().register_partition(replace(request, grpo_group_size=None))


@breaks("test_a_group_with_a_cleared_member_is_never_given")
class MendsGroups(NoopBackend):
    """A group whose cleared member was written again is given."""

    def clear_samples(self, request):
        reply = super().clear_samples(request)
        partition = self._service._ledger._partitions.get(request.partition_id)
        if partition is not None:
            partition.broken_groups.clear()
            for task in partition.tasks.values():
                task.views.clear()
        return reply


@breaks("test_samples_match_the_filter")
class IgnoresFilters(NoopBackend):
    """Hands out whatever is ready."""

    def claim(self, request):
        return super().claim(replace(request, tag_filter=None))


@breaks("test_leased_samples_count_when_acked")
class CountsLeasesAsConsumed(NoopBackend):
    """What was claimed counts, acked or not."""

    def check_consumption(self, request):
        partition = self._service._ledger._partitions.get(request.partition_id)
        if partition is None or not partition.rows or not all(name in partition.tasks for name in request.task_names):
            return ConsumptionReply(consumed=False)
        return ConsumptionReply(
            consumed=all(name in row.holds for row in partition.rows.values() for name in request.task_names)
        )


@breaks("test_an_empty_partition_is_not_consumed")
class ConsumesNothing(NoopBackend):
    """Zero of zero samples counts as everything."""

    def check_consumption(self, request):
        partition = self._service._ledger._partitions.get(request.partition_id)
        if partition is not None and not partition.rows:
            return ConsumptionReply(consumed=True)
        return super().check_consumption(request)


@breaks("test_num_samples_must_be_written_and_consumed")
class ConsumesBeforeTheEnd(NoopBackend):
    """Compares what was consumed with what is there, not with what will come."""

    def check_consumption(self, request):
        partition = self._service._ledger._partitions.get(request.partition_id)
        tasks = [] if partition is None else [partition.tasks.get(name) for name in request.task_names]
        done = bool(tasks and partition.rows) and all(task and task.num_done == len(partition.rows) for task in tasks)
        return ConsumptionReply(consumed=done)


@breaks("test_cleared_samples_count_as_written_and_consumed")
class ConsumesWhatIsThereOnly(NoopBackend):
    """A partition without samples is never consumed."""

    def check_consumption(self, request):
        partition = self._service._ledger._partitions.get(request.partition_id)
        consumed = super().check_consumption(request).consumed
        return ConsumptionReply(consumed=consumed and partition is not None and bool(partition.rows))


@breaks("test_a_finished_partition_has_an_end")
class NeverFinishes(NoopBackend):
    """A registration that keeps takes num_samples only if it is not 0."""

    def register_partition(self, request):
        return super().register_partition(replace(request, num_samples=request.num_samples or None))


@breaks("test_keep_adds_num_samples")
class KeepsTheEndOpen(NoopBackend):
    """A registration that keeps ignores num_samples."""

    def register_partition(self, request):
        known = request.partition_id in self._service._ledger._partitions
        keeps = known and request.if_exists == "keep" and request.num_samples
        return super().register_partition(replace(request, num_samples=None) if keeps else request)


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


@breaks("test_large_groups_are_written_and_given_whole")
class CutsLongLists(NoopBackend):
    """A call of the engine takes 8,000 rows; the rest is not claimed."""

    def claim(self, request):
        claim = super().claim(request)
        return replace(claim, sample_ids=claim.sample_ids[:8000], tags=claim.tags[:8000])


@breaks("test_only_ready_samples_are_given")
class ReadyWithoutTheExtras(NoopBackend):
    """A claim minds the registered fields only."""

    def claim(self, request):
        request.required_fields = [name for name in request.required_fields if name == "x"] or ["x"]
        return super().claim(request)


@breaks("test_a_claim_of_a_cleared_partition_ends_at_once")
class ForgetsWhoWaited(NoopBackend):
    """A claim that waited when its partition was cleared waits on. The first answer to each claim takes a while."""

    def claim(self, request):
        waited = self.__dict__.setdefault("waited", set())
        if request.token not in waited:
            time.sleep(0.3)
            claim = super().claim(request)
            waited.add(request.token)
            return claim
        try:
            return super().claim(request)
        except UnknownPartitionError:
            return Claim()


@breaks("test_blocking_gives_the_tail")
class GivesTheTailToNewClaimsOnly(NoopBackend):
    """A claim that waited does not notice that the last samples have come. The first answer takes a while."""

    def claim(self, request):
        waited = self.__dict__.setdefault("waited", set())
        if request.token not in waited:
            time.sleep(0.3)
        elif request.all_or_nothing:
            listed = self._service.call(commands.ListRequest(request.partition_id, None)).sample_ids
            info = self._service.call(commands.DescribeRequest(request.partition_id))
            if len(listed) == info.num_samples:
                return Claim()
        waited.add(request.token)
        return super().claim(request)


@breaks("test_a_claim_asks_when_a_lease_has_ended[given_later]")
class TellsNobodyOfLeases(NoopBackend):
    """A claim that waits asks when the leases have ended that it knew of, and does not hear of later ones."""

    def __init__(self, config):
        super().__init__(config)
        self._service._tell_of_leases = lambda partition_id: None


@breaks("test_a_claim_is_woken_when_it_need_not_wait")
class NeverWakes(NoopBackend):
    """Declares that it wakes, and does not."""

    def call_ledger_waking(self, deadline, command, wake):
        return self.call_ledger(deadline, command)


@breaks("test_only_as_many_are_woken_as_there_are_samples_for")
class WakesAll(NoopBackend):
    """Wakes every claim that waits, whatever was put."""

    def call_ledger_waking(self, deadline, command, wake):
        self.__dict__.setdefault("wakes", []).append(wake)
        return super().call_ledger_waking(deadline, command, wake)

    def put_samples(self, request):
        reply = super().put_samples(request)
        for wake in self.__dict__.get("wakes", ()):
            wake()
        return reply


@breaks("test_claims_with_many_filters_are_woken_when_they_need_not_wait[partition]")
class WakesAFew(NoopBackend):
    """Keeps no more than 16 claims to wake."""

    def call_ledger_waking(self, deadline, command, wake):
        kept = self.__dict__.setdefault("kept", set())
        if len(kept) < 16:
            kept.add(command.token)
        return super().call_ledger_waking(deadline, command, wake if command.token in kept else lambda: True)


@breaks("test_ranks_get_equal_numbers_of_batches[first_write]")
class RanksTakeWhatIsLeft(NoopBackend):
    """With the default sampler, each rank takes its batch for itself."""

    def claim(self, request):
        return super().claim(replace(request, dp_size=None if request.sampler == "first_write" else request.dp_size))


@breaks("test_the_end_is_the_same_for_all_ranks")
class TellsTheEndToOne(NoopBackend):
    """Does not keep that there is no further batch."""

    def claim(self, request):
        claim = super().claim(request)
        for batches in self._service._ledger._partitions[request.partition_id].batches.values():
            batches.ended.clear()
        return claim


@breaks("test_a_cleared_batch_is_refused_though_its_samples_are_written_anew")
class KnowsBatchesByIds(NoopBackend):
    """A sample that was cleared and written anew is of its batch again."""

    def put_samples(self, request):
        reply = super().put_samples(request)
        for batches in self._service._ledger._partitions[request.partition_id].batches.values():
            batches.kept = {index: replace(batch, last_seq=1 << 62) for index, batch in batches.kept.items()}
        return reply


@breaks("test_reset_consumption_before_the_fields_are_produced")
class ForgetsCursorsOfTags(NoopBackend):
    """A task has not consumed samples that have only tags."""

    def set_cursor(self, request):
        asked = FieldsRequest(
            partition_id=request.partition_id, sample_ids=request.sample_ids, deadline=request.deadline
        )
        listed = self.list_fields(asked)
        produced = [each for each, at in zip(request.sample_ids, listed.index, strict=True) if listed.patterns[at]]
        super().set_cursor(replace(request, sample_ids=produced))
        return SettleReply(num_samples=len(request.sample_ids))
