"""Many processes of a node that read the same batch at the same time, beside as many plain copies of its bytes.

Run:  OMP_NUM_THREADS=1 python benchmarks/readers.py [--readers 8] [--rounds 5] [--backends shm_store tq_simple ...]

Each process reads batch B of `batches.py` into its own memory; a round is over when all have it. The copies are made by
the same processes, out of memory that they share. The configs are those of `configs.py`. Medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from batches import batch, client_steps, size_bytes
from configs import CONFIGS, attaching

from dataplane_core import connect

DEFAULT = ["shm_store", "shm_store views", "tq_simple", "tq_simple views", "tq_simple wire", "redis_store"]
COPY = "copy"


def read(shared: SharedMemory, configs: dict[str, Any], barrier: Any, rounds: int) -> None:
    """A reader: takes part in each round of each contestant."""
    ids, names = _ids_and_names()
    source = np.frombuffer(shared.buf, dtype=np.uint8)
    target = np.ones(len(source), dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        steps = {COPY: lambda: np.copyto(target, source)}
        for name, config in configs.items():
            client = stack.enter_context(connect(config, bootstrap=False))
            steps[name] = lambda client=client: client.get_samples(ids, "bench", names)
        for _ in range(rounds + 1):
            for step in steps.values():
                barrier.wait()
                step()
                barrier.wait()


def _ids_and_names() -> tuple[list[str], list[str]]:
    columns = batch("B")
    return [f"prompt{i // 8}_g{i % 8}" for i in range(len(columns))], list(columns.keys())


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=DEFAULT)
    options = parser.parse_args()
    columns = batch("B")
    shared = SharedMemory(create=True, size=size_bytes(columns))
    spawning = multiprocessing.get_context("spawn")
    barrier = spawning.Barrier(options.readers + 1)
    with contextlib.ExitStack() as stack:
        stack.callback(shared.unlink)
        configs = {}
        for name in options.backends:
            config = CONFIGS.get(name, {"backend": name})
            client = stack.enter_context(connect(config, "auto"))
            client_steps(client, columns)[0]()
            configs[name] = attaching(client, config)
        arguments = (shared, configs, barrier, options.rounds)
        readers = [spawning.Process(target=read, args=arguments, daemon=True) for _ in range(options.readers)]
        for reader in readers:
            reader.start()
        times: dict[str, list[float]] = {name: [] for name in (COPY, *configs)}
        for number in range(options.rounds + 1):
            for kept in times.values():
                barrier.wait()
                started = time.perf_counter()
                barrier.wait()
                if number:
                    kept.append((time.perf_counter() - started) * 1e3)
        for reader in readers:
            reader.join()
    print(f"{options.readers} readers of batch B, {size_bytes(columns) / 1e6:.0f} MB each")
    for name, kept in times.items():
        relative = statistics.median(kept) / statistics.median(times[COPY])
        print(f"{name:18}{statistics.median(kept):10.0f} ms{relative:10.2f} times the copies")
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
