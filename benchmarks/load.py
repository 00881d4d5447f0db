"""A store under many connections: rates, latencies, and what its server takes.

Run:  python benchmarks/load.py --backend tq_simple [--connections 1024] [--period 40] [--seconds 30] [--size 16]
      [--fields 8] [--processes 4] [--partitions 1] [--ledgers 1] [--options '{"journal": "/a/folder"}']

Every connection is a client of its own, with its own thread, in one of a few processes. Each puts samples, claims as
many with a lease, gets them, acks them and clears them, and does so once per ``--period`` seconds; with 0, again at
once. What one puts, another may claim. The first of these rounds is spread over the period. Clients also announce
themselves, as always. With ``--partitions``, the connections use these in turn; with ``--ledgers``, the partitions are
spread over as many ledgers (`num_ledgers` of the config), each over another one if there are enough.

Shown are calls and samples for each second, the 50th and the 99th percentile of the latency of each call, and for each
process that keeps the store its connections, its CPU in percent of one core and in microseconds for each sample that
went through all five calls. Server and clients share the cores, so latencies hold the clients' own waits: with
more load than the cores bear they say how long the queue is. The CPU time for each sample is the figure to keep.

noop has no server: its clients are threads of one process, and the CPU shown is that of them all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
from configs import attaching
from server_cost import OPTIONS, ROW_VALUES, STEPS, batch, cpu_s, server_pids

from dataplane_core import DataPlaneClient, connect
from dataplane_core.backends import ledger_of
from dataplane_core.errors import DataPlaneError

LONG_S = 300.0
LEASE_S = 600.0


def partitions_of(arguments: argparse.Namespace) -> list[str]:
    """Names of partitions that lie on the ledgers in turn."""
    names: list[str] = []
    for number in range(1000 * arguments.partitions):
        if len(names) < arguments.partitions:
            wanted = len(names) % arguments.ledgers
            if ledger_of(f"load-{number}", arguments.ledgers) == wanted:
                names.append(f"load-{number}")
    return names


class Load:
    """The connections of one process."""

    def __init__(self, clients: list[DataPlaneClient], first: int, arguments: argparse.Namespace) -> None:
        self._clients = clients
        self._first = first
        self._arguments = arguments
        self._ended = threading.Event()
        self._measured_from = float("inf")
        self.times: dict[str, list[float]] = {step: [] for step in STEPS}
        self.errors: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(client, first + number), daemon=True)
            for number, client in enumerate(clients)
        ]

    def start(self) -> None:
        """Starts all connections."""
        for thread in self._threads:
            thread.start()

    def measure(self) -> None:
        """Counts calls that begin from now on."""
        self._measured_from = time.perf_counter()

    def end(self) -> None:
        """Waits until every connection has ended its round."""
        self._measured_until = time.perf_counter()
        self._ended.set()
        for thread in self._threads:
            thread.join(LONG_S)

    def _run(self, client: DataPlaneClient, number: int) -> None:
        size, period_s = self._arguments.size, self._arguments.period
        partitions = partitions_of(self._arguments)
        partition = partitions[number % len(partitions)]
        fields = [f"field{each}" for each in range(self._arguments.fields)]
        columns = batch(size, len(fields))
        tags: list[dict[str, Any]] = [{"input_lengths": 100, "version": 7}] * size
        due, turn = time.perf_counter() + random.Random(number).random() * period_s, 0
        while not self._ended.wait(max(0.0, due - time.perf_counter())):
            ids = [f"c{number}-{turn}-{each}" for each in range(size)]
            try:
                self._timed("put", lambda ids=ids: client.put_samples(ids, partition, columns, tags=tags))
                claim = lambda: client.claim_meta(partition, "t", fields, size, lease_s=LEASE_S)  # noqa: E731
                meta = self._timed("claim", claim)
                held = meta.sample_ids
                self._timed("get", lambda held=held: client.get_samples(held, partition, fields))
                self._timed("ack", lambda meta=meta: client.ack(meta))
                self._timed("clear", lambda held=held: client.clear_samples(held, partition))
            except DataPlaneError as error:
                self.errors[f"{type(error).__name__}: {str(error)[:150]}"] += 1
            due, turn = max(due + period_s, time.perf_counter() - period_s), turn + 1

    def _timed(self, step: str, call: Any) -> Any:
        start = time.perf_counter()
        made = call()
        if start >= self._measured_from and not self._ended.is_set():
            self.times[step].append(time.perf_counter() - start)
        return made


def open_clients(config: dict[str, Any], count: int) -> list[DataPlaneClient]:
    """Attaches that many clients, a few at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda _: connect(config, bootstrap=False), range(count)))


def allow_open_files() -> None:
    """Raises this process's limit of open files as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def load_process(
    config: dict[str, Any], count: int, first: int, arguments: argparse.Namespace, pipe: Connection
) -> None:
    """A process of clients, told through the pipe what to do next."""
    allow_open_files()
    clients = open_clients(config, count)
    load = Load(clients, first, arguments)
    pipe.send("attached")
    for act in (load.start, load.measure, load.end):
        pipe.recv()
        act()
        pipe.send("done")
    pipe.send((load.times, load.errors))
    pipe.recv()
    os._exit(0)  # without closing a thousand clients one by one


class Processes:
    """Processes of clients."""

    def __init__(self, config: dict[str, Any], arguments: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(arguments.processes):
            here, there = context.Pipe()
            share = len(range(number, arguments.connections, arguments.processes))
            first = number * arguments.connections
            process = context.Process(target=load_process, args=(config, share, first, arguments, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers()

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]

    def tell(self) -> None:
        """Has all do the next thing, and waits until they have."""
        for pipe in self._pipes:
            pipe.send("next")
        self._answers()

    start = measure = end = tell

    def results(self) -> list[tuple[dict[str, list[float]], Counter[str]]]:
        """What each has measured. Ends them."""
        found = self._answers()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send("end")
            process.join(LONG_S)
        return found


def percentile_ms(values: list[float], percent: float) -> float:
    """Of latencies in seconds."""
    return float(np.percentile(values, percent)) * 1e3 if values else float("nan")


def num_connections(pid: int) -> int:
    """Connections that a process has now, without those on which it waits for new ones."""
    found = psutil.Process(pid).net_connections("all")
    return sum(each.status == "ESTABLISHED" or (each.status == "NONE" and bool(each.laddr)) for each in found)


def main() -> None:
    """Runs the load, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="redis_store")
    parser.add_argument("--connections", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--size", type=int, default=16, help="samples of each call")
    parser.add_argument("--fields", type=int, default=8)
    parser.add_argument("--period", type=float, default=40.0, help="seconds from round to round; 0: at once")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which it measures")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--ledgers", type=int, default=1)
    parser.add_argument("--options", type=json.loads, default={}, help="more options of the backend, as JSON")
    arguments = parser.parse_args()
    allow_open_files()
    options = OPTIONS.get(arguments.backend, {}) | arguments.options
    config = {"backend": arguments.backend, "options": options, "op_timeout_s": LONG_S}
    config["num_ledgers"] = arguments.ledgers
    with connect(config, bootstrap=True) as client:
        for name in partitions_of(arguments):
            client.register_partition(name, [f"field{each}" for each in range(arguments.fields)], None, ["t"])
        pids = server_pids(client)
        start = time.perf_counter()
        load: Any
        if arguments.backend == "noop":
            load = Load([client] * arguments.connections, 0, arguments)
        else:
            load = Processes(attaching(client, config), arguments)
        print(f"{arguments.connections} clients attached in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        load.start()
        time.sleep(min(arguments.period, 20.0) or 5.0)
        load.measure()
        before, start = {name: cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
        time.sleep(arguments.seconds)
        spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
        measured_s = time.perf_counter() - start
        connections = {name: num_connections(pid) for name, pid in pids.items()}
        load.end()
        results = [(load.times, load.errors)] if isinstance(load, Load) else load.results()
    times = {step: [value for each, _ in results for value in each[step]] for step in STEPS}
    errors = sum((found for _, found in results), Counter[str]())
    num_samples = sum(map(len, times.values())) / len(STEPS) * arguments.size
    print(
        f"{arguments.backend}: {arguments.connections} connections, calls of {arguments.size} samples of "
        f"{arguments.fields} fields of {ROW_VALUES} float32"
    )
    calls_per_s, samples_per_s = sum(map(len, times.values())) / measured_s, num_samples / measured_s
    print(f"{calls_per_s:.0f} calls/s, {samples_per_s:.0f} samples/s through all five calls")
    print(f"{'':10}{'p50 ms':>9}{'p99 ms':>9}")
    for step, values in times.items():
        print(f"{step:10}{percentile_ms(values, 50):9.2f}{percentile_ms(values, 99):9.2f}")
    for name, used_s in spent.items():
        print(
            f"{name}: {connections[name]} connections, {100 * used_s / measured_s:.1f} % of a core, "
            f"{used_s / num_samples * 1e6:.1f} us for each sample"
        )
    for error, count in errors.items():
        print(f"{count} times {error}")


if __name__ == "__main__":
    main()
