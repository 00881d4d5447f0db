"""`ThroughAsyncio`: lets the kit's tests call `AsyncDataPlaneClient` as if it were the synchronous client."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, Final, Self

from dataplane_core._compiler_marks import not_compiled
from dataplane_core.client import AsyncDataPlaneClient, DataPlaneClient

_THREADS: Final = 4


class ThroughAsyncio:
    """A client whose operations are the coroutines of `AsyncDataPlaneClient`, run on an event loop in a thread.

    Everything else is that of the synchronous client, and so is all of it in a forked process.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        self._sync = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kit-event-loop", daemon=True)
        self._thread.start()
        self._async = AsyncDataPlaneClient(client, _THREADS)

    def close(self) -> None:
        if not self._thread.is_alive() or os.getpid() != self._sync._connection.pid:
            return self._sync.close()
        try:
            self._run(self._async.close)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return self._sync.__reduce__()

    def __repr__(self) -> str:
        return repr(self._async)

    def __getattr__(self, name: str) -> Any:
        operation = getattr(AsyncDataPlaneClient, name, None)
        is_usable = self._thread.is_alive() and os.getpid() == self._sync._connection.pid
        if not asyncio.iscoroutinefunction(operation) or not is_usable:
            return getattr(self._sync, name)
        return lambda *args, **kwargs: self._run(operation, self._async, *args, **kwargs)

    @not_compiled  # torch compiles no coroutines
    def _run(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(operation(*args, **kwargs), self._loop).result()
