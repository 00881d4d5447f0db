"""More backends that are wrong in one way each: when they are called again, in what they copy, with columns that nobody
registered."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

import broken_claims  # noqa: F401 - registers its backends
import torch
from broken import breaks

from dataplane_core.errors import InvalidRequestError, LeaseExpiredError
from dataplane_core.hookspecs import WireBatch
from dataplane_noop import NoopBackend


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
            listed = self._service.call("list_samples", request.partition_id, None).sample_ids
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


@breaks("test_the_payload_is_copied_no_more_than_it_may_be[get_samples]")
class CopiesOnTheWayOut(NoopBackend):
    """Every read is converted to and fro."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns = {
            name: column.double().float().double().float()
            if isinstance(column, torch.Tensor) and column.dtype == torch.float32 and not column.is_nested
            else column
            for name, column in reply.columns.items()
        }
        return WireBatch(columns=columns, specs=reply.specs)


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


@breaks("test_images_may_come_later_and_from_another")
class ReadyWithoutTheExtras(NoopBackend):
    """A claim minds the registered fields only."""

    def claim(self, request):
        request.required_fields = [name for name in request.required_fields if name == "input_ids"] or ["x"]
        return super().claim(request)


@breaks("test_routed_experts_come_back_per_token")
class NarrowsIntegers(NoopBackend):
    """int64 is stored as int32."""

    def get_samples(self, request):
        reply = super().get_samples(request)
        columns = {
            name: [row.int().long() for row in column.unbind()]
            if isinstance(column, torch.Tensor) and column.is_nested and column.dtype == torch.int64
            else column
            for name, column in reply.columns.items()
        }
        return WireBatch(columns=columns, specs=reply.specs)


@breaks("test_facts_are_about_what_is_not_declared")
class ExplainsWhatItDeclares(NoopBackend):
    """Declares claims, and says why it cannot have them."""

    facts: ClassVar = {"claims": "the engine has no cursor"}
