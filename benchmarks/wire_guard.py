"""What the wire guard costs: puts and gets of whole batches with it and without it, on every backend.

Run:  python benchmarks/wire_guard.py [--rounds 7] [--batches A B] [--backends noop redis_store tq_simple]

The batches are those of `backends.py`. Rounds with and without alternate, so that a busy moment of the machine hits
both; medians are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from backends import MAX_TOKENS, OPTIONS, batch, client_steps, size_bytes
from tensordict import TensorDict

from dataplane_core import connect

WAYS = ([], ["wire_guard"])


def compare(backend: str, columns: TensorDict, rounds: int) -> None:
    """One line: median milliseconds of a put and a get, without and with."""
    times: dict[tuple[int, str], list[float]] = {}
    options = OPTIONS.get(backend, {})
    for number in range(rounds + 1):
        for way, middleware in enumerate(WAYS):
            with connect({"backend": backend, "options": options, "middleware": middleware}) as client:
                put, get, _ = client_steps(client, columns)
                put()  # warms up
                for name, step in (("put", put), ("get", get)):
                    started = time.perf_counter()
                    step()
                    if number:
                        times.setdefault((way, name), []).append((time.perf_counter() - started) * 1e3)
    cells = [f"{backend:14}"]
    for name in ("put", "get"):
        plain, guarded = (statistics.median(times[way, name]) for way in range(len(WAYS)))
        cells.append(f"{name} {plain:6.1f} -> {guarded:6.1f} ms (+{guarded - plain:.1f})")
    print("   ".join(cells))


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", nargs="+", choices=sorted(MAX_TOKENS), default=sorted(MAX_TOKENS))
    parser.add_argument("--backends", nargs="+", default=["noop", "redis_store", "tq_simple"])
    options = parser.parse_args()
    for name in options.batches:
        columns = batch(name)
        print(f"\nbatch {name}: 512 samples, 8 fields, {size_bytes(columns) / 1e6:.0f} MB")
        for backend in options.backends:
            compare(backend, columns, options.rounds)
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
