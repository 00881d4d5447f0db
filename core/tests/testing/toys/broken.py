"""Backends that are wrong in one way each. Each docstring is the bug report; the kit's test that names it is in
`BROKEN`."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from dataclasses import replace

import torch

from dataplane_core.capabilities import Capability
from dataplane_core.errors import CapacityExceededError, DataPlaneError, LeaseExpiredError, MissingDataError
from dataplane_core.fields import FieldSpec
from dataplane_core.hookspecs import (
    Claim,
    ConsumptionReply,
    PartitionInfo,
    PutReply,
    RegisterRequest,
    SampleList,
    SettleReply,
    WireBatch,
)
from dataplane_noop import NoopBackend
from dataplane_noop._segments import Ragged, Segment

#: Backend -> the test of the kit that must fail, by the name of the rule that it breaks.
BROKEN: dict[type[NoopBackend], str] = {}


def breaks(test):
    def register(cls):
        BROKEN[cls] = test
        return cls

    return register


def rows_of(column):
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


# --- reads ------------------------------------------------------------------------------------------------------------


@breaks("test_get_of_missing_samples_names_them")
class DropsMissingSamples(NoopBackend):
    """Returns the rows that are there, and says nothing of the others."""

    def get_samples(self, request):
        listed = set(self._service.call("list_samples", request.partition_id, None).sample_ids)
        request.sample_ids = [each for each in request.sample_ids if each in listed]
        if not request.sample_ids:
            return WireBatch(columns={}, specs={})
        return super().get_samples(request)


@breaks("test_get_of_missing_cells_names_them")
class FillsMissingCells(NoopBackend):
    """A cell not yet produced reads as zero."""

    def get_samples(self, request):
        try:
            return super().get_samples(request)
        except MissingDataError as error:
            if not error.missing_cells:
                raise
            count = len(request.sample_ids)
            spec = FieldSpec("tensor", "float32", 0)
            return WireBatch(
                columns={name: torch.zeros(count) for name in request.fields},
                specs=dict.fromkeys(request.fields, spec),
            )


@breaks("test_get_keeps_the_order_asked_for")
class ReordersRows(NoopBackend):
    """Rows come back in the engine's own order."""

    def get_samples(self, request):
        request.sample_ids = sorted(request.sample_ids)
        return super().get_samples(request)


@breaks("test_columns_come_back_bit_for_bit[int64-scalars]")
class PromotesScalars(NoopBackend):
    """(N,) comes back as (N, 1)."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns, specs = dict(reply.columns), dict(reply.specs)
        for name, spec in specs.items():
            if spec.kind == "tensor" and spec.rank == 0:
                columns[name], specs[name] = columns[name].unsqueeze(1), replace(spec, rank=1)
        return WireBatch(columns=columns, specs=specs)


@breaks("test_columns_come_back_bit_for_bit[int64-vectors]")
class ChangesDtype(NoopBackend):
    """int64 comes back as float32."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns, specs = dict(reply.columns), dict(reply.specs)
        for name, spec in specs.items():
            if spec.dtype == "int64" and not columns[name].is_nested:
                columns[name], specs[name] = columns[name].float(), replace(spec, dtype="float32")
        return WireBatch(columns=columns, specs=specs)


@breaks("test_nan_payloads_survive[float32]")
class CleansNaNs(NoopBackend):
    """Every NaN becomes the same NaN."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns = {
            name: torch.where(column.isnan(), torch.nan, column)
            if isinstance(column, torch.Tensor) and column.dtype == torch.float32 and not column.is_nested
            else column
            for name, column in reply.columns.items()
        }
        return WireBatch(columns=columns, specs=reply.specs)


@breaks("test_columns_come_back_bit_for_bit[int64-jagged_with_empty_rows]")
class LosesEmptyRows(NoopBackend):
    """Rows of length 0 come back with one zero."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns = dict(reply.columns)
        for name, column in columns.items():
            if isinstance(column, torch.Tensor) and column.is_nested:
                columns[name] = [row if len(row) else row.new_zeros((1, *row.shape[1:])) for row in column.unbind()]
        return WireBatch(columns=columns, specs=reply.specs)


@breaks("test_objects_come_back_equal[none-NonTensorStack]")
class TurnsNoneIntoText(NoopBackend):
    """None is stored as an empty string."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns = {
            name: ["" if item is None else item for item in column] if isinstance(column, list) else column
            for name, column in reply.columns.items()
        }
        return WireBatch(columns=columns, specs=reply.specs)


@breaks("test_tensors_may_be_reused_after_put")
class KeepsTheCallersMemory(NoopBackend):
    """Stores references to what it was handed."""

    def _store(self, write_id, columns, num_samples, deadline):
        kept = {
            name: Ragged(column.values(), column.offsets())
            if isinstance(column, torch.Tensor) and column.is_nested
            else column
            for name, column in columns.items()
        }
        self._segments[write_id] = Segment(kept, num_samples)


@breaks("test_what_comes_back_is_owned_by_the_caller")
class HandsOutItsOwnMemory(NoopBackend):
    """Caches replies."""

    def __init__(self, config):
        super().__init__(config)
        self._cache = {}

    def get_samples(self, request):
        key = (request.partition_id, *request.sample_ids, "", *request.fields)
        if key not in self._cache:
            self._cache[key] = super().get_samples(request)
        return self._cache[key]


@breaks("test_a_read_of_missing_data_does_not_wait")
class WaitsForMissingData(NoopBackend):
    """Waits for a producer, far beyond what anybody asked for."""

    def get_samples(self, request):
        while True:
            try:
                return super().get_samples(request)
            except MissingDataError:
                time.sleep(0.05)


@breaks("test_errors_are_of_the_hierarchy[get_missing_sample]")
class RaisesItsEnginesErrors(NoopBackend):
    """A KeyError of its own, which no user can tell from a bug."""

    def get_samples(self, request):
        try:
            return super().get_samples(request)
        except MissingDataError as error:
            raise KeyError(request.sample_ids[0]) from error


@breaks("test_get_hook_raises_its_own_errors")
class LeavesErrorsToTheClient(NoopBackend):
    """Counts on core to notice that rows are missing."""

    def get_samples(self, request):
        try:
            return super().get_samples(request)
        except DataPlaneError as error:
            raise RuntimeError(str(error)) from error


# --- writes -----------------------------------------------------------------------------------------------------------


@breaks("test_put_is_visible_when_it_returns")
class ReportsSuccessTooEarly(NoopBackend):
    """Writes after it has replied."""

    def put_samples(self, request):
        columns = {name: list(c) if isinstance(c, list) else c.clone() for name, c in request.columns.items()}
        late = replace(request, columns=columns, deadline=request.deadline)
        write = super().put_samples

        def later():
            time.sleep(0.05)
            with contextlib.suppress(DataPlaneError):  # the partition may be gone by now
                write(late)

        threading.Thread(target=later, daemon=True).start()
        return PutReply(num_samples=len(request.sample_ids))


@breaks("test_put_hook_counts_its_rows")
class ForgetsToWriteTags(NoopBackend):
    """Tags alone are not written, and not counted."""

    def put_samples(self, request):
        if not request.columns:
            return PutReply(num_samples=0)
        return super().put_samples(request)


@breaks("test_tags_merge_key_by_key")
class ReplacesTags(NoopBackend):
    """A put's tags take the place of all that were there."""

    def put_samples(self, request):
        reply = super().put_samples(request)
        partition = self._service._ledger._partitions[request.partition_id]
        for sample_id, tags in zip(request.sample_ids, request.tags or [], strict=False):
            partition.rows[sample_id].tags = dict(tags)
        return reply


@breaks("test_tags_keep_their_types")
class StoresTagsAsNumbers(NoopBackend):
    """True comes back as 1."""

    def put_samples(self, request):
        if request.tags is not None:
            request.tags = [
                {name: int(value) if isinstance(value, bool) else value for name, value in row.items()}
                for row in request.tags
            ]
        return super().put_samples(request)


@breaks("test_claims_see_whole_rows_with_their_tags")
class CommitsTagsAfterData(NoopBackend):
    """Two writes: cells, then tags."""

    def put_samples(self, request):
        tags, request.tags = request.tags, None
        reply = super().put_samples(request) if request.columns else None
        if tags is None:
            return reply
        time.sleep(0.001)
        return super().put_samples(replace(request, columns={}, specs={}, tags=tags))


@breaks("test_reads_see_whole_rows_or_none")
class WritesFieldByField(NoopBackend):
    """One write per column."""

    def put_samples(self, request):
        reply = PutReply(num_samples=len(request.sample_ids))
        for name, column in request.columns.items():
            super().put_samples(
                replace(request, columns={name: column}, specs={name: request.specs[name]}, tags=request.tags)
            )
            time.sleep(0.001)
        return reply if request.columns else super().put_samples(request)


@breaks("test_a_field_keeps_its_schema[dtype]")
class TakesAnySchema(NoopBackend):
    """The last writer's dtype wins."""

    def put_samples(self, request):
        partition = self._service._ledger._partitions.get(request.partition_id)
        if partition is not None:
            partition.specs.update(request.specs)
        return super().put_samples(request)


@breaks("test_a_field_keeps_its_schema[n_to_n1]")
class WritesTheGoodColumns(NoopBackend):
    """Of a put with one bad column, the others are written."""

    def put_samples(self, request):
        for name in list(request.columns):
            one = {name: request.columns[name]}
            super().put_samples(replace(request, columns=one, specs={name: request.specs[name]}))
        return PutReply(num_samples=len(request.sample_ids))


@breaks("test_put_hook_takes_the_current_epoch")
class IgnoresTheEpoch(NoopBackend):
    """Writes what was checked against another registration."""

    def put_samples(self, request):
        request.epoch = None
        return super().put_samples(request)


@breaks("test_an_overwrite_gives_no_sample_again")
class OverwritesByDeleting(NoopBackend):
    """An overwrite drops the row and writes it anew, which resurrects it for consumers."""

    def put_samples(self, request):
        known = set(self._service.call("list_samples", request.partition_id, None).sample_ids)
        again = [each for each in request.sample_ids if each in known]
        if request.columns and again:
            self._service.call("clear", request.partition_id, again)
        return super().put_samples(request)


@breaks("test_reads_see_all_old_or_all_new_cells")
class OverwritesFieldByField(NoopBackend):
    """Declares atomic_overwrite, but replaces one column after the other."""

    def put_samples(self, request):
        if len(request.columns) < 2:
            return super().put_samples(request)
        known = set(self._service.call("list_samples", request.partition_id, None).sample_ids)
        if not known & set(request.sample_ids):
            return super().put_samples(request)
        for name, column in request.columns.items():
            super().put_samples(replace(request, columns={name: column}, specs={name: request.specs[name]}))
            time.sleep(0.0005)
        return PutReply(num_samples=len(request.sample_ids))


@breaks("test_puts_that_overlap_clears_are_whole_or_nothing")
class WritesRowByRow(NoopBackend):
    """Declares fenced, but a clear may fall between two rows of one put."""

    def put_samples(self, request):
        for place, sample_id in enumerate(request.sample_ids):
            columns = {
                name: [c[place]] if isinstance(c, list) else c[place : place + 1] for name, c in request.columns.items()
            }
            tags = None if request.tags is None else [request.tags[place]]
            super().put_samples(replace(request, sample_ids=[sample_id], columns=columns, tags=tags))
            time.sleep(0.0002)
        return PutReply(num_samples=len(request.sample_ids))


@breaks("test_undeclared_operations_are_refused[overwrite]")
class OverwritesUndeclared(NoopBackend):
    """Does not declare overwrite, and overwrites all the same."""

    capabilities = NoopBackend.capabilities - {Capability.OVERWRITE, Capability.ATOMIC_OVERWRITE}


# --- registration and clears ------------------------------------------------------------------------------------------


@breaks("test_register_again_drops_rows")
class KeepsRowsAcrossRegistrations(NoopBackend):
    """A partition that is known is not opened afresh."""

    def register_partition(self, request):
        try:
            return self._service.call("describe", request.partition_id)
        except DataPlaneError:
            return super().register_partition(request)


@breaks("test_register_again_drops_the_schema")
class KeepsTheSchemaAcrossRegistrations(NoopBackend):
    """The dtype of a field outlives the registration."""

    def register_partition(self, request: RegisterRequest) -> PartitionInfo:
        before = self._service._ledger._partitions.get(request.partition_id)
        info = super().register_partition(request)
        if before is not None:
            self._service._ledger._partitions[request.partition_id].specs.update(before.specs)
        return info


@breaks("test_a_cleared_partition_leaves_the_engine")
class ForgetsButKeeps(NoopBackend):
    """What is cleared is gone from the books, and stays in the engine."""

    def _delete(self, refs, deadline):
        pass


@breaks("test_overwritten_cells_leave_the_engine")
class KeepsOldVersions(NoopBackend):
    """A put does not delete what it replaced."""

    def put_samples(self, request):
        self._delete = lambda refs, deadline: None
        try:
            return super().put_samples(request)
        finally:
            del self._delete


@breaks("test_a_refused_put_leaves_nothing_in_the_engine")
class StoresBeforeItAsks(NoopBackend):
    """A put stores its columns first, and leaves them there when it is refused."""

    def put_samples(self, request):
        self._store(-1 - len(self._segments), request.columns, len(request.sample_ids), request.deadline)
        reply = super().put_samples(request)
        del self._segments[min(self._segments)]
        return reply


@breaks("test_cleared_rows_are_gone")
class KeepsRowsAfterClear(NoopBackend):
    """Drops ids from the listing, and leaves the cells readable."""

    def clear_samples(self, request):
        if request.sample_ids is None:
            return super().clear_samples(request)
        hidden = self.__dict__.setdefault("hidden", set())
        hidden.update(request.sample_ids)
        return type(super().clear_samples(replace(request, sample_ids=["nobody"])))(num_samples=len(request.sample_ids))

    def list_samples(self, request):
        listed = super().list_samples(request)
        kept = [place for place, each in enumerate(listed.sample_ids) if each not in self.__dict__.get("hidden", ())]
        return SampleList(
            sample_ids=[listed.sample_ids[place] for place in kept], tags=[listed.tags[place] for place in kept]
        )


@breaks("test_other_partitions_stay")
class ClearsByPrefix(NoopBackend):
    """Clearing a partition drops those whose names begin alike."""

    def clear_samples(self, request):
        if request.sample_ids is None:
            for other in list(self._service._ledger._partitions):
                if other.startswith(request.partition_id) and other != request.partition_id:
                    super().clear_samples(replace(request, partition_id=other))
        return super().clear_samples(request)


@breaks("test_clear_hook_counts_its_rows")
class ReturnsNone(NoopBackend):
    """Does its work and returns nothing."""

    def clear_samples(self, request):
        super().clear_samples(request)


# --- claims -----------------------------------------------------------------------------------------------------------


@breaks("test_each_sample_is_given_once")
class ClaimsTwice(NoopBackend):
    """Forgets what it gave."""

    def claim(self, request):
        claim = super().claim(replace(request, lease_s=request.lease_s or 1e-9))
        return claim if request.lease_s else replace(claim, lease_tokens=None)


@breaks("test_many_claimers_get_each_sample_once")
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
            partition.poisoned.clear()
            for task in partition.tasks.values():
                task.views.clear()
        return reply


@breaks("test_claims_match_the_filter[{'version':('>=',7)}]")
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


# --- leases -----------------------------------------------------------------------------------------------------------


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
            super().nack(replace(request, sample_ids=[sample_id], lease_tokens=[token]))
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


# --- capacity and guarantees ------------------------------------------------------------------------------------------


@breaks("test_nothing_is_evicted")
class EvictsWhenFull(NoopBackend):
    """Drops the oldest samples to make room."""

    def put_samples(self, request):
        while True:
            try:
                return super().put_samples(request)
            except CapacityExceededError as error:
                listed = self._service.call("list_samples", request.partition_id, None).sample_ids
                if not error.retryable or not listed:
                    raise
                self._service.call("clear", request.partition_id, listed[:1])


@breaks("test_room_does_not_leak")
class LeaksRoom(NoopBackend):
    """What a refused put reserved is never given back."""

    def put_samples(self, request):
        try:
            return super().put_samples(request)
        except DataPlaneError:
            self._service._ledger._held_bytes += 10_000
            raise


@breaks("test_nothing_is_unpickled")
class Unpickles(NoopBackend):
    """Declares no_pickle, and pickles its tags."""

    def list_samples(self, request):
        listed = super().list_samples(request)
        return SampleList(sample_ids=listed.sample_ids, tags=pickle.loads(pickle.dumps(listed.tags)))


@breaks("test_operations_that_build_on_claims_declare_them")
class DeclaresHalf(NoopBackend):
    """Leases without claims."""

    capabilities = NoopBackend.capabilities - {Capability.CLAIMS}


@breaks("test_random_histories_agree_with_the_ledger")
class ForgetsTheSecondTask(NoopBackend):
    """Wrong only in a history of several steps: a clear of one sample gives all of the task 'eval' out again."""

    def clear_samples(self, request):
        reply = super().clear_samples(request)
        partition = self._service._ledger._partitions.get(request.partition_id)
        if request.sample_ids is not None and reply.num_samples and partition is not None and "eval" in partition.tasks:
            task = partition.tasks["eval"]
            task.views.clear()
            task.num_held = task.num_done = 0
            for row in partition.rows.values():
                row.holds.pop("eval", None)
        return reply
