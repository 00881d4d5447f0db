"""Names the limit of a process that keeps an operation from being done."""

from __future__ import annotations

import errno

_NO_THREAD = (
    "This process may start no more threads: raise its limit of processes and threads (ulimit -u, or pids.max of its "
    "container), or end threads that nobody needs."
)
_NO_MEMORY = (
    "This process may have no more memory: raise its limit of address space (ulimit -v) or of its container above the "
    "store's capacity_bytes and what the program needs, or lower capacity_bytes."
)


def limit_hint(error: BaseException) -> str | None:
    """What to set, if a limit of this process is the cause of an error."""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return _NO_THREAD
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return _NO_MEMORY
    return None
