"""What lies behind a client: its backend, the hooks called one by one, and the rows and the owner of a store."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeGuard

from dataplane_core import DataPlaneClient
from dataplane_core.backends import Backend, RefsGoneError, RowStoreBackend
from dataplane_core.codec import encode_columns
from dataplane_core.spec import OPERATIONS

#: Seconds that one call of an engine may take.
_CALL_S: Final = 60.0


def backend_of(client: DataPlaneClient) -> Any:
    """The backend of a client, for a test that looks behind the client. A trainer has no need of it.

    Args:
        client: A `DataPlaneClient`.

    Returns:
        The started instance of the author's class, whatever its attributes are.
    """
    return client._connection.backend


class Hooks:
    """Calls hooks as a client does, without the client's methods. Each method returns the hook's reply. A request has
    ``deadline_s`` seconds, or the client's own limit if that is less."""

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

    def put(self, partition_id: str, sample_ids: Sequence[str], fields: Any, **about: Any) -> Any:
        """Puts columns, which it encodes."""
        columns, specs = ({}, {}) if fields is None else encode_columns(fields, len(sample_ids), self._connection.wire)
        rows = {"sample_ids": list(sample_ids), "columns": columns, "specs": specs, "tags": None}
        return self.ask("put_samples", partition_id, **rows | about)


def soon() -> float:
    return time.monotonic() + _CALL_S


def stores_rows(backend: Backend) -> TypeGuard[RowStoreBackend]:
    """Whether it is a `RowStoreBackend` as an author writes it, whose rows and log are all that it has."""
    return isinstance(backend, RowStoreBackend) and type(backend).start is RowStoreBackend.start


def rows_at(backend: RowStoreBackend, handles: Iterable[int]) -> dict[int, bytes | None]:
    """What each handle's row holds, read one by one. None: there is no row."""
    rows: dict[int, bytes | None] = {}
    for handle in handles:
        try:
            (row,) = backend.get_rows([handle], soon())
            rows[handle] = bytes(row)
        except RefsGoneError:
            rows[handle] = None
    return rows


def kill_owner(backend: RowStoreBackend) -> None:
    """Kills the process of the ledger, if it runs on this host. The next call of a client starts another one.

    Args:
        backend: A started backend that keeps a log.
    """
    os.kill(backend.owner_pid(soon()), signal.SIGKILL)
