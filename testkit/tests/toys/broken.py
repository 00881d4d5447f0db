"""Backends that are wrong in one way each: the name of each, the test of the kit that must fail, and the bug report.

A row says what the hooks do instead; where that takes more than an expression, the row stands above the hook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import pickle
import threading
import time
from unittest import mock

import torch
from msgspec.structs import replace
from table import (
    Table,
    asks,
    catches,
    changed,
    counts,
    notes,
    numbers,
    reads,
    reads_as,
    replies,
    rows,
    settles,
    then,
)

from dataplane_core import errors, spec
from dataplane_core.codec import Ragged
from dataplane_core.ledger import commands
from dataplane_core.spec import new_id
from dataplane_noop import NoopBackend
from dataplane_noop._segments import Segment


def _held_bytes(self, backend):
    return sum(column.nbytes for segment in backend._segments.values() for column in segment._columns.values())


toy = Table(NoopBackend, __name__, held_bytes=_held_bytes)


def _partition(self, request):
    return self._service.ledger._partitions.get(request.partition_id)


def _listed(self, request):
    return self._service.call(commands.ListRequest(request.partition_id, None)).sample_ids


def _written(self, request):
    return sorted(set(_listed(self, request)) & set(request.sample_ids))


def _without(*capabilities):
    return NoopBackend.capabilities - set(capabilities)


def forgets(contents):
    """Clears some containers of the partition after the call."""

    def clear(self, request, reply):
        partition = _partition(self, request)
        for each in contents(partition) if partition else ():
            each.clear()

    return then(clear)


# fmt: off
# --- reads ------------------------------------------------------------------------------------------------------------
@toy("The integers of a read are as wide as those of the put that wrote its first row: wider ones are cut off.")
def reads_the_width_of_the_first_row(self, fetch_fields, located, num_samples, deadline):
    found, first = fetch_fields(located, num_samples, deadline), located.parts[0]
    for name in first.fields:
        stored = self._segments[first.write_id]._columns[name]
        dtype = (stored.values if isinstance(stored, Ragged) else stored).dtype
        found[name] = found[name].to(dtype).to(found[name].dtype)
    return found

@toy("Returns the rows that are there, and says nothing of the others.")
def drops_missing_samples(self, get_samples, request):
    listed = set(_listed(self, request))
    request.sample_ids = [each for each in request.sample_ids if each in listed]
    return get_samples(request) if request.sample_ids else spec.WireBatch(columns={}, specs={})

def _zeros(self, request, error):
    columns = {name: torch.zeros(len(request.sample_ids)) for name in request.fields}
    specs = dict.fromkeys(columns, spec.FieldSpec("tensor", "float32", 0))
    return spec.WireBatch(columns=columns, specs=specs) if error.missing_cells else error

toy.row("FillsMissingCells", "A cell not yet produced reads as zero.",
        get_samples=catches(errors.MissingDataError, _zeros))
toy.row("CopiesToTheDefaultDevice", "Numbers are copied to torch's default device.",
        fails="test_smoke_torchs_defaults_change_nothing[defaults]",
        get_samples=reads("dense", lambda column: torch.as_tensor(column.numpy())))
toy.row("LosesEmptyLists", "Cells that were put while their field was open do not exist.",
        get_samples=catches(errors.OpenCellsError, lambda self, request, error: errors.MissingDataError.for_cells(
            "get_samples", request.partition_id, [(each, request.fields) for each in error.groups[0]])))
toy.row("ForgetsWhatWasInts",
        "Says of cells that were put as ints that they are stored as floats, as their field is by now.",
        get_samples=replies(specs=lambda reply: {name: replace(each, lists="") for name, each in reply.specs.items()}))
toy.row("ReordersRows", "Rows come back in the engine's own order.", fails="test_get_keeps_the_order_asked_for",
        get_samples=asks(sample_ids=lambda request: sorted(request.sample_ids)))
toy.row("PromotesScalars", "(N,) comes back as (N, 1).", fails="test_columns_come_back_bit_for_bit[int64]",
        get_samples=reads_as(0, lambda column: column.unsqueeze(1), rank=1))
toy.row("ChangesDtype", "int64 comes back as float32.", fails="test_columns_come_back_bit_for_bit[int64]",
        get_samples=reads_as("int64", torch.Tensor.float, dtype="float32"))
toy.row("CleansNaNs", "Every NaN becomes the same NaN.", fails="test_columns_come_back_bit_for_bit[float32]",
        get_samples=reads(torch.float32, lambda column: torch.where(column.isnan(), torch.nan, column)))
toy.row("LosesEmptyRows", "Rows of length 0 come back with one zero.",
        fails="test_columns_come_back_bit_for_bit[int64]", get_samples=reads("ragged", lambda column: [
            row if len(row) else row.new_zeros((1, *row.shape[1:])) for row in column.unbind()]))
toy.row("TurnsNoneIntoText", "None is stored as an empty string.", fails="test_objects_come_back_equal",
        get_samples=reads("objects", lambda column: ["" if item is None else item for item in column]))
toy.row("NarrowsIntegers", "int64 is stored as int32.", fails="test_columns_come_back_bit_for_bit[int64]",
        get_samples=reads(torch.int64, lambda column: column.int().long()))
toy.row("CopiesOnTheWayOut", "Every read is converted to and fro.",
        fails="test_the_payload_is_copied_no_more_than_it_may_be[get_samples]",
        get_samples=reads(torch.float32, lambda column: column.double().float().double().float()))

@toy("Stores references to what it was handed.")
def keeps_the_callers_memory(self, store_write, write_id, columns, num_samples, deadline):
    nested = {name: isinstance(column, torch.Tensor) and column.is_nested for name, column in columns.items()}
    kept = {name: Ragged(c.values(), c.offsets()) if nested[name] else c for name, c in columns.items()}
    self._segments[write_id] = Segment(kept, num_samples)

@toy("Caches replies.", fails="test_what_comes_back_is_owned_by_the_caller")
def hands_out_its_own_memory(self, get_samples, request):
    replies = self.seen[request.partition_id, *request.sample_ids, "", *request.fields]
    if not replies:
        replies.append(get_samples(request))
    return replies[0]

@toy("Waits for a producer, far beyond what anybody asked for.")
def waits_for_missing_data(self, get_samples, request):
    while True:
        with contextlib.suppress(errors.MissingDataError):
            return get_samples(request)
        time.sleep(0.05)

class _CannotTravel(errors.MissingDataError):
    def __reduce__(self):
        return type(self), (self.message,)  # without its attributes

class _PrintsAsARepr(errors.MissingDataError):
    __str__ = KeyError.__str__

def _says(kind, hint=None):
    return catches(errors.MissingDataError, lambda self, request, error: kind(
        error.message, missing_samples=error.missing_samples, hint=hint))

toy.row("RaisesItsEnginesErrors", "A KeyError of its own, which no user can tell from a bug.",
        get_samples=catches(errors.MissingDataError, lambda self, request, error: KeyError(request.sample_ids[0])))
toy.row("RaisesErrorsThatCannotTravel", "Another process gets an error without the names of the samples.",
        get_samples=_says(_CannotTravel))
toy.row("PrintsErrorsAsReprs", "The message is in quotes, and does not name the backend.",
        get_samples=_says(_PrintsAsARepr))
toy.row("RaisesPagesOfText", "The message holds all that the store knows.",
        get_samples=_says(errors.MissingDataError, hint="row " * 1000))
toy.row("LeavesErrorsToTheClient", "Counts on core to notice that rows are missing.",
        get_samples=catches(errors.DataPlaneError, lambda self, request, error: RuntimeError(str(error))))
toy.row("TakesLossForHaste", "Payload that is gone is taken for rows that others overwrite all the time.",
        fails="test_lost_payload_is_named",
        get_samples=catches(errors.LostSamplesError, lambda *_: errors.OperationTimeoutError("too fast.")))

# --- puts -------------------------------------------------------------------------------------------------------------
def _one_by_one(put, request, pause_s=0.0):
    """Puts the columns of a request one after the other."""
    for name, column in request.columns.items():
        put(replace(request, columns={name: column}, specs={name: request.specs[name]}, request_id=new_id()))
        time.sleep(pause_s)
    return len(request.sample_ids)

def _forgets_what_is_expected(self, request, error):
    error.expected = {}

toy.row("DoesNotSayWhatItExpects", "Refuses columns of another type without the types of their fields.",
        put_samples=catches(errors.SchemaMismatchError, _forgets_what_is_expected))

@toy("Writes after it has replied.")
def reports_success_too_early(self, put_samples, request):
    columns = {name: list(c) if isinstance(c, list) else c.clone() for name, c in request.columns.items()}
    late = replace(request, columns=columns)

    def later():
        time.sleep(0.05)
        with contextlib.suppress(errors.DataPlaneError):  # the partition may be gone by now
            put_samples(late)

    threading.Thread(target=later, daemon=True).start()
    return len(request.sample_ids)

@toy("Counts the rows of a put, not those that are there already.")
def takes_more_than_were_registered(self, put_samples, request):
    partition = _partition(self, request)
    if partition is None or len(request.sample_ids) > (partition.info.num_samples or 0):
        return put_samples(request)
    with mock.patch.object(partition, "info", replace(partition.info, num_samples=1 << 40)):
        return put_samples(request)

toy.row("ForgetsToWriteTags", "Tags alone are not written, and not counted.", fails="test_hooks_say_what_they_did",
        put_samples=lambda self, put, request: put(request) if request.columns else 0)

@toy("A put's tags take the place of all that were there.")
def replaces_tags(self, put_samples, request):
    reply = put_samples(request)
    for sample_id, tags in zip(request.sample_ids, request.tags or [], strict=False):
        _partition(self, request).rows[sample_id].tags = dict(tags)
    return reply

toy.row("StoresTagsAsNumbers", "True comes back as 1.",
        put_samples=asks(tags=lambda request: request.tags and [
            {name: int(value) if value is True or value is False else value for name, value in row.items()}
            for row in request.tags]))
toy.row("StoresTagsAsJson", "JSON has no NaN: it comes back as None.",
        put_samples=asks(tags=lambda request: json.loads(
            json.dumps(request.tags), parse_constant=lambda name: None if name == "NaN" else float(name))))

@toy("Two writes: cells, then tags.", fails="test_first_writes_are_seen_whole_with_their_tags")
def commits_tags_after_data(self, put_samples, request):
    reply = put_samples(replace(request, tags=None)) if request.columns else None
    if request.tags is None:
        return reply
    time.sleep(0.001)
    return put_samples(replace(request, columns={}, specs={}))

toy.row("WritesFieldByField", "One write per column.", fails="test_first_writes_are_seen_whole_with_their_tags",
        put_samples=lambda self, put, request: _one_by_one(put, request, 0.001) if request.columns else put(request))

@toy("The last writer's dtype wins.")
def takes_any_schema(self, put_samples, request):
    if partition := _partition(self, request):
        partition.specs.update(request.specs)
    return put_samples(request)

toy.row("WritesTheGoodColumns", "Of a put with one bad column, the others are written.",
        put_samples=lambda self, put, request: _one_by_one(put, request))
toy.row("IgnoresTheEpoch", "Writes what was checked against another registration.", put_samples=asks(epoch=None))

@toy("An overwrite drops the row and writes it anew, which resurrects it for consumers.")
def overwrites_by_deleting(self, put_samples, request):
    if request.columns and (again := _written(self, request)):
        self._service.call(commands.ClearRequest(request.partition_id, again))
    return put_samples(request)

@toy("Declares atomic_overwrite, but replaces one column after the other.",
     fails="test_reads_see_all_old_or_all_new_cells")
def overwrites_field_by_field(self, put_samples, request):
    several = len(request.columns) > 1 and _written(self, request)
    return _one_by_one(put_samples, request, 0.0005) if several else put_samples(request)

@toy("Declares fenced, but a clear may fall between two rows of one put.",
     fails="test_puts_that_overlap_clears_are_whole_or_nothing[clear]")
def writes_row_by_row(self, put_samples, request):
    for at, sample_id in enumerate(request.sample_ids):
        row = {name: c[at : at + 1] for name, c in request.columns.items()}
        tags = request.tags and [request.tags[at]]
        put_samples(replace(request, sample_ids=[sample_id], columns=row, tags=tags, request_id=new_id()))
        time.sleep(0.0002)
    return len(request.sample_ids)

toy.row("OverwritesUndeclared", "Does not declare overwrite, and overwrites all the same.",
        capabilities=_without(spec.Capability.OVERWRITE, spec.Capability.ATOMIC_OVERWRITE))
toy.row("PairsColumnsByTheirOrder",
        "Joins the columns of a row in the order in which they come, and numbers them by the order of the specs.",
        put_samples=asks(columns=lambda request: dict(zip(request.specs, request.columns.values(), strict=True))))

@toy("Columns that nobody registered are dropped without a word.",
     register_partition=notes(lambda request: [(request.partition_id, name) for name in request.fields]))
def keeps_what_was_registered(self, put_samples, request):
    for name in [each for each in request.columns if (request.partition_id, each) not in self.seen["noted"]]:
        del request.columns[name], request.specs[name]
    return put_samples(request)

@toy("Every put makes bytes, then bytes of bytes, then tensors of them.",
     fails="test_the_payload_is_copied_no_more_than_it_may_be[put_samples]")
def copies_on_the_way_in(self, put_samples, request):
    kept = []
    for name, column in request.columns.items():
        if isinstance(column, torch.Tensor) and not column.is_nested:
            kept += [bytearray(column.numpy().tobytes()) for _ in range(8)]
            request.columns[name] = torch.frombuffer(kept[-1], dtype=column.dtype).view(column.shape).clone()
    return put_samples(request)

@toy("A field has one dtype in the engine, that of the first put: wider integers of later ones are cut off.")
def keeps_the_width_of_the_first_put(self, store_write, write_id, columns, *rest):
    for name, column in columns.items():
        self.seen[name].append(column.dtype)
    store_write(write_id, {name: column.to(self.seen[name][0]) for name, column in columns.items()}, *rest)

toy.row("StoresIntegersWide", "Narrow integers are kept as int64.", fails="test_narrow_integers_take_less_room",
        store_write=lambda self, write, write_id, columns, *rest: write(
            write_id, {name: column.to(torch.int64) for name, column in columns.items()}, *rest))
toy.row("CountsIntegersWide", "The capacity counts each integer as 8 bytes.",
        call_ledger=counts(lambda write: [8 * size for size in write.row_bytes]))
toy.row("CountsSharedRowsForEachSample", "The capacity counts a shared row as often as it is shared.",
        call_ledger=counts(lambda write: [
            size * max(1, list(write.positions or []).count(row)) for row, size in enumerate(write.row_bytes)]))

# --- registrations and clears -----------------------------------------------------------------------------------------
@toy("A partition that is known is not opened afresh.")
def keeps_rows_across_registrations(self, register_partition, request):
    partition = _partition(self, request)
    return register_partition(request) if partition is None else partition.info

@toy("The dtype of a field outlives the registration.")
def keeps_the_schema_across_registrations(self, register_partition, request):
    before, info = _partition(self, request), register_partition(request)
    _partition(self, request).specs.update(before.specs if before else {})
    return info

toy.row("ForgetsButKeeps", "What is cleared is gone from the books, and stays in the engine.",
        delete_refs=lambda *_: None)

@toy("A put does not delete what it replaced.")
def keeps_old_versions(self, put_samples, request):
    with mock.patch.object(self, "delete_refs"):
        return put_samples(request)

@toy("A put stores its columns first, and leaves them there when it is refused.")
def stores_before_it_asks(self, put_samples, request):
    self.store_write(-1 - len(self._segments), request.columns, len(request.sample_ids), request.deadline)
    reply = put_samples(request)
    del self._segments[min(self._segments)]
    return reply

@toy("Lists a sample with the tags with which it was listed first.", fails="test_a_save_is_loaded")
def lists_what_it_listed_before(self, list_samples, request):
    reply, first = list_samples(request), self.seen[request.partition_id]
    first += zip(reply.sample_ids, reply.tags, strict=True)
    known = dict(reversed(first))
    return replace(reply, tags=[known[each] for each in reply.sample_ids])

@toy("Drops ids from the listing, and leaves the cells readable.",
     list_samples=rows(lambda self, rows: [row for row in rows if row[0] not in self.seen["hidden"]]))
def keeps_rows_after_clear(self, clear_samples, request):
    if request.sample_ids is None:
        return clear_samples(request)
    self.seen["hidden"] += request.sample_ids
    clear_samples(replace(request, sample_ids=["nobody"]))
    return len(request.sample_ids)

@toy("Clearing a partition drops those whose names begin alike.")
def clears_by_prefix(self, clear_samples, request):
    for other in list(self._service.ledger._partitions) if request.sample_ids is None else []:
        if other.startswith(request.partition_id) and other != request.partition_id:
            clear_samples(replace(request, partition_id=other))
    return clear_samples(request)

toy.row("ReturnsNone", "Does its work and returns nothing.", fails="test_hooks_say_what_they_did",
        clear_samples=lambda self, clear, request: clear(request) and None)

toy.row("CountsEpochs", "Registrations are numbered in the store, which forgets how far it had counted.",
        register_partition=numbers(epoch="{}"))

@toy("The ledger forgets that several samples share a row.")
def frees_shared_rows_with_the_first_sample(self, call_ledger, deadline, command):
    reply = call_ledger(deadline, command)
    for write in self._service.ledger._writes.values() if isinstance(command, commands.CommitPut) else ():
        write.num_sharers.clear()
    return reply

# --- claims -----------------------------------------------------------------------------------------------------------
@toy("Forgets what it gave.")
def claims_twice(self, claim, request):
    given = claim(replace(request, lease_s=request.lease_s or 1e-9))
    return given if request.lease_s else replace(given, lease_tokens=None)

@toy("Looks first and marks later, so that two claimers see the same sample.",
     fails="test_many_claimers_get_each_sample_once[alone]")
def claims_in_two_steps(self, claim, request):
    given = self.seen[request.partition_id, request.task_name]
    listed = self.call_ledger(request.deadline, commands.ListRequest(request.partition_id, None)).sample_ids
    ready = [each for each in listed if each not in given][: request.batch_size]
    time.sleep(0.001)
    num_samples = self.call_ledger(request.deadline, commands.DescribeRequest(request.partition_id)).num_samples
    whole = num_samples is not None and len(listed) >= num_samples
    if request.all_or_nothing and len(ready) < request.batch_size and not whole:
        return spec.Claim()
    given.extend(ready)
    return spec.Claim(sample_ids=ready, tags=[{}] * len(ready), exhausted=whole and not ready)

toy.row("LosesTheTail", "The last, smaller batch is never handed out.", register_partition=asks(num_samples=None))

toy.row("ClaimsByName", "Sorts by id.", claim=rows(lambda self, rows: sorted(rows, key=lambda row: row[0])))
toy.row("ClaimsWithoutTags", "Tags are left behind.",
        claim=rows(lambda self, rows: [(sample_id, {}) for sample_id, _ in rows]))
toy.row("CutsLongLists", "A call of the engine takes 8,000 rows; the rest is not claimed.",
        fails="test_thousands_of_samples_in_one_call", claim=rows(lambda self, rows: rows[:8000]))

@toy("Blocks in the hook until its deadline.", fails="test_claim_hook_never_waits")
def waits_inside_the_claim(self, claim, request):
    while True:
        given = claim(request)
        if given.sample_ids or given.exhausted or time.monotonic() >= request.deadline:
            return given
        time.sleep(0.01)

@toy("A registration that keeps ignores num_samples.")
def keeps_the_end_open(self, register_partition, request):
    keeps = _partition(self, request) and request.if_exists == "keep" and request.num_samples
    return register_partition(replace(request, num_samples=None) if keeps else request)

def _without_saying(**kept):
    return replies(shortfall=lambda claim: claim.shortfall and replace(claim.shortfall, **kept))

toy.row("ForgetsWhoHolds", "Says that samples are leased, and not by whom.", claim=_without_saying(leased=()))
toy.row("ForgetsTheFilter", "Samples that do not match are not spoken of.", claim=_without_saying(num_not_matching=0))
toy.row("ForgetsGroups", "Says that samples wait for their groups, and not for which.",
        claim=_without_saying(incomplete_groups={}))
toy.row("SplitsGroups", "Takes no notice of the group size.", register_partition=asks(grpo_group_size=None))
toy.row("MendsGroups", "A group whose cleared member was written again is given.",
        clear_samples=forgets(lambda partition: [
            partition.broken_groups, *(task.views for task in partition.tasks.values())]))
toy.row("IgnoresFilters", "Hands out whatever is ready.", claim=asks(tag_filter=None))
toy.row("NeverFinishes", "A registration that keeps takes num_samples only if it is not 0.",
        register_partition=asks(num_samples=lambda request: request.num_samples or None))
toy.row("ReadyWithoutTheExtras", "A claim minds the registered fields only.", claim=asks(required_fields=["x"]))
toy.row("RanksTakeWhatIsLeft", "With the default sampler, each rank takes its batch for itself.",
        claim=asks(dp_size=lambda request: None if request.sampler == "first_write" else request.dp_size))

toy.row("TellsTheEndToOne", "Does not keep that there is no further batch.",
        fails="test_the_end_is_the_same_for_all_ranks",
        claim=forgets(lambda partition: [batches.ended for batches in partition.batches.values()]))

@toy("A sample that was cleared and written anew is of its batch again.")
def knows_batches_by_ids(self, put_samples, request):
    reply = put_samples(request)
    for batches in _partition(self, request).batches.values():
        batches.kept = {index: dataclasses.replace(batch, last_seq=1 << 62) for index, batch in batches.kept.items()}
    return reply

@toy("A task has not consumed samples that have only tags.")
def forgets_cursors_of_tags(self, set_cursor, request):
    about = {name: getattr(request, name) for name in ("partition_id", "sample_ids", "deadline")}
    listed = self.list_fields(spec.FieldsRequest(**about))
    produced = [each for each, at in zip(request.sample_ids, listed.index, strict=True) if listed.patterns[at]]
    set_cursor(replace(request, sample_ids=produced))
    return len(request.sample_ids)

# --- claims that wait -------------------------------------------------------------------------------------------------
@toy("A claim that waited when its partition was cleared waits on. The first answer to each claim takes a while.")
def forgets_who_waited(self, claim, request):
    if request.token not in self.seen["waited"]:
        time.sleep(0.3)
        given = claim(request)
        self.seen["waited"].append(request.token)
        return given
    return catches(errors.UnknownPartitionError, lambda *_: spec.Claim())(self, claim, request)

@toy("A claim that waited does not notice that the last samples have come. The first answer takes a while.")
def gives_the_tail_to_new_claims_only(self, claim, request):
    if request.token not in self.seen["waited"]:
        time.sleep(0.3)
    elif request.all_or_nothing and len(_listed(self, request)) == _partition(self, request).info.num_samples:
        return spec.Claim()
    self.seen["waited"].append(request.token)
    return claim(request)

@toy("A claim that waits asks when the leases have ended that it knew of, and does not hear of later ones.",
     fails="test_a_claim_that_waits_hears_when_leases_end")
def tells_nobody_of_leases(self, start, **how):
    self._service._tell_of_leases = lambda partition_id: None
    start(**how)

toy.row("NeverWakes", "Declares that it wakes, and does not.",
        call_ledger_waking=lambda self, call, deadline, command, wake: self.call_ledger(deadline, command))

@toy("Wakes every claim that waits, whatever was put.", fails="test_only_as_many_are_woken_as_there_are_samples_for",
     call_ledger_waking=notes(lambda deadline, command, wake: [wake]))
def wakes_all(self, put_samples, request):
    reply = put_samples(request)
    for wake in self.seen["noted"]:
        wake()
    return reply

@toy("Keeps no more than 16 claims to wake.", fails="test_claims_with_many_filters_are_woken_when_they_need_not_wait")
def wakes_a_few(self, call_ledger_waking, deadline, command, wake):
    kept = self.seen["kept"]
    if len(kept) < 16 and command.token not in kept:
        kept.append(command.token)
    return call_ledger_waking(deadline, command, wake if command.token in kept else lambda: True)

# --- consumption ------------------------------------------------------------------------------------------------------
def consumes(done):
    """Says of a partition that is there whether a task has consumed it: by ``done(partition, its tasks, right)``."""
    def check_consumption(self, right, request):
        partition = _partition(self, request)
        tasks = [partition.tasks.get(name) for name in request.task_names] if partition else []
        consumed = right(request)
        return bool(partition and done(partition, tasks, consumed))
    return check_consumption

toy.row("ConsumesNothing", "Zero of zero samples counts as everything.",
        check_consumption=consumes(lambda partition, tasks, right: right or not partition.rows))
toy.row("ConsumesWhatIsThereOnly", "A partition without samples is never consumed.",
        check_consumption=consumes(lambda partition, tasks, right: right and partition.rows))
toy.row("ConsumesBeforeTheEnd", "Compares what was consumed with what is there, not with what will come.",
        check_consumption=consumes(lambda partition, tasks, right: partition.rows and all(
            task and task.num_done == len(partition.rows) for task in tasks)))
toy.row("CountsLeasesAsConsumed", "What was claimed counts, acked or not.",
        check_consumption=consumes(lambda partition, tasks, right: partition.rows and all(
            task and task.num_held == len(partition.rows) for task in tasks)))

# --- leases -----------------------------------------------------------------------------------------------------------
toy.row("LeasesNeverExpire", "A crashed consumer keeps its samples for ever.",
        claim=asks(lease_s=lambda request: request.lease_s and 1e9))
toy.row("AcceptsExpiredAcks", "An ack always succeeds.",
        ack=catches(errors.LeaseExpiredError, lambda self, request, error: settles(self, None, request)))

def _by_id(**changes):
    """Settles for whoever asks, by id."""
    def hook(self, right, request):
        holds = [_partition(self, request).rows[each].holds[request.task_name] for each in request.sample_ids]
        return right(changed(request, {"lease_tokens": [hold.token for hold in holds], **changes}))
    return hook

toy.row("AcceptsAnyToken", "Settles for whoever asks, by id.", ack=_by_id(), renew=settles)
toy.row("NacksById", "A nack gives samples back whoever holds them.", nack=_by_id(request_id=lambda request: new_id()))

@toy("Gives back what it can before it refuses.")
def settles_row_by_row(self, nack, request):
    for sample_id, token in sorted(zip(request.sample_ids, request.lease_tokens, strict=True), reverse=True):
        nack(replace(request, sample_ids=[sample_id], lease_tokens=[token], request_id=new_id()))
    return settles(self, nack, request)

toy.row("UsesTokensAgain", "Tokens are numbered anew with every registration.",
        register_partition=lambda self, register, request: self.seen["numbered"].clear() or register(request),
        claim=numbers(token="token {}"))
toy.row("CountsTokens", "Lease tokens are numbered in the store, which forgets how far it had counted.",
        claim=numbers(token="1.{}"))
toy.row("AcksForAWhile", "An ack is forgotten when the lease ends.", ack=settles)
toy.row("RenewsNothing", "A renewal succeeds, and the lease ends when it would have ended.", renew=settles)

def _renew(self, renew, request):
    self.seen["renewed"][:] = [time.monotonic(), *request.sample_ids]
    return renew(request)

def _younger(renewed):
    """Says that the leases that a renewal names, or the others, are as old as the renewal."""
    def inspect_partition(self, inspect, request):
        found, (renewed_at, *ids) = inspect(request), self.seen["renewed"] or [0.0]
        lease = found.tasks["train"].oldest_lease
        if lease is None or (lease.sample_id in ids) != renewed or not ids:
            return found
        younger = replace(lease, held_s=time.monotonic() - renewed_at)
        return replace(found, tasks={"train": replace(found.tasks["train"], oldest_lease=younger)})
    return inspect_partition

toy.row("RenewsAsIfGivenNow", "A lease is as old as its last renewal.", renew=_renew,
        inspect_partition=_younger(renewed=True))
toy.row("RenewsTheRestAsIfGivenNow", "A renewal of a part of a claim makes the other part a new claim.", renew=_renew,
        inspect_partition=_younger(renewed=False))

# --- guarantees, clients ----------------------------------------------------------------------------------------------
@toy("Drops the oldest samples to make room.")
def evicts_when_full(self, put_samples, request):
    while True:
        try:
            return put_samples(request)
        except errors.CapacityExceededError as error:
            oldest = _listed(self, request)[:1]
            if not error.retryable or not oldest:
                raise
            self._service.call(commands.ClearRequest(request.partition_id, oldest))

toy.row("HidesThatItIsFull", "A put that found no room says only that it is late.",
        fails="test_a_blocked_put_ends_by_its_deadline",
        put_samples=catches(errors.RoomTimeoutError, lambda *_: errors.OperationTimeoutError("", outcome="not_done")))

def _leak(self, request, error):
    self._service.ledger.held_bytes += 10_000

toy.row("LeaksRoom", "What a refused put reserved is never given back.",
        put_samples=catches(errors.DataPlaneError, _leak))
toy.row("Unpickles", "Declares no_pickle, and pickles its tags.", fails="test_nothing_is_unpickled",
        list_samples=replies(tags=lambda listed: pickle.loads(pickle.dumps(listed.tags))))

def _through_a_pipe(listed):
    one_end, other_end = multiprocessing.Pipe()
    with one_end, other_end:
        one_end.send(listed.tags)
        return other_end.recv()

toy.row("UnpicklesMessages", "Declares no_pickle, and sends its tags through a pipe of multiprocessing.",
        fails="test_nothing_is_unpickled", list_samples=replies(tags=_through_a_pipe))
toy.row("DeclaresHalf", "Leases without claims.", fails="test_declarations_are_consistent",
        capabilities=_without(spec.Capability.CLAIMS))

@toy("Wrong only in a history of several steps: a clear of one sample gives all of the task 'eval' out again.")
def forgets_the_second_task(self, clear_samples, request):
    reply, partition = clear_samples(request), _partition(self, request)
    if request.sample_ids is not None and reply and partition and "eval" in partition.tasks:
        partition.tasks["eval"] = type(partition.tasks["eval"])()
        for row in partition.rows.values():
            row.holds.pop("eval", None)
    return reply

toy.row("GivesRoomToWhoeverAsks", "Nobody queues for room.", fails="test_a_large_put_is_not_starved_by_small_ones",
        put_once=lambda self, put, request, writes, ticket: put(request, writes, None),
        call_ledger=lambda self, call, deadline, command: (
            None if isinstance(command, commands.WaitForRoom) else call(deadline, command)))
toy.row("ExplainsWhatItDeclares", "Declares claims, and says why it cannot have them.",
        fails="test_declarations_are_consistent", why_not_declared={"claims": "the engine has no cursor"})
toy.row("ListsTheDead", "Lists a client until it says that it closes.",
        fails="test_clients_that_ended_are_listed_if_asked_for",
        announce=asks(ttl_s=lambda request: request.ttl_s and 9999.0))
toy.row("ForgetsTheDead", "Lists only clients that are open.", fails="test_clients_that_ended_are_listed_if_asked_for",
        list_clients=asks(ended=False))
toy.row("SaysThatItIsAlone",
        "Tells each client that there is no other, so that a thousand announce themselves all the time.",
        fails="test_announced_clients_are_listed", announce=lambda self, announce, request: min(1, announce(request)))
toy.row("ForgetsTheCalls", "Lists clients without what they do.", fails="test_announced_clients_are_listed",
        announce=asks(client=lambda request: replace(request.client, calls=())))
toy.row("CountsAllSamples", "Says that each sample has each field.",
        inspect_partition=replies(num_rows=lambda found: dict.fromkeys(found.num_rows, found.num_samples)))
toy.row("AnswersWithoutTheFilter", "Answers as if questions had no filter.", inspect_partition=asks(
            questions=lambda request: [replace(each, tag_filter=None) for each in request.questions]))

def _note_leased(self, request, given):
    self.seen["leased"] += given.sample_ids if given.lease_tokens else []

@toy("Says who holds the sample that was claimed last.", claim=then(_note_leased))
def names_the_newest_lease(self, inspect_partition, request):
    found = inspect_partition(request)
    for name, task in found.tasks.items():
        if task.oldest_lease:
            newest = replace(task.oldest_lease, sample_id=self.seen["leased"][-1])
            found = replace(found, tasks={**found.tasks, name: replace(task, oldest_lease=newest)})
    return found

# --- calls that are repeated or late ----------------------------------------------------------------------------------
@toy("Declares overwrite, and refuses a put of the very cells that it holds.")
def refuses_to_put_again(self, put_samples, request):
    key = (request.partition_id, *request.sample_ids, *request.columns)
    if request.columns and key in self.seen["held"]:
        raise errors.InvalidRequestError("already written.")
    self.seen["held"].append(key)
    return put_samples(request)

@toy("Rows are known by their position, so that a second clear of the first drops the next one.")
def clears_more_the_second_time(self, clear_samples, request):
    reply = clear_samples(request)
    if request.sample_ids is not None and reply == 0:
        clear_samples(replace(request, sample_ids=_listed(self, request)[-1:], request_id=None))
    return reply

def _note_refused(self, request, error):
    self.seen["refused"] += request.sample_ids

toy.row("GivesBackTwice", "A second nack of the same rows gives them out a second time.",
        nack=catches(errors.LeaseExpiredError, _note_refused),
        claim=rows(lambda self, rows: rows and rows + [(each, {}) for each in self.seen.pop("refused", [])]))

def _late(error, *, writes=False):
    """Raises an error when it is late, before or after it writes."""
    def put_samples(self, put, request):
        late = time.monotonic() > request.deadline
        reply = put(request) if writes or not late else None
        if late:
            raise error
        return reply
    return put_samples

toy.row("HasItsOwnWordForLate", "A deadline that has passed is an error like any other.",
        put_samples=_late(RuntimeError("late")))
toy.row("SaysThatItDidNot", "Writes what is late, and says that it did not.",
        put_samples=_late(errors.OperationTimeoutError("late", outcome="not_done"), writes=True))
toy.row("SaysThatItDid", "Drops what is late, and says that it was done.",
        put_samples=_late(errors.OperationTimeoutError("late", outcome="done")))
toy.row("PutsEachTime", "Declares that requests are repeatable, and does not look at their ids.",
        put_samples=asks(request_id=lambda request: new_id()))

toy.row("ForgetsIdsWithThePartition", "Keeps the ids of requests in the partition, which a clear drops.",
        clear_samples=notes(lambda request: [request] if request.sample_ids is None else []),
        put_samples=lambda self, put, request: put(
            replace(request, request_id=f"{request.request_id}{len(self.seen['noted'])}")))

@toy("Looks for the id of a put when it begins, and keeps it when it has ended.",
     fails="test_puts_with_the_same_id_at_the_same_time_are_carried_out_once[small]")
def looks_for_the_id_too_early(self, put_samples, request):
    done, begun = self.seen[request.request_id], self.seen["begun"]
    if done:
        return done[0]
    begun.append(request.request_id)
    time.sleep(0.05 * (begun.count(request.request_id) - 1))
    done.append(put_samples(replace(request, request_id=new_id())))
    return done[-1]

@toy("A request that was refused stays refused.")
def keeps_refusals(self, put_samples, request):
    for error in self.seen[request.request_id]:
        raise error
    try:
        return put_samples(request)
    except errors.InvalidRequestError as error:
        self.seen[request.request_id].append(error)
        raise
# fmt: on
