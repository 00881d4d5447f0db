"""`RemoteReplayBuffer`: calls a buffer that is a Ray actor, from other processes. Imports Ray only when called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from dataplane_core.errors import DataPlaneError
from dataplane_integrations.errors import CollectorFailedError, WorkerFailedError
from dataplane_integrations.ray import wait_for_all
from dataplane_integrations.replay._buffer import ReplayBuffer
from dataplane_integrations.replay._state import BufferCounts

P = ParamSpec("P")
R = TypeVar("R")


def _remote(method: Callable[Concatenate[ReplayBuffer, P], R]) -> Callable[Concatenate[RemoteReplayBuffer, P], R]:
    """The same operation of the actor. If it waits up to ``timeout_s``, the answer may come so much later."""
    timeout = inspect.signature(method).parameters.get("timeout_s")

    def call(self: RemoteReplayBuffer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        waits_s: Any = 0.0 if timeout is None else kwargs.get("timeout_s", timeout.default)
        answer: R = self._call(method.__name__, *args, waits_s=waits_s, **kwargs)
        return answer

    functools.update_wrapper(call, method)
    return call


class RemoteReplayBuffer:
    """The operations of a `ReplayBuffer` that is a Ray actor; arguments and errors are the same.

    The columns of `take` pass through the actor. To avoid that, use `select` and read them.

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

    enlist = _remote(ReplayBuffer.enlist)
    reserve = _remote(ReplayBuffer.reserve)
    commit = _remote(ReplayBuffer.commit)
    abandon = _remote(ReplayBuffer.abandon)
    withdraw = _remote(ReplayBuffer.withdraw)
    to_abort = _remote(ReplayBuffer.to_abort)
    abort = _remote(ReplayBuffer.abort)
    sweep = _remote(ReplayBuffer.sweep)
    select = _remote(ReplayBuffer.select)
    take = _remote(ReplayBuffer.take)
    consume = _remote(ReplayBuffer.consume)
    discard = _remote(ReplayBuffer.discard)
    leave_out = _remote(ReplayBuffer.leave_out)
    put_back = _remote(ReplayBuffer.put_back)
    wait_until_reserved = _remote(ReplayBuffer.wait_until_reserved)
    set_weight_version = _remote(ReplayBuffer.set_weight_version)
    view = _remote(ReplayBuffer.view)
    load_state = _remote(ReplayBuffer.load_state)

    def fail(
        self,
        message: str,
        cause: BaseException | None = None,
        *,
        collector: str = "collector",
        incarnation: int | None = None,
    ) -> None:
        """See `ReplayBuffer.fail`. A cause that cannot be pickled arrives as its description."""
        failed = CollectorFailedError(message)
        failed.__cause__ = cause
        self._call("__ray_call__", _fail, failed, collector, incarnation)

    @property
    def weight_version(self) -> int:
        """See `ReplayBuffer.weight_version`."""
        return self.view().weight_version

    @property
    def finished(self) -> bool:
        """See `ReplayBuffer.finished`."""
        return self.view().finished

    @property
    def counts(self) -> BufferCounts:
        """See `ReplayBuffer.counts`."""
        counts: BufferCounts = self._call("__ray_call__", _counts)  # an actor has no properties
        return counts

    @contextmanager
    def snapshot(self) -> Iterator[dict[str, Any]]:
        """See `ReplayBuffer.snapshot`. If a process dies inside the block, the buffer clears no rows any more."""
        state: dict[str, Any] = self._call("open_snapshot")
        try:
            yield state
        finally:
            self._call("close_snapshot")

    def _call(self, method: str, *args: Any, waits_s: float = 0.0, **kwargs: Any) -> Any:
        call = getattr(self._actor, method).remote(*args, **kwargs)
        try:
            return wait_for_all({"replay buffer": call}, timeout_s=self._timeout_s + waits_s, doing=method)[0]
        except WorkerFailedError as error:
            own = error.__cause__
            if isinstance(own, DataPlaneError):  # the buffer's own error
                raise own from own.__cause__
            raise


def _counts(buffer: ReplayBuffer) -> BufferCounts:
    return buffer.counts


def _fail(buffer: ReplayBuffer, failed: CollectorFailedError, collector: str, incarnation: int | None) -> None:
    buffer.fail(failed.message, failed.__cause__, collector=collector, incarnation=incarnation)
