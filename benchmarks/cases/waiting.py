"""Clients that wait."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from benchmarks import bench
from benchmarks.bench import Processes, Table, case, scalars
from dataplane_core import DataPlaneClient, connect
from dataplane_core.errors import DataPlaneError

NUM_PROCESSES = 4


def cpu_share(pid: int, seconds: float) -> float:
    """The CPU of a process in percent of one core."""
    before, start = bench.cpu_s(pid), time.perf_counter()
    time.sleep(seconds)
    return 100 * (bench.cpu_s(pid) - before) / (time.perf_counter() - start)


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


def start_waiting(client: DataPlaneClient, kind: str, numbers: range) -> None:
    """Starts threads that wait, each as one client, until the client is closed."""

    def wait(number: int) -> None:
        with suppress(DataPlaneError):
            if kind == "puts":
                client.put_samples([f"w{number}"], "full", scalars(1, 80_000))
            elif number % 3 == 0:
                client.claim_meta("batch", "t", ["x"], 512, timeout_s=600.0)
            elif number % 3 == 1:
                client.claim_meta("filter", "t", ["x"], 8, timeout_s=600.0, tag_filter={"version": (">=", 7)})
            else:
                client.claim_meta("empty", "t", ["x"], 8, timeout_s=600.0)

    for number in numbers:
        threading.Thread(target=wait, args=(number,), daemon=True).start()


def end_puts_soon(client: DataPlaneClient) -> None:
    """Lets puts that wait end within a second: closing waits for them."""
    client._connection.config = client.config.model_copy(update={"op_timeout_s": 1.0})


def _waiting(number: int, config: dict[str, Any], kind: str, count: int) -> Generator[Any, Any, None]:
    start_waiting(connect(config, bootstrap=False), kind, range(number, count, NUM_PROCESSES))
    yield "started"


def others_ms(client: DataPlaneClient, kind: str, seconds: float) -> list[float]:
    """Milliseconds of the operations of one thread that writes and one that reads, 5 ms after each other."""
    end, times = time.perf_counter() + seconds, list[float]()

    def repeat(*operations: Callable[[int], Any]) -> None:
        for number in itertools.count():
            if time.perf_counter() > end:
                return
            times.extend(bench.timed_ms(partial(step, number)) for step in operations)
            time.sleep(0.005)

    def ids(number: int) -> list[str]:
        return [f"n{number}.{i}" for i in range(8)]

    writes = (lambda _: client.put_samples(["r0"], "others", tags=[{"n": 1}]),)
    if kind == "claims":
        writes = (
            lambda number: client.put_samples(ids(number), "others", scalars(8)),
            lambda _: client.claim_meta("others", "t", ["x"], 8, blocking=False),
            lambda number: client.clear_samples(ids(number), "others"),
        )
    with ThreadPoolExecutor(2) as pool:
        reads = pool.submit(repeat, lambda _: client.get_samples([f"r{i}" for i in range(8)], "others", ["x"]))
        for future in [pool.submit(repeat, *writes), reads]:
            future.result()
    return times


@case
def waiting(
    backends: tuple[str, ...] = ("noop", "redis_store", "tq_simple"),
    kinds: tuple[str, ...] = ("claims", "puts"),
    clients: int = 500,
    seconds: float = 10.0,
) -> Iterator[Table]:
    """The CPU of the process that holds the store while many clients wait, and how much they slow down others.

    A third of the claims waits for the last 12 of 512 samples, a third with a filter over 20,000 samples that do not
    match, a third in an empty partition. Puts wait in a full store. Those who wait are threads of four processes, of
    noop threads of this one. The others put, claim, clear and read 8 samples of one scalar, or write tags and read.
    """
    rows = []
    for backend in backends:
        shares, growth = [], []
        for kind in kinds:
            options = {"capacity_bytes": 1_000_000, "on_full": "block"} if kind == "puts" else {}
            config = bench.config_of(backend, **options)
            config["op_timeout_s"] = 600.0
            with ExitStack() as stack:
                client = stack.enter_context(connect(config))
                fill(client, kind)
                pid = bench.ledger_pid(client)
                alone = others_ms(client, kind, seconds)
                if backend == "noop":
                    start_waiting(client, kind, range(clients))
                    stack.callback(end_puts_soon, client)
                else:
                    arguments = (_waiting, NUM_PROCESSES, bench.attaching(client, config), kind, clients)
                    stack.enter_context(Processes(*arguments))
                time.sleep(seconds / 2)  # many clients ask for the first time at once
                shares.append(cpu_share(pid, seconds))
                growth.append(bench.percentile(others_ms(client, kind, seconds), 0.99) - bench.percentile(alone, 0.99))
        rows.append([backend, *shares, *growth])
    heads = [[f"{what}, {clients} {kind} wait" for kind in kinds] for what in ("CPU, %", "others' p99, ms more")]
    yield Table("waiting", ["", *itertools.chain(*heads)], rows)
