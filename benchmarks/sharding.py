"""What sharding a meta costs, against sorting as many Python integers, and how well the packers pack.

Costs: `shard_meta_for_dp` over 8 ranks, one batch, lengths spread evenly over 1 to 4096 tokens. "x sort" compares with
``sorted`` of the same lengths and one loop over the result that adds them up. Every line is the best of several rounds
in time of this process (not of the clock, which means little on a machine that others use); a round runs every
candidate once. Peak memory is what `tracemalloc` sees beyond the meta: the shards themselves, and what it took to make
them.

The cost of packing depends on how many different lengths there are and on how many sequences a bin takes, so three
settings are shown. Rows carry one tag, as `kv_first_write` gives it, except in the lines marked "bare".

Quality: bins over the lower bound ``ceil(tokens / capacity)``, for 16,384 sequences of three kinds.

Run it with ``python benchmarks/sharding.py``.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dataplane_core.meta import KVBatchMeta
from dataplane_core.sharding import PACKERS, packing_metrics, shard_meta_for_dp

RANKS = 8
SIZES = (512, 4096, 16384, 65536, 262144)
KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}

#: Title -> most tokens of a microbatch, and the multiple that lengths are rounded up to.
SETTINGS = {
    "limit 16384 tokens, lengths rounded up to 64": (16384, 64),
    "limit 16384 tokens, lengths as they are": (16384, 1),
    "limit 4096 tokens (half of the sequences are over half a bin), rounded up to 64": (4096, 64),
}


def uniform(count: int) -> list[int]:
    """From 1 to 4096 tokens."""
    lengths: list[int] = np.random.RandomState(0).randint(1, 4097, count).tolist()
    return lengths


def log_normal(count: int) -> list[int]:
    """Median 665 tokens, a long tail, cut at 4096."""
    drawn = np.random.RandomState(0).lognormal(6.5, 0.8, count)
    lengths: list[int] = drawn.astype(np.int64).clip(1, 4096).tolist()
    return lengths


def bimodal(count: int) -> list[int]:
    """Seven of ten near 500 tokens, the others near 3000."""
    random = np.random.RandomState(0)
    drawn = np.where(random.rand(count) < 0.7, random.normal(500, 150, count), random.normal(3000, 500, count))
    lengths: list[int] = drawn.astype(np.int64).clip(1, 4096).tolist()
    return lengths


def sort_and_pass(lengths: list[int]) -> int:
    """The reference: sorts the lengths and adds them up in a loop."""
    total = 0
    for length in sorted(lengths):
        total += length
    return total


def make_meta(lengths: list[int], *, tagged: bool) -> KVBatchMeta:
    """Rows as a rollout writes them."""
    return KVBatchMeta(
        "train",
        "train",
        [f"q{row // 8}_g{row % 8}" for row in range(len(lengths))],
        sequence_lengths=lengths,
        tags=[{"input_lengths": length} for length in lengths] if tagged else None,
    )


def arguments(limit: int, multiple: int) -> dict[str, dict[str, Any]]:
    """Name -> keyword arguments of `shard_meta_for_dp`."""
    dynamic = {"max_tokens_per_microbatch": limit, "sequence_length_round": multiple, **KEYS}
    packing = {"max_tokens_per_microbatch": limit, "sequence_length_pad_multiple": multiple, **KEYS}
    return {
        "dynamic batching": {"dynamic_batching_args": dynamic},
        **{name: {"sequence_packing_args": {"algorithm": name, **packing}} for name in PACKERS},
    }


def best_ms(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least time of each."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.process_time()
            result = run()
            best[name] = min(best[name], (time.process_time() - start) * 1e3)
            del result  # freed outside of the measured time
    return best


def peak_mb(run: Callable[[], object]) -> float:
    """Most memory in use at a time, beyond what was in use before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = run()
        peak = tracemalloc.get_traced_memory()[1] - before
        del result
    finally:
        tracemalloc.stop()
    return peak / 2**20


def report_costs(title: str, limit: int, multiple: int, rounds: int, sizes: list[int]) -> None:
    """One table: a line per candidate, a column per number of rows."""
    lines: dict[str, list[str]] = {}
    for size in sizes:
        lengths = uniform(size)
        metas = {"": make_meta(lengths, tagged=True), ", bare": make_meta(lengths, tagged=False)}
        candidates: dict[str, Callable[[], object]] = {"sort and one pass": partial(sort_and_pass, lengths)}
        for name, args in arguments(limit, multiple).items():
            for suffix, meta in metas.items():
                candidates[f"{name}{suffix}"] = partial(shard_meta_for_dp, meta, dp_world=RANKS, **args)
        times = best_ms(candidates, rounds if size <= 16384 else max(3, rounds // 5))
        for name, took in times.items():
            memory = "" if name == "sort and one pass" else f"{peak_mb(candidates[name]):.1f} MB"
            cell = f"{took:9.2f} ms {took / times['sort and one pass']:5.1f}x {memory:>8}"
            lines.setdefault(name, []).append(cell)
    print(f"\n{title}; columns: time, x sort, peak memory")
    print(f"{'rows':36}" + "".join(f"{size:>28}" for size in sizes))
    for name, cells in lines.items():
        print(f"{name:36}" + "".join(f"{cell:>28}" for cell in cells))


def report_quality(capacities: list[int]) -> None:
    """One table per capacity: bins, and how many more they are than the lower bound."""
    for capacity in capacities:
        print(f"\n16,384 sequences in bins of {capacity} tokens: bins, % over the lower bound, utilisation")
        print(f"{'':32}" + "".join(f"{kind.__name__:>26}" for kind in (uniform, log_normal, bimodal)))
        for name, pack in PACKERS.items():
            cells = []
            for kind in (uniform, log_normal, bimodal):
                lengths = kind(16384)
                metrics = packing_metrics(pack(lengths, capacity), lengths, capacity)
                cells.append(f"{metrics.bins:10} {100 * metrics.excess:6.2f} % {metrics.utilisation:6.4f}")
            print(f"{name:32}" + "".join(f"{cell:>26}" for cell in cells))


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    for title, (limit, multiple) in SETTINGS.items():
        report_costs(title, limit, multiple, options.rounds, options.sizes)
    report_quality([4096, 8192, 16384])
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
