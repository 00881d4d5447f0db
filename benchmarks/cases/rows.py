"""Rows of 1 GiB, many readers of a batch, the cost of a row, and claims out of many rows."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch

from benchmarks import bench
from benchmarks.bench import Processes, Step, Steps, Table, case, client_steps, medians_ms, random_rows
from dataplane_core import connect

COPY = "copy"
MIB = 1 << 20

# --- large rows -------------------------------------------------------------------------------------------------------


def _copy(number: int, size: int) -> Generator[Any, Any, None]:
    """A process that copies a row to new memory, and from there to new memory."""
    row = torch.full((1, size), number, dtype=torch.uint8)
    yield "ready"
    row, seconds, more = bench.watched(row.clone)
    yield seconds, more
    row, seconds, more = bench.watched(row.clone)
    yield seconds, more - size


def _put_and_get(number: int, config: dict[str, Any], size: int) -> Generator[Any, Any, None]:
    """A process that puts a row and reads it."""
    row = torch.full((1, size), number, dtype=torch.uint8)
    with connect(config, bootstrap=False) as client:
        client.put_samples([f"warm{number}"], "large", {"x": row[:, :8]})
        yield "ready"
        _, seconds, more = bench.watched(lambda: client.put_samples([f"large{number}"], "large", {"x": row}))
        yield seconds, more
        columns, seconds, more = bench.watched(lambda: client.get_samples([f"large{number}"], "large", ["x"]))
        assert torch.equal(columns["x"], row)
        yield seconds, more - size


@case
def large_rows(
    backends: tuple[str, ...] = (COPY, "shm_store", "tq_simple", "tq_simple wire"), megabytes: int = 1024
) -> Iterator[Table]:
    """Two processes put and read a row of 1 GiB each, while this one puts and reads 4 bytes again and again.

    Extra memory is the most private memory that a process has beyond what it has before and the row that it reads. With
    "copy" the two processes only copy their rows, and the small rows are in shm_store.
    """
    rows = []
    for name in backends:
        config = bench.config_of("shm_store" if name == COPY else name)
        size, times, ended = megabytes * MIB, list[float](), threading.Event()
        with connect(config) as client:
            for partition in ("large", "small"):
                client.register_partition(partition, ["x"], None, ["train"])
            put, get, _ = client_steps(client, bench.scalars(1), "small")

            def small(put: Step = put, get: Step = get, times: list[float] = times, ended: Any = ended) -> None:
                while not ended.is_set():
                    times.append(bench.timed_ms(lambda: (put(), get())))

            arguments = (_copy, 2, size) if name == COPY else (_put_and_get, 2, bench.attaching(client, config), size)
            with Processes(*arguments) as processes:
                thread = threading.Thread(target=small)
                thread.start()
                answers = [processes.ask() for _ in ("put", "get")]
                ended.set()
                thread.join()
        (put_s, put_more), (get_s, get_more) = (map(max, zip(*answer, strict=True)) for answer in answers)
        rows.append([name, put_s, get_s, put_more // MIB, get_more // MIB, bench.percentile(times, 0.5), max(times)])
    extra = [f"extra memory of a {what}, MiB" for what in ("put", "get")]
    yield Table("large-rows", ["", "put s", "get s", *extra, "small put and read, median ms", "the longest"], rows)


# --- readers ----------------------------------------------------------------------------------------------------------


def _read(number: int, shared: SharedMemory, configs: dict[str, Any]) -> Generator[Any, Any, None]:
    """A process that reads batch B of the store that it is told."""
    source = np.frombuffer(shared.buf, dtype=np.uint8)
    target = np.ones(len(source), dtype=np.uint8)
    names = list(bench.batch("B").keys())
    ids = [f"prompt{i // 8}_g{i % 8}" for i in range(512)]
    with ExitStack() as stack:
        steps: dict[str, Step] = {COPY: lambda: np.copyto(target, source)}
        for name, config in configs.items():
            client = stack.enter_context(connect(config, bootstrap=False))
            steps[name] = lambda client=client: client.get_samples(ids, "bench", names)
        order = yield "ready"
        while True:
            steps[order]()
            order = yield "done"


@case
def readers(
    backends: tuple[str, ...] = ("shm_store", "tq_simple"), readers: int = 8, rounds: int = 5
) -> Iterator[Table]:
    """Many processes of a node read batch B at the same time, beside as many plain copies out of shared memory."""
    columns = bench.batch("B")
    with ExitStack() as stack:
        shared = SharedMemory(create=True, size=bench.size_bytes(columns))
        stack.callback(shared.unlink)
        configs = {}
        for name in backends:
            config = bench.config_of(name)
            client = stack.enter_context(connect(config, "auto"))
            client_steps(client, columns)[0]()
            configs[name] = bench.attaching(client, config)
        processes = stack.enter_context(Processes(_read, readers, shared, configs))
        steps: dict[str, Steps] = {
            name: (lambda name=name: processes.ask(name), lambda: None) for name in (COPY, *configs)
        }
        medians = {name: ms for name, (ms,) in medians_ms(steps, rounds).items()}
    rows = [[name, ms, ms / medians[COPY]] for name, ms in medians.items()]
    yield Table("readers", [f"{readers} readers", "ms", "times the copies"], rows)


# --- the cost of a row, and claims out of many ------------------------------------------------------------------------


@case
def row_cost(backends: tuple[str, ...] = ("redis_store", "tq_mooncake"), rounds: int = 15) -> Iterator[Table]:
    """What a stored row costs beside its bytes: the KiB that a put and a get move in the time that one more row takes.

    It is the `row_cost_bytes` of a backend. From puts and gets of thousands of small rows, and of a few large ones.
    """
    small, large = random_rows(4000, 512), random_rows(256, MIB // 4)
    batches = {"small": small, "half": small[:2000], "large": large, "few": large[:64]}
    rows = []
    for backend in backends:
        with connect(bench.config_of(backend)) as client:
            steps = {name: client_steps(client, {"x": batch}, name) for name, batch in batches.items()}
            took = medians_ms(steps, rounds)
        costs = []
        for small_ms, half_ms, large_ms, few_ms in zip(*took.values(), strict=True):
            kib_ms = (large_ms - few_ms) / (192 * 256)
            costs.append((small_ms - half_ms) / 2000 / kib_ms - 0.5)
        rows.append([backend, *costs])
    yield Table("row-cost", ["a row costs", "of a put, KiB", "of a get, KiB"], rows)


@case
def claims(
    sizes: tuple[int, ...] = (10_000, 1_000_000), backends: tuple[str, ...] = ("redis_store",), rounds: int = 19
) -> Iterator[Table]:
    """Claims of 512 samples out of many that are ready: the first one, which finds them, and the median of others."""
    rows = []
    for backend in backends:
        with connect(bench.config_of(backend)) as client:
            for size in sizes:
                client.register_partition(f"claims{size}", ["x"], None, ["train"])
                for start in range(0, size, 10_000):
                    count = min(10_000, size - start)
                    client.put_samples([f"s{start + i}" for i in range(count)], f"claims{size}", bench.scalars(count))
                claim = partial(client.claim_meta, f"claims{size}", "train", ["x"], 512)
                first, *later = (bench.timed_ms(claim) for _ in range(rounds))
                rows.append([f"{backend}, {size:,} ready", first, statistics.median(later)])
    yield Table("claims", ["a claim of 512", "first, ms", "later, ms"], rows)
