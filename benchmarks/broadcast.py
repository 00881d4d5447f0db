"""Fetch by the leader plus broadcast, against every rank fetching: a replica group of four ranks on one machine.

Four processes form a mesh (dp, cp, tp) of 1 x 1 x 4 over gloo and read the same training batch (512 rows of 256 to 2048
tokens, six token-aligned fields) out of tq_simple. ``leader_broadcast``: one fetch, then broadcasts of the unpadded
rows, which every rank pads. ``independent``: four fetches at the same time. A round ends when the last rank has its
batch; rounds of both alternate, so that a busy moment of the machine hits both.

Bytes read are the payload that the metrics middleware counts. Bytes broadcast are counted at the leader's calls of
``torch.distributed.broadcast``, the descriptor included; each of the three siblings receives as many. Memory is the
leader's resident memory: the most during the fetch and the broadcast, before the padding, less what it was before.
Freed memory is returned to the system first.

What it cannot show: on one machine the store's bytes cross no network, and four fetches share its cores with the store.
Run it with ``python benchmarks/broadcast.py``; ``--rows`` and ``--rounds`` make it shorter.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from batches import training_batch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from dataplane_core import KVBatchMeta, connect, kv_first_write
from dataplane_core.batch import BatchedDataDict
from dataplane_core.middleware import Metrics
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations.trainer.fsdp2 import FSDP2DataPlaneMixin
from dataplane_integrations.trainer.worker import FetchPolicy

RANKS: Final = 4
WAYS: Final[tuple[FetchPolicy, ...]] = ("leader_broadcast", "independent")
#: In place of a way: measure the leader's memory.
MEMORY: Final = "memory"
INSTANCE: Final = "benchmark-broadcast"


class Worker(FSDP2DataPlaneMixin):
    """One rank; it only reads."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (1, 1, RANKS), mesh_dim_names=("dp", "cp", "tp"))


class Counted:
    """Bytes given to ``torch.distributed.broadcast`` in this process, from its making on."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._broadcast = dist.broadcast
        dist.broadcast = distributed_c10d.broadcast = self._count  # objects are broadcast by the latter

    def _count(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.n_bytes += tensor.nbytes
        return self._broadcast(tensor, *args, **kwargs)


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most resident memory while ``work`` runs, less what was resident before. Linux with glibc."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _resident_bytes("VmRSS")
    kept = work()
    most = _resident_bytes("VmHWM")
    del kept
    return most - before


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def size_bytes(batch: BatchedDataDict) -> int:
    """Bytes of all columns."""
    return sum(column.numel() * column.element_size() for column in batch.values())


def serve(rank: int, pipe: Connection, store: str, config: dict[str, Any], meta: KVBatchMeta) -> None:
    """A rank: reads when it is told how, and answers with seconds, bytes read and bytes broadcast; or with memory."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    worker = Worker()
    worker.setup_data_plane(config)
    metrics = cast(Metrics, worker._require_dp_client().middleware[0])
    counted = Counted()
    while (way := pipe.recv()) is not None:
        if way == MEMORY:
            pipe.send(peak_bytes(lambda: worker._fetch(meta, layout="jagged")))
            continue
        before, sent_before = _bytes_read(metrics), counted.n_bytes
        dist.barrier()
        begun = time.perf_counter()
        batch = worker._fetch(meta, fetch_policy=way)
        dist.barrier()
        taken_s = time.perf_counter() - begun
        pipe.send((taken_s, _bytes_read(metrics) - before, counted.n_bytes - sent_before))
        del batch
    worker.close_data_plane()
    pipe.send("closed")
    dist.destroy_process_group()


def _bytes_read(metrics: Metrics) -> int:
    return int(metrics.snapshot()["operations"].get("get_samples", {}).get("n_bytes", 0))


def run(rows: int, rounds: int) -> None:
    """Starts Ray, the store and the ranks, and prints the table."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    options = {"instance": INSTANCE, "ray_address": ray.get_runtime_context().gcs_address}
    try:
        with connect({"backend": "tq_simple", "options": options}) as client:
            client.register_partition("train", [], None, ["train"])
            batch = training_batch(rows)
            ids = [f"p{row}_g0" for row in range(rows)]
            meta = kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train")
            meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = int(batch["input_lengths"].max())
            config = {"backend": "tq_simple", "options": options, "middleware": ["metrics"]}
            print(f"{rows} rows, {RANKS} ranks (1x1x4), {size_bytes(batch) / 1e6:.1f} MB of padded columns")
            answers, peaks = measure(config, meta, rounds)
            report(answers)
            report_leader(answers["leader_broadcast"][0][0], statistics.median(peaks))
    finally:
        ray.shutdown()


def measure(
    config: dict[str, Any], meta: KVBatchMeta, rounds: int
) -> tuple[dict[str, list[list[tuple[float, ...]]]], list[int]]:
    """Per way and round what each rank answered, and per round the leader's memory.

    The first round of each is a warm-up and left out.
    """
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    answers: dict[str, list[list[tuple[float, ...]]]] = {way: [] for way in WAYS}
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(RANKS):
                here, there = context.Pipe()
                arguments = (rank, there, os.path.join(folder, "store"), config, meta)
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            for number in range(rounds + 1):
                for way in WAYS:
                    replies = ask(pipes, way)
                    if number:
                        answers[way].append(replies)
            for _ in range(rounds):
                peaks.append(ask(pipes, MEMORY)[0])
            ask(pipes, None)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
    return answers, peaks


def ask(pipes: Sequence[Connection], way: str | None) -> list[Any]:
    """Tells all ranks how to read; waits for all."""
    for pipe in pipes:
        pipe.send(way)
    for pipe in pipes:
        if not pipe.poll(180):
            raise TimeoutError("a rank did not answer within 180 s")
    return [pipe.recv() for pipe in pipes]


def report(answers: dict[str, list[list[tuple[float, ...]]]]) -> None:
    """One line for each way: medians over the rounds."""
    print(
        f"{'way':<18} {'read from the store':>20} {'broadcast':>12} {'all ranks have it':>18} {'best':>9} {'worst':>9}"
    )
    for way, rounds in answers.items():
        seconds = [max(rank[0] for rank in replies) for replies in rounds]
        read = statistics.median(sum(rank[1] for rank in replies) for replies in rounds)
        sent = rounds[0][0][2] if way == "leader_broadcast" else 0
        print(
            f"{way:<18} {read / 1e6:>17.1f} MB {sent / 1e6:>9.1f} MB {statistics.median(seconds):>16.3f} s "
            f"{min(seconds):>7.3f} s {max(seconds):>7.3f} s"
        )
    leader = [max(r[0] for r in replies) for replies in answers["leader_broadcast"]]
    every = [max(r[0] for r in replies) for replies in answers["independent"]]
    print(f"independent / leader_broadcast, median of the rounds' ratios: {_ratio(every, leader):.2f}")


def report_leader(replies: tuple[float, ...], peak: float) -> None:
    """What the leader sent and held, in relation to what it read."""
    _, read, sent = replies
    print(f"leader: read {read / 1e6:.2f} MB, broadcast {sent / 1e6:.2f} MB: {sent / read:.3f} times what it read")
    print(f"leader: {peak / 1e6:.2f} MB of memory at most until it is broadcast: {peak / read:.2f} times what it read")


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512, help="rows of the batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    given = parser.parse_args()
    run(given.rows, given.rounds)
