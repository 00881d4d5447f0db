"""What the ledger costs: memory for each sample, and CPU time of its commands.

    python benchmarks/ledger.py [--samples 100000]

Samples have 8 fields, written by one put of all fields or by two puts of four, in batches of 512. Memory is what Python
has allocated (tracemalloc), without the ids that the caller holds. Time is CPU time for each sample, the least of five
rounds of puts, claims, acks and clears. The last line is what the id of a request costs besides, which is kept until a
minute after its deadline.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Iterator

from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import FieldSpec, new_id

FIELDS = [f"field{number}" for number in range(8)]
BATCH = 512


def specs(fields: list[str]) -> dict[str, FieldSpec]:
    """Fields of one kind."""
    return dict.fromkeys(fields, FieldSpec("tensor", "float32", 1))


def batches(num_samples: int, group_size: int | None) -> Iterator[list[str]]:
    """Ids, in batches."""
    for first in range(0, num_samples, BATCH):
        numbers = range(first, min(first + BATCH, num_samples))
        yield [f"prompt{n // group_size}_g{n % group_size}" if group_size else f"sample{n}" for n in numbers]


def fill(ledger: Ledger, num_samples: int, *, num_puts: int, tagged: bool, group_size: int | None) -> list[list[str]]:
    """Registers a partition and puts samples. Returns their ids."""
    ledger.apply(commands.RegisterRequest("p", FIELDS, None, ["t"], group_size, {}, "e"), 0.0)
    made = list(batches(num_samples, group_size))
    for ids in made:
        for put in range(num_puts):
            tags = (
                [{"input_lengths": 100 + n % 50, "version": 7} for n in range(len(ids))] if tagged and not put else None
            )
            begin = commands.BeginPut(
                "p",
                ids,
                specs(FIELDS[put::num_puts]),
                [commands.Write(list(specs(FIELDS[put::num_puts])), [64] * len(ids))],
                tags,
                ttl_s=9.0,
            )
            ledger.apply(commands.CommitPut(ledger.apply(begin, 0.0)), 0.0)
    return made


def claim(ledger: Ledger, number: int, lease_s: float | None) -> list[str]:
    """Claims a batch."""
    asked = {"all_or_nothing": False, "lease_s": lease_s, "token": f"{number:032x}"}
    reply = ledger.apply(commands.ClaimRequest("p", "t", FIELDS, BATCH, **asked), 0.0)
    return list(reply.sample_ids)


def memory(num_samples: int) -> None:
    """Prints bytes for each sample."""
    for label, num_puts, tagged, group_size, lease_s in (
        ("one put, nothing else", 1, False, None, 0.0),
        ("two puts, nothing else", 2, False, None, 0.0),
        ("one put, two tags, groups of 8", 1, True, 8, 0.0),
        ("the same, all leased", 1, True, 8, 60.0),
        ("the same, all consumed", 1, True, 8, None),
    ):
        gc.collect()
        tracemalloc.start()
        ledger = Ledger()
        ids = fill(ledger, num_samples, num_puts=num_puts, tagged=tagged, group_size=group_size)
        if lease_s != 0.0:
            for number in range(len(ids)):
                claim(ledger, number, lease_s)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        ids.clear()
        del ids
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"{label:32} {held / num_samples:6.0f} bytes for each sample, with its id")


def times(num_samples: int) -> None:
    """Prints microseconds for each sample."""
    best = {"put": 1e9, "claim": 1e9, "ack": 1e9, "clear": 1e9}
    for _ in range(5):
        ledger, spent = Ledger(), {}
        gc.collect()
        start = time.process_time()
        made = fill(ledger, num_samples, num_puts=1, tagged=True, group_size=8)
        spent["put"] = time.process_time() - start
        claim(ledger, 0, None)  # makes the view
        start = time.process_time()
        claimed = [(number, ids) for number in range(1, len(made)) if (ids := claim(ledger, number, 60.0))]
        spent["claim"] = time.process_time() - start
        start = time.process_time()
        for number, ids in claimed:
            ledger.apply(commands.AckRequest("p", "t", ids, [f"{number:032x}"] * len(ids)), 0.0)
        spent["ack"] = time.process_time() - start
        start = time.process_time()
        for ids in made:
            ledger.apply(commands.ClearRequest("p", ids), 0.0)
            ledger.apply(commands.Collected(ledger.garbage(0.0)), 0.0)
        spent["clear"] = time.process_time() - start
        best = {name: min(best[name], spent[name]) for name in best}
    for name, spent_s in best.items():
        print(f"{name:32} {spent_s / num_samples * 1e6:6.2f} us of CPU for each sample")


def requests(count: int) -> None:
    """Prints bytes and microseconds for each id of a request that was carried out."""
    ids = [new_id() for _ in range(count)]
    best = 1e9
    for _ in range(5):
        ledger, spent = Ledger(), []
        ledger.apply(commands.RegisterRequest("p", FIELDS, None, ["t"], None, {}, "e"), 0.0)
        for number, more in enumerate(({}, {"request_id": "", "left_s": 60.0})):
            made = [
                commands.AckRequest("p", "t", [], [], **({**more, "request_id": each} if number else more))
                for each in ids
            ]
            start = time.process_time()
            for command in made:
                ledger.apply(command, 0.0)
            spent.append(time.process_time() - start)
        best = min(best, spent[1] - spent[0])
    ledger = Ledger()
    ledger.apply(commands.RegisterRequest("p", FIELDS, None, ["t"], None, {}, "e"), 0.0)
    tracemalloc.start()
    for _ in range(count):
        ledger.apply(commands.AckRequest("p", "t", [], [], request_id=new_id(), left_s=60.0), 0.0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{'the id of a request':32} {held / count:6.0f} bytes, {best / count * 1e6:.2f} us of CPU for each request")


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    arguments = parser.parse_args()
    memory(arguments.samples)
    times(arguments.samples)
    requests(arguments.samples)


if __name__ == "__main__":
    main()
