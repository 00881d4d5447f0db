"""Puts and gets of whole batches by the client, on every backend, in memory that is shared and over the wire.

Run:  OMP_NUM_THREADS=1 python benchmarks/backends.py [--rounds 7] [--batches A B images experts] [--backends noop ...]

The batches are those of `batches.py`. Everything that a user gets is in the client's figures: checks, codec, ledger,
confirmed commits. ``views`` reads with that option; ``wire`` is a client of the same store that shares no memory with
its storage unit; ``in TQ``, only if it is named, has its rows in the storage unit of the first peer (``storage:
transfer_queue``). Peers: ``transfer_queue.kv_batch_put`` and ``kv_batch_get`` of the same columns with one storage
unit, which do none of that; Ray's ``put`` and ``get`` of the packed bytes as one array; the same bytes over one TCP
connection and one Unix socket of the loopback, as in `wire.py`; what torch and tensordict take to make the objects that
a read returns, on memory that is there; and one copy into memory that is kept. Rounds are interleaved, so a busy
machine slows all alike; medians are printed. Last come the costs of one small put, of a small round (put, claim,
get of 64 rows x 6 ragged columns), and of the metrics middleware.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import time

os.environ.setdefault("TQ_NUM_THREADS", "2")  # else the peer warns at every request

import numpy as np
import ray
import torch
import transfer_queue
from batches import ALL, Step, batch, client_steps, describe, medians_ms, size_bytes
from configs import CONFIGS
from omegaconf import OmegaConf
from tensordict import TensorDict
from wire import Wire, copy_steps, peer

from dataplane_core import DataPlaneClient, connect

#: What is compared.
DEFAULT = [
    *("noop", "shm_store", "shm_store views", "tq_simple", "tq_simple views", "tq_simple wire"),
    *("redis_store", "tq_mooncake"),
]


def raw_steps(columns: TensorDict) -> tuple[Step, Step, Step]:
    """Put, get and clear by TransferQueue's own interface."""
    keys = [f"prompt{i // 8}_g{i % 8}" for i in range(len(columns))]
    names = list(columns.keys())
    return (
        lambda: transfer_queue.kv_batch_put(keys=keys, partition_id="raw", fields=columns),
        lambda: transfer_queue.kv_batch_get(keys=keys, partition_id="raw", select_fields=names),
        lambda: transfer_queue.kv_clear(keys=keys, partition_id="raw"),
    )


def ray_steps(columns: TensorDict) -> tuple[Step, Step, Step]:
    """Ray's object store: one array of the packed bytes. Its get is a view."""
    packed = np.ones(size_bytes(columns), dtype=np.uint8)
    kept: list[ray.ObjectRef] = []
    return (
        lambda: kept.append(ray.put(packed)),
        lambda: ray.get(kept[-1]),
        kept.clear,
    )


def remake_steps(columns: TensorDict) -> tuple[Step, Step, Step]:
    """Nothing is moved: a get makes nested tensors, and a TensorDict of all columns, on the memory of these."""
    dense = {name: column for name, column in columns.items() if not column.is_nested}
    jagged = {name: (column.values(), column.offsets()) for name, column in columns.items() if column.is_nested}
    lengths = [offsets.diff() for _, offsets in jagged.values()]
    shortest, longest = (int(torch.stack(lengths).aminmax()[end]) if lengths else 0 for end in (0, 1))

    def remake() -> TensorDict:
        nested = {
            name: torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=shortest, max_seqlen=longest)
            for name, (values, offsets) in jagged.items()
        }
        return TensorDict({**dense, **nested}, batch_size=columns.batch_size)

    return lambda: None, remake, lambda: None


def compare(contestants: dict[str, tuple[Step, Step, Step]], rounds: int) -> None:
    """Prints the contestants' medians."""
    print(f"{'':18}{'put ms':>12}{'get ms':>12}")
    for name, (put_ms, get_ms) in medians_ms(contestants, rounds).items():
        print(f"{name:18}{put_ms:12.1f}{get_ms:12.1f}", flush=True)


def small_put_us(client: DataPlaneClient, repeats: int = 500) -> float:
    """Median microseconds of a put of one sample with one scalar."""
    client.register_partition("small", ["x"], None, ["train"])
    columns = TensorDict({"x": torch.ones(1)}, batch_size=[1])
    times = []
    for number in range(repeats):
        started = time.perf_counter()
        client.put_samples([f"s{number}"], "small", columns)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def small_round_us(client: DataPlaneClient, repeats: int = 300) -> float:
    """Median microseconds of a put, claim and get of 64 rows x 6 ragged columns of 1 to 39 floats."""
    offsets = torch.cat((torch.zeros(1), torch.randint(1, 40, (64,)).cumsum(0))).long()
    nested = torch.nested.nested_tensor_from_jagged
    columns = {f"c{number}": nested(torch.rand(int(offsets[-1])), offsets) for number in range(6)}
    times = []
    for number in range(repeats):
        ids = [f"{number}-{row}" for row in range(64)]
        client.register_partition("round", list(columns), 64, ["train"])
        started = time.perf_counter()
        client.put_samples(ids, "round", columns)
        client.get_data(client.claim_meta("round", "train", list(columns), 64))
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--backends", nargs="+", default=DEFAULT)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    batches = {name: batch(name) for name in options.batches}
    with contextlib.ExitStack() as stack:
        configs = {name: CONFIGS.get(name, {"backend": name}) for name in options.backends}
        clients = {name: stack.enter_context(connect(config, "auto")) for name, config in configs.items()}
        tcp, unix = stack.enter_context(peer(max(map(size_bytes, batches.values()))))
        wires = {"TCP, 1": Wire(socket.AF_INET, tcp, 1), "Unix, 1": Wire(socket.AF_UNIX, unix, 1)}
        for wire in wires.values():
            stack.callback(wire.close)
        for name, columns in batches.items():
            print(f"\n{describe(name, columns)}")
            contestants = {backend: client_steps(client, columns) for backend, client in clients.items()}
            memory = memoryview(bytearray(size_bytes(columns)))
            contestants |= {"raw kv_batch": raw_steps(columns), "ray put, get": ray_steps(columns)}
            contestants |= {each: wire.steps(memory) for each, wire in wires.items()}
            contestants |= {"torch's objects": remake_steps(columns), "copy": copy_steps(memory)}
            compare(contestants, options.rounds)
        print("\nput of 1 sample, 1 scalar; round of 64 samples, 6 ragged columns")
        for backend, client in clients.items():
            with_metrics = {"backend": backend, "middleware": ["metrics"]}
            line = f"{backend:18}{small_put_us(client):9.0f} us{small_round_us(client):9.0f} us"
            if backend == "noop":
                with connect(with_metrics) as counted:
                    line += f"; with the metrics middleware {small_put_us(counted):.0f} us"
            print(line)
    transfer_queue.close()
    ray.shutdown()
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
