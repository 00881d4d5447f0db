"""What a setting costs: puts, claims and gets of whole batches without it and with it, on every backend.

Run:  python benchmarks/settings.py [--rounds 15] [--batches A B] [--backends noop shm_store ...]
          [--ways wire_guard metrics "recorder none" "recorder digests" "recorder all" "as put"]

A way is a middleware, or ``as put``: integers are not stored narrower than they are. The batches are those of
`batches.py`, and ``A wide``: batch A with token ids that int64 needs, so that nothing is saved. Each way has a store of
its own, side by side; the ways take turns in each round, so that a busy moment of the machine hits all; medians are
printed, with what the way adds, and the payload that is held, as a share of that without the setting.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from typing import Any

import ray
from batches import ALL, batch, client_steps, describe
from tensordict import TensorDict

from dataplane_core import connect

#: Options of stores that share nothing, by backend; {} stands for a number.
OPTIONS = {
    "shm_store": {"namespace": "settings{}"},
    "redis_store": {"server": "private", "namespace": "settings{}"},
    "tq_simple": {"instance": "settings{}"},
    "tq_mooncake": {"instance": "settings{}"},
}
AS_PUT = "as put"
WAYS = ("wire_guard", "metrics", "recorder none", "recorder digests", "recorder all", AS_PUT)
STEPS = ("put", "claim", "get")


def columns_of(name: str) -> TensorDict:
    """The columns of a batch."""
    columns = batch("A" if name == "A wide" else name)
    if name == "A wide":
        values = columns["input_ids"].values()
        values += 1 << 40
    return columns


def compare(backend: str, columns: TensorDict, ways: list[str], rounds: int, folder: str) -> None:
    """A line for each way: median milliseconds of a put, a claim and a get, and what it adds to those without it."""
    times: dict[str, dict[str, list[float]]] = {way: {step: [] for step in STEPS} for way in ways}
    held: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        steps = {}
        for number, way in enumerate(ways):
            client = stack.enter_context(
                connect(
                    {
                        "backend": backend,
                        "options": {key: value.format(number) for key, value in OPTIONS.get(backend, {}).items()},
                        "middleware": middleware_of(way, f"{folder}/{backend}-{number}"),
                        "narrow": way != AS_PUT,
                    }
                )
            )
            put, get, clear = client_steps(client, columns)
            names, count = list(columns.keys()), len(columns)

            def claim(client: Any = client, names: list[str] = names, count: int = count) -> None:
                assert client.claim_meta("bench", "train", names, count).size == count

            put()
            held[way] = client.describe("bench").held_bytes
            clear()
            steps[way] = (put, claim, get, clear)
        for round_number, (way, (*timed, clear)) in itertools.product(range(rounds + 1), steps.items()):
            for name, step in zip(STEPS, timed, strict=True):
                started = time.perf_counter()
                step()
                if round_number:  # the first one warms up
                    times[way][name].append((time.perf_counter() - started) * 1e3)
            clear()
    medians = {way: {step: statistics.median(each) for step, each in found.items()} for way, found in times.items()}
    for way, found in medians.items():
        cells = [
            f"{step} {found[step]:7.2f} ms"
            + (f" ({found[step] - medians['none'][step]:+.2f})" if way != "none" else "")
            for step in STEPS
        ]
        print("   ".join([f"{backend:11} {way:16}", *cells, f"held {held[way] / held['none']:.2f}"]), flush=True)


def middleware_of(way: str, folder: str) -> list[Any]:
    """The middleware of a config."""
    if way in ("none", AS_PUT):
        return []
    name, _, payload = way.partition(" ")
    return [{name: {"folder": folder, "payload": payload, "max_bytes": "1GB"}}] if payload else [name]


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", nargs="+", choices=(*ALL, "A wide"), default=("A", "B"))
    parser.add_argument(
        "--backends", nargs="+", default=["noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"]
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    if {"tq_simple", "tq_mooncake"} & set(options.backends):
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.batches:
            columns = columns_of(name)
            print(f"\n{describe(name, columns)}")
            for backend in options.backends:
                compare(backend, columns, ["none", *options.ways], options.rounds, f"{folder}/{name}")
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
