"""Calls a backend's hooks directly, without the client, to test the hooks' own rows, order and errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partialmethod
from typing import Any, TypeVar

from tensordict import TensorDictBase

from dataplane_core import DataPlaneClient
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
    UnitInfo,
    UnitList,
    WireBatch,
    new_id,
)

_R = TypeVar("_R")


def backend_of(client: DataPlaneClient) -> Any:
    """The backend of a client, for a test that looks behind the client. A trainer has no need of it.

    Args:
        client: A `DataPlaneClient`.

    Returns:
        The started instance of the author's class, whatever its attributes are.
    """
    return client._backend


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
        return self._ask(
            PartitionInfo,
            "register_partition",
            RegisterRequest,
            partition_id=partition_id,
            fields=list(fields),
            num_samples=num_samples,
            consumer_tasks=list(tasks),
            grpo_group_size=group_size,
            enums={name: list(words) for name, words in (enums or {}).items()},
        )

    def describe(self, partition_id: str) -> PartitionInfo:
        """``describe_partition``."""
        return self._ask(PartitionInfo, "describe_partition", DescribeRequest, partition_id=partition_id)

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
        return self._ask(
            PutReply,
            "put_samples",
            PutRequest,
            partition_id=partition_id,
            sample_ids=list(sample_ids),
            columns=columns,
            specs=specs,
            tags=None if tags is None else [dict(row) for row in tags],
            epoch=epoch,
            request_id=request_id or new_id(),
        )

    def get(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> WireBatch:
        """``get_samples``, with the columns in the wire format."""
        about = {"partition_id": partition_id, "sample_ids": list(sample_ids), "fields": list(fields)}
        return self._ask(WireBatch, "get_samples", GetRequest, **about)

    def read(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> dict[str, Any]:
        """``get_samples``, with the columns decoded."""
        reply = self.get(partition_id, sample_ids, fields)
        return decode_columns(reply.columns, reply.specs, len(sample_ids), self._wire)

    def claim(
        self, partition_id: str, batch_size: int, fields: Sequence[str] = ("x",), task: str = "train", **more: Any
    ) -> Claim:
        """``claim``. ``more`` are further attributes of the request."""
        settings = {"all_or_nothing": False, "lease_s": None, "tag_filter": None, **more}
        return self._ask(
            Claim,
            "claim",
            ClaimRequest,
            partition_id=partition_id,
            task_name=task,
            required_fields=list(fields),
            batch_size=batch_size,
            **settings,
        )

    def consumed(self, partition_id: str, tasks: Sequence[str] = ("train",)) -> ConsumptionReply:
        """``check_consumption``."""
        about = {"partition_id": partition_id, "task_names": list(tasks)}
        return self._ask(ConsumptionReply, "check_consumption", ConsumptionRequest, **about)

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> ClearReply:
        """``clear_samples``."""
        names = None if sample_ids is None else list(sample_ids)
        return self._ask(ClearReply, "clear_samples", ClearRequest, partition_id=partition_id, sample_ids=names)

    def listing(self, partition_id: str) -> SampleList:
        """``list_samples``."""
        return self._ask(SampleList, "list_samples", ListRequest, partition_id=partition_id, tag_filter=None)

    def announce(self, client: ClientInfo, ttl_s: float) -> AnnounceReply:
        """``announce``."""
        return self._ask(AnnounceReply, "announce", AnnounceRequest, client=client, ttl_s=ttl_s)

    def clients(self) -> Sequence[ClientInfo]:
        """``list_clients``."""
        return self._ask(ClientList, "list_clients", ListClientsRequest).clients

    def units(self) -> Sequence[UnitInfo]:
        """``list_units``."""
        return self._ask(UnitList, "list_units", ListUnitsRequest).units

    def _settle(
        self,
        operation: str,
        request_type: Any,
        partition_id: str,
        sample_ids: Sequence[str],
        tokens: Sequence[str],
        *,
        request_id: str | None = None,
        **lease_s: float,
    ) -> SettleReply:
        return self._ask(
            SettleReply,
            operation,
            request_type,
            partition_id=partition_id,
            task_name="train",
            sample_ids=list(sample_ids),
            lease_tokens=list(tokens),
            request_id=request_id or new_id(),
            **lease_s,
        )

    ack = partialmethod(_settle, "ack", AckRequest)
    nack = partialmethod(_settle, "nack", NackRequest)
    #: Needs ``lease_s`` as a keyword argument.
    renew = partialmethod(_settle, "renew", RenewRequest)

    def _ask(self, reply_type: type[_R], operation: str, request_type: Any, **about: Any) -> _R:
        request = request_type(**about, deadline=time.monotonic() + self._deadline_s)
        reply = getattr(self._backend, operation)(request)
        assert isinstance(reply, reply_type), (
            f"hook '{operation}' returned {type(reply).__name__}, expected {reply_type.__name__}"
        )
        return reply
