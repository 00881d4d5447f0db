"""shm_store: many processes at once, small operations beside noop's, and the memory of a client.

Run:  python benchmarks/shm_store.py [--seconds 5]

Prints the milliseconds of a put and a read of batches A and B (`batches.py`) with one copying thread and with one
per core, up to 4, beside torch's copy with as many; how many MB a second one process and four processes put (batch B),
beside plain copies of as many bytes into shared memory, which are the limit; how many claims of one sample a second
four processes make; microseconds of a put, a read and a claim of one sample with one scalar, on noop and on shm_store;
the time of a read of batch B as views; and how far the memory of a process grows in a put and in a read, beyond the
tensors that it gets.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import NUM_SAMPLES, Step, batch, client_steps, medians_ms, size_bytes
from server_cost import cpu_s
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, connect
from dataplane_testkit import backend_of

CONFIG: dict[str, Any] = {"backend": "shm_store", "options": {"namespace": "benchmark"}}


def many_puts(number: int, seconds: float, start: Any, results: Any) -> None:
    """Puts and clears batch B until the time is over. Reports bytes per second spent in puts, and in all."""
    columns = batch("B")
    ids = [f"{number}.{i}" for i in range(NUM_SAMPLES)]
    with connect(CONFIG, bootstrap=False) as client:
        for _ in range(2):
            client.put_samples(ids, "bench", columns)
            client.clear_samples(ids, "bench")
        start.wait()
        end, count, in_puts = time.perf_counter() + seconds, 0, 0.0
        while time.perf_counter() < end:
            begun = time.perf_counter()
            client.put_samples(ids, "bench", columns)
            in_puts += time.perf_counter() - begun
            client.clear_samples(ids, "bench")
            count += 1
        results.put(np.array([size_bytes(columns) * count / in_puts]))


def many_copies(number: int, seconds: float, start: Any, results: Any) -> None:
    """Copies the bytes of batch B into shared memory until the time is over. Reports bytes per second."""
    source = np.ones(size_bytes(batch("B")), dtype=np.uint8)
    target = np.frombuffer(mmap.mmap(-1, len(source)), dtype=np.uint8)
    np.copyto(target, source)
    start.wait()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() < begun + seconds:
        np.copyto(target, source)
        count += 1
    results.put(np.array([len(source) * count / (time.perf_counter() - begun)]))


def many_claims(number: int, seconds: float, start: Any, results: Any) -> None:
    """Claims one sample at a time until the time is over. Reports claims per second, their number and their CPU."""
    with connect(CONFIG, bootstrap=False) as client:
        start.wait()
        begun, cpu, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < begun + seconds:
            if not client.claim_meta("claims", "train", ["x"], 1, blocking=False).size:
                break
            count += 1
        results.put(np.array([count / (time.perf_counter() - begun), count, time.process_time() - cpu]))


def together(work: Callable[..., None], count: int, seconds: float) -> Any:
    """The sums of what ``count`` processes report."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(count), context.Queue()
    processes = [context.Process(target=work, args=(number, seconds, start, results)) for number in range(count)]
    for process in processes:
        process.start()
    total: Any = sum(results.get() for _ in processes)
    for process in processes:
        process.join()
    return total


def median_us(step: Callable[[int], Any], repeats: int = 1000) -> float:
    """Median microseconds of ``step(0)``, ``step(1)``, ..."""
    times = []
    for number in range(repeats):
        begun = time.perf_counter()
        step(number)
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


def small_operations(client: DataPlaneClient) -> tuple[float, float, float]:
    """Microseconds of a put, a read and a claim of one sample with one scalar."""
    client.register_partition("small", ["x"], None, ["train"])
    columns = TensorDict({"x": torch.ones(1)}, batch_size=[1])
    return (
        median_us(lambda number: client.put_samples([f"s{number}"], "small", columns)),
        median_us(lambda number: client.get_samples([f"s{number}"], "small", ["x"])),
        median_us(lambda _: client.claim_meta("small", "train", ["x"], 1, blocking=False)),
    )


def torch_copy(size: int, threads: int) -> Step:
    """One copy of the bytes into memory that was used before."""
    source = torch.ones(size, dtype=torch.uint8)
    target = source.clone()

    def step() -> None:
        torch.set_num_threads(threads)
        target.copy_(source)
        torch.set_num_threads(1)

    return step


def by_threads(name: str) -> None:
    """Prints the medians of puts and reads of a batch with one copying thread and with several."""
    columns = batch(name)
    with contextlib.ExitStack() as stack:
        contestants: dict[str, tuple[Step, Step, Step]] = {}
        for count in sorted({1, min(4, len(os.sched_getaffinity(0)))}):
            options = {"namespace": f"benchmark-{count}", "copy_threads": count}
            client = stack.enter_context(connect({"backend": "shm_store", "options": options}))
            contestants[f"{count} copy threads"] = client_steps(client, columns)
            copy = torch_copy(size_bytes(columns), count)
            contestants[f"torch's copy, {count}"] = (copy, copy, lambda: None)
        for what, (put_ms, get_ms) in medians_ms(contestants, rounds=30).items():
            print(f"batch {name}, {what:18}{put_ms:8.2f} ms put{get_ms:8.2f} ms get")


def private_bytes() -> int:
    """Memory of this process that it shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_", "Swap:")))


def peak_growth(step: Callable[[], Any]) -> tuple[int, Any]:
    """How far this process's own memory grew at most while ``step`` ran, and what it returned."""
    before, peak, over = private_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = step()
    over.set()
    watcher.join()
    return max(peak, private_bytes()) - before, result


def main() -> None:
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    by_threads("A")
    by_threads("B")
    with connect(CONFIG) as client, connect({"backend": "noop"}) as noop:
        print(f"{'':12}{'put us':>10}{'read us':>10}{'claim us':>10}")
        for name, each in (("noop", noop), ("shm_store", client)):
            print(f"{name:12}" + "".join(f"{value:10.0f}" for value in small_operations(each)))

        columns = batch("B")
        payload = size_bytes(columns)
        ids = [f"m{i}" for i in range(NUM_SAMPLES)]
        client.register_partition("bench", list(columns.keys()), None, ["train"])
        client.put_samples(ids, "bench", columns)
        client.clear_samples(ids, "bench")
        grown, _ = peak_growth(lambda: client.put_samples(ids, "bench", columns))
        print(f"\npeak memory of a put of {payload / 1e6:.0f} MB: {grown / payload:.2f} payloads")
        grown, _ = peak_growth(lambda: client.get_samples(ids, "bench", list(columns.keys())))
        print(f"peak memory of its read: {grown / payload - 1:.2f} payloads beyond the tensors")
        viewing = {**CONFIG, "options": {**CONFIG["options"], "views": True}}
        with connect(viewing, bootstrap=False) as viewer:
            took_us = median_us(lambda _: viewer.get_samples(ids, "bench", list(columns.keys())))
        print(f"its read as views, again and again: {took_us / 1e3:.2f} ms")
        client.clear_samples(ids, "bench")

        print()
        for name, work in (("puts of batch B", many_puts), ("plain copies", many_copies)):
            (one,), (four,) = (together(work, count, options.seconds) for count in (1, 4))
            times = f"{four / one:.2f}x"
            print(f"{name}: 1 process {one / 1e6:.0f} MB/s, 4 processes {four / 1e6:.0f} MB/s, {times}")

        total = int(40_000 * options.seconds)
        client.register_partition("claims", ["x"], None, ["train"])
        for first in range(0, total, 50_000):
            some = [f"c{i}" for i in range(first, min(first + 50_000, total))]
            client.put_samples(some, "claims", TensorDict({"x": torch.ones(len(some))}, batch_size=[len(some)]))
        ledger = backend_of(client)._process.pid
        before_s = cpu_s(ledger)
        rate, count, clients_s = together(many_claims, 4, options.seconds)
        ledger_s = cpu_s(ledger) - before_s
        print(f"claims of one sample, 4 processes: {rate:.0f} a second")
        server_us, client_us = ledger_s / count * 1e6, clients_s / count * 1e6
        print(f"CPU per claim: {server_us:.0f} us in the ledger's process, {client_us:.0f} us in the client")
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
