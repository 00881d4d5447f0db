"""Backends that are wrong in one way each; see `table`."""
# ruff: noqa: F401 - the rows use what is imported

import copy
import dataclasses
import json
import multiprocessing
import pickle
import threading
import time
from unittest import mock

import torch
from msgspec.structs import replace
from table import Table

from dataplane_core import spec
from dataplane_core.codec.rows import row_nbytes
from dataplane_core.errors import MissingDataError
from dataplane_core.ledger import commands, group_of
from dataplane_core.ledger.partition import Partition
from dataplane_core.ledger.rollouts import RolloutGroup
from dataplane_core.spec import Capability, Ragged, new_id
from dataplane_noop import NoopBackend
from dataplane_noop._backend import Segment


def _held_bytes(self, backend):
    return sum(sum(row_nbytes(segment._columns, segment._num_kept)) for segment in backend._segments.values())


_LISTED = "self.call_ledger(request.deadline, commands.ListRequest(request.partition_id, None)).sample_ids"
_LAZY = {
    "partition": "self._service.ledger._partitions.get(request.partition_id)",
    "listed": _LISTED,
    "written": f"sorted({{*{_LISTED}}} & {{*request.sample_ids}})",
    "rows": "list(zip(reply.sample_ids, reply.tags, strict=True))",
    "tasks": "[partition.tasks.get(name) for name in request.task_names] if partition else []",
    "holds": "[partition.rows[each].holds[request.task_name] for each in request.sample_ids]",
    "lack": "reply.shortfall",
    "late": "time.monotonic() > request.deadline",
}
table = Table(NoopBackend, __name__, _LAZY, held_bytes=_held_bytes)


def in_parts(right, parts, pause_s=0.0):
    """Makes a request in parts."""
    for part in parts:
        right(replace(part, request_id=new_id()))
        time.sleep(pause_s)
    return len({each for part in parts for each in part.sample_ids})


def by_column(request):
    parts = [{"columns": {name: c}, "specs": {name: request.specs[name]}} for name, c in request.columns.items()]
    return [replace(request, **part) for part in parts or [{}]]


def with_rows(reply, rows):
    return replace(reply, sample_ids=[each for each, _ in rows], tags=[tags for _, tags in rows])


def recast(reply, sort, change, **about):
    """Changes the columns of a sort in a read: a dtype or rank of dense tensors, "dense", "ragged" or "objects"."""
    columns, specs = dict(reply.columns), dict(reply.specs)
    for name, column in columns.items():
        sorts = ["ragged"] if isinstance(column, Ragged) else ["objects"]
        if isinstance(column, torch.Tensor):
            sorts = ["dense", column.dtype, specs[name].rank]
        if sort in sorts:
            columns[name], specs[name] = change(column), replace(specs[name], **about)
    return replace(reply, columns=columns, specs=specs)


def cast(column, dtype):
    return Ragged(column.values.to(dtype), column.offsets) if isinstance(column, Ragged) else column.to(dtype)


def dtype_of(column):
    return (column.values if isinstance(column, Ragged) else column).dtype


def without_empty_rows(column):
    rows = column.values.split(column.lengths.tolist())
    rows = [row if len(row) else row.new_zeros((1, *row.shape[1:])) for row in rows]
    return Ragged(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))


def sized(command, sizes):
    """A put that reserves other room: ``sizes(write)`` are the bytes of its rows."""
    if not isinstance(command, commands.BeginPut):
        return command
    return replace(command, writes=[replace(each, row_bytes=sizes(each)) for each in command.writes])


def younger(inspected, renewed, *, those):
    """Says that the leases that a renewal names, or the others, are as old as the renewal."""
    at_s, *ids = [[0.0], *renewed][-1]
    lease = inspected.tasks["train"].oldest_lease
    if ids and lease and (lease.sample_id in ids) == those:
        lease = replace(lease, held_s=time.monotonic() - at_s)
    return replace(inspected, tasks={"train": replace(inspected.tasks["train"], oldest_lease=lease)})


class CannotTravel(MissingDataError):
    def __reduce__(self):
        return type(self), (self.message,)  # without its attributes


class PrintsAsARepr(MissingDataError):
    __str__ = KeyError.__str__


table.rows("""
test_get_keeps_the_order_asked_for
ReordersRows.get_samples: request.sample_ids = sorted(request.sample_ids)
test_columns_come_back_bit_for_bit[int64]
PromotesScalars.get_samples: -> reply = recast(reply, 0, lambda column: column.unsqueeze(1), rank=1)
ChangesDtype.get_samples: -> reply = recast(reply, torch.int64, torch.Tensor.float, dtype="float32")
NarrowsIntegers.get_samples: -> reply = recast(reply, torch.int64, lambda column: column.int().long())
LosesEmptyRows.get_samples: -> reply = recast(reply, "ragged", without_empty_rows)
test_columns_come_back_bit_for_bit[float32]
CleansNaNs.get_samples: -> reply = recast(reply, torch.float32, lambda c: torch.where(c.isnan(), torch.nan, c))
test_objects_come_back_equal
TurnsNoneIntoText.get_samples: -> reply = recast(reply, "objects", lambda c: ["" if it is None else it for it in c])
test_smoke_torchs_defaults_change_nothing[defaults]
CopiesToTheDefaultDevice.get_samples: -> reply = recast(reply, "dense", lambda c: torch.as_tensor(c.numpy()))
test_the_payload_is_copied_no_more_than_it_may_be[get_samples]
CopiesOnTheWayOut.get_samples: -> reply = recast(reply, torch.float32, lambda c: c.double().float().double().float())
test_lost_payload_is_named
TakesLossForHaste.get_samples: -! LostSamplesError: raise OperationTimeoutError("others overwrite it.") from error
test_what_comes_back_is_owned_by_the_caller
HandsOutItsOwnMemory.get_samples: cached = seen[request.partition_id, *request.sample_ids, "", *request.fields]
    if cached: return cached[0]
    -> cached.append(reply)
test_random_histories_agree_with_the_ledger
LosesEmptyLists.get_samples: -! OpenCellsError: cells = [(each, request.fields) for each in error.groups[0]]
    raise MissingDataError.for_cells("get_samples", request.partition_id, cells) from error
ForgetsWhatWasInts.get_samples: -> specs = {name: replace(each, lists="") for name, each in reply.specs.items()}
    reply = replace(reply, specs=specs)
ReadsTheWidthOfTheFirstRow.fetch_fields: -> first = located.parts[0]
    for name in first.fields:
        dtype = dtype_of(self._segments[first.write_id]._columns[name])
        reply[name] = cast(cast(reply[name], dtype), dtype_of(reply[name]))
DropsMissingSamples.get_samples: request.sample_ids = [each for each in request.sample_ids if each in listed]
    if not request.sample_ids: return spec.WireBatch(columns={}, specs={})
KeepsTheCallersMemory.store_write: self._segments[write_id] = Segment(columns, num_samples); return
WaitsForMissingData.get_samples: -! MissingDataError: time.sleep(0.2); return self.get_samples(request)
FillsMissingCells.get_samples: -! MissingDataError:
    columns = dict.fromkeys(request.fields, torch.zeros(len(request.sample_ids)))
    specs = dict.fromkeys(columns, spec.FieldSpec("tensor", "float32", 0))
    if error.missing_cells: return spec.WireBatch(columns=columns, specs=specs)
RaisesItsEnginesErrors.get_samples: -! MissingDataError: raise KeyError(request.sample_ids[0]) from error
RaisesErrorsThatCannotTravel.get_samples: -! MissingDataError:
    raise CannotTravel(error.message, missing_samples=error.missing_samples) from error
PrintsErrorsAsReprs.get_samples: -! MissingDataError:
    raise PrintsAsARepr(error.message, missing_samples=error.missing_samples) from error
RaisesPagesOfText.get_samples: -! MissingDataError:
    raise MissingDataError(error.message, missing_samples=error.missing_samples, hint="row " * 1000) from error
LeavesErrorsToTheClient.get_samples: -! DataPlaneError: raise RuntimeError(str(error)) from error
DoesNotSayWhatItExpects.put_samples: -! SchemaMismatchError: error.expected = {}
WritesTheGoodColumns.put_samples: return in_parts(right, by_column(request))
PairsColumnsByTheirOrder.put_samples: request.columns = dict(zip(request.specs, request.columns.values(), strict=True))
StoresTagsAsNumbers.put_samples: request.tags = request.tags and [
        {name: int(value) if isinstance(value, bool) else value for name, value in row.items()} for row in request.tags]
StoresTagsAsJson.put_samples: text = json.dumps(request.tags)
    request.tags = json.loads(text, parse_constant=lambda name: None if name == "NaN" else float(name))
ReplacesTags.put_samples: -> for each, tags in zip(request.sample_ids, request.tags or []):
        partition.rows[each].tags = dict(tags)
CountsIntegersWide.call_ledger: command = sized(command, lambda write: [8 * size for size in write.row_bytes])
CountsSharedRowsForEachSample.call_ledger: command = sized(command, lambda write: [
        size * max(1, list(write.positions or []).count(row)) for row, size in enumerate(write.row_bytes)])
ReportsSuccessTooEarly.put_samples: request.columns = copy.deepcopy(request.columns)
    threading.Timer(0.05, right, [request]).start()
    return len(request.sample_ids)
TakesMoreThanWereRegistered.put_samples: if len(request.sample_ids) <= (partition.info.num_samples or 0):
        with mock.patch.object(partition, "info", replace(partition.info, num_samples=1 << 40)):
            return right(request)
TakesAnySchema.put_samples: partition.specs.update(request.specs)
OverwritesByDeleting.put_samples: if request.columns and partition and written:
        self._service.call(commands.ClearRequest(request.partition_id, written))
KeepsWhatWasRegistered.register_partition: seen[request.partition_id] += request.fields
KeepsWhatWasRegistered.put_samples: kept = [name for name in request.columns if name in seen[request.partition_id]]
    request.columns, request.specs = ({name: part[name] for name in kept} for part in (request.columns, request.specs))
KeepsTheWidthOfTheFirstPut.store_write: for name, column in columns.items(): seen[name].append(dtype_of(column))
    columns = {name: cast(column, seen[name][0]) for name, column in columns.items()}
EvictsWhenFull.put_samples: -! CapacityExceededError: if error.retryable and listed:
        self._service.call(commands.ClearRequest(request.partition_id, listed[:1]))
        return self.put_samples(request)
LeaksRoom.put_samples: -! DataPlaneError: self._service.ledger.held_bytes += 10_000
RefusesToPutAgain.put_samples: key = (request.partition_id, *request.sample_ids, *request.columns)
    if request.columns and key in seen["held"]: raise InvalidRequestError("already written.")
    seen["held"].append(key)
KeepsRefusals.put_samples: for error in seen[request.request_id]: raise error
    -! InvalidRequestError: seen[request.request_id].append(error)
OverwritesUndeclared.capabilities: NoopBackend.capabilities - {Capability.OVERWRITE, Capability.ATOMIC_OVERWRITE}
HasItsOwnWordForLate.put_samples: if late: raise RuntimeError("late")
SaysThatItDidNot.put_samples: was_late = late -> if was_late: raise OperationTimeoutError("late", outcome="not_done")
SaysThatItDid.put_samples: if late: raise OperationTimeoutError("late", outcome="done")
PutsEachTime.put_samples: request.request_id = new_id()
ForgetsIdsWithThePartition.clear_samples: seen["cleared"] += [request] if request.sample_ids is None else []
ForgetsIdsWithThePartition.put_samples: request.request_id = f"{request.request_id}{len(seen['cleared'])}"
KeepsRowsAcrossRegistrations.register_partition: return partition.info
CountsEpochs.register_partition: seen["epochs"].append(1); request.epoch = str(len(seen["epochs"]))
KeepsTheSchemaAcrossRegistrations.register_partition: before = dict(getattr(partition, "specs", {}))
    -> partition.specs.update(before)
KeepsOldVersions.put_samples: with mock.patch.object(self, "delete_refs"): return right(request)
ForgetsButKeeps.delete_refs: return
StoresBeforeItAsks.put_samples: write_id = -1 - len(self._segments)
    self.store_write(write_id, request.columns, len(request.sample_ids), request.deadline)
    -> del self._segments[write_id]
KeepsRowsAfterClear.clear_samples: hidden = request.sample_ids; request.sample_ids = hidden and ["nobody"]
    -> seen["hidden"] += hidden or []
    reply = len(hidden) if hidden else reply
KeepsRowsAfterClear.list_samples: -> reply = with_rows(reply, [row for row in rows if row[0] not in seen["hidden"]])
ClearsByPrefix.clear_samples: for other in [] if request.sample_ids else list(self._service.ledger._partitions):
        if other.startswith(request.partition_id) and other != request.partition_id:
            right(replace(request, partition_id=other))
FreesSharedRowsWithTheFirstSample.call_ledger: -> if isinstance(command, commands.CommitPut):
        for write in self._service.ledger._writes.values(): write.num_holders[:] = [1] * len(write.num_holders)
ClearsMoreTheSecondTime.clear_samples: -> if request.sample_ids is not None and reply == 0:
        right(replace(request, sample_ids=listed[-1:], request_id=None))
ForgetsTheSecondTask.clear_samples: -> if request.sample_ids and reply and "eval" in partition.tasks:
        partition.tasks["eval"] = type(partition.tasks["eval"])()
        for row in partition.rows.values(): row.holds.pop("eval", None)
LosesTheTail.register_partition: request.num_samples = None
KeepsTheEndOpen.register_partition: keeps = request.if_exists == "keep" and partition and request.num_samples
    if keeps: request.num_samples = None
NeverFinishes.register_partition: request.num_samples = request.num_samples or None
SplitsGroups.register_partition: request.grpo_group_size = None
MendsGroups.clear_samples: -> for kept in [partition.broken_groups, *(task.views for task in partition.tasks.values())]:
        kept.clear()
ClaimsTwice.claim: lease_s = request.lease_s; request.lease_s = lease_s or 1e-9
    -> reply = reply if lease_s else replace(reply, lease_tokens=None)
ClaimsByName.claim: -> reply = with_rows(reply, sorted(rows, key=lambda row: row[0]))
ClaimsWithoutTags.claim: -> reply = replace(reply, tags=[{} for _ in reply.tags])
IgnoresFilters.claim: request.tag_filter = None
ReadyWithoutTheExtras.claim: request.required_fields = ["x"]
RanksTakeWhatIsLeft.claim: request.dp_size = None if request.sampler == "first_write" else request.dp_size
ForgetsWhoHolds.claim: -> if lack: reply = replace(reply, shortfall=replace(lack, leased=()))
ForgetsTheFilter.claim: -> if lack: reply = replace(reply, shortfall=replace(lack, num_not_matching=0))
ForgetsGroups.claim: -> if lack: reply = replace(reply, shortfall=replace(lack, incomplete_groups={}))
KnowsBatchesByIds.put_samples: -> for batches in partition.batches.values():
        batches.kept = {index: dataclasses.replace(batch, last_seq=1 << 62) for index, batch in batches.kept.items()}
ForgetsCursorsOfTags.set_cursor: asked = request.sample_ids
    fields = self.list_fields(spec.FieldsRequest(request.partition_id, asked, deadline=request.deadline))
    request.sample_ids = [each for each, at in zip(asked, fields.index, strict=True) if fields.patterns[at]]
    -> reply = len(asked)
NeverWakes.call_ledger: wake = None
ForgetsWhoWaited.claim: waited = request.token in seen["asked"]
    if not waited: time.sleep(0.3)
    seen["asked"].append(request.token)
    -! UnknownPartitionError: if waited: return spec.Claim()
GivesTheTailToNewClaimsOnly.claim: waited = request.token in seen["asked"]
    if not waited: time.sleep(0.3)
    elif request.all_or_nothing and len(listed) == partition.info.num_samples: return spec.Claim()
    seen["asked"].append(request.token)
ConsumesNothing.check_consumption: -> reply = reply or not partition.rows
ConsumesWhatIsThereOnly.check_consumption: -> reply = reply and bool(partition.rows)
ConsumesBeforeTheEnd.check_consumption: -> done = [task and task.num_done for task in tasks]
    reply = bool(partition.rows) and {*done} == {len(partition.rows)}
CountsLeasesAsConsumed.check_consumption: -> held = [task and task.num_held for task in tasks]
    reply = bool(partition.rows) and {*held} == {len(partition.rows)}
LeasesNeverExpire.claim: request.lease_s = request.lease_s and 1e9
AcceptsExpiredAcks.ack: -! LeaseExpiredError: return len(request.sample_ids)
AcksForAWhile.ack: return len(request.sample_ids)
RenewsNothing.renew: return len(request.sample_ids)
AcceptsAnyToken.ack: request.lease_tokens = [hold.token for hold in holds]
AcceptsAnyToken.renew: return len(request.sample_ids)
NacksById.nack: request.lease_tokens, request.request_id = [hold.token for hold in holds], new_id()
CountsTokens.claim: seen["claims"].append(1); request.token = f"1.{len(seen['claims'])}"
UsesTokensAgain.claim: seen["claims"].append(1); request.token = f"token {len(seen['claims'])}"
UsesTokensAgain.register_partition: seen["claims"].clear()
SettlesRowByRow.nack: pairs = sorted(zip(request.sample_ids, request.lease_tokens, strict=True), reverse=True)
    return in_parts(right, [replace(request, sample_ids=[each], lease_tokens=[token]) for each, token in pairs])
GivesBackTwice.nack: -! LeaseExpiredError: seen["refused"] += request.sample_ids
GivesBackTwice.claim: -> again = [(each, {}) for each in seen.pop("refused", [])] if rows else []
    reply = with_rows(reply, rows + again)
RenewsAsIfGivenNow.renew: seen["renewed"].append([time.monotonic(), *request.sample_ids])
RenewsAsIfGivenNow.inspect_partition: -> reply = younger(reply, seen["renewed"], those=True)
RenewsTheRestAsIfGivenNow.renew: seen["renewed"].append([time.monotonic(), *request.sample_ids])
RenewsTheRestAsIfGivenNow.inspect_partition: -> reply = younger(reply, seen["renewed"], those=False)
CountsAllSamples.inspect_partition: -> reply = replace(reply, num_rows=dict.fromkeys(reply.num_rows, reply.num_samples))
AnswersWithoutTheFilter.inspect_partition: asked = request.questions
    request.questions = [replace(each, tag_filter=None) for each in asked]
NamesTheNewestLease.claim: -> seen["leased"] += reply.sample_ids if reply.lease_tokens else []
NamesTheNewestLease.inspect_partition: -> for name, task in reply.tasks.items():
        if task.oldest_lease:
            newest = replace(task.oldest_lease, sample_id=seen["leased"][-1])
            reply = replace(reply, tasks={**reply.tasks, name: replace(task, oldest_lease=newest)})
ForgetsToWriteTags.put_samples: if not request.columns: return 0
ReturnsNone.clear_samples: -> reply = None
test_a_save_is_loaded
ListsWhatItListedBefore.list_samples: -> seen[request.partition_id] += rows
    known = dict(reversed(seen[request.partition_id]))
    reply = replace(reply, tags=[known[each] for each in reply.sample_ids])
test_thousands_of_samples_in_one_call
CutsLongLists.claim: -> reply = with_rows(reply, rows[:8000])
test_claims_end_at_their_limits
IgnoresLimits.claim: request.max_rows = request.max_tokens = None
test_groups_of_rollouts_are_given_whole
GivesWhatIsThere.claim: if partition and partition.info.rollouts:
        for group in partition.groups.values(): group.size = group.num_rollouts = 1
WaitsForCells.put_samples: if request.columns: return right(request)
    with mock.patch.object(Partition, "_offer", lambda *about: None): return right(request)
test_a_dead_rollout_costs_no_sibling
ForgetsSealsOfGroups.put_samples: for tags in request.tags or (): tags.pop("group_rollouts", None)
test_what_is_sealed_stays_as_it_is
TakesWhatIsTooMuch.put_samples: allow = mock.patch.object(RolloutGroup, "check_put", lambda *about: None)
    with allow: return right(request)
test_a_rollout_that_is_not_whole_may_begin_anew
BreaksForEveryRow.clear_samples: -> for each in request.sample_ids or ():
        if partition and (group := partition.groups.get(group_of(each))): group.is_broken = True
test_the_end_is_the_same_for_all_ranks
TellsTheEndToOne.claim: -> for batches in partition.batches.values(): batches.ended.clear()
test_many_claimers_get_each_sample_once[alone]
ClaimsInTwoSteps.claim: given, here = seen[request.partition_id, request.task_name], listed
    ready = [each for each in here if each not in given][: request.batch_size]
    time.sleep(0.001)
    num_samples = self.call_ledger(request.deadline, commands.DescribeRequest(request.partition_id)).num_samples
    whole = num_samples is not None and len(here) >= num_samples
    if request.all_or_nothing and len(ready) < request.batch_size and not whole: return spec.Claim()
    given.extend(ready); return spec.Claim(sample_ids=ready, tags=[{}] * len(ready), exhausted=whole and not ready)
test_claim_hook_never_waits
WaitsInsideTheClaim.claim: -> while not (reply.sample_ids or reply.exhausted or late):
        time.sleep(0.01)
        reply, late = right(request), time.monotonic() > request.deadline
test_a_claim_that_waits_hears_when_leases_end
TellsNobodyOfLeases.start: self._service._tell_of_leases = lambda partition_id: None
test_only_as_many_are_woken_as_there_are_samples_for
WakesAll.call_ledger: seen["wakes"] += [wake] if wake else []
WakesAll.put_samples: -> for wake in seen["wakes"]: wake()
test_claims_with_many_filters_are_woken_when_they_need_not_wait
WakesAFew.call_ledger: token, kept = getattr(command, "token", None), seen["kept"]
    kept += [token] if wake and len(kept) < 16 and token not in kept else []
    if wake and token not in kept: wake = lambda: True
test_narrow_integers_take_less_room
StoresIntegersWide.store_write: columns = {name: cast(column, torch.int64) for name, column in columns.items()}
test_content_is_kept_once_for_all_puts
KeepsContentOfEachPut.call_ledger: -> if isinstance(command, commands.CommitPut):
        self._service.ledger.forget_all_content()
FreesContentTooEarly.call_ledger: -> if isinstance(command, commands.CommitPut):
        for write in self._service.ledger._writes.values():
            if write.digests: write.num_holders[:] = [min(1, count) for count in write.num_holders]
NeverFreesContent.call_ledger: -> if isinstance(command, commands.CommitPut):
        for write in self._service.ledger._writes.values():
            if write.digests: write.num_holders[:] = [count and count + 1 for count in write.num_holders]
CountsContentForEachPut.call_ledger: -> if isinstance(command, commands.CommitPut):
        for holder in self._service.ledger._partitions.values(): holder.held_bytes += 100_000 * len(holder.content)
MistakesContent.call_ledger: -> if isinstance(command, commands.CommitPut):
        content = self._service.ledger._content
        content.update(dict.fromkeys(content, next(iter(content.values()), None)))
TrustsProbes.put_samples: self._probes.told_apart = lambda request, writes, kept: list(writes)
test_puts_that_bring_the_same_cell_at_once_leave_it_once
KeepsBothOfTwo.call_ledger: if isinstance(command, commands.CommitPut): self._service.ledger.forget_all_content()
test_lost_content_is_brought_again
RemembersWhatIsLost.call_ledger: if isinstance(command, commands.ForgetContent): return
test_of_racing_puts_that_exclude_each_other_one_is_accepted[enum]
IgnoresEnums.put_samples: request.strings = {}
test_of_racing_puts_that_exclude_each_other_one_is_accepted[declared]
TakesAnyFirstWrite.put_samples: partition.declared.clear()
test_first_writes_are_seen_whole_with_their_tags
CommitsTagsAfterData.put_samples: later = replace(request, columns={}, specs={})
    if request.columns and request.tags: return in_parts(right, [replace(request, tags=None), later], 0.001)
WritesFieldByField.put_samples: return in_parts(right, by_column(request), 0.005)
test_reads_see_all_old_or_all_new_cells
OverwritesFieldByField.put_samples: if partition and written: return in_parts(right, by_column(request), 0.2)
test_puts_that_overlap_clears_are_whole_or_nothing[clear]
WritesRowByRow.put_samples: parts, tags = [], request.tags or [None] * len(request.sample_ids)
    for row, sample_id in enumerate(request.sample_ids):
        columns = {name: column[row : row + 1] for name, column in request.columns.items()}
        parts.append(replace(request, sample_ids=[sample_id], columns=columns, tags=request.tags and [tags[row]]))
    return in_parts(right, parts, 0.0002)
test_the_payload_is_copied_no_more_than_it_may_be[put_samples]
CopiesOnTheWayIn.put_samples: kept, request.columns = [], dict(request.columns)
    for name, column in request.columns.items():
        if isinstance(column, torch.Tensor):
            kept += [bytearray(column.numpy().tobytes()) for _ in range(8)]
            request.columns[name] = torch.frombuffer(kept[-1], dtype=column.dtype).view(column.shape).clone()
test_a_blocked_put_ends_by_its_deadline
HidesThatItIsFull.put_samples: -! RoomTimeoutError: raise OperationTimeoutError("", outcome="not_done") from error
test_a_large_put_is_not_starved_by_small_ones
GivesRoomToWhoeverAsks.put_once: ticket = None
GivesRoomToWhoeverAsks.call_ledger: if isinstance(command, commands.WaitForRoom): return None
test_puts_with_the_same_id_at_the_same_time_are_carried_out_once[small]
LooksForTheIdTooEarly.put_samples: done, begun = seen[request.request_id], seen["begun"]
    if done: return done[0]
    begun.append(request.request_id); time.sleep(0.05 * (begun.count(request.request_id) - 1))
    request.request_id = new_id()
    -> done.append(reply)
test_nothing_is_unpickled
Unpickles.list_samples: -> reply = replace(reply, tags=pickle.loads(pickle.dumps(reply.tags)))
UnpicklesMessages.list_samples: -> one_end, other_end = multiprocessing.Pipe(); one_end.send(reply.tags)
    reply = replace(reply, tags=other_end.recv())
test_declarations_are_consistent
DeclaresHalf.capabilities: NoopBackend.capabilities - {Capability.CLAIMS}
ExplainsWhatItDeclares.why_not_declared: {"claims": "the engine has no cursor"}
test_clients_that_ended_are_listed_if_asked_for
ListsTheDead.announce: request.ttl_s = request.ttl_s and 9999.0
ForgetsTheDead.list_clients: request.ended = False
test_announced_clients_are_listed
SaysThatItIsAlone.announce: -> reply = min(1, reply)
ForgetsTheCalls.announce: request.client = replace(request.client, calls=())
""")
#: Above rows stands the rule that a chaos run must find broken.
chaos = Table(NoopBackend, __name__, _LAZY, held_bytes=_held_bytes)
chaos.rows("""
capacity
HoldsTooMuch.__init__: config = config.model_copy(update={"capacity_bytes": 4 * config.capacity_bytes})
error
TimesOutAtOnce.put_samples: raise OperationTimeoutError("late")
puts
IsAlwaysFull.put_samples: raise CapacityExceededError("full")
leaked
KeepsWhatIsCleared.delete_refs: return
lost
ForgetsOthers.clear_samples: content = self._service.ledger.content_refs()
    -> self.delete_refs(content, request.deadline)
groups
GivesPartsOfGroups.claim: -> if len(rows) > 1:
        tokens = reply.lease_tokens and reply.lease_tokens[:-1]
        reply = replace(with_rows(reply, rows[:-1]), lease_tokens=tokens)
""")
