"""Calls a backend's hooks directly, without the client, to test what they reply."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from dataplane_core import DataPlaneClient
from dataplane_core.backends import Backend
from dataplane_core.codec import encode_columns
from dataplane_core.spec import OPERATIONS, new_id


def backend_of(client: DataPlaneClient) -> Any:
    """The backend of a client, for a test that looks behind the client. A trainer has no need of it.

    Args:
        client: A `DataPlaneClient`.

    Returns:
        The started instance of the author's class, whatever its attributes are.
    """
    return client._connection.backend


class Hooks:
    """Calls hooks as core does. Each method returns the hook's reply.

    Args:
        backend: A started backend.
        deadline_s: Seconds until the deadline of each request; may be negative.
    """

    def __init__(self, backend: Backend, deadline_s: float = 90.0) -> None:
        self._backend = backend
        self._wire = type(backend).wire
        self._deadline_s = deadline_s

    def ask(self, operation: str, partition_id: str | None = None, **about: Any) -> Any:
        """Calls a hook; ``about`` are the other attributes of its request."""
        made, expected = OPERATIONS[operation].request, OPERATIONS[operation].reply
        named = {} if partition_id is None else {"partition_id": partition_id}
        request = made(**named, **about, deadline=time.monotonic() + self._deadline_s)
        reply = getattr(self._backend, operation)(request)
        assert isinstance(reply, expected), (
            f"hook '{operation}' returned {type(reply).__name__}, expected {expected.__name__}"
        )
        return reply

    def put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: TensorDictBase | Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        request_id: str | None = None,
    ) -> Any:
        """Puts columns, which it encodes."""
        columns, specs = ({}, {}) if fields is None else encode_columns(fields, len(sample_ids), self._wire)
        rows = {"sample_ids": list(sample_ids), "tags": None if tags is None else [dict(row) for row in tags]}
        once = request_id or new_id()
        return self.ask("put_samples", partition_id, columns=columns, specs=specs, **rows, request_id=once)
