"""shm_store in a folder beside shm_store: puts and reads, puts that are on the disk when they return, and the restart.

Run:  OMP_NUM_THREADS=1 python benchmarks/durable.py [--rounds 30] [--disk FOLDER] [--rows 100000] [--gigabytes 8]

Prints the milliseconds of a put and a read of batches A and B (`batches.py`): plain, in a folder in /dev/shm, in a
folder on a disk, and there with ``sync: commit``, beside a file of as many bytes that is written and synced
(``write`` and ``fdatasync``, over a file that is there and into a new one). Rounds are interleaved. Then how many MB a
second 1, 4 and 16 processes put with ``sync: commit``, beside one process that writes and syncs a file. Then the
seconds of a start on a folder with so many rows of so many bytes in all, after all its processes were killed, and of
the first read.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from batches import NUM_SAMPLES, batch, client_steps, describe, medians_ms, size_bytes

from dataplane_core import connect
from dataplane_testkit import backend_of

MEMORY = Path("/dev/shm")


def config_of(name: str, folder: Path | None = None, sync: str = "none", **options: Any) -> dict[str, Any]:
    """A store of its own."""
    chosen: dict[str, Any] = {"namespace": f"durable-{os.getpid()}-{name}", **options}
    if folder is not None:
        chosen |= {"durable": str(folder / name), "sync": sync}
    return {"backend": "shm_store", "options": chosen}


@contextmanager
def folder_in(parent: Path) -> Iterator[Path]:
    """A folder, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="dataplane-durable-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def write_ms(folder: Path, num_bytes: int, rounds: int, *, new: bool) -> float:
    """Median milliseconds to write and sync a file: a new one, or one that is there."""
    data = memoryview(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy())
    times = []
    path = folder / "file"
    for number in range(rounds + 1):
        if new:
            path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        begun = time.perf_counter()
        left = data
        while left:
            left = left[os.write(fd, left) :]
        os.fdatasync(fd)
        if number:
            times.append((time.perf_counter() - begun) * 1e3)
        os.close(fd)
    path.unlink()
    return statistics.median(times)


def compare(name: str, disk: Path, rounds: int) -> None:
    """Puts and reads of one batch, on all kinds of stores."""
    columns = batch(name)
    print(f"\n{describe(name, columns)}\n| | put | get |\n|---|---|---|")
    with ExitStack() as stack:
        memory, on_disk = stack.enter_context(folder_in(MEMORY)), stack.enter_context(folder_in(disk))
        configs = {
            "plain": config_of("plain"),
            "durable, tmpfs": config_of("memory", memory),
            "durable, disk": config_of("disk", on_disk),
            "durable, disk, sync: commit": config_of("synced", on_disk, "commit"),
        }
        clients = {each: stack.enter_context(connect(config)) for each, config in configs.items()}
        steps = {each: client_steps(client, columns) for each, client in clients.items()}
        for each, (put, get) in medians_ms(steps, rounds).items():
            print(f"| {each} | {put:.1f} | {get:.1f} |", flush=True)
        for new in (False, True):
            what = "a new file" if new else "the same file again"
            print(f"| write and fdatasync, {what} | {write_ms(on_disk, size_bytes(columns), rounds, new=new):.1f} | |")


def put_for(number: int, config: dict[str, Any], seconds: float, start: Any, results: Any) -> None:
    """Puts and clears batch A until the time is over. Reports its puts."""
    torch.set_num_threads(1)
    columns = batch("A")
    ids = [f"{number}.{i}" for i in range(NUM_SAMPLES)]
    with connect(config, bootstrap=False) as client:
        client.put_samples(ids, "bench", columns)
        start.wait()
        end, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            client.put_samples(ids, "bench", columns)
            count += 1
        results.put(count)


def many_writers(disk: Path, seconds: float) -> None:
    """Puts with ``sync: commit`` by several processes."""
    columns = batch("A")
    print(f"\nMB/s put with sync: commit, {describe('A', columns)}\n| writers | MB/s |\n|---|---|")
    context = multiprocessing.get_context("spawn")
    with folder_in(disk) as folder:
        for writers in (1, 4, 16):
            config = config_of(f"writers{writers}", folder, "commit", capacity_bytes=3 << 30)
            with connect(config) as owner:
                owner.register_partition("bench", list(columns.keys()), None, [])
                start, results = context.Barrier(writers + 1), context.SimpleQueue()
                run: Callable[..., Any] = context.Process
                processes = [run(target=put_for, args=(i, config, seconds, start, results)) for i in range(writers)]
                for process in processes:
                    process.start()
                start.wait()
                begun = time.perf_counter()
                count = sum(results.get() for _ in processes)
                took = time.perf_counter() - begun
                for process in processes:
                    process.join()
            print(f"| {writers} | {count * size_bytes(columns) / took / 1e6:.0f} |", flush=True)
        took_ms = write_ms(folder, size_bytes(columns), 20, new=False)
        print(f"| one process that writes and syncs a file | {size_bytes(columns) / took_ms / 1e3:.0f} |")


def fill(config: dict[str, Any], rows: int, row_bytes: int) -> None:
    """Puts so many rows and ends by SIGKILL, with the ledger's process."""
    client = connect(config)
    client.register_partition("bench", ["x"], None, ["train"])
    column = torch.zeros(1000, row_bytes, dtype=torch.uint8)
    for first in range(0, rows, 1000):
        ids = [f"s{i}" for i in range(first, min(first + 1000, rows))]
        column += 1
        client.put_samples(ids, "bench", {"x": column[: len(ids)]})
    ledger = backend_of(client)._process
    os.kill(ledger.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def restart(parent: Path, rows: int, size: float) -> None:
    """Starts on a folder whose processes were killed."""
    row_bytes = max(1, int(size / rows))
    with folder_in(parent) as folder:
        config = config_of("restart", folder, capacity_bytes=int(size * 1.2) + (64 << 20))
        process = multiprocessing.get_context("spawn").Process(target=fill, args=(config, rows, row_bytes))
        process.start()
        process.join()
        begun = time.perf_counter()
        with connect(config_of("empty")):
            empty_s = time.perf_counter() - begun
        begun = time.perf_counter()
        with connect(config) as client:
            started = time.perf_counter()
            column = client.get_samples(["s0", f"s{rows - 1}"], "bench", ["x"])["x"]
            read = time.perf_counter()
            assert client.list_samples("bench").size == rows
            assert column[0, 0] == 1, column
        print(
            f"\n{rows} rows, {size / 1e9:.1f} GB in {parent}: start {started - begun:.2f} s, first read of 2 rows "
            f"{(read - started) * 1e3:.0f} ms; start of an empty plain store {empty_s:.2f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--disk", type=Path, default=Path("."), help="a folder on the disk to measure")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--only", choices=["compare", "writers", "restart"])
    options = parser.parse_args()
    if options.only in (None, "compare"):
        for name in ("A", "B"):
            compare(name, options.disk, options.rounds)
    if options.only in (None, "writers"):
        many_writers(options.disk, options.seconds)
    if options.only in (None, "restart"):
        size = options.gigabytes * 1e9
        for parent in (MEMORY, options.disk):
            if parent == MEMORY and psutil.virtual_memory().available < 1.2 * size:
                print(f"\nThe memory is too small for {size / 1e9:.1f} GB in {parent}.")
            else:
                restart(parent, options.rows, size)


if __name__ == "__main__":
    main()
