"""Backends that are wrong in one way each: in what a put stores."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace

import torch
from broken import Broken

from dataplane_core.errors import DataPlaneError, SchemaMismatchError
from dataplane_core.ledger import commands
from dataplane_core.spec import Capability, PutReply, new_id
from dataplane_noop import NoopBackend

BROKEN = Broken()
breaks = BROKEN.breaks


def _one_by_one(put, request, pause_s=0.0):
    """Puts the columns of a request one after the other."""
    for name, column in request.columns.items():
        put(replace(request, columns={name: column}, specs={name: request.specs[name]}, request_id=new_id()))
        time.sleep(pause_s)
    return PutReply(num_samples=len(request.sample_ids))


@breaks("test_a_list_becomes_the_type_that_its_field_has")
class DoesNotSayWhatItExpects(NoopBackend):
    """Refuses columns of another type without the types of their fields."""

    def put_samples(self, request):
        try:
            return super().put_samples(request)
        except SchemaMismatchError as error:
            error.expected = {}
            raise


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


@breaks("test_no_more_samples_are_written_than_were_registered")
class TakesMoreThanWereRegistered(NoopBackend):
    """Counts the rows of a put, not those that are there already."""

    def put_samples(self, request):
        partition = self._service._ledger._partitions.get(request.partition_id)
        total = None if partition is None else partition.info.num_samples
        if partition is not None and total is not None and len(request.sample_ids) <= total:
            partition.info = replace(partition.info, num_samples=1 << 40)
        try:
            return super().put_samples(request)
        finally:
            if partition is not None:
                partition.info = replace(partition.info, num_samples=total)


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


@breaks("test_tags_that_are_no_finite_numbers_leave_the_store_usable")
class StoresTagsAsJson(NoopBackend):
    """JSON has no NaN: it comes back as None."""

    def put_samples(self, request):
        if request.tags is not None:
            text = json.dumps(request.tags)
            request.tags = json.loads(text, parse_constant=lambda name: None if name == "NaN" else float(name))
        return super().put_samples(request)


@breaks("test_first_writes_are_seen_whole_with_their_tags")
class CommitsTagsAfterData(NoopBackend):
    """Two writes: cells, then tags."""

    def put_samples(self, request):
        tags, request.tags = request.tags, None
        reply = super().put_samples(request) if request.columns else None
        if tags is None:
            return reply
        time.sleep(0.001)
        return super().put_samples(replace(request, columns={}, specs={}, tags=tags))


@breaks("test_first_writes_are_seen_whole_with_their_tags")
class WritesFieldByField(NoopBackend):
    """One write per column."""

    def put_samples(self, request):
        put = super().put_samples
        return _one_by_one(put, request, 0.001) if request.columns else put(request)


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
        return _one_by_one(super().put_samples, request)


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
        known = set(self._service.call(commands.ListRequest(request.partition_id, None)).sample_ids)
        again = [each for each in request.sample_ids if each in known]
        if request.columns and again:
            self._service.call(commands.ClearRequest(request.partition_id, again))
        return super().put_samples(request)


@breaks("test_reads_see_all_old_or_all_new_cells")
class OverwritesFieldByField(NoopBackend):
    """Declares atomic_overwrite, but replaces one column after the other."""

    def put_samples(self, request):
        known = set(self._service.call(commands.ListRequest(request.partition_id, None)).sample_ids)
        if len(request.columns) < 2 or not known & set(request.sample_ids):
            return super().put_samples(request)
        return _one_by_one(super().put_samples, request, 0.0005)


@breaks("test_puts_that_overlap_clears_are_whole_or_nothing[clear]")
class WritesRowByRow(NoopBackend):
    """Declares fenced, but a clear may fall between two rows of one put."""

    def put_samples(self, request):
        for place, sample_id in enumerate(request.sample_ids):
            columns = {
                name: [c[place]] if isinstance(c, list) else c[place : place + 1] for name, c in request.columns.items()
            }
            tags = None if request.tags is None else [request.tags[place]]
            super().put_samples(
                replace(request, sample_ids=[sample_id], columns=columns, tags=tags, request_id=new_id())
            )
            time.sleep(0.0002)
        return PutReply(num_samples=len(request.sample_ids))


@breaks("test_undeclared_operations_are_refused[overwrite]")
class OverwritesUndeclared(NoopBackend):
    """Does not declare overwrite, and overwrites all the same."""

    capabilities = NoopBackend.capabilities - {Capability.OVERWRITE, Capability.ATOMIC_OVERWRITE}


@breaks("test_middleware_may_add_its_column_first")
class PairsColumnsByTheirOrder(NoopBackend):
    """Joins the columns of a row in the order in which they come, and numbers them by the order of the specs."""

    def put_samples(self, request):
        request.columns = dict(zip(request.specs, request.columns.values(), strict=True))
        return super().put_samples(request)


@breaks("test_images_ride_with_the_tokens")
class KeepsWhatWasRegistered(NoopBackend):
    """Columns that nobody registered are dropped without a word."""

    def register_partition(self, request):
        self.__dict__.setdefault("known", {})[request.partition_id] = set(request.fields)
        return super().register_partition(request)

    def put_samples(self, request):
        known = self.__dict__.get("known", {}).get(request.partition_id, set())
        for name in [name for name in request.columns if name not in known]:
            del request.columns[name], request.specs[name]
        return super().put_samples(request)


@breaks("test_the_payload_is_copied_no_more_than_it_may_be[put_samples]")
class CopiesOnTheWayIn(NoopBackend):
    """Every put makes bytes, then bytes of bytes, then tensors of them."""

    def put_samples(self, request):
        kept = []
        for name, column in request.columns.items():
            if isinstance(column, torch.Tensor) and not column.is_nested:
                kept += [bytearray(column.numpy().tobytes()) for _ in range(8)]
                request.columns[name] = torch.frombuffer(kept[-1], dtype=column.dtype).view(column.shape).clone()
        return super().put_samples(request)


@breaks("test_an_overwrite_may_be_wider_or_narrower")
class KeepsTheWidthOfTheFirstPut(NoopBackend):
    """A field has one dtype in the engine, that of the first put: wider integers of later ones are cut off."""

    def start(self, *, bootstrap, deadline):
        super().start(bootstrap=bootstrap, deadline=deadline)
        self._dtypes = {}

    def store_write(self, write_id, columns, num_samples, deadline):
        kept = {name: column.to(self._dtypes.setdefault(name, column.dtype)) for name, column in columns.items()}
        super().store_write(write_id, kept, num_samples, deadline)


@breaks("test_narrow_integers_take_less_room")
class StoresIntegersWide(NoopBackend):
    """Narrow integers are kept as int64."""

    def store_write(self, write_id, columns, num_samples, deadline):
        wide = {name: column.to(torch.int64) for name, column in columns.items()}
        super().store_write(write_id, wide, num_samples, deadline)


@breaks("test_capacity_counts_narrow_integers")
class CountsIntegersWide(NoopBackend):
    """The capacity counts each integer as 8 bytes."""

    def call_ledger(self, deadline, command):
        if isinstance(command, commands.BeginPut):
            writes = [replace(write, row_bytes=[8 * size for size in write.row_bytes]) for write in command.writes]
            command = replace(command, writes=writes)
        return super().call_ledger(deadline, command)
