"""The CPU time that a store's own processes take for each sample.

Run:  python benchmarks/server_cost.py [--backends redis_store tq_simple shm_store] [--sizes 1 16 512] [--seconds 3]
      [--fields 8] [--values 16] [--options '{"journal": "/a/folder"}'] [--out figures.json]

One client puts, claims with a lease, gets, acks and clears samples, in calls of 1, 16 and 512 samples, and each sample
goes through all five. A field is a row of 16 float32 (``--values``), and each sample has two tags. Shown is the CPU
time of the processes that keep the store: Redis; tq_simple's controller and its storage unit; the ledger process of
shm_store; of noop this process, with the client. Ray's own processes and the client's are not counted.

The figures are CPU time (``CLOCK_PROCESS_CPUTIME_ID`` of the process), so work of other programs changes them little.
They are for one call after another. A server that is busy all the time takes less for each call, since it sleeps less
often: ``benchmarks/load.py`` shows that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, connect
from dataplane_testkit import backend_of

#: Options of backends that need some.
OPTIONS: dict[str, dict[str, Any]] = {
    "redis_store": {"server": "private", "namespace": f"cost-{os.getpid()}"},
    "shm_store": {"namespace": f"cost-{os.getpid()}", "capacity_bytes": 1 << 30},
}
STEPS = ("put", "claim", "get", "ack", "clear")
ROW_VALUES = 16


def cpu_s(pid: int) -> float:
    """CPU seconds of a process since its start, exact to nanoseconds."""
    return time.clock_gettime((~pid << 3) | 2)


def server_pids(client: DataPlaneClient) -> dict[str, int]:
    """The processes that keep the store: name -> process id. With ``num_ledgers``, those of each of its stores."""
    found: dict[str, int] = {}

    def add(name: str, pid: int) -> None:
        found[f"{name} {sum(each.startswith(name) for each in found)}" if name in found else name] = pid

    for store in getattr(backend_of(client), "_stores", [backend_of(client)]):
        instance = getattr(store, "_instance", None)
        if instance is not None:  # a backend with a controller on Ray
            add("controller", ray.get(instance.controller.__ray_call__.remote(lambda _: os.getpid())))
    for child in psutil.Process().children(recursive=True):  # Ray's processes are among them
        words = " ".join(child.cmdline())
        if "StorageUnit" in words:
            add("unit", child.pid)
        elif "redis-server" in child.name():
            add("redis", child.pid)
        elif "dataplane_shm" in words:
            add("ledger", child.pid)
        elif "backends.owner" in words:
            add("owner", child.pid)
    return found or {"process": os.getpid()}


def batch(size: int, num_fields: int, num_values: int = ROW_VALUES) -> TensorDict:
    """``size`` rows of every field."""
    return TensorDict({f"field{each}": torch.rand(size, num_values) for each in range(num_fields)}, batch_size=[size])


def measure(
    client: DataPlaneClient, pids: dict[str, int], size: int, num_fields: int, num_values: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Server -> step -> CPU microseconds for each sample, in calls of ``size`` samples."""
    columns, fields = batch(size, num_fields, num_values), [f"field{each}" for each in range(num_fields)]
    client.register_partition("cost", fields, None, ["t"])
    spent = {name: dict.fromkeys(STEPS, 0.0) for name in pids}
    claimed: Any = None
    number = 0

    def ids() -> list[str]:
        return [f"sample{number * size + each}" for each in range(size)]

    def claim() -> None:
        nonlocal claimed
        claimed = client.claim_meta("cost", "t", fields, size, lease_s=60.0)

    acts: dict[str, Callable[[], Any]] = {
        "put": lambda: client.put_samples(ids(), "cost", columns, tags=[{"input_lengths": 100, "version": 7}] * size),
        "claim": claim,
        "get": lambda: client.get_samples(ids(), "cost", fields),
        "ack": lambda: client.ack(claimed),
        "clear": lambda: client.clear_samples(ids(), "cost"),
    }
    rounds, end = 0, 0.0
    while not rounds or time.perf_counter() < end:
        for step, act in acts.items():
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            act()
            if number >= 10:  # the first rounds warm up
                for name, pid in pids.items():
                    spent[name][step] += cpu_s(pid) - before[name]
        number += 1
        if number == 10:
            end = time.perf_counter() + seconds
        rounds += number > 10
    client.clear_samples(None, "cost")
    return {name: {step: each / rounds / size * 1e6 for step, each in steps.items()} for name, steps in spent.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["redis_store", "tq_simple", "shm_store"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 512])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--fields", type=int, default=8)
    parser.add_argument("--values", type=int, default=ROW_VALUES, help="float32 of each field of each sample")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of the backends, as JSON")
    parser.add_argument("--out", help="also writes the figures here as JSON, for benchmarks/scaling.py")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    print(f"CPU us of the server for each sample, {arguments.fields} fields of {arguments.values} float32")
    print(f"{'':26}{'samples':>8}" + "".join(f"{step:>9}" for step in (*STEPS, "together")))
    for backend in arguments.backends:
        options = OPTIONS.get(backend, {}) | arguments.options
        with connect({"backend": backend, "options": options}, bootstrap=True) as client:
            pids = server_pids(client)
            for size in arguments.sizes:
                found = measure(client, pids, size, arguments.fields, arguments.values, arguments.seconds)
                for name, steps in found.items():
                    steps["together"] = sum(steps.values())
                    print(f"{backend + ' ' + name:26}{size:8}" + "".join(f"{each:9.1f}" for each in steps.values()))
                    figures.setdefault(f"{backend} {name}", {})[str(size)] = steps
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
