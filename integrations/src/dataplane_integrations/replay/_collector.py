"""`Collector`, `AsyncCollector`, `serve`: run rollouts ahead of training. They leave no half-written group behind."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from dataplane_core.arguments import Count, PositiveSeconds, checked_as
from dataplane_core.batch import kv_first_write
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import (
    CapacityExceededError,
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    InvalidTypeError,
    OperationTimeoutError,
    UnknownPartitionError,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_integrations.errors import (
    CollectorFailedError,
    ReplayClosedError,
    ReplayTimeoutError,
    ReservationLostError,
    RolloutAbortedError,
    noted_on,
)
from dataplane_integrations.replay._prompts import END_WEIGHT_VERSION_TAG, PromptSource, Reservation
from dataplane_integrations.rollout import RolloutReceipt

#: Generates the reserved groups. Returns their columns (rows in the order of the reservations' ``sample_ids``), which
#: the collector then writes; or their meta or receipt, if the rollout actor has written them.
Rollout: TypeAlias = Callable[[Sequence[Reservation]], "Mapping[str, Any] | KVBatchMeta | RolloutReceipt"]

#: Generates the reserved groups; returns what `Rollout` returns.
AsyncRollout: TypeAlias = Callable[
    [Sequence[Reservation]], "Awaitable[Mapping[str, Any] | KVBatchMeta | RolloutReceipt]"
]

#: Seconds that a thread waits for room before it checks again whether to stop.
_RESERVE_S: Final = 0.2
#: The first and the longest pause of a thread while the store is full, in seconds.
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(slots=True, kw_only=True)
class CollectorCounts:
    """What a collector has done.

    Attributes:
        groups: Groups committed.
        failures: Failed rollouts or writes: their rows are cleared, and their prompts are generated again. Also calls
            for prompts that the store did not answer.
        aborted: Groups that nobody would train on any more, or that others generate since their lease ended.
        held_back: Writes that waited because the store was full.
        last_error: The last failure, or None.
    """

    groups: int = 0
    failures: int = 0
    aborted: int = 0
    held_back: int = 0
    last_error: BaseException | None = None


class Collector:
    """Threads that claim prompts, call the rollout function, write the groups and commit them, until stopped.

    A context manager: entering starts it. A thread claims a prompt before it generates, so rollouts are never further
    ahead than the staleness rule allows. If a rollout or write fails, the rows of its groups are cleared, and their
    prompts are generated again. If the store is full, a batch waits until there is room. If the store does not answer,
    that is a failure. A rollout may ask `PromptSource.to_abort` of the buffer whether its groups have become too stale,
    and end itself with a `RolloutAbortedError`, which is none.

    While ``rollout`` runs, the client is in the phase ``generate`` of its groups (`DataPlaneClient.phase`).

    Args:
        buffer: The buffer; in another process than the trainer's, a `PromptSource`.
        rollout: See `Rollout`. Called from several threads where ``num_threads`` is above 1.
        client: Writes the columns that ``rollout`` returns. None: that of ``buffer``.
        name: Name of this collector.
        groups_per_call: Groups for one call of ``rollout``; fewer if the rule does not admit so many.
        num_threads: Number of concurrent calls of ``rollout``.
        max_failures: The collector stops after so many failures in a row. The trainer then gets a
            `CollectorFailedError`.
        write_options: For `dataplane_core.kv_first_write`, such as ``pad_to_multiple``.

    Raises:
        InvalidRequestError: A number below 1.
        InvalidTypeError: An argument has another type.
    """

    def __init__(
        self,
        buffer: PromptSource,
        rollout: Rollout,
        *,
        client: DataPlaneClient | None = None,
        name: str = "collector",
        groups_per_call: int = 1,
        num_threads: int = 1,
        max_failures: int = 5,
        write_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._buffer = buffer
        self._rollout = rollout
        self._client = client
        self._name = name
        self._groups_per_call: int = checked_as("Collector: groups_per_call", Count, groups_per_call)
        self._num_threads: int = checked_as("Collector: num_threads", Count, num_threads)
        self._max_failures: int = checked_as("Collector: max_failures", Count, max_failures)
        self._write_options = dict(write_options or {})
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._state = threading.Condition()
        # guarded by _state
        self._paused = 0
        self._busy = 0
        self._num_running = 0
        self._counts = CollectorCounts()
        self._in_a_row = 0
        self._error: BaseException | None = None

    @property
    def counts(self) -> CollectorCounts:
        """The counts so far; a copy."""
        with self._state:
            return dataclasses.replace(self._counts)

    def start(self) -> None:
        """Tells the trainer, and starts the threads.

        Raises:
            InvalidRequestError: The collector was already started, or stopped.
        """
        if self._threads or self._stop.is_set():
            done = "started" if self._threads else "stopped"
            raise InvalidRequestError(f"Collector('{self._name}').start refused: it was {done} already.")
        self._buffer.enlist(self._name)
        self._num_running = self._num_threads
        self._threads = [
            threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
            for number in range(self._num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = 60.0) -> None:
        """Waits for running rollouts, commits them, and ends the threads. Idempotent.

        Raises:
            CollectorFailedError: The collector had failed; the cause is the error of its last rollout.
            OperationTimeoutError: A rollout did not end in time. Its thread is left behind, and ends with the process.
        """
        self._stop.set()
        with self._state:
            self._state.notify_all()
        self._join(timeout_s)
        if any(thread.is_alive() for thread in self._threads):
            raise OperationTimeoutError(
                f"collector '{self._name}' did not stop within {timeout_s:g} s: a rollout or a write still runs."
            )
        if self._error is not None:
            raise CollectorFailedError(self._reason(self._error)) from self._error

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits until the threads have ended because the prompts are used up. Then as `stop`."""
        self._join(timeout_s)
        self.stop(timeout_s=0.0)

    @contextmanager
    def quiet(self, timeout_s: float = 60.0) -> Iterator[None]:
        """Inside the block nothing is generated: waits for running rollouts and writes, and starts none.

        A save inside the block has no half-generated group, so a run restored from it continues exactly as this one. A
        write that waits for room only ends when the trainer frees some: give the store room for all groups that the
        staleness rule admits, or save without this.

        Raises:
            OperationTimeoutError: A rollout, or a write that waits for room, did not end in time.
        """
        with self._state:
            self._paused += 1
            still = self._state.wait_for(lambda: self._busy == 0, timeout_s)
        try:
            if not still:
                raise OperationTimeoutError(
                    f"collector '{self._name}' is not quiet after {timeout_s:g} s: {self._busy} threads still generate "
                    f"or write; writes waited for room {self._counts.held_back} times so far."
                )
            yield
        finally:
            with self._state:
                self._paused -= 1
                self._state.notify_all()

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.stop()
        except DataPlaneError:
            if error[0] is None:  # else report the error of the block
                raise

    # --- inside -------------------------------------------------------------------------------------------------------

    def _join(self, timeout_s: float) -> None:
        """Waits at most ``timeout_s`` for all threads together."""
        give_up = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(min(max(0.0, give_up - time.monotonic()), threading.TIMEOUT_MAX))

    def _run(self) -> None:
        try:
            while self._one_round():
                pass
        except (ReplayClosedError, UnknownPartitionError):
            return  # the buffer is closed, or the run is over
        except BaseException as error:
            with self._state:
                self._error = error
            self._stop.set()
            with suppress(DataPlaneError):  # `stop` raises it
                self._buffer.fail(self._reason(error), error, collector=self._name)
        finally:
            with self._state:
                self._num_running -= 1
                is_last = not self._num_running
            if is_last and self._error is None:
                with suppress(DataPlaneError):  # then the buffer is gone
                    self._buffer.withdraw(self._name)

    def _one_round(self) -> bool:
        """Waits while paused, then makes some groups. Returns False if there is nothing more to do."""
        with self._state:
            self._state.wait_for(lambda: self._stop.is_set() or not self._paused)
            if self._stop.is_set():
                return False
            self._busy += 1
        try:
            return self._make_groups()
        finally:
            with self._state:
                self._busy -= 1
                self._state.notify_all()

    def _make_groups(self) -> bool:
        """Reserves, generates, writes and commits. Returns False if there are no more prompts."""
        try:
            reservations = self._buffer.reserve(
                self._groups_per_call, collector=self._name, at_least=1, timeout_s=_RESERVE_S
            )
        except ReplayTimeoutError:
            return True  # no room yet, or no trainer
        except (ReplayClosedError, UnknownPartitionError, InvalidRequestError):
            raise
        except DataPlaneError as error:  # the store does not answer
            self._note_failure(error)
            self._stop.wait(_LONGEST_PAUSE_S)
            return True
        if not reservations:
            return False
        try:
            try:
                self._buffer.commit(reservations, self._written(reservations))
            except (RolloutAbortedError, ReservationLostError):  # nobody wants them
                self._give_back(partial(self._buffer.abort, reservations))
                with self._state:
                    self._counts.aborted += len(reservations)
            else:
                with self._state:
                    self._counts.groups += len(reservations)
                    self._in_a_row = 0
        except BaseException as error:
            self._roll_back(reservations, error)
        return True

    def _written(self, reservations: Sequence[Reservation]) -> KVBatchMeta:
        """Calls ``rollout`` and makes sure that the rows are in the store. Returns their meta."""
        client, partition_id = self._client or self._buffer._require_dp_client(), self._buffer.partition_id
        groups = [reservation.group for reservation in reservations]
        with client.phase("generate", partition_id=partition_id, groups=groups):
            made = self._rollout(reservations)
        if isinstance(made, RolloutReceipt):
            return made.meta
        if isinstance(made, KVBatchMeta):
            return made
        if not isinstance(made, Mapping):
            raise InvalidTypeError(
                f"collector '{self._name}': the rollout returned {type(made).__name__}. Expected columns, or a meta or "
                "receipt of rows already written."
            )
        ids = [sample_id for reservation in reservations for sample_id in reservation.sample_ids]
        end = {END_WEIGHT_VERSION_TAG: self._buffer.weight_version}
        tags = [reservation.tags | end for reservation in reservations for _ in reservation.sample_ids]
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return kv_first_write(
                    made, sample_ids=ids, dp_client=client, partition_id=partition_id, tags=tags, **self._write_options
                )
            except DataPlaneError as error:
                if not _found_no_room(error) or self._stop.is_set():
                    raise
                client.clear_samples(ids, partition_id)  # a write that timed out may have happened
            with self._state:
                self._counts.held_back += 1
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _roll_back(self, reservations: Sequence[Reservation], error: BaseException) -> None:
        ended = isinstance(error, ReplayClosedError) or not isinstance(error, Exception)
        no_room = _found_no_room(error)
        with noted_on(error, "the rows written could not be cleared"):
            self._give_back(partial(self._buffer.abandon, reservations, failed=not ended and not no_room))
        if ended:
            raise error
        if no_room:
            with self._state:
                self._counts.last_error = error
                self._counts.held_back += 1
                self._in_a_row = 0
            self._stop.wait(_LONGEST_PAUSE_S)
        else:
            self._note_failure(error)

    def _give_back(self, give: Callable[[], None]) -> None:
        """Gives prompts back, as soon as the store answers. When the collector stops or fails, their leases end."""
        while True:
            try:
                give()
                return
            except (ClientClosedError, UnknownPartitionError):
                raise
            except DataPlaneError as error:
                if self._in_a_row + 1 >= self._max_failures:
                    raise  # the caller notes the last failure
                self._note_failure(error)
                if self._stop.wait(_LONGEST_PAUSE_S):
                    raise

    def _note_failure(self, error: BaseException) -> None:
        """Counts a failure. Raises the error if there were too many one after another."""
        with self._state:
            self._counts.last_error = error
            self._counts.failures += 1
            self._in_a_row += 1
            if self._in_a_row >= self._max_failures:
                raise error

    def _reason(self, error: BaseException) -> str:
        what = f"{type(error).__name__}: {error}"
        if not self._in_a_row:
            return f"collector '{self._name}' cannot go on: {what}"
        return f"collector '{self._name}' gave up after {self._in_a_row} failures one after another, the last: {what}"


def serve(
    client: DataPlaneClient, partition_id: str, rollout: Rollout, *, lease_s: float = 60.0, **options: Any
) -> None:
    """Generates groups for the trainer's `ReplayBuffer` until its prompts are used up. Blocks.

    Any number of processes may do so, and join or die at any time. If one dies, others get its prompts when the lease
    ends. The trainer may start later. Ends also when the partition of the prompts is dropped.

    Args:
        client: This process's client. Writes the columns that ``rollout`` returns.
        partition_id: As for `PromptSource`.
        rollout: See `Rollout`.
        lease_s: As for `PromptSource`.
        options: As for `Collector`.

    Raises:
        CollectorFailedError: Too many rollouts failed one after another; the cause is the last error.

    Examples:
        >>> serve(client, "replay", lambda claimed: generate([reservation.prompt for reservation in claimed]))
    """
    with closing(PromptSource(client, partition_id, lease_s=lease_s)) as source:
        source.wait_for_trainer(math.inf)
        name = f"{socket.gethostname()}-{os.getpid()}"
        collector = Collector(source, rollout, client=client, **{"name": name, **options})
        collector.start()
        collector.wait(math.inf)


class AsyncCollector:
    """Keeps coroutines running that generate groups; reserves, writes and commits for them, in threads of its own.

    An asynchronous context manager: entering starts it. Nothing blocks the event loop. If all groups of a coroutine
    have become too stale to be trained on, it is cancelled, and its groups are given up. All else is as for
    `Collector`. `ReplayBuffer.select` and its like block: call them in a thread, with ``asyncio.to_thread``.

    Args:
        buffer: As for `Collector`.
        rollout: See `AsyncRollout`.
        max_concurrent: How many coroutines run at the same time. Each occupies a thread that waits for it.
        abort_poll_s: How often each coroutine's groups are checked for staleness, in seconds.
        options: As for `Collector`, besides ``num_threads``.

    Raises:
        InvalidRequestError: A number below 1, or a time of 0 s or less.
        InvalidTypeError: An argument has another type.
    """

    def __init__(
        self,
        buffer: PromptSource,
        rollout: AsyncRollout,
        *,
        max_concurrent: int = 8,
        abort_poll_s: float = 0.5,
        **options: Any,
    ) -> None:
        self._buffer = buffer
        self._rollout = rollout
        self._abort_poll_s: float = checked_as("AsyncCollector: abort_poll_s", PositiveSeconds, abort_poll_s)
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

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._collector.__exit__, *error)

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


def _found_no_room(error: BaseException | None) -> bool:
    """Whether a write failed because the store was full, here or in the rollout actor.

    A put that timed out waiting for room raises `RoomTimeoutError`. Another timeout means that the store does not
    answer.
    """
    while error is not None and not isinstance(error, CapacityExceededError):
        error = error.__cause__
    return error is not None and error.retryable
