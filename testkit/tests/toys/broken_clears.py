"""Backends that are wrong in one way each: in what a registration or a clear leaves behind."""

from __future__ import annotations

from dataclasses import replace

from broken import Broken

from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import commands
from dataplane_core.spec import PartitionInfo, RegisterRequest, SampleList
from dataplane_noop import NoopBackend

BROKEN = Broken()
breaks = BROKEN.breaks


@breaks("test_register_again_drops_rows")
class KeepsRowsAcrossRegistrations(NoopBackend):
    """A partition that is known is not opened afresh."""

    def register_partition(self, request):
        try:
            return self._service.call(commands.DescribeRequest(request.partition_id))
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

    def delete_refs(self, refs, deadline):
        pass


@breaks("test_overwritten_cells_leave_the_engine")
class KeepsOldVersions(NoopBackend):
    """A put does not delete what it replaced."""

    def put_samples(self, request):
        self.delete_refs = lambda refs, deadline: None
        try:
            return super().put_samples(request)
        finally:
            del self.delete_refs


@breaks("test_a_refused_put_leaves_nothing_in_the_engine")
class StoresBeforeItAsks(NoopBackend):
    """A put stores its columns first, and leaves them there when it is refused."""

    def put_samples(self, request):
        self.store_write(-1 - len(self._segments), request.columns, len(request.sample_ids), request.deadline)
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


@breaks("test_the_epoch_is_the_one_that_the_registration_drew")
class CountsEpochs(NoopBackend):
    """Registrations are numbered in the store, which forgets how far it had counted."""

    def register_partition(self, request):
        self.count = self.__dict__.get("count", 0) + 1
        request.epoch = str(self.count)
        return super().register_partition(request)


@breaks("test_clearing_a_sample_leaves_the_others")
class FreesSharedRowsWithTheFirstSample(NoopBackend):
    """The ledger forgets that several samples share a row."""

    def call_ledger(self, deadline, command):
        reply = super().call_ledger(deadline, command)
        if isinstance(command, commands.CommitPut):
            for write in self._service._ledger._writes.values():
                write.num_sharers.clear()
        return reply


@breaks("test_equal_cells_count_once")
class CountsSharedRowsForEachSample(NoopBackend):
    """The capacity counts a shared row as often as it is shared."""

    def call_ledger(self, deadline, command):
        if isinstance(command, commands.BeginPut):
            counted = [
                replace(
                    write, row_bytes=[size * write.positions.count(row) for row, size in enumerate(write.row_bytes)]
                )
                if write.positions
                else write
                for write in command.writes
            ]
            command = replace(command, writes=counted)
        return super().call_ledger(deadline, command)
