"""Claims that wait, and the asyncio client, on one host.

    python benchmarks/asyncio_client.py [BACKEND]

Prints: the time from a commit to the return of a claim that waits for it, with 64 waiting in four processes; what 2,000
idle waiting claims cost the store's process; 500 tasks of the asyncio client beside 16 threads of the synchronous one,
with small puts, claims, reads and acks; and how long the event loop stands still while a batch is put and read.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch
from configs import attaching

from dataplane_core import AsyncDataPlaneClient, DataPlaneClient, connect, connect_async
from dataplane_core.errors import ClientClosedError
from dataplane_core.spec import Scope

SPAWN = multiprocessing.get_context("spawn")
NUM_TASKS, PER_TASK = 500, 4


def config(backend: str) -> dict[str, Any]:
    """A store of this program's own."""
    options = {
        "shm_store": {"namespace": f"asyncio-{os.getpid()}"},
        "redis_store": {"server": "private", "namespace": f"asyncio-{os.getpid()}"},
    }
    return {"backend": backend, "options": options.get(backend, {})}


def claimer(config: dict[str, Any], told: Any, num_threads: int) -> None:
    """Threads of one process that claim one sample after the other, and say when they got it."""
    client = connect(config, bootstrap=False)

    def claim() -> None:
        while True:
            (sample_id,) = client.claim_meta("p", "t", ["x"], 1, timeout_s=300.0).sample_ids
            told.put((sample_id, time.clock_gettime(time.CLOCK_MONOTONIC)))
            if sample_id.startswith("end"):
                return

    threads = [threading.Thread(target=claim) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()


def woken(client: DataPlaneClient, made: dict[str, Any]) -> None:
    """Commit to return, with 64 claims that wait in four processes."""
    told = SPAWN.Queue()
    attach = attaching(client, made)
    processes = [SPAWN.Process(target=claimer, args=(attach, told, 16)) for _ in range(4)]
    for process in processes:
        process.start()
    time.sleep(15.0)
    took_ms = []
    for number in range(100):
        client.put_samples([f"s{number}"], "p", {"x": torch.zeros(1)})
        start = time.clock_gettime(time.CLOCK_MONOTONIC)
        _, end = told.get(timeout=60)
        took_ms.append(1e3 * (end - start))
        time.sleep(0.05)
    took_ms.sort()
    print(f"commit to return, 64 wait: median {statistics.median(took_ms):.2f} ms, 90 of 100 {took_ms[89]:.2f} ms")
    client.put_samples([f"end{i}" for i in range(64)], "p", {"x": torch.zeros(64)})
    for process in processes:
        process.join(60)


async def idle(made: dict[str, Any]) -> None:
    """What 2,000 claims that wait cost the processes that serve the store."""
    async with await connect_async(made) as client:
        await client.register_partition("p", ["x"], None, ["t"])
        servers = psutil.Process().children(recursive=True)
        claims = [asyncio.create_task(client.claim_meta("p", "t", ["x"], 1, timeout_s=300.0)) for _ in range(2000)]
        await asyncio.sleep(15.0)

        def cpu_s() -> float:
            return sum(sum(server.cpu_times()[:2]) for server in servers)

        before = cpu_s()
        await asyncio.sleep(20.0)
        print(f"2,000 claims wait: the store's processes use {(cpu_s() - before) / 0.2:.1f} % of a core")
        closing = asyncio.create_task(client.close())
        ended = await asyncio.gather(*claims, return_exceptions=True)
        assert all(isinstance(each, ClientClosedError) for each in ended)
        await closing


def small_in_threads(client: DataPlaneClient) -> float:
    """Operations per second of 16 threads."""
    one = torch.arange(32)[None]

    def work(task: int) -> None:
        for number in range(PER_TASK):
            client.put_samples([f"s{task}.{number}"], "p", {"x": one})
            meta = client.claim_meta("p", "t", ["x"], 1, lease_s=60.0)
            client.get_data(meta)
            client.ack(meta)

    with ThreadPoolExecutor(16) as pool:
        start = time.perf_counter()
        list(pool.map(work, range(NUM_TASKS)))
        return 4 * NUM_TASKS * PER_TASK / (time.perf_counter() - start)


async def small_in_tasks(client: AsyncDataPlaneClient) -> float:
    """Operations per second of 500 tasks."""
    one = torch.arange(32)[None]
    given: list[str] = []

    async def work(task: int) -> None:
        for number in range(PER_TASK):
            await client.put_samples([f"s{task}.{number}"], "p", {"x": one})
            meta = await client.claim_meta("p", "t", ["x"], 1, lease_s=60.0)
            given.extend(meta.sample_ids)
            await client.get_data(meta)
            await client.ack(meta)

    start = time.perf_counter()
    await asyncio.gather(*(work(task) for task in range(NUM_TASKS)))
    took_s = time.perf_counter() - start
    assert len(given) == len(set(given)) == NUM_TASKS * PER_TASK
    return 4 * NUM_TASKS * PER_TASK / took_s


async def tasks(made: dict[str, Any], threads: int) -> float:
    """As `small_in_tasks`, with a client of its own."""
    async with await connect_async(made, threads=threads) as client:
        await client.register_partition("p", ["x"], None, ["t"])
        return await small_in_tasks(client)


async def heartbeat(made: dict[str, Any]) -> None:
    """How long the loop stands still while a batch of 16 MB is put and read, ten times."""
    lengths = torch.randint(256, 2049, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    floats = torch.nested.nested_tensor_from_jagged(torch.rand(sum(lengths)), tokens.offsets())
    batch = {"input_ids": tokens, **{f"f{i}": floats for i in range(5)}}
    ids = [f"s{i}" for i in range(512)]
    late_ms: list[float] = []

    async def beat() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.002)
            late_ms.append(1e3 * (time.perf_counter() - start) - 2.0)

    async with await connect_async(made) as client:
        await client.register_partition("p", ["x"], None, ["t"])
        for number in range(12):
            if number == 2:  # the first rounds import and touch what they need
                start = time.perf_counter()
                gc.collect()  # looks at all of torch's objects, and would stop the loop as long as this takes
                print(f"a full garbage collection takes {(time.perf_counter() - start) * 1e3:.0f} ms")
                gc.freeze()
                beating = asyncio.create_task(beat())
            await client.put_samples(ids, "p", batch)
            await client.get_samples(ids, "p", list(batch))
        beating.cancel()
    print(f"the loop stood still for {max(late_ms):.1f} ms at most, of {len(late_ms)} beats, while batches moved")


def main() -> None:
    """Prints all."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "shm_store"
    made = config(backend)
    with connect(made) as client:
        client.register_partition("p", ["x"], None, ["t"])
        if client.scope is not Scope.PROCESS:  # other processes wait
            woken(client, made)
    asyncio.run(idle(made))
    for _ in range(3):
        with connect(made) as client:
            client.register_partition("p", ["x"], None, ["t"])
            threads = small_in_threads(client)
        found = {count: asyncio.run(tasks(made, count)) for count in (2, 4)}
        ratios = ", ".join(f"{rate / threads:.2f} with threads={count}" for count, rate in found.items())
        print(f"small operations: 16 threads {threads:.0f} a second; 500 tasks, times as many: {ratios}")
    asyncio.run(heartbeat(made))


if __name__ == "__main__":
    main()
