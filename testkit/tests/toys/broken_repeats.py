"""Backends that are wrong in one way each: when an operation is called again, or too late."""

from __future__ import annotations

import time
from dataclasses import replace

from broken import Broken

from dataplane_core.errors import InvalidRequestError, LeaseExpiredError, OperationTimeoutError
from dataplane_core.ledger import commands
from dataplane_core.spec import new_id
from dataplane_noop import NoopBackend

BROKEN = Broken()
breaks = BROKEN.breaks


@breaks("test_an_operation_whose_reply_was_lost_may_be_called_again[put_samples]")
class RefusesToPutAgain(NoopBackend):
    """Declares overwrite, and refuses a put of the very cells that it holds."""

    def put_samples(self, request):
        key = (request.partition_id, *request.sample_ids, *request.columns)
        held = self.__dict__.setdefault("held", set())
        if request.columns and key in held:
            raise InvalidRequestError("already written.")
        held.add(key)
        return super().put_samples(request)


@breaks("test_an_operation_whose_reply_was_lost_may_be_called_again[clear_samples]")
class ClearsMoreTheSecondTime(NoopBackend):
    """Rows are known by their position, so that a second clear of the first drops the next one."""

    def clear_samples(self, request):
        reply = super().clear_samples(request)
        if request.sample_ids is not None and reply.num_samples == 0:
            listed = self._service.call(commands.ListRequest(request.partition_id, None)).sample_ids
            super().clear_samples(replace(request, sample_ids=listed[-1:]))
        return reply


@breaks("test_an_operation_whose_reply_was_lost_may_be_called_again[nack]")
class GivesBackTwice(NoopBackend):
    """A second nack of the same rows gives them out a second time."""

    def nack(self, request):
        try:
            return super().nack(request)
        except LeaseExpiredError:
            self.twice = list(request.sample_ids)
            raise

    def claim(self, request):
        claim = super().claim(request)
        twice = self.__dict__.pop("twice", []) if claim.sample_ids else []
        return replace(claim, sample_ids=[*claim.sample_ids, *twice], tags=[*claim.tags, *[{}] * len(twice)])


@breaks("test_an_operation_that_is_late_may_be_called_again[put_samples]")
class HasItsOwnWordForLate(NoopBackend):
    """A deadline that has passed is an error like any other."""

    def put_samples(self, request):
        if time.monotonic() > request.deadline:
            raise RuntimeError("late")
        return super().put_samples(request)


def _says(outcome, *, writes):
    def put_samples(self, request):
        if time.monotonic() <= request.deadline:
            return NoopBackend.put_samples(self, request)
        if writes:
            NoopBackend.put_samples(self, request)
        raise OperationTimeoutError("late", outcome=outcome)

    return put_samples


@breaks("test_an_error_says_truly_whether_a_put_happened")
class SaysThatItDidNot(NoopBackend):
    """Writes what is late, and says that it did not."""

    put_samples = _says("not_done", writes=True)


@breaks("test_an_error_says_truly_whether_a_put_happened")
class SaysThatItDid(NoopBackend):
    """Drops what is late, and says that it was done."""

    put_samples = _says("done", writes=False)


@breaks("test_a_put_repeated_after_an_overwrite_leaves_the_newer_value[small]")
class PutsEachTime(NoopBackend):
    """Declares that requests are repeatable, and does not look at their ids."""

    def put_samples(self, request):
        return super().put_samples(replace(request, request_id=new_id()))


@breaks("test_a_put_repeated_after_a_clear_writes_nothing[small-partition]")
class ForgetsIdsWithThePartition(NoopBackend):
    """Keeps the ids of requests in the partition, which a clear drops."""

    def clear_samples(self, request):
        self.generation = self.__dict__.get("generation", 0) + (request.sample_ids is None)
        return super().clear_samples(request)

    def put_samples(self, request):
        return super().put_samples(
            replace(request, request_id=f"{request.request_id}{self.__dict__.get('generation', 0)}")
        )


@breaks("test_puts_with_the_same_id_at_the_same_time_are_carried_out_once[small]")
class LooksForTheIdTooEarly(NoopBackend):
    """Looks for the id of a put when it begins, and keeps it when it has ended."""

    def put_samples(self, request):
        begun, done = self.__dict__.setdefault("begun", []), self.__dict__.setdefault("done", {})
        if request.request_id in done:
            return done[request.request_id]
        begun.append(request.request_id)
        time.sleep(0.05 * (begun.count(request.request_id) - 1))
        reply = done[request.request_id] = super().put_samples(replace(request, request_id=new_id()))
        return reply


@breaks("test_a_refused_put_repeated_is_tried_anew")
class KeepsRefusals(NoopBackend):
    """A request that was refused stays refused."""

    def put_samples(self, request):
        refused = self.__dict__.setdefault("refused", {})
        if request.request_id in refused:
            raise refused[request.request_id]
        try:
            return super().put_samples(request)
        except InvalidRequestError as error:
            refused[request.request_id] = error
            raise


@breaks("test_a_repeated_nack_leaves_the_next_holder_its_leases[4]")
class NacksById(NoopBackend):
    """A nack gives samples back whoever holds them."""

    def nack(self, request):
        rows = self._service._ledger._partitions[request.partition_id].rows
        tokens = [rows[each].holds[request.task_name].token for each in request.sample_ids]
        return super().nack(replace(request, lease_tokens=tokens, request_id=new_id()))
