"""`RemoteReplayBuffer`: calls a buffer that is a Ray actor, from other processes. Imports Ray only when called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dataplane_core.batch import BatchedDataDict
from dataplane_core.errors import DataPlaneError
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.errors import WorkerFailedError
from dataplane_integrations.ray import wait_for_all
from dataplane_integrations.replay._buffer import ReplayBuffer
from dataplane_integrations.replay._groups import BufferCounts
from dataplane_integrations.replay._ids import Reservation
from dataplane_integrations.replay._policies import BufferView

__all__ = ["RemoteReplayBuffer"]


class RemoteReplayBuffer:
    """The operations of a `ReplayBuffer` that is a Ray actor; arguments and errors are the same.

    Set ``max_concurrency`` of the actor to at least the number of callers that wait at the same time. docs/async.md
    shows how to start it.

    Args:
        actor: Its handle.
        partition_id: The buffer's partition.
        timeout_s: Seconds that an answer may take, beyond the timeout of the call itself.

    Raises:
        WorkerFailedError: The actor died and its state is lost. Restore a save, or start with an empty buffer.
        WorkerTimeoutError: No answer in time.
    """

    def __init__(self, actor: Any, partition_id: str, timeout_s: float = 60.0) -> None:
        self.partition_id = partition_id
        self._actor = actor
        self._timeout_s = timeout_s

    def enlist(self, collector: str = "collector") -> int:
        """See `ReplayBuffer.enlist`."""
        number: int = self._call("enlist", collector)
        return number

    def reserve(
        self,
        num_groups: int = 1,
        *,
        collector: str = "collector",
        incarnation: int | None = None,
        at_least: int | None = None,
        timeout_s: float = 60.0,
    ) -> list[Reservation]:
        """See `ReplayBuffer.reserve`."""
        reserved: list[Reservation] = self._call(
            "reserve",
            num_groups,
            collector=collector,
            incarnation=incarnation,
            at_least=at_least,
            timeout_s=timeout_s,
            waits_s=timeout_s,
        )
        return reserved

    def commit(self, reservations: Sequence[Reservation], meta: KVBatchMeta) -> None:
        """See `ReplayBuffer.commit`."""
        self._call("commit", list(reservations), meta)

    def abandon(self, reservations: Sequence[Reservation], *, requeue: bool = True) -> None:
        """See `ReplayBuffer.abandon`."""
        self._call("abandon", list(reservations), requeue=requeue)

    def to_abort(self, reservations: Sequence[Reservation]) -> list[Reservation]:
        """See `ReplayBuffer.to_abort`."""
        in_vain: list[Reservation] = self._call("to_abort", list(reservations))
        return in_vain

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """See `ReplayBuffer.abort`."""
        self._call("abort", list(reservations))

    def fail(
        self,
        message: str,
        cause: BaseException | None = None,
        *,
        collector: str = "collector",
        incarnation: int | None = None,
    ) -> None:
        """See `ReplayBuffer.fail`."""
        self._call("fail", message, cause, collector=collector, incarnation=incarnation)

    def sweep(self) -> int:
        """See `ReplayBuffer.sweep`."""
        number: int = self._call("sweep")
        return number

    def select(self, num_groups: int, *, min_groups: int | None = None, timeout_s: float = 60.0) -> KVBatchMeta:
        """See `ReplayBuffer.select`."""
        meta: KVBatchMeta = self._call(
            "select", num_groups, min_groups=min_groups, timeout_s=timeout_s, waits_s=timeout_s
        )
        return meta

    def take(
        self,
        num_groups: int,
        select_fields: Sequence[str] | None = None,
        *,
        min_groups: int | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> tuple[KVBatchMeta, BatchedDataDict]:
        """See `ReplayBuffer.take`. The columns pass through the actor. To avoid that, use `select` and read them."""
        taken: tuple[KVBatchMeta, BatchedDataDict] = self._call(
            "take",
            num_groups,
            select_fields,
            min_groups=min_groups,
            timeout_s=timeout_s,
            **options,
            waits_s=timeout_s,
        )
        return taken

    def consume(self, meta: KVBatchMeta) -> None:
        """See `ReplayBuffer.consume`."""
        self._call("consume", meta)

    def discard(self, meta: KVBatchMeta, *, requeue: bool = False) -> None:
        """See `ReplayBuffer.discard`."""
        self._call("discard", meta, requeue=requeue)

    def leave_out(self, meta: KVBatchMeta, lost: Sequence[str]) -> KVBatchMeta:
        """See `ReplayBuffer.leave_out`."""
        left: KVBatchMeta = self._call("leave_out", meta, list(lost))
        return left

    def put_back(self, meta: KVBatchMeta) -> None:
        """See `ReplayBuffer.put_back`."""
        self._call("put_back", meta)

    def wait_until_reserved(self, *, timeout_s: float = 60.0) -> None:
        """See `ReplayBuffer.wait_until_reserved`."""
        self._call("wait_until_reserved", timeout_s=timeout_s, waits_s=timeout_s)

    def set_weight_version(self, weight_version: int) -> list[str]:
        """See `ReplayBuffer.set_weight_version`."""
        evicted: list[str] = self._call("set_weight_version", weight_version)
        return evicted

    @property
    def weight_version(self) -> int:
        """See `ReplayBuffer.weight_version`."""
        return self.view().weight_version

    @property
    def counts(self) -> BufferCounts:
        """See `ReplayBuffer.counts`."""
        counts: BufferCounts = self._call("__ray_call__", _counts)  # an actor has no properties
        return counts

    def view(self) -> BufferView:
        """See `ReplayBuffer.view`."""
        view: BufferView = self._call("view")
        return view

    @contextmanager
    def snapshot(self) -> Iterator[dict[str, Any]]:
        """See `ReplayBuffer.snapshot`. If a process dies inside the block, the buffer clears no rows any more."""
        state: dict[str, Any] = self._call("open_snapshot")
        try:
            yield state
        finally:
            self._call("close_snapshot")

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `ReplayBuffer.load_state`."""
        self._call("load_state", dict(state))

    def _call(self, method: str, *args: Any, waits_s: float = 0.0, **kwargs: Any) -> Any:
        call = getattr(self._actor, method).remote(*args, **kwargs)
        try:
            return wait_for_all({"replay buffer": call}, timeout_s=self._timeout_s + waits_s, doing=method)[0]
        except WorkerFailedError as error:
            if isinstance(error.__cause__, DataPlaneError):  # the buffer's own error
                raise error.__cause__ from None
            raise


def _counts(buffer: ReplayBuffer) -> BufferCounts:
    return buffer.counts
