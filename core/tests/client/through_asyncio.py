"""Lets tests call `AsyncDataPlaneClient` as if it were the synchronous client."""

import asyncio
import os
import threading
from contextlib import AbstractContextManager

from dataplane_core._compiler_marks import not_compiled
from dataplane_core.client import AsyncDataPlaneClient


class ThroughAsyncio(AbstractContextManager):
    """A client whose operations are coroutines, run on an event loop in a thread."""

    def __init__(self, client):
        self._sync = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._async = AsyncDataPlaneClient(client, 4)

    def close(self):
        if not self._thread.is_alive() or os.getpid() != self._sync._connection.pid:
            return self._sync.close()
        try:
            self._run(self._async.close)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __exit__(self, *error):
        self.close()

    def __reduce__(self):
        return self._sync.__reduce__()

    def __getattr__(self, name):
        operation = getattr(AsyncDataPlaneClient, name, None)
        is_usable = self._thread.is_alive() and os.getpid() == self._sync._connection.pid
        if not asyncio.iscoroutinefunction(operation) or not is_usable:
            return getattr(self._sync, name)
        return lambda *args, **kwargs: self._run(operation, self._async, *args, **kwargs)

    @not_compiled  # torch compiles no coroutines
    def _run(self, operation, *args, **kwargs):
        return asyncio.run_coroutine_threadsafe(operation(*args, **kwargs), self._loop).result()
