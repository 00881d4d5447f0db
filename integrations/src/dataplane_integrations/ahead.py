"""Reading ahead: a thread does the next reads while the caller computes on the newest one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def read_ahead(reads: Iterable[Callable[[], _T]], depth: int) -> Generator[Callable[[], _T], None, None]:
    """Does reads in order, in one thread, up to ``depth`` of them before their turn.

    Closing the generator, which a ``for`` loop that ends early also does, cancels the reads that have not begun, and
    waits for the one that runs. Then the thread has ended.

    Args:
        reads: The reads; may be endless. They are taken one by one, each only when it may begin.
        depth: How many may run ahead. 0: none; there is no thread, and each runs where its result is asked for.

    Yields:
        Per read a function that waits for it, and returns its result or raises its error. Call it before the next is
        yielded. After an error, close the generator.
    """
    if depth == 0:
        yield from reads
        return
    waiting = iter(reads)
    begun: deque[Future[_T]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        try:
            while True:
                begun.extend(thread.submit(read) for read in itertools.islice(waiting, depth + 1 - len(begun)))
                if not begun:
                    return
                yield begun.popleft().result
        finally:
            thread.shutdown(cancel_futures=True)
