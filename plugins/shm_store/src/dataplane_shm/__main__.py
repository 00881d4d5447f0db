"""The process of the ledger, which answers the clients of one store over a Unix socket.

Run as ``python -m dataplane_shm OPTIONS`` by the client that owns the store; see `Options`. It ends when that client
ends it, or ends.
"""

import errno
import gc
import resource
import signal
import sys
from pathlib import Path

import msgspec

from dataplane_core.errors import DataPlaneError
from dataplane_core.host_memory import Arena, arena_bytes_for
from dataplane_core.hosting import ExtentService, Server, listen_at
from dataplane_core.ledger import LedgerService
from dataplane_shm._messages import FAILURE, SOCKET, Options, packed_failure
from dataplane_shm._store import Store


def main(words: str) -> None:
    """Runs the server of a store."""
    options = msgspec.json.decode(words, type=Options)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each thread of a client is a socket
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process: no handler may raise in the middle of a command
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error, not a signal, if the arena is too large for ulimit -f
    serve = _serve if options.durable is None else _serve_folder
    serve(options)


def _serve(options: Options) -> None:
    arena_bytes = arena_bytes_for(options.capacity_bytes)
    try:
        arena = Arena.create(arena_bytes)
    except OSError as error:
        limit = "-v" if error.errno == errno.ENOMEM else "-f"
        sys.exit(
            f"{arena_bytes} bytes of shared memory cannot be made: {error}. Raise the limit of ulimit {limit}, or "
            "lower capacity_bytes"
        )
    extents = ExtentService(arena, options.touch_ahead_bytes)
    ledger = LedgerService(capacity_bytes=options.capacity_bytes)
    store = Store(extents, ledger, options.capacity_bytes, options.on_full)
    Server(store, listen_at(Path(options.folder) / SOCKET)).run()


def _serve_folder(options: Options) -> None:
    from dataplane_shm._durable import DurableStore

    assert options.durable is not None
    gc.disable()  # the state of before is millions of objects: a collection among them finds nothing, and takes longest
    try:
        store = DurableStore(
            Path(options.durable),
            options.capacity_bytes,
            options.on_full,
            sync=options.sync == "commit",
            touch_ahead_bytes=options.touch_ahead_bytes,
            namespace=Path(options.folder).name,
        )
    except DataPlaneError as error:
        (Path(options.folder) / FAILURE).write_bytes(packed_failure(error))
        sys.exit(str(error))
    gc.freeze()
    gc.enable()
    server = Server(store, listen_at(Path(options.folder) / SOCKET))
    signal.signal(signal.SIGTERM, lambda *_: server.close())
    server.run()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
