"""Calls a backend's hooks directly, without the client, to test the hooks' own rows, order and errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partialmethod
from typing import Any, TypeVar

from tensordict import TensorDictBase

from dataplane_core.backends import Backend
from dataplane_core.codec import decode_columns, encode_columns
from dataplane_core.spec import (
    AckRequest,
    AnnounceReply,
    AnnounceRequest,
    Claim,
    ClaimRequest,
    ClearReply,
    ClearRequest,
    ClientInfo,
    ClientList,
    ConsumptionReply,
    ConsumptionRequest,
    DescribeRequest,
    GetRequest,
    ListClientsRequest,
    ListRequest,
    ListUnitsRequest,
    NackRequest,
    PartitionInfo,
    PutReply,
    PutRequest,
    RegisterRequest,
    RenewRequest,
    SampleList,
    SettleReply,
    TagFilter,
    UnitInfo,
    UnitList,
    WireBatch,
    check_tag_filter,
    new_id,
)

__all__ = ["Hooks"]

_R = TypeVar("_R")


class Hooks:
    """Calls hooks as core does: unique ids, encoded columns, a deadline.

    Args:
        backend: A started backend.
        deadline_s: Seconds until the deadline of each request; may be negative.
    """

    def __init__(self, backend: Backend, deadline_s: float = 90.0) -> None:
        self._backend = backend
        self._wire = type(backend).wire
        self._deadline_s = deadline_s

    def within(self, deadline_s: float) -> Hooks:
        """The same hooks with another deadline."""
        return Hooks(self._backend, deadline_s)

    def register(
        self,
        partition_id: str,
        fields: Sequence[str] = ("x",),
        *,
        num_samples: int | None = None,
        tasks: Sequence[str] = ("train",),
        group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
    ) -> PartitionInfo:
        """``register_partition``."""
        request = RegisterRequest(
            partition_id=partition_id,
            fields=list(fields),
            num_samples=num_samples,
            consumer_tasks=list(tasks),
            grpo_group_size=group_size,
            enums={name: list(words) for name, words in (enums or {}).items()},
            deadline=self._deadline(),
        )
        return self._call("register_partition", request, PartitionInfo)

    def describe(self, partition_id: str) -> PartitionInfo:
        """``describe_partition``."""
        request = DescribeRequest(partition_id=partition_id, deadline=self._deadline())
        return self._call("describe_partition", request, PartitionInfo)

    def put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: TensorDictBase | Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        epoch: str | None = None,
        request_id: str | None = None,
    ) -> PutReply:
        """``put_samples``, with the fields encoded in the backend's wire format."""
        columns, specs = ({}, {}) if fields is None else encode_columns(fields, len(sample_ids), self._wire)
        request = PutRequest(
            partition_id=partition_id,
            sample_ids=list(sample_ids),
            columns=columns,
            specs=specs,
            tags=None if tags is None else [dict(row) for row in tags],
            epoch=epoch,
            request_id=request_id or new_id(),
            deadline=self._deadline(),
        )
        return self._call("put_samples", request, PutReply)

    def get(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> WireBatch:
        """``get_samples``, with the columns in the wire format."""
        request = GetRequest(
            partition_id=partition_id, sample_ids=list(sample_ids), fields=list(fields), deadline=self._deadline()
        )
        return self._call("get_samples", request, WireBatch)

    def read(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> dict[str, Any]:
        """``get_samples``, with the columns decoded."""
        reply = self.get(partition_id, sample_ids, fields)
        return decode_columns(reply.columns, reply.specs, len(sample_ids), self._wire)

    def claim(
        self,
        partition_id: str,
        batch_size: int,
        fields: Sequence[str] = ("x",),
        *,
        task: str = "train",
        all_or_nothing: bool = False,
        lease_s: float | None = None,
        tag_filter: TagFilter | None = None,
        explain: bool = False,
    ) -> Claim:
        """``claim``."""
        request = ClaimRequest(
            partition_id=partition_id,
            task_name=task,
            required_fields=list(fields),
            batch_size=batch_size,
            all_or_nothing=all_or_nothing,
            lease_s=lease_s,
            tag_filter=check_tag_filter(tag_filter),
            explain=explain,
            deadline=self._deadline(),
        )
        return self._call("claim", request, Claim)

    def consumed(self, partition_id: str, tasks: Sequence[str] = ("train",)) -> ConsumptionReply:
        """``check_consumption``."""
        request = ConsumptionRequest(partition_id=partition_id, task_names=list(tasks), deadline=self._deadline())
        return self._call("check_consumption", request, ConsumptionReply)

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> ClearReply:
        """``clear_samples``."""
        request = ClearRequest(
            partition_id=partition_id,
            sample_ids=None if sample_ids is None else list(sample_ids),
            deadline=self._deadline(),
        )
        return self._call("clear_samples", request, ClearReply)

    def listing(self, partition_id: str, tag_filter: TagFilter | None = None) -> SampleList:
        """``list_samples``."""
        request = ListRequest(
            partition_id=partition_id, tag_filter=check_tag_filter(tag_filter), deadline=self._deadline()
        )
        return self._call("list_samples", request, SampleList)

    def announce(self, client: ClientInfo, ttl_s: float) -> AnnounceReply:
        """``announce``."""
        request = AnnounceRequest(client=client, ttl_s=ttl_s, deadline=self._deadline())
        return self._call("announce", request, AnnounceReply)

    def clients(self) -> Sequence[ClientInfo]:
        """``list_clients``."""
        return self._call("list_clients", ListClientsRequest(deadline=self._deadline()), ClientList).clients

    def units(self) -> Sequence[UnitInfo]:
        """``list_units``."""
        return self._call("list_units", ListUnitsRequest(deadline=self._deadline()), UnitList).units

    def _settle(
        self,
        operation: str,
        request_type: Any,
        partition_id: str,
        sample_ids: Sequence[str],
        tokens: Sequence[str],
        *,
        task: str = "train",
        request_id: str | None = None,
        **lease_s: float,
    ) -> SettleReply:
        request = request_type(
            partition_id=partition_id,
            task_name=task,
            sample_ids=list(sample_ids),
            lease_tokens=list(tokens),
            request_id=request_id or new_id(),
            deadline=self._deadline(),
            **lease_s,
        )
        return self._call(operation, request, SettleReply)

    ack = partialmethod(_settle, "ack", AckRequest)
    nack = partialmethod(_settle, "nack", NackRequest)
    #: Needs ``lease_s`` as a keyword argument.
    renew = partialmethod(_settle, "renew", RenewRequest)

    def _call(self, operation: str, request: Any, reply_type: type[_R]) -> _R:
        reply = getattr(self._backend, operation)(request)
        assert isinstance(reply, reply_type), (
            f"hook '{operation}' returned {type(reply).__name__}, expected {reply_type.__name__}"
        )
        return reply

    def _deadline(self) -> float:
        return time.monotonic() + self._deadline_s
