"""Rows of 1 GiB: how long they take, how much memory a client needs beside them, and how long they hold up small calls.

Run:  OMP_NUM_THREADS=1 python benchmarks/large_rows.py [--megabytes 1024] [--backends shm_store "tq_simple wire" ...]

Two processes put and read a row each at the same time, of bytes in one column, while a third one puts and reads a row
of 4 bytes again and again. Extra memory is the most private memory that a process has beyond what it has before, the
row that it puts and the row that it reads. The configs are those of `backends.py`. ``copies`` is what the machine does
without a store for the large rows: the two processes only copy them, and the small rows are in shm_store.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from configs import CONFIGS, attaching

from dataplane_core import connect

DEFAULT = ["copies", "shm_store", "tq_simple", "tq_simple wire"]


def private_bytes() -> int:
    """The private memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most private memory while the block runs, beyond that at its begin."""

    def __enter__(self) -> Peak:
        self._begin = self._most = private_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, private_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.extra_bytes = self._most - self._begin


def copy(number: int, size_bytes: int, barrier: Any, results: Any) -> None:
    """Copies a row to new memory, and from there to new memory."""
    row = torch.full((1, size_bytes), number, dtype=torch.uint8)
    times = []
    for _ in range(2):
        barrier.wait()
        started = time.perf_counter()
        row = row.clone()
        times.append(time.perf_counter() - started)
    barrier.wait()
    results.put((times[0], size_bytes, times[1], 0))


def large(config: dict[str, Any], number: int, size_bytes: int, barrier: Any, results: Any) -> None:
    """Puts and reads a row."""
    row = torch.full((1, size_bytes), number, dtype=torch.uint8)
    with connect(config, bootstrap=False) as client:
        client.register_partition("large", ["x"], None, ["train"])
        client.put_samples([f"warm{number}"], "large", {"x": row[:, :8]})
        barrier.wait()
        with Peak() as put:
            started = time.perf_counter()
            client.put_samples([f"large{number}"], "large", {"x": row})
            put_s = time.perf_counter() - started
        barrier.wait()
        with Peak() as get:
            started = time.perf_counter()
            found = client.get_samples([f"large{number}"], "large", ["x"])["x"]
            get_s = time.perf_counter() - started
        assert torch.equal(found, row)
        barrier.wait()
        results.put((put_s, put.extra_bytes, get_s, get.extra_bytes - size_bytes))


def small(config: dict[str, Any], barrier: Any, results: Any) -> None:
    """Puts and reads a small row, from the second barrier to the last. Puts the longest calls in ms."""
    with connect(config, bootstrap=False) as client:
        client.register_partition("small", ["x"], None, ["train"])
        row = torch.ones(1, 1)
        ended = threading.Event()

        def wait() -> None:
            for _ in range(3):
                barrier.wait()
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        times = []
        while not ended.is_set():
            started = time.perf_counter()
            client.put_samples(["a"], "small", {"x": row})
            client.get_samples(["a"], "small", ["x"])
            times.append((time.perf_counter() - started) * 1e3)
        times.sort()
        results.put((times[len(times) // 2], times[-1]))


def measure(name: str, size_bytes: int) -> None:
    """Prints the figures of a backend."""
    backend = "shm_store" if name == "copies" else name
    config = {"op_timeout_s": 300.0, **CONFIGS.get(backend, {"backend": backend})}
    spawning = multiprocessing.get_context("spawn")
    with connect(config) as owner:
        config = attaching(owner, config)
        barrier, results, calls = spawning.Barrier(3), spawning.SimpleQueue(), spawning.SimpleQueue()
        target, settings = (large, (config,)) if name == backend else (copy, ())
        work = [
            spawning.Process(target=target, args=(*settings, each, size_bytes, barrier, results)) for each in (1, 2)
        ]
        work.append(spawning.Process(target=small, args=(config, barrier, calls)))
        for process in work:
            process.start()
        for process in work:
            process.join()
        if any(process.exitcode for process in work):
            print(f"{name:18} failed", flush=True)
            return
        found = [results.get() for _ in range(2)]
        put_s, put_extra, get_s, get_extra = (max(each) for each in zip(*found, strict=True))
        median_ms, longest_ms = calls.get()
        print(
            f"{name:18}{put_s:8.2f}{get_s:8.2f}{put_extra / 2**20:14.0f}{get_extra / 2**20:14.0f}"
            f"{median_ms:14.1f}{longest_ms:14.1f}",
            flush=True,
        )


def main() -> None:
    """Prints a line for each backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--backends", nargs="+", default=DEFAULT)
    options = parser.parse_args()
    heads = ["put extra MiB", "get extra MiB", "small ms", "longest ms"]
    print(f"{'':18}{'put s':>8}{'get s':>8}" + "".join(f"{head:>14}" for head in heads))
    for name in options.backends:
        measure(name, options.megabytes << 20)
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
