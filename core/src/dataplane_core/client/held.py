"""`HeldMetas`: the claimed samples of a stream or a loader, whose leases are renewed until they are acked."""

from __future__ import annotations

import contextlib
import math
import threading
import time

from dataplane_core.client.client import DataPlaneClient
from dataplane_core.errors import ClientClosedError, DataPlaneError, LeaseExpiredError
from dataplane_core.meta import KVBatchMeta

__all__ = ["HeldMetas"]


class HeldMetas:
    """Metas of claims that are not acked yet, as far as it knows. Safe for threads.

    Args:
        client: The client that renews their leases, and gives them back.
        lease_s: How long a renewed lease lasts, in seconds.
        most_held_s: Seconds after which a meta is given back.
    """

    def __init__(self, client: DataPlaneClient, lease_s: float, most_held_s: float = math.inf) -> None:
        self._client = client
        self._lease_s = lease_s
        self._most_held_s = most_held_s
        self._held: dict[int, tuple[KVBatchMeta, float]] = {}  # by `id`: the meta, and until when it is held
        self._lock = threading.Lock()

    def add(self, meta: KVBatchMeta) -> None:
        """Holds what was claimed."""
        with self._lock:
            self._held[id(meta)] = meta, time.monotonic() + self._most_held_s

    def discard(self, meta: KVBatchMeta) -> None:
        """Lets go of a meta that was acked."""
        with self._lock:
            self._held.pop(id(meta), None)

    def renew(self) -> bool:
        """Renews the leases, and lets go of those that have ended. Returns whether any are left. Blocks."""
        with self._lock:
            held = list(self._held.values())
        for meta, until in held:
            try:
                if time.monotonic() <= until:
                    self._client.renew(meta, self._lease_s)
                    continue
                self._client.nack(meta)
            except (LeaseExpiredError, KeyError, ClientClosedError):
                pass  # it was acked or cleared, or is lost: its ack says so
            except DataPlaneError:
                continue  # the store may answer the next time
            self.discard(meta)
        return bool(self._held)

    def give_back(self, meta: KVBatchMeta | None = None) -> None:
        """Gives back one meta, or all. Blocks."""
        with self._lock:
            metas = [each for each, _ in self._held.values()] if meta is None else [meta]
            for each in metas:
                self._held.pop(id(each), None)
        for each in metas:
            with contextlib.suppress(DataPlaneError):  # the lease or the client has ended
                self._client.nack(each)
