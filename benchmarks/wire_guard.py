"""The cost of the wire guard: puts and gets of whole batches with it and without it, on every backend.

Run:  python benchmarks/wire_guard.py [--rounds 15] [--batches A B] [--backends noop shm_store redis_store ...]

The batches are those of `batches.py`. Each backend has two stores, side by side; rounds with and without alternate, so
that a busy moment of the machine hits both; medians are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os

import ray
from batches import MAX_TOKENS, batch, client_steps, describe, medians_ms
from tensordict import TensorDict

from dataplane_core import connect

#: Options of two stores that share nothing, by backend; {} stands for its name.
OPTIONS = {
    "shm_store": {"namespace": "guard{}"},
    "redis_store": {"server": "private", "namespace": "guard{}"},
    "tq_simple": {"instance": "guard{}"},
    "tq_mooncake": {"instance": "guard{}"},
}


def compare(backend: str, columns: TensorDict, rounds: int) -> None:
    """One line: median milliseconds of a put and a get, without and with."""
    with contextlib.ExitStack() as stack:
        contestants = {}
        for way, middleware in (("plain", []), ("guarded", ["wire_guard"])):
            options = {key: value.format(way) for key, value in OPTIONS.get(backend, {}).items()}
            client = stack.enter_context(connect({"backend": backend, "options": options, "middleware": middleware}))
            contestants[way] = client_steps(client, columns)
        medians = medians_ms(contestants, rounds)
    cells = [
        f"{name} {plain:6.1f} -> {guarded:6.1f} ms ({guarded - plain:+.1f})"
        for name, plain, guarded in zip(("put", "get"), medians["plain"], medians["guarded"], strict=True)
    ]
    print("   ".join([f"{backend:14}", *cells]))


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", nargs="+", choices=sorted(MAX_TOKENS), default=sorted(MAX_TOKENS))
    parser.add_argument(
        "--backends", nargs="+", default=["noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"]
    )
    options = parser.parse_args()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for name in options.batches:
        columns = batch(name)
        print(f"\n{describe(name, columns)}")
        for backend in options.backends:
            compare(backend, columns, options.rounds)
    ray.shutdown()
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
