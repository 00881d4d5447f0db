"""`AsyncCollector`: a `Collector` whose rollouts are coroutines of the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeAlias

from dataplane_core.errors import InvalidRequestError
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.errors import RolloutAbortedError
from dataplane_integrations.replay._buffer import ReplayBuffer
from dataplane_integrations.replay._collector import Collector, CollectorCounts
from dataplane_integrations.replay._ids import Reservation
from dataplane_integrations.replay._remote import RemoteReplayBuffer
from dataplane_integrations.rollout import RolloutReceipt

#: Generates the reserved groups; returns what `Rollout` returns.
AsyncRollout: TypeAlias = Callable[
    [Sequence[Reservation]], "Awaitable[Mapping[str, Any] | KVBatchMeta | RolloutReceipt]"
]


class AsyncCollector:
    """Keeps coroutines running that generate groups; reserves, writes and commits for them, in threads of its own.

    An asynchronous context manager: entering starts it. Nothing blocks the event loop. If all groups of a coroutine
    have become too stale to be trained on, it is cancelled, and its groups are given up. All else is as for
    `Collector`. `ReplayBuffer.select` and its like block: call them in a thread, with ``asyncio.to_thread``.

    Args:
        buffer: The buffer, or a `RemoteReplayBuffer`.
        rollout: See `AsyncRollout`.
        max_concurrent: How many coroutines run at the same time. Each occupies a thread that waits for it.
        abort_poll_s: How often each coroutine's groups are checked for staleness, in seconds.
        options: As for `Collector`, besides ``num_threads``.

    Raises:
        InvalidRequestError: A number below 1, or a time of 0 s or less.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | RemoteReplayBuffer,
        rollout: AsyncRollout,
        *,
        max_concurrent: int = 8,
        abort_poll_s: float = 0.5,
        **options: Any,
    ) -> None:
        if abort_poll_s <= 0:
            raise InvalidRequestError(f"AsyncCollector refused: abort_poll_s is {abort_poll_s}. Expected more than 0.")
        self._buffer = buffer
        self._rollout = rollout
        self._abort_poll_s = abort_poll_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._collector = Collector(buffer, self._run, num_threads=max_concurrent, **options)

    @property
    def counts(self) -> CollectorCounts:
        """The counts so far; a copy."""
        return self._collector.counts

    async def start(self) -> None:
        """As `Collector.start`. The rollouts run in the event loop of the caller."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._collector.start)

    async def stop(self, timeout_s: float = 60.0) -> None:
        """As `Collector.stop`."""
        await asyncio.to_thread(self._collector.stop, timeout_s)

    async def wait(self, timeout_s: float = 60.0) -> None:
        """As `Collector.wait`."""
        await asyncio.to_thread(self._collector.wait, timeout_s)

    @asynccontextmanager
    async def quiet(self, timeout_s: float = 60.0) -> AsyncIterator[None]:
        """As `Collector.quiet`."""
        block = self._collector.quiet(timeout_s)
        await asyncio.to_thread(block.__enter__)
        try:
            yield
        finally:
            block.__exit__(None, None, None)

    async def __aenter__(self) -> AsyncCollector:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._collector.__exit__, kind, error, trace)

    def _run(self, reservations: Sequence[Reservation]) -> Any:
        """Runs one coroutine in the event loop, from a thread of the collector."""
        assert self._loop is not None, "the threads run only after start"
        tasks: list[asyncio.Task[Any]] = []

        async def generate() -> Any:
            task = asyncio.current_task()
            assert task is not None, "it runs as one"
            tasks.append(task)
            return await self._rollout(reservations)

        future = asyncio.run_coroutine_threadsafe(generate(), self._loop)
        try:
            while not wait([future], self._abort_poll_s).done:
                if tasks and len(self._buffer.to_abort(reservations)) == len(reservations):
                    self._loop.call_soon_threadsafe(tasks[0].cancel)
                    wait([future])
                    raise RolloutAbortedError(f"{len(reservations)} groups became too stale while they were generated.")
            return future.result()
        finally:
            future.cancel()
