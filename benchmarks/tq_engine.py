"""The engine of tq_simple beside TransferQueue's own key-value interface: the same bytes, the same storage process.

Run:  python benchmarks/tq_engine.py [--rounds 15] [--rows 512] [--megabytes 16 65]

Peer: ``transfer_queue.kv_batch_put`` and ``kv_batch_get`` of 8 ragged columns, one storage unit, as a user would call
it. The engine moves the same bytes as one row per sample, over one unit and over two; joining columns to rows is the
backend's work and not in these figures. The rounds of all contestants are interleaved, so a busy machine slows all of
them alike; medians and minima are printed. Limit: what one memcpy of the bytes takes.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))  # else the peer warns at every request
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from dataplane_tq_simple import TQSimpleConfig
from dataplane_tq_simple._engine import Engine

NUM_COLUMNS = 8
TIMEOUT_S = 120.0


class Contestant:
    """Puts and gets one batch; `clear` is not timed."""

    def __init__(self, put: Callable[[], Any], get: Callable[[], Any], clear: Callable[[], Any]) -> None:
        self.put, self.get, self.clear = put, get, clear


def engine_contestant(engine: Engine, lengths: np.ndarray) -> Contestant:
    offsets = np.concatenate([[0], np.cumsum(lengths * 4 * NUM_COLUMNS)]).astype(np.int64)
    buffer = np.random.default_rng(0).integers(0, 256, offsets[-1], dtype=np.uint8)
    first = 0
    handles: list[int] = []

    def put() -> None:
        nonlocal first, handles
        handles = list(range(first, first + len(lengths)))
        first += len(lengths)
        engine.put_rows(handles, buffer, offsets, deadline=time.monotonic() + TIMEOUT_S)

    def get() -> None:
        rows = engine.get_rows(handles, deadline=time.monotonic() + TIMEOUT_S)
        assert sum(row.nbytes for row in rows) == offsets[-1]

    return Contestant(put, get, lambda: engine.delete_rows(handles, deadline=time.monotonic() + TIMEOUT_S))


def raw_contestant(lengths: np.ndarray) -> Contestant:
    keys = [f"sample{i}" for i in range(len(lengths))]
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    names = [f"column{i}" for i in range(NUM_COLUMNS)]
    columns = {name: torch.nested.nested_tensor_from_jagged(torch.rand(int(offsets[-1])), offsets) for name in names}
    fields = TensorDict(columns, batch_size=len(keys))

    def put() -> None:
        transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=fields)

    def get() -> None:
        batch = transfer_queue.kv_batch_get(keys=keys, partition_id="train", select_fields=names)
        assert batch.batch_size == fields.batch_size

    return Contestant(put, get, lambda: transfer_queue.kv_clear(keys=keys, partition_id="train"))


def memcpy_contestant(lengths: np.ndarray) -> Contestant:
    source = np.ones(int(lengths.sum()) * 4 * NUM_COLUMNS, dtype=np.uint8)
    target = np.ones_like(source)
    return Contestant(lambda: np.copyto(target, source), lambda: np.copyto(source, target), lambda: None)


def measure(contestants: dict[str, Contestant], rounds: int) -> dict[str, dict[str, list[float]]]:
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for round_ in range(rounds + 1):
        for name, contestant in contestants.items():
            for step in ("put", "get"):
                started = time.perf_counter()
                getattr(contestant, step)()
                if round_:  # the first round warms up
                    times[name][step].append((time.perf_counter() - started) * 1e3)
            contestant.clear()
    return times


def report(title: str, times: dict[str, dict[str, list[float]]]) -> None:
    print(f"\n{title}")
    print(f"{'':28}{'put ms':>8}{'(min)':>8}{'get ms':>8}{'(min)':>8}{'both':>8}{'raw/this':>10}")
    both = {name: sum(statistics.median(steps[step]) for step in ("put", "get")) for name, steps in times.items()}
    for name, steps in times.items():
        cells = [
            f"{value:8.1f}" for step in ("put", "get") for value in (statistics.median(steps[step]), min(steps[step]))
        ]
        print(f"{name:28}{''.join(cells)}{both[name]:8.1f}{both['raw kv_batch, 8 columns'] / both[name]:9.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 65])
    options = parser.parse_args()

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    deadline = time.monotonic() + TIMEOUT_S
    with (
        Engine.open(TQSimpleConfig(instance="one"), bootstrap=True, deadline=deadline) as one,
        Engine.open(TQSimpleConfig(instance="two", num_storage_units=2), bootstrap=True, deadline=deadline) as two,
    ):
        for megabytes in options.megabytes:
            mean = megabytes * 10**6 / (4 * NUM_COLUMNS * options.rows)
            lengths = np.random.default_rng(0).integers(int(mean / 2), int(mean * 1.5) + 1, options.rows)
            contestants = {
                "raw kv_batch, 8 columns": raw_contestant(lengths),
                "engine, 1 unit": engine_contestant(one, lengths),
                "engine, 2 units": engine_contestant(two, lengths),
                "one memcpy": memcpy_contestant(lengths),
            }
            times = measure(contestants, options.rounds)
            report(f"{options.rows} rows, {lengths.sum() * 4 * NUM_COLUMNS / 1e6:.0f} MB", times)

        calls = []
        for _ in range(300):
            started = time.perf_counter()
            one.controller_pid(time.monotonic() + TIMEOUT_S)
            calls.append((time.perf_counter() - started) * 1e3)
        print(f"\none call into the controller: median {statistics.median(calls):.2f} ms, min {min(calls):.2f} ms")
    transfer_queue.close()
    ray.shutdown()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
