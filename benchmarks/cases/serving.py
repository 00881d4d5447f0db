"""How much work one store bears: CPU for each sample, a run's share of a core, many connections, and memory."""

from __future__ import annotations

import gc
import itertools
import random
import resource
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch
from tensordict import TensorDict

from benchmarks import bench
from benchmarks.bench import Processes, Table, case
from dataplane_core import DataPlaneClient, connect
from dataplane_core.backends import ledger_of
from dataplane_core.errors import DataPlaneError
from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import FieldSpec, new_id

STEPS = ("put", "claim", "get", "ack", "clear")


def columns_of(size: int, fields: int, values: int) -> TensorDict:
    """Rows of float32 in every field."""
    return TensorDict({f"field{number}": torch.rand(size, values) for number in range(fields)}, batch_size=[size])


def rounds_of(client: DataPlaneClient, partition: str, columns: TensorDict) -> Callable[[str], dict[str, Any]]:
    """The five calls of a round with samples of a prefix: put with two tags, claim with a lease, get, ack, clear.

    What one client puts, another may claim; so the round goes on with what it claimed.
    """
    size, fields = len(columns), list(columns.keys())
    tags = [{"input_lengths": 100, "version": 7}] * size

    def calls(prefix: str) -> dict[str, Any]:
        ids, claimed = [f"{prefix}-{number}" for number in range(size)], []

        def claim() -> None:
            claimed.append(client.claim_meta(partition, "t", fields, size, lease_s=600.0))

        return {
            "put": lambda: client.put_samples(ids, partition, columns, tags=tags),
            "claim": claim,
            "get": lambda: client.get_data(claimed[0]),
            "ack": lambda: client.ack(claimed[0]),
            "clear": lambda: client.clear_samples(claimed[0].sample_ids, partition),
        }

    return calls


# --- CPU of the servers -----------------------------------------------------------------------------------------------


def costs(
    backend: str, size: int, fields: int, values: int, seconds: float, journal: str
) -> dict[str, dict[str, float]]:
    """Server -> call -> CPU microseconds for each sample, in calls of ``size`` samples, one after another."""
    options = {"journal": journal} if journal else {}
    if backend == "shm_store":
        options["capacity_bytes"] = 1 << 30
    with connect(bench.config_of(backend, **options)) as client:
        columns = columns_of(size, fields, values)
        client.register_partition("cost", list(columns.keys()), None, ["t"])
        pids, calls = bench.server_pids(client), rounds_of(client, "cost", columns)
        spent = {name: Counter[str]() for name in pids}
        for number in itertools.count(-10):  # the first rounds warm up
            if number == 0:
                end = time.perf_counter() + seconds
            elif number > 0 and time.perf_counter() > end:
                break
            for step, call in calls(str(number)).items():
                before = {name: bench.cpu_s(pid) for name, pid in pids.items()}
                call()
                for name, pid in pids.items():
                    spent[name][step] += (bench.cpu_s(pid) - before[name]) * (number >= 0)
    return {f"{backend}, {name}": {step: spent[name][step] / number / size * 1e6 for step in STEPS} for name in pids}


@case
def server_cost(
    backends: tuple[str, ...] = ("redis_store", "tq_simple", "shm_store"),
    sizes: tuple[int, ...] = (1, 16, 512),
    fields: int = 8,
    values: int = 16,
    seconds: float = 3.0,
    journal: str = "",
) -> Iterator[Table]:
    """CPU microseconds of a store's own processes for each sample that is put, claimed, read, acked and cleared once.

    A field is a row of so many float32. The servers are Redis and its owner; tq_simple's controller and its storage
    unit; the ledger process of shm_store; of noop this process. Work of other programs changes the figures little. A
    server that is busy all the time takes less for each call, since it sleeps less often (`load` shows that).
    """
    rows: dict[str, list[float]] = {}
    for backend in backends:
        for size in sizes:
            for server, steps in costs(backend, size, fields, values, seconds, journal).items():
                rows.setdefault(server, []).append(sum(steps.values()))
    heads = [f"{size} sample{'s' * (size > 1)}" for size in sizes]
    yield Table("server-cost", ["calls of", *heads], [[server, *sums] for server, sums in rows.items()])


@case
def scaling(
    backends: tuple[str, ...] = ("redis_store", "tq_simple", "shm_store"),
    gpus: tuple[int, ...] = (8, 64, 512),
    rate: float = 2.0,
    tokens: int = 1536,
    size: int = 16,
    seconds: float = 3.0,
) -> Iterator[Table]:
    """How much of a core of each server a run takes, computed from `server-cost` and stated assumptions.

    Each GPU finishes ``--rate`` samples per second, of ``--tokens`` tokens in one int64 and five float32 columns, 28
    bytes a token. A sample is put twice, by the rollout and by whoever adds columns; two tasks claim, get and ack it;
    one call clears it. Calls have ``--size`` samples. Its bytes pass the server three times: in once, out twice. A
    process with one thread ends at 100 %; plan for half of that. A second put that adds a few columns moves fewer bytes
    than are measured, so the CPU is rather too high.
    """
    samples, num_bytes = [count * rate for count in gpus], tokens * 28
    rows: list[Any] = [
        ["samples per second", *samples],
        ["MB per second through the server", *(3 * num_bytes * each_second / 1e6 for each_second in samples)],
    ]
    times = {"put": 2, "claim": 2, "get": 2, "ack": 2, "clear": 1}
    for backend in backends:
        for server, steps in costs(backend, size, 8, num_bytes // 32, seconds, "").items():
            sample_us = sum(times[step] * us for step, us in steps.items())
            rows.append([f"{server}, % of a core", *(each_second * sample_us / 1e4 for each_second in samples)])
    yield Table("scaling", ["", *(f"{count} GPUs" for count in gpus)], rows)


# --- many connections -------------------------------------------------------------------------------------------------


def _allow_open_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _load(
    number: int, config: dict[str, Any], count: int, partitions: Sequence[str], columns: Any, period_s: float
) -> Generator[Any, str, None]:
    """A process of clients with a thread each. It is told to start, to measure from now on, and to end."""
    _allow_open_files()
    times: dict[str, list[float]] = {step: [] for step in STEPS}
    errors, ended, measures = Counter[str](), threading.Event(), threading.Event()

    def run(client: DataPlaneClient, number: int) -> None:
        calls = rounds_of(client, partitions[number % len(partitions)], columns)
        due = time.perf_counter() + random.Random(number).random() * period_s  # spreads the first rounds
        for turn in itertools.count():
            if ended.wait(max(0.0, due - time.perf_counter())):
                return
            try:
                for step, call in calls(f"c{number}-{turn}").items():
                    ms = bench.timed_ms(call)
                    if measures.is_set():
                        times[step].append(ms)
            except DataPlaneError as error:
                errors[f"{type(error).__name__}: {str(error)[:150]}"] += 1
            due = max(due + period_s, time.perf_counter() - period_s)

    with ThreadPoolExecutor(8) as pool:
        clients = list(pool.map(lambda _: connect(config, bootstrap=False), range(count)))
    threads = [
        threading.Thread(target=run, args=pair, daemon=True) for pair in zip(clients, itertools.count(number * count))
    ]
    yield "attached"
    for thread in threads:
        thread.start()
    yield "started"
    measures.set()
    yield "measures"
    measures.clear()
    ended.set()
    for thread in threads:
        thread.join(300.0)
    yield times, errors


@case
def load(
    backend: str = "redis_store",
    connections: int = 1024,
    processes: int = 4,
    size: int = 16,
    fields: int = 8,
    period: float = 40.0,
    seconds: float = 30.0,
    partitions: int = 1,
    ledgers: int = 1,
    journal: str = "",
) -> Iterator[Table]:
    """A store under many connections: rates, latencies, and what its servers take.

    Every connection is a client of its own, with a thread, in one of a few processes. Each makes a round of five calls
    once per ``--period`` seconds; with 0, again at once. Partitions are used in turn, and spread over the ledgers.
    Server and clients share the cores, so latencies hold the clients' own waits: the CPU for each sample, through all
    five calls, is the figure to keep.
    """
    _allow_open_files()
    named = (f"load-{number}" for number in itertools.count())
    names = [
        next(name for name in named if ledger_of(name, ledgers) == number % ledgers) for number in range(partitions)
    ]
    config = {**bench.config_of(backend, **({"journal": journal} if journal else {})), "num_ledgers": ledgers}
    columns = columns_of(size, fields, 16)
    with connect(config) as client:
        for name in names:
            client.register_partition(name, list(columns.keys()), None, ["t"])
        pids = bench.server_pids(client)
        arguments = (bench.attaching(client, config), connections // processes, names, columns, period)
        with Processes(_load, processes, *arguments) as members:
            members.ask("start")
            time.sleep(min(period, 20.0) or 5.0)
            members.ask("measure")
            before, start = {name: bench.cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
            time.sleep(seconds)
            spent = {name: bench.cpu_s(pid) - before[name] for name, pid in pids.items()}
            measured_s = time.perf_counter() - start
            num_open = {name: len(psutil.Process(pid).net_connections("all")) for name, pid in pids.items()}
            results = members.ask("end")
    times = {step: [ms for by_step, _ in results for ms in by_step[step]] for step in STEPS}
    num_calls = sum(map(len, times.values()))
    num_samples = num_calls / len(STEPS) * size
    rows: list[Any] = []
    for step, ms in times.items():
        rows.append([f"{step}, ms: p50 / p99", (bench.percentile(ms, 0.5), bench.percentile(ms, 0.99))])
    rows.append(["calls a second", num_calls / measured_s])
    rows.append(["samples a second, through all five calls", num_samples / measured_s])
    for name, used_s in spent.items():
        rows.append([f"{name}: open connections", num_open[name]])
        rows.append([f"{name}: % of a core", 100 * used_s / measured_s])
        rows.append([f"{name}: us for each sample", used_s / num_samples * 1e6])
    rows += [[error, number] for error, number in sum((errors for _, errors in results), Counter[str]()).items()]
    yield Table("load", [f"{backend}, {connections} connections", ""], rows)


# --- the ledger's memory ----------------------------------------------------------------------------------------------

FIELDS = [f"field{number}" for number in range(8)]


def filled(num_samples: int, num_puts: int, group_size: int | None, lease_s: float | None) -> Ledger:
    """A ledger with samples of 8 fields, in batches of 512. Groups also have two tags; 0 as lease_s claims none."""
    ledger = Ledger()
    ledger.apply(commands.RegisterRequest("p", FIELDS, None, ["t"], group_size, {}, "e"), 0.0)
    for first in range(0, num_samples, 512):
        numbers = range(first, min(first + 512, num_samples))
        ids = [f"q{n // group_size}_g{n % group_size}" if group_size else f"sample{n}" for n in numbers]
        tags = [{"input_lengths": 100 + n % 50, "version": 7} for n in numbers] if group_size else None
        for put in range(num_puts):
            fields = FIELDS[put::num_puts]
            specs = dict.fromkeys(fields, FieldSpec("tensor", "float32", 1))
            begin = commands.BeginPut("p", ids, specs, [commands.Write(fields, [64] * len(ids))], tags, ttl_s=9.0)
            ledger.apply(commands.CommitPut(ledger.apply(begin, 0.0)), 0.0)
        if lease_s != 0.0:
            terms = {"all_or_nothing": False, "lease_s": lease_s, "token": f"{first:032x}"}
            ledger.apply(commands.ClaimRequest("p", "t", FIELDS, 512, **terms), 0.0)
    return ledger


def with_requests(count: int) -> Ledger:
    """A ledger that carried out requests, whose ids are kept until a minute after their deadlines."""
    ledger = Ledger()
    ledger.apply(commands.RegisterRequest("p", FIELDS, None, ["t"], None, {}, "e"), 0.0)
    for _ in range(count):
        ledger.apply(commands.AckRequest("p", "t", [], [], request_id=new_id(), left_s=60.0), 0.0)
    return ledger


@case
def ledger(samples: int = 100_000) -> Iterator[Table]:
    """Bytes of the ledger's memory for each sample with 8 fields, with its id, and for the id of each request."""
    ledgers: dict[str, Callable[[], Ledger]] = {
        "one put, nothing else": lambda: filled(samples, 1, None, 0.0),
        "two puts, nothing else": lambda: filled(samples, 2, None, 0.0),
        "one put, two tags, groups of 8": lambda: filled(samples, 1, 8, 0.0),
        "the same, all leased": lambda: filled(samples, 1, 8, 60.0),
        "the same, all consumed": lambda: filled(samples, 1, 8, None),
        "the id of a request": lambda: with_requests(samples),
    }
    rows = []
    for label, make in ledgers.items():
        tracemalloc.start()
        kept = make()
        gc.collect()
        rows.append([label, tracemalloc.get_traced_memory()[0] / samples])
        tracemalloc.stop()
        del kept
    yield Table("ledger", ["", "bytes"], rows)
