"""Calls a backend's hooks directly, without the client, to test the hooks' own rows, order and errors."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from functools import partialmethod
from typing import Any, get_type_hints

from tensordict import TensorDictBase

from dataplane_core import DataPlaneClient
from dataplane_core.backends import Backend
from dataplane_core.codec import decode_columns, encode_columns
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
    """Calls hooks as core does: unique ids, encoded columns, a deadline. Each call returns the hook's reply.

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
        followers: Sequence[str] = (),
    ) -> Any:
        """``register_partition``."""
        return self._ask(
            "register_partition",
            partition_id=partition_id,
            fields=list(fields),
            num_samples=num_samples,
            consumer_tasks=list(tasks),
            grpo_group_size=group_size,
            enums={name: list(words) for name, words in (enums or {}).items()},
            followers=list(followers),
        )

    def describe(self, partition_id: str) -> Any:
        """``describe_partition``."""
        return self._ask("describe_partition", partition_id=partition_id)

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
        """``put_samples``, with the fields encoded in the backend's wire format."""
        columns, specs = ({}, {}) if fields is None else encode_columns(fields, len(sample_ids), self._wire)
        return self._ask(
            "put_samples",
            partition_id=partition_id,
            sample_ids=list(sample_ids),
            columns=columns,
            specs=specs,
            tags=None if tags is None else [dict(row) for row in tags],
            epoch=epoch,
            request_id=request_id or new_id(),
        )

    def get(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> Any:
        """``get_samples``, with the columns in the wire format."""
        return self._ask("get_samples", partition_id=partition_id, sample_ids=list(sample_ids), fields=list(fields))

    def read(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> dict[str, Any]:
        """``get_samples``, with the columns decoded."""
        reply = self.get(partition_id, sample_ids, fields)
        return decode_columns(reply.columns, reply.specs, len(sample_ids), self._wire)

    def claim(
        self, partition_id: str, batch_size: int, fields: Sequence[str] = ("x",), task: str = "train", **more: Any
    ) -> Any:
        """``claim``. ``more`` are further attributes of the request."""
        settings = {"all_or_nothing": False, "lease_s": None, "tag_filter": None, **more}
        return self._ask(
            "claim",
            partition_id=partition_id,
            task_name=task,
            required_fields=list(fields),
            batch_size=batch_size,
            **settings,
        )

    def consumed(self, partition_id: str, tasks: Sequence[str] = ("train",)) -> Any:
        """``check_consumption``."""
        return self._ask("check_consumption", partition_id=partition_id, task_names=list(tasks))

    def clear(self, partition_id: str, sample_ids: Sequence[str] | None) -> Any:
        """``clear_samples``."""
        names = None if sample_ids is None else list(sample_ids)
        return self._ask("clear_samples", partition_id=partition_id, sample_ids=names)

    def listing(self, partition_id: str) -> Any:
        """``list_samples``."""
        return self._ask("list_samples", partition_id=partition_id, tag_filter=None)

    def announce(self, client: ClientInfo, ttl_s: float) -> Any:
        """``announce``."""
        return self._ask("announce", client=client, ttl_s=ttl_s)

    def clients(self, *, ended: bool = False) -> Any:
        """``list_clients``."""
        return self._ask("list_clients", ended=ended).clients

    def answers(self, partition_id: str, *questions: Question) -> Any:
        """``inspect_partition`` with questions."""
        return self._ask("inspect_partition", partition_id=partition_id, questions=list(questions)).answers

    def units(self) -> Any:
        """``list_units``."""
        return self._ask("list_units").units

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
        return self._ask(
            operation,
            partition_id=partition_id,
            task_name="train",
            sample_ids=list(sample_ids),
            lease_tokens=list(tokens),
            request_id=request_id or new_id(),
            **lease_s,
        )

    ack = partialmethod(_settle, "ack")
    nack = partialmethod(_settle, "nack")
    #: Needs ``lease_s`` as a keyword argument.
    renew = partialmethod(_settle, "renew")

    def _ask(self, operation: str, **about: Any) -> Any:
        types = _types_of(operation)
        request = types["request"](**about, deadline=time.monotonic() + self._deadline_s)
        reply = getattr(self._backend, operation)(request)
        assert isinstance(reply, types["return"]), (
            f"hook '{operation}' returned {type(reply).__name__}, expected {types['return'].__name__}"
        )
        return reply
