"""Backends that are wrong in one way each: when an operation is called again, or too late."""

from __future__ import annotations

import time
from dataclasses import replace

from broken import Broken

from dataplane_core.errors import (
    InvalidRequestError,
    LeaseExpiredError,
)
from dataplane_core.ledger import commands
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
            listed = self._service.call(commands.ListSamples(request.partition_id, None)).sample_ids
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
