"""Opening a `BlobStore` that was used for long, against a fresh one of as many rows; and how large its file is.

Opening is `connect` and the first answer, without and with a first claim: a replay of claims builds what claims look
into, where a fresh store does so at its first one.

    python benchmarks/journal.py memory 100000      # records, in a store of dicts
    python benchmarks/journal.py sqlite 100000      # the same in the example's SQLite file
    python benchmarks/journal.py empty 20000        # training steps in SQLite that leave no row

SQLite runs here without syncs of the disk, which change no size and no time of opening.
"""

from __future__ import annotations

import gc
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core/tests/blobstore"), str(ROOT / "examples/third_party_sqlite/src")]

from blob_stores import trimmed  # noqa: E402
from dataplane_sqlite_example import SQLiteStore  # noqa: E402

from dataplane_core import BlobStore, DataPlaneClient, DataPlaneConfig  # noqa: E402
from dataplane_core.journal_shortening import _TAIL_BYTES  # noqa: E402
from dataplane_core.registry import connect_backend  # noqa: E402

ROWS, BATCH, OPENINGS = 10_000, 10, 7


class Unsynced(SQLiteStore):
    def _connect(self, timeout_s: float) -> sqlite3.Connection:
        database = super()._connect(timeout_s)
        database.execute("PRAGMA synchronous = OFF")
        return database


def connect(cls: type[BlobStore], options: dict[str, str]) -> DataPlaneClient:
    config = DataPlaneConfig(backend="sqlite_example", options=options, op_timeout_s=600)
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


def use(client: DataPlaneClient, ids: list[str], records: int) -> None:
    """Rows come and go; ``ROWS`` of them stay. Ends where the next snapshot is nearly due: the worst time to open."""
    begin, slowest = time.perf_counter(), 0.0
    number = -1
    while number < records // 6 or client._backend._journal.snapshots.tail_nbytes < 0.9 * _TAIL_BYTES:
        number += 1
        at = time.perf_counter()
        new = [f"prompt{ROWS + number * BATCH + i}_g0" for i in range(BATCH)]
        step(client, new, ids[:BATCH])
        ids = ids[BATCH:] + new
        slowest = max(slowest, time.perf_counter() - at)
    took = time.perf_counter() - begin
    print(f"{records} records in {took:.0f} s, {1e6 * took / records:.0f} us each; slowest step {1e3 * slowest:.0f} ms")


def opening_ms(open_again: Callable[[], DataPlaneClient]) -> tuple[float, float]:
    """To the first answer, and to the end of a first claim."""
    answered, claimed = [], []
    for _ in range(OPENINGS):
        gc.collect()  # what the client before left; a new process has none
        begin = time.perf_counter()
        with open_again() as client:
            client.check_consumption_status("p", ["t"])
            answered.append(time.perf_counter() - begin)
            meta = client.claim_meta("p", "t", ["x"], BATCH, blocking=False, lease_s=600)
            claimed.append(time.perf_counter() - begin)
            if meta.sample_ids:
                client.nack(meta)
    return 1e3 * sorted(answered)[OPENINGS // 2], 1e3 * sorted(claimed)[OPENINGS // 2]


def compare(records: int, make: Callable[[str], Callable[[], DataPlaneClient]]) -> None:
    opened = {}
    for name, batch in (("one put", ROWS), ("puts of 512", 512)):
        open_again = make(name)
        with open_again() as client:
            fill(client, batch)
        opened[name] = opening_ms(open_again)
    open_again = make("used")
    with open_again() as client:
        use(client, fill(client, 512), records)
    used = opening_ms(open_again)
    for name, fresh in opened.items():
        for what, before, after in zip(("opening", "opening and a claim"), fresh, used, strict=True):
            print(f"{what}, {ROWS} rows: fresh, by {name}: {before:.0f} ms; after {records} records: {after:.0f} ms, "
                  f"{after / before:.2f} times")  # fmt: skip


def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:

        def sqlite(name: str) -> Callable[[], DataPlaneClient]:
            return lambda: connect(Unsynced, {"path": f"{folder}/{name}.sqlite"})

        def memory(name: str) -> Callable[[], DataPlaneClient]:
            cls = trimmed()
            return lambda: connect(cls, {})

        if kind != "empty":
            compare(count, {"sqlite": sqlite, "memory": memory}[kind])
            return
        with sqlite("empty")() as client:
            client.register_partition("p", ["x"], None, ["t"])
            for number in range(1, count + 1):
                new = [f"s{number}_g{i}" for i in range(16)]
                step(client, new, new)
                if number % (count // 4) == 0:
                    size = sum(file.stat().st_size for file in Path(folder).iterdir())
                    print(f"{number} steps: {size / 1e6:.1f} MB, opening takes {opening_ms(sqlite('empty'))[0]:.0f} ms")


if __name__ == "__main__":
    main()
