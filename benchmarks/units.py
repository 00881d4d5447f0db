"""What one storage unit of tq_simple carries over the wire, and what four do, where each has a slow network.

Run:  OMP_NUM_THREADS=1 python benchmarks/units.py [--rounds 5] [--megabytes-per-s 50]

Units on nodes of their own have a network each. Here all run on one host, so each is reached through a process that
forwards so many bytes a second in each direction. One client puts and gets batch B of `batches.py`, over one unit and
over four. If the units work at the same time, four are four times as fast. Medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator

from batches import batch, client_steps, medians_ms, size_bytes

from dataplane_core import DataPlaneClient, connect
from dataplane_testkit import backend_of

_CHUNK_BYTES = 1 << 16


def forward(source: socket.socket, target: socket.socket, bytes_per_s: float) -> None:
    """Forwards what comes, at this rate."""
    ready_at = time.monotonic()
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            now = time.monotonic()
            time.sleep(max(0.0, ready_at - now))
            ready_at = max(ready_at, now) + len(data) / bytes_per_s
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def serve(unit: tuple[str, int], bytes_per_s: float, ports: multiprocessing.SimpleQueue[int]) -> None:
    """Forwards connections to a unit."""
    listener = socket.create_server(("127.0.0.1", 0))
    ports.put(listener.getsockname()[1])
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(unit)
        for channel in (near, far):
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((near, far), (far, near)):
            threading.Thread(target=forward, args=(*pair, bytes_per_s), daemon=True).start()


@contextlib.contextmanager
def slowed(client: DataPlaneClient, bytes_per_s: float) -> Iterator[None]:
    """Has a client reach each unit through a slow network."""
    places = backend_of(client)._engine._places
    spawning = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        lives = {}
        for number in places.living().values():
            found = spawning.SimpleQueue()
            life = places.life(number)
            target = life.started.ip, life.started.data_port
            slow = spawning.Process(target=serve, args=(target, bytes_per_s, found), daemon=True)
            slow.start()
            stack.callback(slow.join)
            stack.callback(slow.kill)
            nearer = life.started._replace(ip="127.0.0.1", data_port=found.get())
            lives[number] = life._replace(started=nearer)
        places.life = lives.get
        yield


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes-per-s", type=float, default=50.0)
    options = parser.parse_args()
    columns = batch("B")
    with contextlib.ExitStack() as stack:
        contestants = {}
        for count in (1, 4):
            own = {"instance": f"units-{count}", "num_storage_units": count, "share_memory": False}
            client = stack.enter_context(connect({"backend": "tq_simple", "options": {**own, "near_writer": False}}))
            stack.enter_context(slowed(client, options.megabytes_per_s * 1e6))
            contestants[f"{count} units"] = client_steps(client, columns)
        medians = medians_ms(contestants, options.rounds)
    least = size_bytes(columns) / options.megabytes_per_s / 1e3
    print(f"batch B, {size_bytes(columns) / 1e6:.0f} MB as put; one network carries that in {least:.0f} ms")
    for name, (put_ms, get_ms) in medians.items():
        print(f"{name:10}{put_ms:10.0f} ms put{get_ms:10.0f} ms get")
    (put_1, get_1), (put_4, get_4) = medians.values()
    print(f"four are {put_1 / put_4:.1f} (put) and {get_1 / get_4:.1f} (get) times as fast as one")
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
