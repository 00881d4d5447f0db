"""How much waiting clients cost the store, and how much they slow down other clients.

Run:  python benchmarks/waiting.py [--waiting 500] [--seconds 10] [--backends noop redis_store tq_simple]

Two rounds per backend. First, claims wait, a third each: for the last 12 of 512 samples; with a filter over 20,000
samples that do not match; in an empty partition. Meanwhile one thread puts 8 samples of one scalar, claims and clears
them, and another reads 8. Then, in a full store, puts wait for room; the one thread writes tags, the other reads. The
waiting clients are threads of four processes (noop: of this one). Shown are the CPU of the process that keeps the store
(Redis, tq_simple's controller; noop: this process), while nobody else works, and how long the others' operations
take without and with those who wait. Of Redis also how many requests it gets a second, from those who wait alone.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import ray
import torch
from configs import attaching
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, connect
from dataplane_core.errors import DataPlaneError
from dataplane_testkit import backend_of

#: Options of backends that need some.
OPTIONS = {"redis_store": {"server": "private"}}
PROCESSES = 4
LONG_S = 600.0
CAPACITY_BYTES = 1_000_000


def scalars(count: int, size: int = 1) -> TensorDict:
    """``count`` rows of ``size`` float32."""
    return TensorDict({"x": torch.zeros(count, size)}, batch_size=[count])


def fill(client: DataPlaneClient, kind: str) -> None:
    """What those who wait, wait for."""
    client.register_partition("others", ["x"], None, ["t"])
    client.put_samples([f"r{i}" for i in range(8)], "others", scalars(8))
    if kind == "puts":
        client.register_partition("full", ["x"], None, ["t"])
        client.put_samples([f"s{i}" for i in range(90)], "full", scalars(90, 2_500))
        return
    for name in ("batch", "filter", "empty"):
        client.register_partition(name, ["x"], None, ["t"])
    client.put_samples([f"s{i}" for i in range(500)], "batch", scalars(500))
    client.put_samples([f"s{i}" for i in range(20_000)], "filter", scalars(20_000), tags=[{"version": 1}] * 20_000)


def wait(client: DataPlaneClient, kind: str, number: int) -> None:
    """Waits, as one client, until that client is closed."""
    with contextlib.suppress(DataPlaneError):
        if kind == "puts":
            client.put_samples([f"w{number}"], "full", scalars(1, 80_000))
        elif number % 3 == 0:
            client.claim_meta("batch", "t", ["x"], 512, timeout_s=LONG_S)
        elif number % 3 == 1:
            client.claim_meta("filter", "t", ["x"], 8, timeout_s=LONG_S, tag_filter={"version": (">=", 7)})
        else:
            client.claim_meta("empty", "t", ["x"], 8, timeout_s=LONG_S)


def start_waiting(client: DataPlaneClient, kind: str, numbers: range) -> None:
    """Starts them, as daemon threads."""
    for number in numbers:
        threading.Thread(target=wait, args=(client, kind, number), daemon=True).start()


def waiting_process(config: dict[str, Any], kind: str, numbers: range, pipe: Connection) -> None:
    """A process of clients that wait, until it is told to end."""
    client = connect(config, bootstrap=False)
    start_waiting(client, kind, numbers)
    pipe.send("started")
    pipe.recv()
    os._exit(0)


@contextlib.contextmanager
def waiting(client: DataPlaneClient, config: dict[str, Any], kind: str, count: int) -> Iterator[None]:
    """Keeps ``count`` clients waiting."""
    if config["backend"] == "noop":
        start_waiting(client, kind, range(count))
        yield
        return
    context = multiprocessing.get_context("spawn")
    attach = attaching(client, config)
    started = []
    try:
        for place in range(PROCESSES):
            here, there = context.Pipe()
            numbers = range(place, count, PROCESSES)
            process = context.Process(target=waiting_process, args=(attach, kind, numbers, there), daemon=True)
            process.start()
            started.append((process, here))
        for _, here in started:
            here.recv()
        yield
    finally:
        for process, here in started:
            here.send("end")
            process.join(30)


def store_process(client: DataPlaneClient) -> psutil.Process:
    """The process that keeps the store's control plane."""
    instance = getattr(backend_of(client), "_instance", None)
    if instance is not None:
        return psutil.Process(ray.get(instance.controller.__ray_call__.remote(lambda _: os.getpid())))
    for child in psutil.Process().children(recursive=True):
        if "backends.owner" in " ".join(child.cmdline()):
            return child
    return psutil.Process()


def cpu_share(process: psutil.Process, seconds: float) -> float:
    """Its CPU in percent of one core."""
    before, start = process.cpu_times(), time.perf_counter()
    time.sleep(seconds)
    after, end = process.cpu_times(), time.perf_counter()
    return 100 * (after.user + after.system - before.user - before.system) / (end - start)


def num_requests(client: DataPlaneClient) -> int | None:
    """How many requests Redis has got; None for other stores."""
    session = getattr(backend_of(client), "_session", None)
    if session is None:
        return None
    info = session.command("INFO", time.monotonic() + LONG_S, b"INFO", b"stats").decode()
    return next(int(line.partition(":")[2]) for line in info.splitlines() if line.startswith("total_reads_processed:"))


def others_ms(client: DataPlaneClient, kind: str, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each operation of one thread that writes and one that reads."""
    times: dict[str, list[float]] = {}
    end = time.perf_counter() + seconds

    def timed(name: str, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        call()
        times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    def write() -> None:
        number = 0
        while time.perf_counter() < end:
            if kind == "puts":
                timed("put of tags", lambda: client.put_samples(["r0"], "others", tags=[{"n": 1}]))
            else:
                ids = [f"n{number}.{i}" for i in range(8)]
                timed("put", lambda ids=ids: client.put_samples(ids, "others", scalars(8)))
                timed("claim", lambda: client.claim_meta("others", "t", ["x"], 8, blocking=False))
                timed("clear", lambda ids=ids: client.clear_samples(ids, "others"))
            number += 1
            time.sleep(0.005)

    def read() -> None:
        while time.perf_counter() < end:
            timed("read", lambda: client.get_samples([f"r{i}" for i in range(8)], "others", ["x"]))
            time.sleep(0.005)

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(name: str, kind: str, count: int, seconds: float) -> None:
    """One round; prints its lines of the table."""
    options = dict(OPTIONS.get(name, {}))
    if kind == "puts":
        options.update(capacity_bytes=CAPACITY_BYTES, on_full="block")
    config = {"backend": name, "options": options, "op_timeout_s": LONG_S}
    client = connect(config)
    try:
        fill(client, kind)
        process = store_process(client)
        idle = cpu_share(process, seconds / 2)
        alone = others_ms(client, kind, seconds)
        with waiting(client, config, kind, count):
            time.sleep(seconds / 2)  # many clients ask for the first time at once
            asked = num_requests(client)
            busy = cpu_share(process, seconds)
            asked = None if asked is None else num_requests(client) - asked
            beside = others_ms(client, kind, seconds)
        requests = "" if asked is None else f"; {asked / seconds:.0f} requests a second"
        print(
            f"{name}, {count} {kind} wait; CPU of the store's process: {idle:.1f} % without them, {busy:.1f} % with"
            f"{requests}"
        )
        for operation, before in alone.items():
            after = beside[operation]
            print(
                f"  {operation:12} p50 {percentile(before, 0.5):7.2f} -> {percentile(after, 0.5):7.2f} ms"
                f"   p99 {percentile(before, 0.99):7.2f} -> {percentile(after, 0.99):7.2f} ms"
            )
    finally:
        client._connection.config = client.config.model_copy(update={"op_timeout_s": 1.0})  # noop's puts wait on
        client.close()


def main() -> None:
    """Runs all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kinds", nargs="+", choices=["claims", "puts"], default=["claims", "puts"])
    parser.add_argument("--backends", nargs="+", default=["noop", "redis_store", "tq_simple"])
    options = parser.parse_args()
    for name in options.backends:
        for kind in options.kinds:
            measure(name, kind, options.waiting, options.seconds)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
