"""The cost of the codec, compared with slicing row by row and with memcpy.

Batch A: 512 samples, six jagged fields (``input_ids`` int64, five float32) of 256 to 2048 tokens; 16 MB of rows in 29
MB of padded columns. Batch B: 4096 samples of the same fields with 16 to 256 tokens.

Every line is the median of seven rounds; a round runs every candidate once, so that a busy moment of the machine hits
all of them. Shown is the processor's time, since the clock's means little on a machine that others use. Run it with
``python benchmarks/codec.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dataplane_core import materialize, pack_jagged_fields

ROUNDS = 7
FIELDS = ("input_ids", "generation_logprobs", "prev_logprobs", "reference_policy_logprobs", "advantages", "token_mask")


def make_batch(num_samples: int, shortest: int, longest: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Padded columns and their lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (num_samples,), generator=generator)
    width = int(lengths.max())
    columns = {name: torch.randn(num_samples, width, generator=generator) for name in FIELDS}
    columns["input_ids"] = torch.randint(0, 32000, (num_samples, width), generator=generator)
    return columns, lengths


def pack_by_slices(columns: dict[str, torch.Tensor], lengths: list[int]) -> dict[str, torch.Tensor]:
    """Every row sliced, then joined."""
    return {
        name: torch.cat([column[row, :length] for row, length in enumerate(lengths)])
        for name, column in columns.items()
    }


def pack_by_nesting(columns: dict[str, torch.Tensor], lengths: list[int]) -> dict[str, torch.Tensor]:
    """Every row sliced, then nested: the obvious way."""
    return {
        name: torch.nested.as_nested_tensor(
            [column[row, :length] for row, length in enumerate(lengths)], layout=torch.jagged
        )
        for name, column in columns.items()
    }


def pad_by_rows(values: dict[str, torch.Tensor], lengths: list[int], width: int) -> dict[str, torch.Tensor]:
    """Every row copied into a padded column."""
    padded = {}
    for name, flat in values.items():
        column = padded[name] = flat.new_zeros((len(lengths), width))
        start = 0
        for row, length in enumerate(lengths):
            column[row, :length] = flat[start : start + length]
            start += length
    return padded


def run(title: str, num_samples: int, shortest: int, longest: int) -> None:
    """Measures one batch and prints it."""
    columns, lengths = make_batch(num_samples, shortest, longest)
    counts = lengths.tolist()
    packed = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=FIELDS)
    values = {name: packed.get(name).values() for name in FIELDS}
    size_mb = sum(flat.nbytes for flat in values.values()) / 1e6

    candidates: dict[str, Callable[[], Any]] = {
        "memcpy of the rows": lambda: {name: bytearray(flat.numpy()) for name, flat in values.items()},
        "pack_jagged_fields": lambda: pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=FIELDS),
        "row slices, as_nested_tensor": lambda: pack_by_nesting(columns, counts),
        "row slices, torch.cat": lambda: pack_by_slices(columns, counts),
        "materialize": lambda: materialize(packed),
        "pad row by row": lambda: pad_by_rows(values, counts, longest),
    }
    times: dict[str, list[float]] = {}
    for round_number in range(ROUNDS + 1):
        for name, function in candidates.items():
            start = time.process_time()
            result = function()
            elapsed = time.process_time() - start
            del result
            if round_number:  # the first is warm-up
                times.setdefault(name, []).append(elapsed)

    print(f"\n{title}: {num_samples} samples, {shortest} to {longest} tokens, {len(FIELDS)} fields, {size_mb:.1f} MB")
    limit = statistics.median(times["memcpy of the rows"])
    print(f"  {'':32} {'cpu ms':>8} {'x memcpy':>9}")
    for name, taken in times.items():
        print(f"  {name:32} {statistics.median(taken) * 1e3:8.2f} {statistics.median(taken) / limit:9.1f}")


if __name__ == "__main__":
    # as in a trainer, which has freed large tensors: from then on malloc keeps 16 MB instead of giving pages back and
    # asking for fresh ones, whose faults would take more time than anything measured here
    torch.empty(31 << 20, dtype=torch.uint8).fill_(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    run("Batch A", 512, 256, 2048)
    run("Batch B", 4096, 16, 256)
