"""Clients of both kinds, with calls that block."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
from through_asyncio import ThroughAsyncio

from dataplane_core import connect, stream
from dataplane_core.client import AsyncStream
from dataplane_testkit.faults import Faults


class _AsyncClient(ThroughAsyncio):
    def stream(self, *args: Any, **words: Any) -> _AsyncStream:
        return _AsyncStream(self, stream(self._async, *args, **words))

    def close(self) -> None:
        """Closes the client. Its streams need the event loop until the block ends."""
        self._run(self._async.close)

    def __exit__(self, *error: object) -> None:
        super().close()


class _AsyncStream(AbstractContextManager):
    """A stream of an asynchronous client, with calls that block."""

    def __init__(self, client: _AsyncClient, wrapped: AsyncStream) -> None:
        self._client, self._wrapped = client, wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        return partial(self._client._run, found) if inspect.iscoroutinefunction(found) else found

    def __iter__(self) -> _AsyncStream:
        return self

    def __next__(self) -> Any:
        try:
            return self._client._run(self._wrapped.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __exit__(self, *error: object) -> None:
        self.close()


@pytest.fixture(params=["sync", "async"])
def opened(request):
    """Connects with a config. The test runs with a client of each kind; `stream` is a method of it."""

    def open_client(config):
        client = connect(config)
        if request.param == "async":
            return _AsyncClient(client)
        client.stream = partial(stream, client)
        return client

    return open_client


@pytest.fixture
def faults():
    """Middleware that does beside a call what the test says."""
    return Faults()
