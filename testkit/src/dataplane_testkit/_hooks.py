"""Calls a backend's hooks directly, without the client, to test what they reply."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from dataplane_core import DataPlaneClient
from dataplane_core.codec import encode_columns
from dataplane_core.spec import OPERATIONS


def backend_of(client: DataPlaneClient) -> Any:
    """The backend of a client, for a test that looks behind the client. A trainer has no need of it.

    Args:
        client: A `DataPlaneClient`.

    Returns:
        The started instance of the author's class, whatever its attributes are.
    """
    return client._connection.backend


class Hooks:
    """Calls hooks as a client does, without the client's methods. Each method returns the hook's reply.

    Args:
        client: A client.
        deadline_s: Seconds until the deadline of each request, at most the client's own.
    """

    def __init__(self, client: DataPlaneClient, deadline_s: float = 90.0) -> None:
        self._connection = client._connection
        self._deadline_s = deadline_s

    def call(self, request: Any) -> Any:
        """Calls the hook of a request."""
        request.deadline = time.monotonic() + self._deadline_s
        with self._connection.naming_errors():
            return self._connection.call(request)

    def ask(self, operation: str, *partition_id: str, **about: Any) -> Any:
        """Calls a hook; ``about`` are the other attributes of its request."""
        return self.call(OPERATIONS[operation].request(*partition_id, **about))

    def put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: TensorDictBase | Mapping[str, Any] | None,
        **about: Any,
    ) -> Any:
        """Puts columns, which it encodes."""
        columns, specs = ({}, {}) if fields is None else encode_columns(fields, len(sample_ids), self._connection.wire)
        rows = {"sample_ids": list(sample_ids), "columns": columns, "specs": specs, "tags": None}
        return self.ask("put_samples", partition_id, **rows | about)
