"""A mixed load with kills for some minutes. Memory, keys, descriptors and latency are watched, and must stay flat.

    python benchmarks/soak.py [--minutes 10] [--backends noop shm_store redis_store] [--out out/soak]

The minutes are divided among the backends, which run in turn. Three processes and a thread of this one put, claim with
leases, read, ack or nack, and clear; every few seconds a process is killed and another one takes its place. (noop
lives in one process: there, threads do this, and none is killed.) What a killed process left is claimed by the others
when its lease ends; what it had consumed is cleared after some seconds.

Once a second, for the processes of the store and for this process: resident memory, open descriptors; what the store
holds (samples, keys of Redis, extents of shm_store); and the median latency of each operation. After a warm-up of a
third of the time, a line is fitted to each series (the median of all slopes between two points, so that single peaks
count little). The run fails if the line rises over the rest of the run by more than `ALLOWED` says, or if the processes
did not work. Keys of Redis that end by themselves are not counted: those of acknowledged requests, after 150 s at most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from configs import attaching

from dataplane_core import DataPlaneClient, connect
from dataplane_core.errors import DataPlaneError
from dataplane_testkit import backend_of

BACKENDS = ("noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake")
#: Options of backends that need some.
OPTIONS: dict[str, dict[str, Any]] = {"redis_store": {"server": "private"}}
WORKERS = 3
KILL_EVERY_S = 4.0
LEASE_S = 2.0
#: Samples of a claim at most: more than of a put, so that no backlog grows.
CLAIMED = 64
#: Samples are cleared after so many seconds, whoever has them.
OLD_S = 8.0
WARM_UP = 1 / 3
#: Series -> how much its line may rise from the warm-up to the end: a share of its mean, and an amount.
ALLOWED = {
    "memory of the store, MB": (0.05, 6.0),
    "memory of this process, MB": (0.05, 6.0),
    "descriptors of the store": (0.02, 3.0),
    "descriptors of this process": (0.02, 3.0),
    "samples": (0.3, 60.0),
    "keys": (0.3, 120.0),
    "extents": (0.3, 60.0),
    "latency": (0.5, 2.0),
}
#: Colours that people with colour blindness can tell apart (Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c2a300", "#7a3fb0")


@dataclass
class Latencies:
    """How long operations took since the last look, in milliseconds. Threads share it."""

    taken: dict[str, list[float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """What a call returns."""
        start = time.perf_counter()
        reply = call()
        with self.lock:
            self.taken.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
        return reply

    def take(self) -> dict[str, float]:
        """The median of each operation; begins again."""
        with self.lock:
            taken, self.taken = self.taken, {}
        return {f"latency of {name}, ms": statistics.median(values) for name, values in taken.items()}


def cycle(client: DataPlaneClient, dice: random.Random, latencies: Latencies) -> None:
    """Puts some samples; claims some, reads them, and acks and clears them, or gives them back."""
    count = dice.choice([1, 8, 32])
    ids = [uuid.uuid4().hex for _ in range(count)]
    rows = {"x": [torch.zeros(dice.randint(1, 500)) for _ in ids], "y": torch.ones(count, 16)}
    tags: Any = [{"made": time.time()}] * count
    latencies.timed("put", lambda: client.put_samples(ids, "p", rows, tags=tags))
    meta = latencies.timed(
        "claim", lambda: client.claim_meta("p", "t", ["x", "y"], CLAIMED, blocking=False, lease_s=LEASE_S)
    )
    if not meta.size:
        return
    latencies.timed("get", lambda: client.get_samples(meta.sample_ids, "p", ["x", "y"]))
    if dice.random() < 0.1:
        client.nack(meta)
        return
    latencies.timed("ack", lambda: client.ack(meta))
    latencies.timed("clear", lambda: client.clear_samples(meta.sample_ids, "p"))


def work(
    client: DataPlaneClient, seed: int, latencies: Latencies, ended: Callable[[], bool], count: Any = None
) -> None:
    """Cycles, with pauses, until it is to end. Leases that ended and samples that others cleared are no faults here."""
    dice = random.Random(seed)
    while not ended():
        with suppress(DataPlaneError):
            cycle(client, dice, latencies)
            if count is not None:
                count.value += 1
        time.sleep(dice.uniform(0.0, 0.04))


def worker(config: dict[str, Any], seed: int, count: Any) -> None:
    """A process that works until it is killed, and counts its cycles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    work(connect(config, bootstrap=False), seed, Latencies(), lambda: False, count)


@contextmanager
def load(
    client: DataPlaneClient, config: dict[str, Any], latencies: Latencies, counts: list[Any]
) -> Iterator[Callable[[], None]]:
    """Workers that run meanwhile, and count their cycles. Gives a function that kills one and starts another."""
    ended = threading.Event()
    threads = [threading.Thread(target=work, args=(client, 0, latencies, ended.is_set))]
    if config["backend"] == "noop":
        threads += [threading.Thread(target=work, args=(client, n, latencies, ended.is_set)) for n in range(1, WORKERS)]
    for thread in threads:
        thread.start()
    attach = attaching(client, config)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tensordict", "dataplane_core.client", "dataplane_core.connecting"])
    processes: list[Any] = []
    seeds = iter(range(100, 1 << 30))

    def start() -> None:
        counts.append(context.RawValue("q"))  # without a lock, which a killed process would keep
        process = context.Process(target=worker, args=(attach, next(seeds), counts[-1]), daemon=True)
        process.start()
        processes.append(process)

    def kill_one() -> None:
        if processes:
            first = processes.pop(0)
            first.kill()
            first.join()
            first.close()
            start()

    try:
        if config["backend"] != "noop":
            for _ in range(WORKERS):
                start()
        yield kill_one
    finally:
        ended.set()
        for process in processes:
            process.kill()
            process.join()
        for thread in threads:
            thread.join()


def total(processes: list[psutil.Process], what: Callable[[psutil.Process], int]) -> int:
    """The sum over processes, without those that have ended: Ray ends and starts some."""
    found = 0
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            found += what(each)
    return found


def sizes(client: DataPlaneClient, store: list[psutil.Process]) -> dict[str, float]:
    """What is looked at once a second."""
    here = psutil.Process()
    seen: dict[str, float] = {
        "memory of this process, MB": here.memory_info().rss / 1e6,
        "descriptors of this process": here.num_fds(),
        "samples": client.describe("p").num_samples,
    }
    if store:
        seen["memory of the store, MB"] = total(store, lambda each: each.memory_info().rss) / 1e6
        seen["descriptors of the store"] = total(store, psutil.Process.num_fds)
    backend: Any = backend_of(client)
    if hasattr(backend, "statistics"):
        seen["extents"] = backend.statistics(time.monotonic() + 30.0).num_extents
    if client.backend_name == "redis_store":
        said = backend._session.command("INFO", time.monotonic() + 30.0, b"INFO", b"keyspace").decode()
        keys, expiring = (int(found) for found in re.search(r"keys=(\d+),expires=(\d+)", said).groups())
        seen["keys"] = keys - expiring
    return seen


def clear_old(client: DataPlaneClient) -> None:
    """Clears samples that are older than `OLD_S`: those of killed processes, consumed and not cleared."""
    old = client.list_samples("p", {"made": ("<", time.time() - OLD_S)})
    if old.size:
        client.clear_samples(old.sample_ids, "p")


Series = dict[str, list[tuple[float, float]]]


def soak(name: str, seconds: float) -> tuple[Series, list[int]]:
    """Runs the load on a backend. Returns the series, (seconds since the start, value), and each process's cycles."""
    config: dict[str, Any] = {"backend": name, "options": dict(OPTIONS.get(name, {})), "op_timeout_s": 60.0}
    if name in ("shm_store", "redis_store"):
        config["options"]["namespace"] = f"soak-{uuid.uuid4().hex[:12]}"
    series: Series = {}
    counts: list[Any] = []
    before = set(psutil.Process().children(recursive=True))
    with connect(config) as client:
        store = [each for each in psutil.Process().children(recursive=True) if each not in before]
        store = [each for each in store if each.name() != "sh"]  # watchers, which end what outlives its owner
        client.register_partition("p", ["x", "y"], None, ["t"])
        latencies = Latencies()
        with load(client, config, latencies, counts) as kill_one:
            start = time.monotonic()
            killed = start + KILL_EVERY_S
            while (now := time.monotonic()) < start + seconds:
                clear_old(client)
                for key, value in {**sizes(client, store), **latencies.take()}.items():
                    series.setdefault(key, []).append((now - start, value))
                if now >= killed:
                    kill_one()
                    killed += KILL_EVERY_S
                time.sleep(max(0.0, now + 1.0 - time.monotonic()))
        client.clear_samples(None, "p")
    return series, [count.value for count in counts]


def slope_of(points: list[tuple[float, float]]) -> float:
    """The median of the slopes between any two points (Theil and Sen), per second."""
    at, values = np.array(points).T
    first, second = np.triu_indices(len(at), 1)
    return float(np.median((values[second] - values[first]) / (at[second] - at[first])))


@dataclass(frozen=True)
class Verdict:
    """How much a series rose after the warm-up, and whether it may."""

    name: str
    mean: float
    rise: float
    allowed: float

    @property
    def flat(self) -> bool:
        """Whether it rose no more than it may."""
        return self.rise <= self.allowed

    def __str__(self) -> str:
        word = "flat" if self.flat else "RISES"
        return f"  {self.name:30} mean {self.mean:9.2f}, rise {self.rise:+8.2f} of {self.allowed:7.2f} allowed: {word}"


def judge(series: Series, seconds: float) -> list[Verdict]:
    """A verdict for each series."""
    verdicts = []
    for name, points in series.items():
        late = [point for point in points if point[0] >= WARM_UP * seconds]
        if len(late) < 10:
            continue
        share, amount = ALLOWED["latency" if name.startswith("latency") else name]
        mean = statistics.fmean(value for _, value in late)
        verdicts.append(Verdict(name, mean, slope_of(late) * (1 - WARM_UP) * seconds, share * mean + amount))
    return verdicts


def draw(path: Path, name: str, series: Series, seconds: float) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")  # files only; a display may not be there
    from matplotlib import pyplot as plt

    panels = {
        "memory, MB": [each for each in series if each.startswith("memory")],
        "descriptors": [each for each in series if each.startswith("descriptors")],
        "what the store holds": [each for each in ("samples", "keys", "extents") if each in series],
        "median latency, ms": [each for each in series if each.startswith("latency")],
    }
    figure, axes = plt.subplots(len(panels), 1, figsize=(10.5, 11), sharex=True)
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for color, each in zip(COLORS, names, strict=False):
            at, values = np.array(series[each]).T
            label = each.removeprefix("latency of ").removesuffix(", ms").removesuffix(", MB")
            axis.plot(at, values, color=color, linewidth=1.4, label=label)
        axis.axvspan(0, WARM_UP * seconds, color="#dedede", alpha=0.5, linewidth=0)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
        if "latency" in title:
            axis.set_yscale("log")  # a busy machine makes single peaks
        else:
            axis.set_ylim(bottom=0)
        axis.grid(color="#dedede")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, frameon=False)
    axes[-1].set_xlabel("seconds; the warm-up is grey")
    figure.suptitle(
        f"{name}: mixed load, a worker killed every {KILL_EVERY_S:g} s" * (name != "noop") or f"{name}: mixed load"
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Runs the backends in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all backends together")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="the folder of the pictures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # all processes of this run have this token
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    seconds = 60 * arguments.minutes / len(arguments.backends)
    rising = []
    for name in arguments.backends:
        try:
            series, counts = soak(name, seconds)
        except DataPlaneError as error:
            print(f"{name}: does not run: {error}")
            rising.append(name)
            continue
        verdicts = judge(series, seconds)
        path = arguments.out / f"{name}.png"
        draw(path, name, series, seconds)
        print(f"{name}: {seconds:.0f} s, see {path}")
        print("\n".join(map(str, verdicts)), flush=True)
        worked = sum(count > 0 for count in counts)
        if counts:
            print(f"  {worked} of {len(counts)} processes made {sum(counts)} cycles", flush=True)
        flat = bool(verdicts) and all(each.flat for each in verdicts)
        if not flat or 2 * worked < len(counts):
            rising.append(name)
    if rising:
        sys.exit(f"not flat, or processes did not work: {', '.join(rising)}")


if __name__ == "__main__":
    main()
