"""Coroutine functions as tests, each in an event loop of its own. Clients of both kinds, with calls that block."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from functools import partial
from typing import Any

import pytest

from dataplane_core import connect, connect_async, stream
from dataplane_testkit.faults import Faults


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs it, or leaves it to pytest."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class _Blocking:
    """What has coroutine functions, with calls that block: each runs in an event loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wrapped: Any) -> None:
        self._loop, self._wrapped = loop, wrapped

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **words: self._run(found(*args, **words))


class _BlockingClient(_Blocking):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(asyncio.new_event_loop(), None)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._wrapped = self._run(connect_async(config))

    def stream(self, *args: Any, **words: Any) -> _BlockingStream:
        return _BlockingStream(self._loop, stream(self._wrapped, *args, **words))

    def __enter__(self) -> _BlockingClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _BlockingStream(_Blocking):
    def __iter__(self) -> _BlockingStream:
        return self

    def __next__(self) -> Any:
        try:
            return self._run(anext(self._wrapped))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> _BlockingStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@pytest.fixture(params=["sync", "async"])
def opened(request):
    """Connects with a config. The test runs with a client of each kind; `stream` is a method of it."""

    def open_client(config):
        if request.param == "async":
            return _BlockingClient(config)
        client = connect(config)
        client.stream = partial(stream, client)
        return client

    return open_client


@pytest.fixture
def faults():
    """Middleware that does beside a call what the test says."""
    return Faults()
