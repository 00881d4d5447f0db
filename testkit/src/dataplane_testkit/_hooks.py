"""Calls a backend's hooks directly, without the client, to test the hooks' own rows, order and errors."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from tensordict import TensorDictBase

from dataplane_core import DataPlaneClient
from dataplane_core.backends import Backend
from dataplane_core.codec import encode_columns
from dataplane_core.spec import ClientInfo, DataPlaneSpec, Question, new_id


def backend_of(client: DataPlaneClient) -> Any:
    """The backend of a client, for a test that looks behind the client. A trainer has no need of it.

    Args:
        client: A `DataPlaneClient`.

    Returns:
        The started instance of the author's class, whatever its attributes are.
    """
    return client._backend


@functools.cache
def _types_of(operation: str) -> Mapping[str, Any]:
    """The types of a hook's ``request`` and ``return``."""
    return get_type_hints(getattr(DataPlaneSpec, operation))


class Hooks:
    """Calls hooks as core does: unique ids, encoded columns, a deadline. Each method returns the hook's reply.

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

    def _ask(self, operation: str, partition_id: str | None = None, **about: Any) -> Any:
        types = _types_of(operation)
        named = {} if partition_id is None else {"partition_id": partition_id}
        request = types["request"](**named, **about, deadline=time.monotonic() + self._deadline_s)
        reply = getattr(self._backend, operation)(request)
        assert isinstance(reply, types["return"]), (
            f"hook '{operation}' returned {type(reply).__name__}, expected {types['return'].__name__}"
        )
        return reply

    # --- partitions ---------------------------------------------------------------------------------------------------

    def register(
        self,
        partition_id: str,
        fields: Sequence[str] = ("x",),
        *,
        tasks: Sequence[str] = ("train",),
        group_size: int | None = None,
        **more: Any,
    ) -> Any:
        """``more`` are further attributes of the request."""
        about = {"fields": list(fields), "consumer_tasks": list(tasks), "grpo_group_size": group_size, **more}
        return self._ask("register_partition", partition_id, **about)

    def describe(self, partition_id: str) -> Any:
        return self._ask("describe_partition", partition_id)

    def answers(self, partition_id: str, *questions: Question) -> Any:
        return self._ask("inspect_partition", partition_id, questions=list(questions)).answers

    # --- rows ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: TensorDictBase | Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        epoch: str | None = None,
        request_id: str | None = None,
    ) -> Any:
        columns, specs = ({}, {}) if fields is None else encode_columns(fields, len(sample_ids), self._wire)
        rows = {"sample_ids": list(sample_ids), "tags": None if tags is None else [dict(row) for row in tags]}
        once = {"epoch": epoch, "request_id": request_id or new_id()}
        return self._ask("put_samples", partition_id, columns=columns, specs=specs, **rows, **once)

    def get(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> Any:
        return self._ask("get_samples", partition_id, sample_ids=list(sample_ids), fields=list(fields))

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> Any:
        return self._ask("clear_samples", partition_id, sample_ids=None if sample_ids is None else list(sample_ids))

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(
        self, partition_id: str, batch_size: int, fields: Sequence[str] = ("x",), task: str = "train", **more: Any
    ) -> Any:
        """``more`` are further attributes of the request."""
        about = {"task_name": task, "required_fields": list(fields), "all_or_nothing": False, **more}
        return self._ask("claim", partition_id, batch_size=batch_size, **about)

    def _settle(
        self,
        operation: str,
        partition_id: str,
        sample_ids: Sequence[str],
        tokens: Sequence[str],
        *,
        request_id: str | None = None,
        **lease_s: float,
    ) -> Any:
        rows = {"task_name": "train", "sample_ids": list(sample_ids), "lease_tokens": list(tokens)}
        return self._ask(operation, partition_id, **rows, request_id=request_id or new_id(), **lease_s)

    ack = functools.partialmethod(_settle, "ack")
    nack = functools.partialmethod(_settle, "nack")
    #: Needs ``lease_s`` as a keyword argument.
    renew = functools.partialmethod(_settle, "renew")

    # --- clients and units --------------------------------------------------------------------------------------------

    def announce(self, client: ClientInfo, ttl_s: float) -> Any:
        return self._ask("announce", client=client, ttl_s=ttl_s)

    def clients(self, *, ended: bool = False) -> Any:
        return self._ask("list_clients", ended=ended).clients

    def units(self) -> Any:
        return self._ask("list_units").units
