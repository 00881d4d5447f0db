"""A mixed load with kills, under which memory, keys, descriptors and latency must stay flat."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import bench
from benchmarks.bench import Table, case
from dataplane_core import DataPlaneClient, connect
from dataplane_core.errors import DataPlaneError
from dataplane_testkit import backend_of

WORKERS = 3
KILL_EVERY_S = 4.0
#: Samples are cleared after so many seconds, whoever has them: those of killed processes, consumed and not cleared.
OLD_S = 8.0
WARM_UP = 1 / 3
#: First word of a series -> how much its line may rise from the warm-up to the end: a share of its mean, an amount.
ALLOWED = {
    "memory": (0.05, 6.0),
    "descriptors": (0.02, 3.0),
    "samples": (0.3, 60.0),
    "keys": (0.3, 120.0),
    "extents": (0.3, 60.0),
    "latency": (0.5, 2.0),
}


class Latencies:
    """Milliseconds of each operation since the last look. Threads share it."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """What a call returns."""
        start = time.perf_counter()
        reply = call()
        with self._lock:
            self._taken.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
        return reply

    def take(self) -> dict[str, float]:
        """The median of each operation; begins again."""
        with self._lock:
            taken, self._taken = self._taken, {}
        return {f"latency of {name}, ms": statistics.median(values) for name, values in taken.items()}


def cycle(client: DataPlaneClient, dice: random.Random, timed: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Puts some samples; claims some, reads them, and acks and clears them, or gives them back."""
    ids = [uuid.uuid4().hex for _ in range(dice.choice([1, 8, 32]))]
    rows = {"x": [torch.zeros(dice.randint(1, 500)) for _ in ids], "y": torch.ones(len(ids), 16)}
    tags: Any = [{"made": time.time()}] * len(ids)
    timed("put", lambda: client.put_samples(ids, "p", rows, tags=tags))
    # more than a put has, so that no backlog grows
    meta = timed("claim", lambda: client.claim_meta("p", "t", ["x", "y"], 64, blocking=False, lease_s=2.0))
    if not meta.size:
        return
    timed("get", lambda: client.get_samples(meta.sample_ids, "p", ["x", "y"]))
    if dice.random() < 0.1:
        client.nack(meta)
        return
    timed("ack", lambda: client.ack(meta))
    timed("clear", lambda: client.clear_samples(meta.sample_ids, "p"))


def work(client: DataPlaneClient, seed: int, latencies: Latencies, ended: threading.Event, count: Any = None) -> None:
    """Cycles, with pauses, until it is to end. Leases that ended and samples that others cleared are no faults here."""
    dice = random.Random(seed)
    while not ended.is_set():
        with suppress(DataPlaneError):
            cycle(client, dice, latencies.timed)
            if count is not None:
                count.value += 1
        time.sleep(dice.uniform(0.0, 0.04))


def worker(config: dict[str, Any], seed: int, count: Any) -> None:
    """A process that works until it is killed, and counts its cycles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    work(connect(config, bootstrap=False), seed, Latencies(), threading.Event(), count)


class Workers:
    """Processes that cycle, of which one at a time is killed and replaced."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.counts: list[Any] = []
        self._config, self._processes = config, list[Any]()
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "tensordict", "dataplane_core.client", "benchmarks.bench"])
        for _ in range(WORKERS):
            self._start()

    def _start(self) -> None:
        self.counts.append(self._context.RawValue("q"))  # without a lock, which a killed process would keep
        arguments = (self._config, 100 + len(self.counts), self.counts[-1])
        self._processes.append(self._context.Process(target=worker, args=arguments, daemon=True))
        self._processes[-1].start()

    def kill_one(self) -> None:
        """Another one takes its place."""
        self._end(self._processes.pop(0))
        self._start()

    def close(self) -> None:
        """Kills all."""
        for process in self._processes:
            self._end(process)

    def _end(self, process: Any) -> None:
        process.kill()
        process.join()
        process.close()


def total(processes: list[psutil.Process], what: Callable[[psutil.Process], int]) -> int:
    """The sum over processes, without those that have ended: Ray ends and starts some."""
    amount = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            amount += what(process)
    return amount


def sizes(client: DataPlaneClient, store: list[psutil.Process]) -> dict[str, float]:
    """What is looked at once a second. Keys of Redis that end by themselves are not counted."""
    series: dict[str, float] = {"samples": client.describe("p").num_samples}
    for owner, processes in (("this process", [psutil.Process()]), ("the store", store)):
        if processes:
            series[f"memory of {owner}, MB"] = total(processes, lambda process: process.memory_info().rss) / 1e6
            series[f"descriptors of {owner}"] = total(processes, psutil.Process.num_fds)
    backend: Any = backend_of(client)
    if hasattr(backend, "statistics"):
        series["extents"] = backend.statistics(time.monotonic() + 30.0).num_extents
    if client.backend_name == "redis_store":
        text = backend._session.command("INFO", time.monotonic() + 30.0, b"INFO", b"keyspace").decode()
        keys, expiring = map(int, re.search(r"keys=(\d+),expires=(\d+)", text).groups())
        series["keys"] = keys - expiring
    return series


def soaked(name: str, seconds: float) -> tuple[dict[str, list[tuple[float, float]]], list[int]]:
    """Runs the load on a backend. Returns each series, (seconds since the start, value), and each process's cycles."""
    config = bench.config_of(name)
    series: dict[str, list[tuple[float, float]]] = {}
    latencies, ended, workers = Latencies(), threading.Event(), None
    before = set(psutil.Process().children(recursive=True))
    with ExitStack() as stack:
        client = stack.enter_context(connect(config))
        store = [process for process in psutil.Process().children(recursive=True) if process not in before]
        store = [process for process in store if process.name() != "sh"]  # watchers, which end what outlives its owner
        client.register_partition("p", ["x", "y"], None, ["t"])
        num_threads = WORKERS if name == "noop" else 1
        threads = [threading.Thread(target=work, args=(client, seed, latencies, ended)) for seed in range(num_threads)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(ended.set)
        if name != "noop":
            workers = Workers(bench.attaching(client, config))
            stack.callback(workers.close)
        start = time.monotonic()
        for second in itertools.count():
            now = time.monotonic()
            if now >= start + seconds:
                break
            old = client.list_samples("p", {"made": ("<", time.time() - OLD_S)})
            if old.size:
                client.clear_samples(old.sample_ids, "p")
            for key, value in {**sizes(client, store), **latencies.take()}.items():
                series.setdefault(key, []).append((now - start, value))
            if workers and second and second % KILL_EVERY_S == 0:
                workers.kill_one()
            time.sleep(max(0.0, now + 1.0 - time.monotonic()))
    return series, [count.value for count in workers.counts] if workers else []


def rise(points: list[tuple[float, float]], seconds: float) -> float:
    """How much a line rises in so many seconds. Its slope is the median of those between any two points."""
    at, values = np.array(points).T
    first, second = np.triu_indices(len(at), 1)
    return float(np.median((values[second] - values[first]) / (at[second] - at[first]))) * seconds


@case
def soak(
    minutes: float = 10.0,
    backends: tuple[str, ...] = ("noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"),
) -> Iterator[Table]:
    """A mixed load with kills, in turn on each backend: memory, keys, descriptors and latency must stay flat.

    Three processes and a thread of this one put, claim with leases, read, ack or nack, and clear; every few seconds a
    process is killed and another one takes its place. (noop lives in one process: there, threads do this, and none is
    killed.) Once a second sizes and median latencies are noted. After a warm-up of a third of the time, a line is
    fitted to each series, such that single peaks count little. The run fails if one rises by more than `ALLOWED` says,
    or if fewer than half of the processes worked.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # all processes of this run have this token
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    seconds, failed = 60 * minutes / len(backends), []
    for name in backends:
        series, counts = soaked(name, seconds)
        rows: list[Any] = []
        for key, points in series.items():
            late = [point for point in points if point[0] >= WARM_UP * seconds]
            if len(late) < 10:
                continue
            share, amount = ALLOWED[key.split()[0]]
            mean = statistics.fmean(value for _, value in late)
            more, allowed = rise(late, (1 - WARM_UP) * seconds), share * mean + amount
            rows.append([key, mean, more, allowed, "flat" if more <= allowed else "RISES"])
        num_working = sum(count > 0 for count in counts)
        if not rows or any(row[-1] == "RISES" for row in rows) or 2 * num_working < len(counts):
            failed.append(name)
        if counts:
            rows.append([f"cycles of {num_working} of {len(counts)} processes", sum(counts), "", "", ""])
        yield Table(f"soak: {name}", [name, "mean", "rise", "allowed", ""], rows)
    if failed:
        raise SystemExit(f"not flat, or processes did not work: {', '.join(failed)}")
