"""Puts and gets of whole batches through redis_store, beside a hand-written redis-py pipeline of the same cells.

Run:  python benchmarks/redis_store.py [--rounds 7] [--batches A B] [--samples 10000 1000000]

The batches are those of `batches.py`: A, 512 samples and 16 MB; B, 61 MB. The peer does what one would
write by hand: one HSET of all cells per sample, one HMGET per sample, in one pipeline each, over the same unix socket;
the cells are framed before the clock starts, and what comes back stays bytes. So it does less: no checks, no codec, no
schema, no commit. Rounds are interleaved, so a busy machine slows both alike; medians are printed.

Then claims of 512 out of 10,000 and of 1,000,000 ready samples of one scalar each, in turns: the first claim, which
finds them, and the median of later ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import uuid

import redis
import torch
from batches import MAX_TOKENS, NUM_SAMPLES, Step, batch, client_steps, describe, medians_ms, size_bytes
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, connect
from dataplane_core.codec import encode_columns
from dataplane_core.spec import WireFormat


def pipeline_steps(server: redis.Redis, columns: TensorDict) -> tuple[Step, Step, Step]:
    """Put, get and clear by a pipeline of redis-py."""
    keys = [f"raw:prompt{i // 8}_g{i % 8}" for i in range(NUM_SAMPLES)]
    names = list(columns.keys())
    encoded, _ = encode_columns(columns, NUM_SAMPLES, WireFormat(bytes=True))
    rows = [{name: encoded[name][index] for name in names} for index in range(NUM_SAMPLES)]

    def put() -> None:
        pipeline = server.pipeline(transaction=False)
        for key, row in zip(keys, rows, strict=True):
            pipeline.hset(key, mapping=row)
        pipeline.execute()

    def get() -> list[list[bytes | None]]:
        pipeline = server.pipeline(transaction=False)
        for key in keys:
            pipeline.hmget(key, names)
        return pipeline.execute()

    return put, get, lambda: server.unlink(*keys)


def compare(columns: TensorDict, contestants: dict[str, tuple[Step, Step, Step]], rounds: int) -> None:
    """Prints the contestants' medians."""
    megabytes = size_bytes(columns) / 1e6
    medians = medians_ms(contestants, rounds)
    peer = medians["redis-py pipeline"]
    heads = ["put ms", "get ms", "put MB/s", "get MB/s", "put x peer", "get x peer"]
    print(f"{'':18}" + "".join(f"{head:>12}" for head in heads))
    for name, (put_ms, get_ms) in medians.items():
        cells = [
            *(f"{put_ms:.1f}", f"{get_ms:.1f}"),
            *(f"{megabytes / put_ms * 1e3:.0f}", f"{megabytes / get_ms * 1e3:.0f}"),
            *(f"{peer[0] / put_ms:.2f}", f"{peer[1] / get_ms:.2f}"),
        ]
        print(f"{name:18}" + "".join(f"{cell:>12}" for cell in cells))


def compare_claims(client: DataPlaneClient, sizes: list[int], claims: int) -> None:
    """Claims of 512 from partitions of different sizes, in turns; prints the first and the median of later ones."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        client.register_partition(f"claims{size}", ["x"], None, ["train"])
        for start in range(0, size, 10_000):
            ids = [f"s{number}" for number in range(start, min(start + 10_000, size))]
            columns = TensorDict({"x": torch.ones(len(ids))}, batch_size=[len(ids)])
            client.put_samples(ids, f"claims{size}", columns)
    for _ in range(claims):
        for size, kept in times.items():
            started = time.perf_counter()
            meta = client.claim_meta(f"claims{size}", "train", ["x"], 512)
            kept.append((time.perf_counter() - started) * 1e3)
            assert meta.size == 512
    for size, (first, *later) in times.items():
        client.clear_samples(None, f"claims{size}")
        print(
            f"claim of 512 of {size:,} ready: first {first:.1f} ms, median of later {statistics.median(later):.1f} ms"
        )


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", nargs="*", choices=sorted(MAX_TOKENS), default=sorted(MAX_TOKENS))
    parser.add_argument("--samples", nargs="*", type=int, default=[10_000, 1_000_000])
    options = parser.parse_args()
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    config = {
        "backend": "redis_store",
        "options": {"server": "private", "namespace": namespace},
        "op_timeout_s": 120.0,
    }
    with connect(config) as client:
        from dataplane_redis._server import private_url

        server = redis.Redis.from_url(private_url(namespace))
        for name in options.batches:
            columns = batch(name)
            print(f"\n{describe(name, columns)}")
            contestants = {
                "redis_store": client_steps(client, columns),
                "redis-py pipeline": pipeline_steps(server, columns),
            }
            compare(columns, contestants, options.rounds)
        print()
        compare_claims(client, options.samples, 19)
        server.close()
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
