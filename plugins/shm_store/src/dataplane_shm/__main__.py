"""The process of the ledger, which answers the clients of one store over a Unix socket.

Run as ``python -m dataplane_shm SOCKET ARENA_BYTES CAPACITY_BYTES ON_FULL TOUCH_AHEAD_BYTES`` by the client that owns
the store. It ends when that client ends it, or ends.
"""

import errno
import resource
import signal
import sys
from pathlib import Path

from dataplane_core.host_memory import Arena
from dataplane_core.hosting import ExtentService, Server, listen_at
from dataplane_core.ledger import LedgerService
from dataplane_shm._store import Store


def main(path: str, arena_bytes: str, capacity_bytes: str, on_full: str, touch_ahead_bytes: str) -> None:
    """Runs the server of a store."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each thread of a client is a socket
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error, not a signal, if the arena is too large for ulimit -f
    try:
        arena = Arena.create(int(arena_bytes))
    except OSError as error:
        limit = "-v" if error.errno == errno.ENOMEM else "-f"
        sys.exit(
            f"{arena_bytes} bytes of shared memory cannot be made: {error}. Raise the limit of ulimit {limit}, or "
            "lower capacity_bytes"
        )
    extents = ExtentService(arena, int(touch_ahead_bytes))
    store = Store(extents, LedgerService(capacity_bytes=int(capacity_bytes)), int(capacity_bytes), on_full)
    Server(store, listen_at(Path(path)), between=extents.touch_ahead).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
