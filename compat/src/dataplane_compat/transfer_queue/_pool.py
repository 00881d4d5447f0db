"""The ``async_`` forms: a method or function that runs in a thread of a bounded pool.

Puts have a pool of their own. They may wait for room in the store, and what makes room must not wait for them.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: Threads of each pool. They start when they are first needed.
_THREADS: Final = 16
_NAMES: Final = ("put", "call")
_pools: dict[str, ThreadPoolExecutor] = {}


def _new_pools() -> None:
    _pools.update({name: ThreadPoolExecutor(_THREADS, thread_name_prefix=f"dataplane-{name}") for name in _NAMES})


_new_pools()
os.register_at_fork(after_in_child=_new_pools)  # threads do not survive a fork


def end_threads() -> None:
    """Ends the threads that are idle now. The next call starts new ones."""
    ended = list(_pools.values())
    _new_pools()
    for pool in ended:
        pool.shutdown()


def submit(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Runs a call that writes no columns."""
    return _pools["call"].submit(call, *args, **kwargs)


def in_threads(call: Callable[P, R], pool: str = "call") -> Callable[P, Coroutine[Any, Any, R]]:
    """The asyncio form of a call. Calls that write columns belong in the pool ``put``."""

    @functools.wraps(call)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(_pools[pool].submit(call, *args, **kwargs))

    run.__name__ = f"async_{call.__name__}"
    run.__qualname__ = run.__qualname__.replace(call.__name__, run.__name__)
    run.__doc__ = f"`{call.__name__}` for asyncio."
    return run
