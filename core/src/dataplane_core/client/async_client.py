"""`AsyncDataPlaneClient`: the operations of `DataPlaneClient` as coroutines.

It calls a `DataPlaneClient` in a few threads of its own, so that copies, and waits for the store, do not stop the event
loop. Checks, codec, hooks and messages are those of that client. Only the waiting of claims is done on the loop, so a
claim that waits holds no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, Concatenate, Final, Generic, Literal, NoReturn, ParamSpec, Self, TypeAlias, TypeVar

from dataplane_core.client.claims import ask, checked_claim, claimed, claiming
from dataplane_core.client.client import DataPlaneClient
from dataplane_core.client.connection import ADVICE_S, LATEST_END, ClientFacts, limit_hint, note_step
from dataplane_core.errors import BackendError, DataPlaneError, OperationTimeoutError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Claim, ClaimRequest
from dataplane_core.spec.waking import CANCELLATION, Cancellation

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: What became of a cancelled operation.
Outcome: TypeAlias = Literal["not run", "done", "failed", "given back"]
_TOLD: Final[dict[Outcome, str]] = {
    "not run": "It was not run.",
    "done": "It was under way, and is done.",
    "failed": "It was under way, and failed.",
    "given back": "What it was handed was given back.",
}
_CLAIM: Final = inspect.signature(DataPlaneClient.claim_meta)


class OperationCancelledError(DataPlaneError):
    """What became of an operation of `AsyncDataPlaneClient` that was cancelled when it was queued or under way.

    It is the cause of the `asyncio.CancelledError` that the operation raises; `of` finds it.

    Attributes:
        outcome: ``not run``: it changed nothing. ``done``: it is done, as if it had not been cancelled. ``failed``: it
            raised the error that is this one's cause. ``given back``: a claim gave back what it was handed.
        result: What it returned, if it is done. For a claim without a lease, the meta of the samples that the task was
            given.
    """

    def __init__(self, message: str, *, outcome: Outcome = "not run", result: Any = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.outcome: Outcome = outcome
        self.result = result

    @classmethod
    def of(cls, error: BaseException) -> Self | None:
        """Finds it among the causes of an error: an `asyncio.CancelledError`, or the `TimeoutError` of asyncio.

        None: the cancelled task had no operation under way.
        """
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, cls):
            cause = cause.__cause__
        return cause


def _in_thread(
    method: Callable[Concatenate[DataPlaneClient, _P], _R], *, writes: bool = False, several: bool = False
) -> Callable[Concatenate[AsyncDataPlaneClient, _P], Coroutine[Any, Any, _R]]:
    """The coroutine function that calls a method of `DataPlaneClient` in a thread. See `AsyncDataPlaneClient._run`."""

    @wraps(method)
    async def call(self: AsyncDataPlaneClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        function = partial(method, self._client, *args, **kwargs)
        return await self._run(method.__name__, function, writes=writes, several=several)

    return call


def _like(
    method: Callable[Concatenate[DataPlaneClient, _P], _R],
) -> Callable[
    [Callable[..., Coroutine[Any, Any, _R]]], Callable[Concatenate[AsyncDataPlaneClient, _P], Coroutine[Any, Any, _R]]
]:
    """Gives a coroutine function the arguments, types and docstring of a method of `DataPlaneClient`."""
    return wraps(method)


# --- threads ----------------------------------------------------------------------------------------------------------


class Call(Generic[_R]):
    """A function that a thread runs."""

    error: BaseException | None = None
    result: _R  # if it has ended without an error
    ended = False  # changed and read on the event loop

    def __init__(self, function: Callable[[], _R]) -> None:
        self._function = function
        self._context = contextvars.copy_context()  # that of the task, as if it called the function itself
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()
        self._taken = threading.Lock()  # by the thread that runs it, or by its cancellation

    async def end(self) -> None:
        """Waits until it has ended. If the waiting task is cancelled, the call goes on."""
        if self._future.cancelled():
            self._future = self._loop.create_future()
        if not self.ended:
            await self._future

    def cancel(self) -> bool:
        """Whether it was prevented from running. False: a thread runs it, or has run it."""
        return self._taken.acquire(blocking=False)

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, once `cancel` has prevented it from running. Called on the event loop."""
        self.error = error
        self._tell()

    def _run(self) -> None:
        try:
            self.result = self._context.run(self._function)
        except BaseException as error:  # the caller gets it
            self.error = error
        del self._function  # with all that it holds

    def _tell(self) -> None:
        self.ended = True
        if not self._future.done():
            self._future.set_result(None)


class CallThreads:
    """Threads that run calls in the order in which they come. They start when they are needed.

    Calls that end at about the same time wake the event loop once. With the executor of the standard library, 500 tasks
    moved a tenth to a quarter fewer small samples (``benchmarks/asyncio_client.py`` of commit 12304f53, noop, 2 and 4
    threads).
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._submitted = itertools.count(1)
        self._num_ended = 0
        self._ended: dict[asyncio.AbstractEventLoop, deque[Call[Any]]] = {}
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], _R]) -> Call[_R]:
        """Has a thread call a function. Needs a running event loop."""
        call = Call(function)
        num_open = next(self._submitted) - self._num_ended
        if len(self._threads) < min(num_open, self._most):
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise BackendError(f"no thread runs this call: {error}.", hint=limit_hint(error)) from error
            else:
                self._threads.append(thread)  # else those that run do this call too
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Ends the threads, after the calls that were submitted. Blocks until then."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if call.cancel():
                call._run()
            self._hand_back(call)  # also one that was cancelled, for which nobody waits
            del call

    def _hand_back(self, call: Call[Any]) -> None:
        loop = call._loop
        with self._lock:
            self._num_ended += 1
            ended = self._ended.setdefault(loop, deque())
            ended.append(call)
            if len(ended) > 1:
                return  # the loop is woken already
            for closed in [loop for loop in self._ended if loop.is_closed()]:
                del self._ended[closed]  # nobody waits there
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._tell, loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ended = self._ended.pop(loop)
        for call in ended:
            call._tell()


async def _in_own_thread(name: str, function: Callable[[], _R], undo: Callable[[_R], object]) -> _R:
    """Calls a function in a thread of its own, and waits for its end also if it is cancelled. Then it is undone."""
    threads = CallThreads(name, 1)
    call = threads.submit(function)
    try:
        await call.end()
    except asyncio.CancelledError:
        await _end_of(call)
        if call.error is None:
            await _end_of(threads.submit(partial(undo, call.result)))
        raise
    finally:
        threads.close()
    if call.error is not None:
        raise call.error
    return call.result


async def _end_of(call: Call[Any]) -> None:
    """Waits until a call has ended, even if the waiting task is cancelled again."""
    while not call.ended:
        with contextlib.suppress(asyncio.CancelledError):
            await call.end()


# --- the client -------------------------------------------------------------------------------------------------------


class _LoopBell:
    """As `Bell`, for a claim that waits on an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def ring(self) -> bool:
        """Ends the wait. Any thread may call it. False: the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            return False
        return True

    async def wait(self, pause_s: float) -> None:
        """Waits until it is woken, or the pause is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._woken.wait()
        self._woken.clear()


class AsyncDataPlaneClient(ClientFacts):
    """A `DataPlaneClient` whose operations are coroutines. `dataplane_core.connect_async` makes it.

    The operations have the arguments, results and errors of `DataPlaneClient`. They run in ``threads`` threads for
    puts and as many for the others, since a put may wait for room that another operation makes. Further operations
    wait for a free thread. A claim that waits holds none, so any number may wait. Tasks of one event loop or of several
    may share a client.

    **Cancellation.** An operation that is cancelled before it runs does nothing. One that runs already is waited for,
    at most ``op_timeout_s``, since it uses the caller's memory. The cause of the `asyncio.CancelledError` is then an
    `OperationCancelledError`, which says what became of it. A cancelled claim gives back what it was handed, and a
    cancelled put that waits for room gives up.
    `asyncio.timeout` works the same way: `OperationCancelledError.of` finds the error behind its `TimeoutError`.

    Examples:
        >>> import asyncio
        >>> from dataplane_core import connect_async
        >>> async def main():
        ...     async with await connect_async({"backend": "noop"}) as client:
        ...         await client.register_partition("step-1", ["reward"], 2, ["trainer"])
        ...         claim = asyncio.create_task(client.claim_meta("step-1", "trainer", ["reward"], 2))
        ...         await client.put_samples(["a", "b"], "step-1", {"reward": [0.5, 1.0]})
        ...         columns = await client.get_data(await claim)
        ...         return columns["reward"].tolist()
        >>> asyncio.run(main())
        [0.5, 1.0]
    """

    def __init__(self, client: DataPlaneClient, threads: int) -> None:
        self._client = client
        self._connection = client._connection
        self._threads = threads
        self._writers = CallThreads("dataplane-async-put", threads)
        self._others = CallThreads("dataplane-async", threads)

    @classmethod
    async def _open(cls, connect: Callable[[], DataPlaneClient], threads: int) -> Self:
        return cls(await _in_own_thread("dataplane-async-connect", connect, DataPlaneClient.close), threads)

    # --- operations ---------------------------------------------------------------------------------------------------

    register_partition = _in_thread(DataPlaneClient.register_partition)
    finish_partition = _in_thread(DataPlaneClient.finish_partition)
    put_samples = _in_thread(DataPlaneClient.put_samples, writes=True)
    seal = _in_thread(DataPlaneClient.seal, writes=True, several=True)
    get_samples = _in_thread(DataPlaneClient.get_samples)
    get_data = _in_thread(DataPlaneClient.get_data)
    ack = _in_thread(DataPlaneClient.ack)
    nack = _in_thread(DataPlaneClient.nack)
    renew = _in_thread(DataPlaneClient.renew)
    check_consumption_status = _in_thread(DataPlaneClient.check_consumption_status)
    is_finished = _in_thread(DataPlaneClient.is_finished)
    clear_samples = _in_thread(DataPlaneClient.clear_samples)
    ping = _in_thread(DataPlaneClient.ping)
    list_units = _in_thread(DataPlaneClient.list_units)
    list_clients = _in_thread(DataPlaneClient.list_clients)
    why = _in_thread(DataPlaneClient.why, several=True)
    list_partitions = _in_thread(DataPlaneClient.list_partitions)
    describe = _in_thread(DataPlaneClient.describe)
    list_samples = _in_thread(DataPlaneClient.list_samples)
    list_sample_ids = _in_thread(DataPlaneClient.list_sample_ids)
    list_fields = _in_thread(DataPlaneClient.list_fields)
    list_consumed = _in_thread(DataPlaneClient.list_consumed)
    reset_consumption = _in_thread(DataPlaneClient.reset_consumption)
    save = _in_thread(DataPlaneClient.save, several=True)
    load = _in_thread(DataPlaneClient.load, writes=True, several=True)

    @_like(DataPlaneClient.claim_meta)
    async def claim_meta(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
        connection = self._connection
        bound = _CLAIM.bind(self._client, *args, **kwargs)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        with connection.operation("claim_meta", arguments["partition_id"]):
            blocking, timeout_s = bool(arguments.pop("blocking")), arguments["timeout_s"]
            request = checked_claim(connection, all_or_nothing=blocking, **arguments)
            return await self._claim(request, timeout_s if blocking else None)

    # --- its end ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """As `DataPlaneClient.close`. Claims that wait end with `ClientClosedError`. Idempotent."""
        await _in_own_thread("dataplane-async-close", self._close, lambda _: None)

    def _close(self) -> None:
        try:
            self._client.close()
        finally:
            self._writers.close()
            self._others.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<async {self._client!r}>"

    # --- what its process does ----------------------------------------------------------------------------------------

    @wraps(DataPlaneClient.phase)
    def phase(
        self, name: str, *, partition_id: str | None = None, groups: Sequence[str] = ()
    ) -> contextlib.AbstractContextManager[None]:
        return self._client.phase(name, partition_id=partition_id, groups=groups)

    @wraps(DataPlaneClient.mark_step)
    async def mark_step(self, step: int, **values: float) -> None:
        async with contextlib.AsyncExitStack() as calls:
            calls.callback(note_step, self._connection, step, values)
            for stream in list(self._connection.streams):
                calls.push_async_callback(stream.ack)

    # --- how it is done -----------------------------------------------------------------------------------------------

    async def _run(
        self,
        what: str,
        function: Callable[[], _R],
        *,
        writes: bool = False,
        several: bool = False,
        until: float = math.inf,
        if_cancelled: Callable[[_R], tuple[Outcome, Any]] = lambda result: ("done", result),
    ) -> _R:
        """Calls a function in a thread. If it is cancelled meanwhile, waits for its end.

        Args:
            what: The operation, for messages.
            function: The function.
            writes: Whether it is a put.
            several: Whether it makes several operations, each with an ``op_timeout_s`` of its own.
            until: When to give up if no thread is free, if that is before ``op_timeout_s`` is over.
            if_cancelled: Called in a thread with the result of a cancelled call. Returns what is left of it.
        """
        until = min(until, time.monotonic() + self.config.op_timeout_s)
        cancellation = Cancellation()

        def in_time() -> _R:
            CANCELLATION.set(cancellation)
            if not several:
                LATEST_END.set(until)
            return function()

        with self._connection.operation():
            call = (self._writers if writes else self._others).submit(in_time)
            late = asyncio.get_running_loop().call_later(until - time.monotonic(), self._give_up, what, call)
            try:
                await call.end()
            except asyncio.CancelledError:
                outcome: Outcome = "not run"
                result = error = None
                if not call.cancel():
                    cancellation.cancel()
                    await _end_of(call)
                    error = call.error
                    if error is None:
                        left = self._others.submit(partial(if_cancelled, call.result))
                        await _end_of(left)
                        error = left.error
                    outcome, result = ("failed", None) if error is not None else left.result
                self._raise_cancelled(f"{what} was cancelled. {_TOLD[outcome]}", outcome, result, error)
            finally:
                late.cancel()
            if call.error is not None:
                raise call.error
            return call.result

    def _raise_cancelled(
        self, message: str, outcome: Outcome, result: Any = None, error: BaseException | None = None
    ) -> NoReturn:
        """Raises the cancellation, with what became of the operation as its cause."""
        cause = OperationCancelledError(message, outcome=outcome, result=result, backend=self.backend_name)
        cause.__cause__ = error
        # not a subclass: `asyncio.timeout` and task groups of Python 3.11 know a cancellation by its exact type
        raise asyncio.CancelledError(cause.message) from cause

    def _give_up(self, what: str, call: Call[Any]) -> None:
        """Ends a call that no thread runs yet."""
        if call.cancel():
            call.fail(
                OperationTimeoutError(
                    f"{what} timed out: all {self._threads} threads of this client were busy. It was not run.",
                    outcome="not_done",
                    hint="Give connect_async more threads.",
                )
            )

    async def _claim(self, request: ClaimRequest, timeout_s: float | None) -> KVBatchMeta:
        """Takes the steps of a claim. It waits on the event loop."""
        connection = self._connection
        steps = claiming(connection, request, timeout_s, connection.waiters, _LoopBell)
        result: Any = None
        try:
            while True:
                step = steps.send(result)
                if isinstance(step, ClaimRequest):
                    result = await self._ask(step)
                elif callable(step):
                    result = await self._advise(step)
                else:
                    bell, pause_s = step
                    try:
                        await bell.wait(pause_s)
                    except asyncio.CancelledError:
                        where = f"claim_meta('{request.partition_id}', '{request.task_name}')"
                        self._raise_cancelled(
                            f"{where} was cancelled while it waited, and was handed nothing.", "not run"
                        )
        except StopIteration as end:
            meta: KVBatchMeta = end.value[0]
            return meta
        finally:
            steps.close()

    async def _advise(self, function: Callable[[], _R]) -> _R | None:
        """Says why a claim waits, if that is soon found. If not, the claim goes on or fails as it would have."""
        until = time.monotonic() + ADVICE_S
        try:
            return await self._run("claim_meta", function, until=until, if_cancelled=lambda _: ("not run", None))
        except DataPlaneError:  # all threads are busy, or the client was closed
            return None

    async def _ask(self, request: ClaimRequest) -> Claim:
        """Asks once. What a cancelled claim was handed is given back, if it can be."""

        def if_cancelled(claim: Claim) -> tuple[Outcome, Any]:
            if not claim.sample_ids or request.dp_rank is not None:
                return "not run", None  # a batch of a rank that this client does not count is given to its next claim
            meta = claimed(self._connection, request, claim)
            if meta.lease_tokens is None:
                return "done", meta
            self._client.nack(meta)
            return "given back", None

        claim = partial(ask, self._connection, request)
        return await self._run("claim_meta", claim, until=request.deadline, if_cancelled=if_cancelled)
