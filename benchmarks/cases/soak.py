"""A mixed load with kills, under which memory, keys, descriptors and latency must stay flat."""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import bench
from benchmarks.bench import Processes, Table, case
from dataplane_core import DataPlaneClient, connect
from dataplane_core.errors import DataPlaneError
from dataplane_core.middleware import EventMiddleware, OperationEvent
from dataplane_testkit import backend_of

WORKERS = 3
#: Seconds from kill to kill.
KILL_EVERY = 4
#: Samples are cleared after so many seconds, whoever has them: those of killed processes, consumed and not cleared.
OLD_S = 8.0
WARM_UP = 1 / 3
OPERATIONS = ("put_samples", "claim", "get_samples", "ack", "clear_samples")
#: First word of a series -> how much its line may rise from the warm-up to the end: a share of its mean, an amount.
ALLOWED = {
    "memory": (0.05, 6.0),
    "descriptors": (0.02, 3.0),
    "samples": (0.3, 60.0),
    "keys": (0.3, 120.0),
    "extents": (0.3, 60.0),
    "latency": (0.5, 2.0),
}


def cycle(client: DataPlaneClient, dice: random.Random) -> None:
    """Puts some samples; claims some, reads them, and acks and clears them, or gives them back."""
    ids = [uuid.uuid4().hex for _ in range(dice.choice([1, 8, 32]))]
    rows = {"x": [torch.zeros(dice.randint(1, 500)) for _ in ids], "y": torch.ones(len(ids), 16)}
    tags: Any = [{"made": time.time()}] * len(ids)
    client.put_samples(ids, "p", rows, tags=tags)
    # more than a put has, so that no backlog grows
    meta = client.claim_meta("p", "t", ["x", "y"], 64, blocking=False, lease_s=2.0)
    if not meta.size:
        return
    client.get_samples(meta.sample_ids, "p", ["x", "y"])
    if dice.random() < 0.1:
        client.nack(meta)
        return
    client.ack(meta)
    client.clear_samples(meta.sample_ids, "p")


def work(client: DataPlaneClient, seed: int, ended: threading.Event, counts: list[int]) -> None:
    """Cycles, with pauses, until it is to end. Leases that ended and samples that others cleared are no faults here."""
    dice = random.Random(seed)
    while not ended.is_set():
        with suppress(DataPlaneError):
            cycle(client, dice)
            counts[0] += 1
        time.sleep(dice.uniform(0.0, 0.04))


def _worker(number: int, config: dict[str, Any]) -> Generator[Any, Any, None]:
    """A process that works until it is killed. It answers how many cycles it made."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    counts, client = [0], connect(config, bootstrap=False)
    threading.Thread(target=work, args=(client, 100 + number, threading.Event(), counts), daemon=True).start()
    while True:
        yield counts[0]


class Latencies(EventMiddleware):
    """The milliseconds of each operation since the last look, over all threads of a client."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, float]] = []

    def note(self, event: OperationEvent, request: Any, outcome: Any) -> None:
        """Keeps those of the load, not of what looks at it."""
        if event.op in OPERATIONS:
            self._events.append((event.op, event.wall_ms))

    def take(self) -> dict[str, float]:
        """The median of each operation; begins again."""
        events, self._events = self._events, []
        by_operation: dict[str, list[float]] = {}
        for operation, ms in events:
            by_operation.setdefault(operation, []).append(ms)
        return {f"latency of {name}, ms": statistics.median(values) for name, values in by_operation.items()}


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
        import redis

        from dataplane_redis._server import private_url

        with redis.Redis.from_url(private_url(client.config.options["namespace"])) as server:
            keyspace = server.info("keyspace")["db0"]
        series["keys"] = keyspace["keys"] - keyspace["expires"]
    return series


def soaked(name: str, seconds: float) -> tuple[dict[str, list[tuple[float, float]]], list[int]]:
    """Runs the load on a backend. Returns each series, (seconds since the start, value), and each process's cycles."""
    config = bench.config_of(name)
    series: dict[str, list[tuple[float, float]]] = {}
    latencies, cycles, ended, workers = Latencies(), list[int](), threading.Event(), None
    before = set(psutil.Process().children(recursive=True))
    with ExitStack() as stack:
        client = stack.enter_context(connect({**config, "middleware": [latencies]}))
        store = [process for process in psutil.Process().children(recursive=True) if process not in before]
        store = [process for process in store if process.name() != "sh"]  # watchers, which end what outlives its owner
        client.register_partition("p", ["x", "y"], None, ["t"])
        pool = stack.enter_context(ThreadPoolExecutor())
        stack.callback(ended.set)
        for seed in range(WORKERS if name == "noop" else 1):
            pool.submit(work, client, seed, ended, [0])
        if name != "noop":
            workers = stack.enter_context(Processes(_worker, WORKERS, bench.attaching(client, config)))
        start = time.monotonic()
        for second in itertools.count(1):
            now = time.monotonic()
            if now >= start + seconds:
                break
            old = client.list_samples("p", {"made": ("<", time.time() - OLD_S)})
            if old.size:
                client.clear_samples(old.sample_ids, "p")
            for key, value in {**sizes(client, store), **latencies.take()}.items():
                series.setdefault(key, []).append((now - start, value))
            if workers and second % KILL_EVERY == 0:
                cycles.append(workers.ask()[0])
                workers.replace_one()
            time.sleep(max(0.0, now + 1.0 - time.monotonic()))
        cycles += workers.ask() if workers else []
    return series, cycles


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
