"""How much time reading ahead hides: portions of a split step, and the batches of a stream.

One process reads batches of 128 rows (256 to 2048 tokens, six token-aligned fields) from ``shm_store`` or another
backend, and computes on each as long as its fetch takes, which is measured first: read, decode and padding. The compute
is a wait, as for a GPU, or work of this process's own core. Rounds with and without reading ahead alternate, so that a
busy moment of the machine hits both; the table has the medians of the rounds' milliseconds per batch. A worker alone
pads ahead too; a stream pads at the batch's turn, so at most the read is hidden.

Run it with ``OMP_NUM_THREADS=1 python benchmarks/read_ahead.py`` on an otherwise quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from batches import training_batch

from dataplane_core import KVBatchMeta, connect, kv_first_write, stream
from dataplane_core.batch import BatchedDataDict, pad_columns
from dataplane_core.client import DataPlaneClient
from dataplane_integrations.trainer.worker import DataPlaneWorkerMixin

ROWS: Final = 128


def wait(seconds: float) -> None:
    """Compute of a device."""
    time.sleep(seconds)


def work(seconds: float) -> None:
    """Compute of this process's core: torch operations, which let other threads run."""
    matrix = torch.ones(256, 256)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix = matrix @ matrix * 0.0


class Worker(DataPlaneWorkerMixin):
    """Computes for a given time on each portion."""

    def __init__(self, compute: Callable[[float], None], seconds: float) -> None:
        self.compute, self.seconds = compute, seconds

    def _local_coords(self) -> dict[str, int]:
        return {}

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Nothing to begin."""

    def train_microbatch(self, data: BatchedDataDict) -> None:
        """Computes."""
        self.compute(self.seconds)

    def finish_train_step(self) -> dict[str, Any]:
        """Nothing to finish."""
        return {}

    def abort_train_step(self) -> None:
        """Nothing to drop."""


def write(client: DataPlaneClient, partition: str, batches: int) -> list[KVBatchMeta]:
    """A partition with so many batches."""
    client.register_partition(partition, [], ROWS * batches, ["train"])
    batch = training_batch(ROWS)
    ids = [[f"p{number}x{row}_g0" for row in range(ROWS)] for number in range(batches)]
    return [kv_first_write(batch, sample_ids=each, dp_client=client, partition_id=partition) for each in ids]


def walk(worker: Worker, metas: list[KVBatchMeta], depth: int) -> float:
    """Seconds of a split step over all portions."""
    worker.begin_train_step_presharded(None)
    begun = time.perf_counter()
    worker.train_microbatches_presharded(metas, read_ahead=depth)
    seconds = time.perf_counter() - begun
    worker.finish_train_step_presharded()
    return seconds


def consume(worker: Worker, client: DataPlaneClient, metas: list[KVBatchMeta], depth: int) -> float:
    """Seconds of a stream over all batches; they are written before."""
    partition = f"stream {time.monotonic_ns()}"
    write(client, partition, len(metas))
    batches = stream(client, partition, "train", list(metas[0].fields or []), ROWS, prefetch=depth, clear=True)
    begun = time.perf_counter()
    for batch in batches:
        worker.train_microbatch(pad_columns(BatchedDataDict(batch.columns.items()), batch.meta))
    return time.perf_counter() - begun


def _seconds(reader: Worker, meta: KVBatchMeta, layout: Any) -> float:
    begun = time.perf_counter()
    reader._fetch(meta, layout=layout)
    return time.perf_counter() - begun


def run(backend: str, batches: int, rounds: int, depth: int) -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    with connect({"backend": backend}) as client:
        metas = write(client, "portions", batches)
        reader = Worker(wait, 0.0)
        reader.setup_data_plane(client)
        fetch_s, read_s = (
            statistics.median(_seconds(reader, meta, layout) for _ in range(3) for meta in metas)
            for layout in ("padded", "jagged")
        )
        print(
            f"{backend}, {batches} batches of {ROWS} rows, {rounds} rounds; a fetch takes {1e3 * fetch_s:.1f} ms, "
            f"without padding {1e3 * read_s:.1f} ms"
        )
        print(f"{'':28} {'compute':>9} {'not ahead':>10} {f'{depth} ahead':>10} {'hidden, of the fetch':>21}")
        for kind, compute in (("wait", wait), ("work", work)):
            worker = Worker(compute, fetch_s)
            worker.setup_data_plane(client)
            ways: dict[str, Callable[[int], float]] = {
                "portions of a split step": lambda ahead, worker=worker: walk(worker, metas, ahead),
                "a stream": lambda ahead, worker=worker: consume(worker, client, metas, ahead),
            }
            for name, way in ways.items():
                seconds: dict[int, list[float]] = {0: [], depth: []}
                for number in range(rounds + 1):
                    for ahead, taken in seconds.items():
                        each_ms = 1e3 * way(ahead) / batches
                        if number:  # the first round warms up
                            taken.append(each_ms)
                plain, ahead_ms = (statistics.median(taken) for taken in seconds.values())
                hidden = (plain - ahead_ms) / (1e3 * fetch_s)
                print(f"{name:28} {kind:>9} {plain:>7.1f} ms {ahead_ms:>7.1f} ms {hidden:>20.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="shm_store")
    parser.add_argument("--batches", type=int, default=12, help="batches of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=1, help="batches read ahead (default: %(default)s)")
    given = parser.parse_args()
    run(given.backend, given.batches, given.rounds, given.depth)
