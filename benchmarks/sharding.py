"""What sharding a meta costs, against sorting as many Python integers.

`shard_meta_for_dp` over 8 ranks, one batch, lengths spread evenly over 1 to 4096 tokens. "x sort" compares with
``sorted`` of the same lengths and one loop over the result that adds them up. Every line is the best of several rounds
in time of this process (not of the clock, which means little on a machine that others use); a round runs every
candidate once. Peak memory is what `tracemalloc` sees beyond the meta: the shards themselves, and what it took to make
them.

The cost of packing depends on how many different lengths there are and on how many sequences a bin takes, so three
settings are shown. Rows carry one tag, as `kv_first_write` gives it.

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

from dataplane_core import shard_meta_for_dp
from dataplane_core.meta import KVBatchMeta
from dataplane_core.sharding import PACKERS

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


def sort_and_pass(lengths: list[int]) -> int:
    """The reference: sorts the lengths and adds them up in a loop."""
    total = 0
    for length in sorted(lengths):
        total += length
    return total


def make_meta(lengths: list[int]) -> KVBatchMeta:
    """Rows as a rollout writes them."""
    return KVBatchMeta(
        "train",
        "train",
        [f"q{row // 8}_g{row % 8}" for row in range(len(lengths))],
        sequence_lengths=lengths,
        tags=[{"input_lengths": length} for length in lengths],
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
        meta = make_meta(lengths)
        candidates: dict[str, Callable[[], object]] = {"sort and one pass": partial(sort_and_pass, lengths)}
        for name, args in arguments(limit, multiple).items():
            candidates[name] = partial(shard_meta_for_dp, meta, dp_world=RANKS, **args)
        times = best_ms(candidates, rounds if size <= 16384 else max(3, rounds // 5))
        for name, took in times.items():
            memory = "" if name == "sort and one pass" else f"{peak_mb(candidates[name]):.1f} MB"
            cell = f"{took:9.2f} ms {took / times['sort and one pass']:5.1f}x {memory:>8}"
            lines.setdefault(name, []).append(cell)
    print(f"\n{title}; columns: time, x sort, peak memory")
    print(f"{'rows':36}" + "".join(f"{size:>28}" for size in sizes))
    for name, cells in lines.items():
        print(f"{name:36}" + "".join(f"{cell:>28}" for cell in cells))


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    for title, (limit, multiple) in SETTINGS.items():
        report_costs(title, limit, multiple, options.rounds, options.sizes)
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
