"""Backends that are wrong in one way each: in what a read gives back."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from broken import Broken

from dataplane_core.codec import Ragged
from dataplane_core.errors import (
    DataPlaneError,
    LostSamplesError,
    MissingDataError,
    OpenCellsError,
    OperationTimeoutError,
)
from dataplane_core.ledger import commands
from dataplane_core.spec import FieldSpec, WireBatch
from dataplane_noop import NoopBackend
from dataplane_noop._segments import Segment

BROKEN = Broken()
breaks = BROKEN.breaks


def _is_dense(column):
    return isinstance(column, torch.Tensor) and not column.is_nested


def _reads(change):
    """A read that changes every column."""

    def get_samples(self, request):
        reply = NoopBackend.get_samples(self, request)
        return replace(reply, columns={name: change(column) for name, column in reply.columns.items()})

    return get_samples


@breaks("test_puts_that_differ_in_width_are_read_together")
class ReadsTheWidthOfTheFirstRow(NoopBackend):
    """The integers of a read are as wide as those of the put that wrote its first row: wider ones are cut off."""

    def fetch_fields(self, located, num_samples, deadline):
        found = super().fetch_fields(located, num_samples, deadline)
        first = located.parts[0]
        for name in first.fields:
            stored = self._segments[first.write_id]._columns[name]
            dtype = (stored.values if isinstance(stored, Ragged) else stored).dtype
            found[name] = found[name].to(dtype).to(found[name].dtype)
        return found


@breaks("test_get_of_missing_samples_names_them")
class DropsMissingSamples(NoopBackend):
    """Returns the rows that are there, and says nothing of the others."""

    def get_samples(self, request):
        listed = set(self._service.call(commands.ListRequest(request.partition_id, None)).sample_ids)
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


@breaks("test_smoke_torchs_defaults_change_nothing[device]")
class CopiesToTheDefaultDevice(NoopBackend):
    """Numbers are copied to torch's default device."""

    get_samples = _reads(lambda column: torch.as_tensor(column.numpy()) if _is_dense(column) else column)


@breaks("test_empty_lists_leave_a_field_open")
class LosesEmptyLists(NoopBackend):
    """Cells that were put while their field was open do not exist."""

    def get_samples(self, request):
        try:
            return super().get_samples(request)
        except OpenCellsError as error:
            cells = [(sample_id, request.fields) for sample_id in error.groups[0]]
            raise MissingDataError.for_cells("get_samples", request.partition_id, cells) from error


@breaks("test_ints_of_a_list_may_become_floats")
class ForgetsWhatWasInts(NoopBackend):
    """Says of cells that were put as ints that they are stored as floats, as their field is by now."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        specs = {name: replace(spec, lists="") for name, spec in reply.specs.items()}
        return WireBatch(columns=reply.columns, specs=specs)


@breaks("test_get_keeps_the_order_asked_for")
class ReordersRows(NoopBackend):
    """Rows come back in the engine's own order."""

    def get_samples(self, request):
        request.sample_ids = sorted(request.sample_ids)
        return super().get_samples(request)


@breaks("test_columns_come_back_bit_for_bit[int64]")
class PromotesScalars(NoopBackend):
    """(N,) comes back as (N, 1)."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns, specs = dict(reply.columns), dict(reply.specs)
        for name, spec in specs.items():
            if spec.kind == "tensor" and spec.rank == 0:
                columns[name], specs[name] = columns[name].unsqueeze(1), replace(spec, rank=1)
        return WireBatch(columns=columns, specs=specs)


@breaks("test_columns_come_back_bit_for_bit[int64]")
class ChangesDtype(NoopBackend):
    """int64 comes back as float32."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns, specs = dict(reply.columns), dict(reply.specs)
        for name, spec in specs.items():
            if spec.dtype == "int64" and not columns[name].is_nested:
                columns[name], specs[name] = columns[name].float(), replace(spec, dtype="float32")
        return WireBatch(columns=columns, specs=specs)


@breaks("test_columns_come_back_bit_for_bit[float32]")
class CleansNaNs(NoopBackend):
    """Every NaN becomes the same NaN."""

    get_samples = _reads(
        lambda column: (
            torch.where(column.isnan(), torch.nan, column)
            if _is_dense(column) and column.dtype == torch.float32
            else column
        )
    )


@breaks("test_columns_come_back_bit_for_bit[int64]")
class LosesEmptyRows(NoopBackend):
    """Rows of length 0 come back with one zero."""

    get_samples = _reads(
        lambda column: (
            [row if len(row) else row.new_zeros((1, *row.shape[1:])) for row in column.unbind()]
            if isinstance(column, torch.Tensor) and column.is_nested
            else column
        )
    )


@breaks("test_objects_come_back_equal")
class TurnsNoneIntoText(NoopBackend):
    """None is stored as an empty string."""

    get_samples = _reads(
        lambda column: ["" if item is None else item for item in column] if isinstance(column, list) else column
    )


@breaks("test_what_was_put_may_be_reused")
class KeepsTheCallersMemory(NoopBackend):
    """Stores references to what it was handed."""

    def store_write(self, write_id, columns, num_samples, deadline):
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


@breaks("test_get_of_only_missing_samples_raises")
class RaisesItsEnginesErrors(NoopBackend):
    """A KeyError of its own, which no user can tell from a bug."""

    def get_samples(self, request):
        try:
            return super().get_samples(request)
        except MissingDataError as error:
            raise KeyError(request.sample_ids[0]) from error


class _CannotTravel(MissingDataError):
    """Loses its attributes when it is pickled."""

    def __reduce__(self):
        return type(self), (self.message,)


class _PrintsAsARepr(MissingDataError):
    """Its text is that of a KeyError."""

    __str__ = KeyError.__str__


def _raises(error_type, hint=None):
    def get_samples(self, request):
        try:
            return NoopBackend.get_samples(self, request)
        except MissingDataError as error:
            raise error_type(error.message, missing_samples=error.missing_samples, hint=hint) from error

    return get_samples


@breaks("test_get_of_only_missing_samples_raises")
class RaisesErrorsThatCannotTravel(NoopBackend):
    """Another process gets an error without the names of the samples."""

    get_samples = _raises(_CannotTravel)


@breaks("test_get_of_only_missing_samples_raises")
class PrintsErrorsAsReprs(NoopBackend):
    """The message is in quotes, and does not name the backend."""

    get_samples = _raises(_PrintsAsARepr)


@breaks("test_get_of_only_missing_samples_raises")
class RaisesPagesOfText(NoopBackend):
    """The message holds all that the store knows."""

    get_samples = _raises(MissingDataError, hint="row " * 1000)


@breaks("test_get_of_missing_samples_names_them")
class LeavesErrorsToTheClient(NoopBackend):
    """Counts on core to notice that rows are missing."""

    def get_samples(self, request):
        try:
            return super().get_samples(request)
        except DataPlaneError as error:
            raise RuntimeError(str(error)) from error


@breaks("test_lost_payload_is_named")
class TakesLossForHaste(NoopBackend):
    """Payload that is gone is taken for rows that others overwrite all the time."""

    def get_samples(self, request):
        try:
            return super().get_samples(request)
        except LostSamplesError as error:
            raise OperationTimeoutError("the rows were overwritten faster than they could be read.") from error


@breaks("test_columns_come_back_bit_for_bit[int64]")
class NarrowsIntegers(NoopBackend):
    """int64 is stored as int32."""

    get_samples = _reads(
        lambda column: column.int().long() if _is_dense(column) and column.dtype == torch.int64 else column
    )


@breaks("test_the_payload_is_copied_no_more_than_it_may_be[get_samples]")
class CopiesOnTheWayOut(NoopBackend):
    """Every read is converted to and fro."""

    get_samples = _reads(
        lambda column: (
            column.double().float().double().float() if _is_dense(column) and column.dtype == torch.float32 else column
        )
    )
