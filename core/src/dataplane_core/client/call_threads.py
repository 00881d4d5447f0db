"""`CallThreads`: a few threads that run functions for an event loop, with little work on the loop for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from dataplane_core.client.connection import limit_hint
from dataplane_core.errors import BackendError

_R = TypeVar("_R")


class Call(Generic[_R]):
    """A function that a thread runs.

    Attributes:
        error: What it raised, if it has ended.
        result: What it returned, if it has ended without an error.
        ended: Whether it has ended. Changed and read on the event loop.
    """

    error: BaseException | None = None
    result: _R
    ended = False

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

    Calls that end at about the same time wake the event loop once, which is what makes many small calls cheap.

    Args:
        name: The names of the threads begin with it.
        most: How many threads there are at most.
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
            for closed in [each for each in self._ended if each.is_closed()]:
                del self._ended[closed]  # nobody waits there
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._tell, loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ended = self._ended.pop(loop)
        for call in ended:
            call._tell()
