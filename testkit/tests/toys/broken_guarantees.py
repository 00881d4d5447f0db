"""Backends that are wrong in one way each: in what they declare, in who gets the room, or over a long history."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import replace
from typing import ClassVar

from broken import Broken

from dataplane_core.errors import CapacityExceededError, DataPlaneError, OperationTimeoutError, RoomTimeoutError
from dataplane_core.ledger import commands
from dataplane_core.spec import AnnounceReply, Capability, SampleList
from dataplane_noop import NoopBackend

BROKEN = Broken()
breaks = BROKEN.breaks


@breaks("test_nothing_is_evicted")
class EvictsWhenFull(NoopBackend):
    """Drops the oldest samples to make room."""

    def put_samples(self, request):
        while True:
            try:
                return super().put_samples(request)
            except CapacityExceededError as error:
                listed = self._service.call(commands.ListRequest(request.partition_id, None)).sample_ids
                if not error.retryable or not listed:
                    raise
                self._service.call(commands.ClearRequest(request.partition_id, listed[:1]))


@breaks("test_a_blocked_put_ends_by_its_deadline")
class HidesThatItIsFull(NoopBackend):
    """A put that found no room says only that it is late."""

    def put_samples(self, request):
        try:
            return super().put_samples(request)
        except RoomTimeoutError as error:
            raise OperationTimeoutError("put_samples timed out.", outcome="not_done") from error


@breaks("test_room_does_not_leak")
class LeaksRoom(NoopBackend):
    """What a refused put reserved is never given back."""

    def put_samples(self, request):
        try:
            return super().put_samples(request)
        except DataPlaneError:
            self._service._ledger.held_bytes += 10_000
            raise


@breaks("test_nothing_is_unpickled")
class Unpickles(NoopBackend):
    """Declares no_pickle, and pickles its tags."""

    def list_samples(self, request):
        listed = super().list_samples(request)
        return SampleList(sample_ids=listed.sample_ids, tags=pickle.loads(pickle.dumps(listed.tags)))


@breaks("test_nothing_is_unpickled")
class UnpicklesMessages(NoopBackend):
    """Declares no_pickle, and sends its tags through a pipe of multiprocessing."""

    def list_samples(self, request):
        listed = super().list_samples(request)
        one_end, other_end = multiprocessing.Pipe()
        with one_end, other_end:
            one_end.send(listed.tags)
            return SampleList(sample_ids=listed.sample_ids, tags=other_end.recv())


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


@breaks("test_a_large_put_is_not_starved_by_small_ones")
class GivesRoomToWhoeverAsks(NoopBackend):
    """Nobody queues for room."""

    def put_once(self, request, writes, ticket):
        return super().put_once(request, writes, None)

    def call_ledger(self, deadline, command):
        return None if isinstance(command, commands.WaitForRoom) else super().call_ledger(deadline, command)


@breaks("test_reasons_are_given_only_for_what_is_not_declared")
class ExplainsWhatItDeclares(NoopBackend):
    """Declares claims, and says why it cannot have them."""

    why_not_declared: ClassVar = {"claims": "the engine has no cursor"}


@breaks("test_a_client_that_is_silent_is_not_listed_for_long")
class ListsTheDead(NoopBackend):
    """Lists a client until it says that it closes."""

    def announce(self, request):
        return super().announce(replace(request, ttl_s=request.ttl_s and 9999.0))


@breaks("test_clients_that_ended_are_listed_if_asked_for")
class ForgetsTheDead(NoopBackend):
    """Lists only clients that are open."""

    def list_clients(self, request):
        return super().list_clients(replace(request, ended=False))


@breaks("test_describe_counts_the_samples_that_have_a_field")
class CountsAllSamples(NoopBackend):
    """Says that each sample has each field."""

    def inspect_partition(self, request):
        found = super().inspect_partition(request)
        return replace(found, num_rows=dict.fromkeys(found.num_rows, found.num_samples))


@breaks("test_questions_are_answered")
class AnswersWithoutTheFilter(NoopBackend):
    """Answers as if questions had no filter."""

    def inspect_partition(self, request):
        plain = [replace(each, tag_filter=None) for each in request.questions]
        return super().inspect_partition(replace(request, questions=plain))


@breaks("test_the_number_of_clients_is_replied")
class SaysThatItIsAlone(NoopBackend):
    """Tells each client that there is no other, so that a thousand announce themselves all the time."""

    def announce(self, request):
        super().announce(request)
        return AnnounceReply(num_clients=1)


@breaks("test_announced_clients_are_listed")
class ForgetsTheCalls(NoopBackend):
    """Lists clients without what they do."""

    def announce(self, request):
        return super().announce(replace(request, client=replace(request.client, calls=())))


@breaks("test_describe_names_the_oldest_lease")
class NamesTheNewestLease(NoopBackend):
    """Says who holds the sample that was claimed last."""

    def claim(self, request):
        claim = super().claim(request)
        if claim.lease_tokens:
            self.__dict__.setdefault("given", []).extend(claim.sample_ids)
        return claim

    def inspect_partition(self, request):
        found = super().inspect_partition(request)
        tasks = {
            name: task
            if task.oldest_lease is None
            else replace(task, oldest_lease=replace(task.oldest_lease, sample_id=self.given[-1]))
            for name, task in found.tasks.items()
        }
        return replace(found, tasks=tasks)
