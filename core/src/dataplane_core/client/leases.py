"""`HeldMetas`: the leases of what was claimed and is not acked: renews them, and gives back what is left."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

from dataplane_core.client.client import DataPlaneClient
from dataplane_core.errors import ClientClosedError, DataPlaneError, LeaseExpiredError
from dataplane_core.meta import KVBatchMeta


class HeldMetas:
    """Metas of claims that are not acked yet, as far as it knows. Safe for threads. Renewed leases last ``lease_s``."""

    def __init__(self, client: DataPlaneClient, lease_s: float) -> None:
        self._client = client
        self._lease_s = lease_s
        # Changed by single steps only, and without a lock: a signal handler may come between any two.
        # By the `id` of the claim's meta: that meta, so that no other one gets its id; its samples whose leases are
        # held; and when the newest renewal that succeeded began
        self._held: dict[int, tuple[KVBatchMeta, KVBatchMeta, float]] = {}

    @property
    def num_samples(self) -> int:
        """How many samples are held."""
        return sum(left.size for _, left, _ in list(self._held.values()))

    def add(self, meta: KVBatchMeta) -> None:
        """Holds what was claimed. An empty batch has no leases."""
        if meta.sample_ids:
            self._held[id(meta)] = meta, meta, time.monotonic()

    def holds(self, meta: KVBatchMeta) -> bool:
        """Whether the lease of an added meta was held at the newest renewal."""
        return id(meta) in self._held

    def discard(self, meta: KVBatchMeta) -> None:
        """Lets go of a meta that was acked."""
        self._held.pop(id(meta), None)

    def check(self, meta: KVBatchMeta) -> None:
        """See `StreamBatch.check`."""
        _, _, renewed_at = self._held.get(id(meta), (meta, meta, -math.inf))
        if time.monotonic() - renewed_at >= self._lease_s:
            raise LeaseExpiredError(
                f"the lease on {meta.size} samples of '{meta.partition_id}' is held no longer, or was not renewed for "
                f"lease_s, {self._lease_s:g} s.",
                sample_ids=meta.sample_ids,
            )

    def renew(self) -> bool:
        """Renews the leases, and lets go of those that have ended. Returns whether any are left. Blocks."""
        for key, (claimed, meta, _) in self._held.copy().items():
            asked_at = time.monotonic()
            try:
                left = _of_held(lambda part: self._client.renew(part, self._lease_s), meta)
            except (KeyError, ClientClosedError):
                left = None  # it was cleared, or is lost: its ack says so
            except DataPlaneError:
                continue  # the store may answer the next time
            if left is None:
                self._held.pop(key, None)
            elif key in self._held:  # if it is acked now, the next renewal drops it
                self._held[key] = claimed, left, asked_at
        return bool(self._held)

    def give_back(self, meta: KVBatchMeta | None = None) -> None:
        """Gives back one meta, or all. Blocks."""
        for key in list(self._held) if meta is None else [id(meta)]:
            held = self._held.pop(key, None)
            if held is not None:
                with contextlib.suppress(DataPlaneError):  # the client or its store has ended
                    _of_held(self._client.nack, held[1])


def _of_held(call: Callable[[KVBatchMeta], object], meta: KVBatchMeta) -> KVBatchMeta | None:
    """Calls with the samples whose leases are still held, and returns them, or None if there are none: others may have
    been acked one by one, or cleared."""
    while True:
        try:
            call(meta)
            return meta
        except LeaseExpiredError as error:
            held = [index for index, sample_id in enumerate(meta.sample_ids) if sample_id not in error.sample_ids]
            if not 0 < len(held) < meta.size:
                return None
            meta = meta.subset(held)
