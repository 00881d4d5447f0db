"""Opening a `BlobStore` that was used for long, against a fresh one of as many rows; and how large its file is.

    python benchmarks/journal.py memory 100000      # records, in a store of dicts
    python benchmarks/journal.py sqlite 100000      # the same in the example's SQLite file
    python benchmarks/journal.py empty 20000        # training steps in SQLite that leave no row

Opening is `connect` and the first answer, without and with a first claim. Shown is the median of its CPU time, so that
other processes of the machine count little. SQLite runs here without syncs of the disk, which change no size and no
time of opening.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

from dataplane_core import BlobStore, DataPlaneClient, DataPlaneConfig
from dataplane_core.backends import CapacityOptions
from dataplane_core.connecting import connect_backend

ROWS, BATCH, OPENINGS = 10_000, 10, 7
SQLITE = Path(__file__).resolve().parents[1] / "examples/third_party_sqlite/src"


class MemoryOptions(CapacityOptions):
    path: str


class MemoryStore(BlobStore):
    """Blobs and records in dicts of this process, which all clients of a path share."""

    Config = MemoryOptions
    stores: ClassVar[dict[str, tuple[dict[str, bytes], dict[int, bytes]]]] = {}

    def start(self, *, bootstrap: bool, deadline: float) -> None:
        self.blobs, self.records = self.stores.setdefault(self.config.path, ({}, {}))

    def put(self, key: str, data: bytes) -> None:
        self.blobs[key] = data

    def get(self, key: str) -> bytes | None:
        return self.blobs.get(key)

    def delete(self, key: str) -> None:
        self.blobs.pop(key, None)

    def append(self, seq: int, record: bytes) -> bool:
        free = next(reversed(self.records), -1) + 1
        if seq == free:
            self.records[seq] = record
        return seq == free

    def read(self, from_seq: int) -> list[bytes]:
        if not self.records:
            return []
        first, last = next(iter(self.records)), next(reversed(self.records))
        return [self.records[seq] for seq in range(max(from_seq, first), last + 1)]

    def trim(self, before_seq: int) -> None:
        for seq in list(itertools.takewhile(lambda seq: seq < before_seq, self.records)):
            del self.records[seq]


def sqlite_store() -> type[BlobStore]:
    sys.path.append(str(SQLITE))  # it need not be installed
    from dataplane_sqlite_example import SQLiteStore

    class Unsynced(SQLiteStore):
        def _connect(self, timeout_s: float) -> sqlite3.Connection:
            database = super()._connect(timeout_s)
            database.execute("PRAGMA synchronous = OFF")
            return database

    return Unsynced


def connect(cls: type[BlobStore], path: Path) -> DataPlaneClient:
    config = DataPlaneConfig(backend=cls.__name__.lower(), options={"path": str(path)}, op_timeout_s=600)
    return connect_backend(cls, config, bootstrap=True)


def put(client: DataPlaneClient, ids: list[str]) -> None:
    client.put_samples(ids, "p", {"x": torch.zeros(len(ids))})


def fill(client: DataPlaneClient, batch: int) -> list[str]:
    client.register_partition("p", ["x"], None, ["t"])
    ids = [f"prompt{i}_g0" for i in range(ROWS)]
    for start in range(0, ROWS, batch):
        put(client, ids[start : start + batch])
    return ids


def step(client: DataPlaneClient, new: list[str], old: list[str]) -> None:
    """Six records: a put is two, its claim, its ack, a clear, and that what was cleared is deleted."""
    put(client, new)
    client.ack(client.claim_meta("p", "t", ["x"], len(new), lease_s=600))
    client.clear_samples(old, "p")


def use(cls: type[BlobStore], path: Path, records: int) -> None:
    """Rows come and go; ``ROWS`` of them stay. Ends where the next snapshot is nearly due: the worst time to open."""
    trims = [0, 0]  # the number of the step in which each was

    class Watched(cls):
        def trim(self, before_seq: int) -> None:
            super().trim(before_seq)
            trims.append(number)

    begin, slowest, number = time.perf_counter(), 0.0, 0
    with connect(Watched, path) as client:
        ids = fill(client, 512)
        while number < records // 6 or number - trims[-1] < 0.9 * (trims[-1] - trims[-2]):
            number += 1
            at = time.perf_counter()
            new = [f"prompt{ROWS + number * BATCH + i}_g0" for i in range(BATCH)]
            step(client, new, ids[:BATCH])
            ids = ids[BATCH:] + new
            slowest = max(slowest, time.perf_counter() - at)
    took, records = time.perf_counter() - begin, 6 * number
    print(
        f"{records} records in {took:.0f} s, {1e6 * took / records:.0f} us each; slowest step {1e3 * slowest:.0f} ms; "
        f"{6 * (number - trims[-1])} records since the last snapshot, of {6 * (trims[-1] - trims[-2])}"
    )


def answer(client: DataPlaneClient) -> None:
    client.check_consumption_status("p", ["t"])


def claim(client: DataPlaneClient) -> None:
    answer(client)
    client.nack(client.claim_meta("p", "t", ["x"], BATCH, blocking=False, lease_s=600))


def opening_ms(cls: type[BlobStore], path: Path, first: Callable[[DataPlaneClient], None]) -> float:
    gc.collect()  # what the client before left; a new process has none
    begin = time.process_time()
    with connect(cls, path) as client:
        first(client)
        return 1e3 * (time.process_time() - begin)


def compare(cls: type[BlobStore], folder: Path, records: int) -> None:
    for name, batch in (("one put", ROWS), ("puts of 512", 512)):
        with connect(cls, folder / name) as client:
            fill(client, batch)
    use(cls, folder / "used", records)
    # claims come last: what they record would be replayed by the openings without one
    for what, first in (("opening", answer), ("opening and a claim", claim)):
        took: dict[str, list[float]] = {"one put": [], "puts of 512": [], "used": []}
        for _ in range(OPENINGS):
            for name, each in took.items():
                each.append(opening_ms(cls, folder / name, first))
        used = statistics.median(took.pop("used"))
        for name, each in took.items():
            fresh = statistics.median(each)
            print(f"{what}, {ROWS} rows: {used:.0f} ms; fresh, by {name}: {fresh:.0f} ms, so {used / fresh:.2f} times")


def empty(cls: type[BlobStore], folder: Path, steps: int) -> None:
    path = folder / "empty"
    with connect(cls, path) as client:
        client.register_partition("p", ["x"], None, ["t"])
        for number in range(1, steps + 1):
            new = [f"s{number}_g{i}" for i in range(16)]
            step(client, new, new)
            if number % max(1, steps // 4) == 0:
                size = sum(file.stat().st_size for file in folder.iterdir())
                took = statistics.median(opening_ms(cls, path, answer) for _ in range(OPENINGS))
                print(f"{number} steps: {size / 1e6:.1f} MB, opening takes {took:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["memory", "sqlite", "empty"])
    parser.add_argument("count", type=int, help="records; of 'empty': steps")
    asked = parser.parse_args()
    run = empty if asked.kind == "empty" else compare
    with tempfile.TemporaryDirectory() as folder:
        run(MemoryStore if asked.kind == "memory" else sqlite_store(), Path(folder), asked.count)


if __name__ == "__main__":
    main()
