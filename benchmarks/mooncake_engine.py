"""Mooncake's engine alone, and its standalone client, beside the tq_mooncake backend: the same rows.

Run:  OMP_NUM_THREADS=1 python benchmarks/mooncake_engine.py [--rounds 7] [--batches A B] [--memcpy]

- ``engine``: ``batch_put_from`` and ``batch_get_into`` of a `MooncakeDistributedStore`, over TCP to the segment of one
  other process. All rows lie in one registered buffer. Nothing is encoded, bounded or checked but the codes.
- ``standalone client``: the same calls of a process that shares memory with a ``mooncake_client``, which has the
  segment. ``--memcpy`` lets that client copy with MC_STORE_MEMCPY, instead of by TCP from itself to itself.
- ``tq_mooncake``: the backend's client, with one storage unit.

A row is what a sample of the batch takes. Each of the first two runs in processes of its own, with a master of its own.
Rounds are interleaved, so a busy machine slows all alike; medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
from batches import MAX_TOKENS, Step, batch, client_steps, describe, medians_ms
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from dataplane_core import connect
from dataplane_mooncake._master import Master
from dataplane_mooncake.machine import master_path
from dataplane_tq_simple.addresses import refuses

_SPAWN = multiprocessing.get_context("spawn")
_HOST = "127.0.0.1"
_SEGMENT_BYTES = 1 << 30
_START_S = 60.0


def row_sizes(columns: Any) -> npt.NDArray[np.int64]:
    """(N,): bytes of each sample of a batch."""
    sizes = np.zeros(columns.batch_size[0], dtype=np.int64)
    for column in columns.values():
        counts = column.offsets().diff().numpy() if column.is_nested else 1
        sizes += counts * column.element_size()
    return sizes


def hold_segment(master: str, ready: Any) -> None:
    """A process that lends a segment."""
    store = MooncakeDistributedStore()
    assert store.setup(_HOST, "P2PHANDSHAKE", _SEGMENT_BYTES, 0, "tcp", "", master) == 0
    ready.put(None)
    time.sleep(1e6)


def use_store(orders: Connection, peer: str, standalone: bool, pool_bytes: int) -> None:
    """A process that puts, gets and deletes rows, as it is told.

    Args:
        orders: Where it is told sizes of rows, then the names of steps. It answers each with None.
        peer: Address of the master, or of the standalone client.
        standalone: Whether it uses a standalone client.
        pool_bytes: Most bytes of a batch.
    """
    store, config = MooncakeDistributedStore(), ReplicateConfig()
    config.with_hard_pin = True
    if standalone:
        assert store.setup_dummy(pool_bytes, 0, peer) == 0
        address = store.alloc_from_mem_pool(pool_bytes)
    else:
        assert store.setup(_HOST, "P2PHANDSHAKE", 0, 0, "tcp", "", peer) == 0
        memory = np.ones(pool_bytes, dtype=np.uint8)
        address = memory.ctypes.data
    assert store.register_buffer(address, pool_bytes) == 0
    numbers = itertools.count()
    keys: list[str] = []
    starts, sizes = [], []
    for order in iter(orders.recv, None):
        if order == "put":
            keys = [f"row{next(numbers)}" for _ in sizes]
            assert not any(store.batch_put_from(keys, starts, sizes, config))
        elif order == "get":
            assert store.batch_get_into(keys, starts, sizes) == sizes
        elif order == "clear":
            assert not any(store.batch_remove(keys, True))
        else:
            sizes = order
            starts = (np.cumsum(sizes) - sizes + address).tolist()
        orders.send(None)
    store.close()


@contextlib.contextmanager
def own_master() -> Iterator[str]:
    """The address of a master."""
    master = Master(_HOST)
    try:
        master.start(time.monotonic() + _START_S)
        yield master.address
    finally:
        master.stop()


@contextlib.contextmanager
def segment(master: str) -> Iterator[None]:
    """Another process's segment."""
    ready = _SPAWN.SimpleQueue()
    process = _SPAWN.Process(target=hold_segment, args=(master, ready), daemon=True)
    process.start()
    try:
        ready.get()
        yield
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def standalone_client(master: str, memcpy: bool) -> Iterator[str]:
    """The address of a standalone client."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    words = [
        str(master_path().with_name("mooncake_client")),
        f"--host={_HOST}",
        f"--port={port}",
        f"--global_segment_size={_SEGMENT_BYTES >> 30} GB",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
    ]
    environment = os.environ | {"MC_STORE_MEMCPY": str(int(memcpy)), "MC_TCP_BIND_ADDRESS": _HOST}
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while refuses(_HOST, port, 1.0):
                assert process.poll() is None
                time.sleep(0.05)
            yield f"{_HOST}:{port}"
        finally:
            process.kill()


class User:
    """Drives a process of `use_store`."""

    def __init__(self, peer: str, standalone: bool, pool_bytes: int) -> None:
        self._orders, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=use_store, args=(theirs, peer, standalone, pool_bytes), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, order: Any) -> None:
        self._orders.send(order)
        self._orders.recv()

    def steps(self, sizes: npt.NDArray[np.int64]) -> tuple[Step, Step, Step]:
        """Put, get and clear of rows of these sizes."""
        self.tell(sizes.tolist())
        return lambda: self.tell("put"), lambda: self.tell("get"), lambda: self.tell("clear")

    def close(self) -> None:
        self._orders.send(None)
        self._process.join()


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", nargs="+", choices=sorted(MAX_TOKENS), default=sorted(MAX_TOKENS))
    parser.add_argument("--memcpy", action="store_true")
    options = parser.parse_args()
    batches = {name: batch(name) for name in options.batches}
    most_bytes = max(int(row_sizes(columns).sum()) for columns in batches.values())
    pool_bytes = -(-most_bytes >> 20) << 20
    with contextlib.ExitStack() as stack:
        masters = [stack.enter_context(own_master()) for _ in range(2)]
        stack.enter_context(segment(masters[0]))
        through = stack.enter_context(standalone_client(masters[1], options.memcpy))
        users = {"engine": User(masters[0], False, pool_bytes), "standalone client": User(through, True, pool_bytes)}
        for user in users.values():
            stack.callback(user.close)
        client = stack.enter_context(connect({"backend": "tq_mooncake"}))
        for name, columns in batches.items():
            sizes = row_sizes(columns)
            contestants = {each: user.steps(sizes) for each, user in users.items()}
            contestants["tq_mooncake"] = client_steps(client, columns)
            medians = medians_ms(contestants, options.rounds)
            least = medians["engine"]
            print(f"\n{describe(name, columns)}\n{'':20}" + "".join(f"{each:>14}" for each in _HEADINGS))
            for each, (put_ms, get_ms) in medians.items():
                cells = [f"{put_ms:.1f}", f"{get_ms:.1f}", f"{put_ms / least[0]:.2f}", f"{get_ms / least[1]:.2f}"]
                print(f"{each:20}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


_HEADINGS = ("put ms", "get ms", "put / engine", "get / engine")

if __name__ == "__main__":
    main()
