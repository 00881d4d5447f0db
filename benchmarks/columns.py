"""Reads of single columns, equal cells, and what a stored row costs, on every backend.

Run:  python benchmarks/columns.py [--rounds 15] [--backends noop shm_store redis_store tq_simple tq_mooncake]

For each backend it prints, all medians of interleaved rounds:

- the cost of a stored row beside its bytes, in microseconds and as bytes that are moved in the same time, from puts and
  gets of 4,000 small rows and of a few large ones (not for backends that address cells);
- reads of each field of a put of 10 (64 samples; six fields of 4 to 32 KB per cell, one of 1 MB, three scalars), as a
  multiple of the read from a store that holds nothing else;
- batches A and B of `batches.py`, with large columns apart (as it is) and with all columns together;
- 64 groups of 16 samples that have one image of 1 MB each, as a multiple of 64 samples with an image of their own: put,
  get with ``share_rows``, stored bytes; the same for rows of equal bytes that lie in memory 16 times; and what looking
  for equal cells costs where none are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

os.environ.setdefault("TQ_NUM_THREADS", "2")

import torch
from batches import Step, batch, medians_ms
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, connect
from dataplane_testkit import backend_of

CONFIGS: dict[str, dict[str, Any]] = {"redis_store": {"backend": "redis_store", "options": {"server": "private"}}}
BACKENDS = ["noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"]
KIB, MIB = 1 << 10, 1 << 20


def steps(client: DataPlaneClient, partition: str, columns: Any, **options: Any) -> tuple[Step, Step, Step]:
    """Put, get and clear of a batch."""
    names = list(columns.keys())
    ids = [f"prompt{i // 16}_g{i % 16}" for i in range(len(columns[names[0]]))]
    client.register_partition(partition, names, None, ["train"])
    return (
        lambda: client.put_samples(ids, partition, columns),
        lambda: client.get_samples(ids, partition, names, **options),
        lambda: client.clear_samples(ids, partition),
    )


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for a class attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def with_attribute(contestant: tuple[Step, Step, Step], owner: Any, name: str, value: Any) -> tuple[Step, Step, Step]:
    """The same steps, with another value for a class attribute."""

    def run(step: Step) -> None:
        with attribute(owner, name, value):
            step()

    put, get, clear = contestant
    return (lambda: run(put), lambda: run(get), clear)


def random_rows(num_rows: int, size_bytes: int) -> torch.Tensor:
    """Rows of random bytes."""
    return torch.randint(0, 256, (num_rows, size_bytes), dtype=torch.uint8)


def print_row_cost(client: DataPlaneClient, rounds: int) -> None:
    """The time that a row takes beside that of its bytes."""
    small, large = random_rows(4000, 512), random_rows(256, MIB // 4)
    contestants = {
        name: steps(client, f"cost-{name}", TensorDict({"x": rows}, batch_size=[len(rows)]))
        for name, rows in {"small": small, "half": small[:2000], "large": large, "few": large[:64]}.items()
    }
    took = medians_ms(contestants, rounds)
    for which, what in enumerate(("put", "get")):
        us_per_row = (took["small"][which] - took["half"][which]) * 1e3 / 2000
        us_per_kib = (took["large"][which] - took["few"][which]) * 1e3 / (192 * MIB // 4 / KIB)
        us_per_row -= us_per_kib / 2
        print(
            f"  {what}: a row {us_per_row:.1f} us, a KiB {us_per_kib:.2f} us: "
            f"a row costs {us_per_row / us_per_kib:.1f} KiB"
        )


def print_single_fields(client: DataPlaneClient, rounds: int) -> None:
    """Reads of one field of ten."""
    num_rows = 64
    fields: dict[str, torch.Tensor] = {
        f"{size} KB": random_rows(num_rows, size * KIB) for size in (4, 8, 12, 16, 24, 32)
    }
    fields["1 MB"] = random_rows(num_rows, MIB)
    fields.update({f"scalar {number}": torch.arange(num_rows) for number in range(3)})
    ids = [f"s{i}" for i in range(num_rows)]
    client.register_partition("all", list(fields), None, ["train"])
    client.put_samples(ids, "all", TensorDict(fields, batch_size=[num_rows]))
    ratios = []
    for name, column in fields.items():
        client.register_partition("one", [name], None, ["train"])
        client.put_samples(ids, "one", TensorDict({name: column}, batch_size=[num_rows]))
        times: dict[str, list[float]] = {"all": [], "one": []}
        for _ in range(2 * rounds + 1):
            for partition, kept in times.items():
                started = time.perf_counter()
                client.get_samples(ids, partition, [name])
                kept.append((time.perf_counter() - started) * 1e3)
        from_all, alone = (statistics.median(kept[1:]) for kept in times.values())
        ratios.append(from_all / alone)
        print(f"  {name:>9}: {from_all:7.2f} ms, alone {alone:7.2f} ms: {from_all / alone:.2f}x")
    print(f"  largest: {max(ratios):.2f}x")
    for partition in ("all", "one"):
        client.clear_samples(None, partition)


def print_batches(client: DataPlaneClient, rounds: int) -> None:
    """Batches A and B, with columns apart and without."""
    owner = type(backend_of(client))
    for name in ("A", "B"):
        columns = batch(name)
        contestant = steps(client, "batch", columns)
        took = medians_ms(
            {"apart": contestant, "together": with_attribute(contestant, owner, "row_cost_bytes", None)}, rounds
        )
        (put, get), (put_together, get_together) = took["apart"], took["together"]
        print(
            f"  batch {name}: put {put:.1f} ms, get {get:.1f} ms; all columns together {put_together:.1f} and "
            f"{get_together:.1f} ms: {put / put_together:.2f}x, {get / get_together:.2f}x"
        )


def image_batches() -> Mapping[str, Any]:
    """64 images; 64 groups of 16 that share them, as the same memory and as equal bytes."""
    images = random_rows(64, MIB)
    return {
        "64 images": {"image": list(images)},
        "same memory": {"image": [images[i // 16] for i in range(1024)]},
        "equal bytes": {"image": images.repeat_interleave(16, 0)},
    }


def print_equal_cells(client: DataPlaneClient, rounds: int) -> None:
    """Groups that share an image."""
    batches = image_batches()
    contestants = {name: steps(client, name, rows, share_rows=True) for name, rows in batches.items()}
    took = medians_ms(contestants, rounds)
    put, get = took["64 images"]
    print(f"  64 images: put {put:.1f} ms, get {get:.1f} ms")
    for name in ("same memory", "equal bytes"):
        shared_put, shared_get = took[name]
        print(
            f"  64 groups of 16, {name}: put {shared_put:.1f} ms ({shared_put / put:.2f}x), get {shared_get:.1f} ms "
            f"({shared_get / get:.2f}x)"
        )
    images, groups = (held(client, name, contestants[name]) for name in ("64 images", "same memory"))
    print(f"  held: 64 images {images}, groups {groups}")
    contestant = contestants["64 images"]
    wire = replace(client._wire, shared_rows=False)
    took = medians_ms({"looked": contestant, "not": with_attribute(contestant, client, "_wire", wire)}, rounds)
    print(f"  no equal cells: put {took['looked'][0] / took['not'][0]:.3f}x of a put that does not look for them")


def held(client: DataPlaneClient, partition: str, contestant: tuple[Step, Step, Step]) -> str:
    """The payload bytes that a put holds."""
    put, _, clear = contestant
    put()
    text = f"{client.describe(partition).held_bytes / 1e6:.1f} MB"
    clear()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for name in arguments.backends:
        print(name)
        with connect(CONFIGS.get(name, {"backend": name})) as client:
            if name not in ("noop", "shm_store"):
                print_row_cost(client, arguments.rounds)
            print_single_fields(client, arguments.rounds)
            if name not in ("noop", "shm_store"):
                print_batches(client, arguments.rounds)
            print_equal_cells(client, arguments.rounds)


if __name__ == "__main__":
    main()
