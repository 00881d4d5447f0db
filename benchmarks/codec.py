"""The cost of the codec, compared with slicing row by row and with memcpy.

Batch A: 512 samples, six jagged fields (``input_ids`` int64, five float32) of 256 to 2048 tokens; 16 MB of rows in 29
MB of padded columns. Batch B: 4096 samples of the same fields with 16 to 256 tokens, where the cost per cell shows.

Every line is the median of seven rounds; a round runs every candidate once, so that a busy moment of the machine hits
all of them. The processor's time is shown beside the clock's, since the latter means little on a machine that others
use. "x ours" compares a group's members with its first. Run it with ``python benchmarks/codec.py``.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict

from dataplane_core.batch import materialize, pack_jagged_fields
from dataplane_core.codec import decode_columns, encode_columns, join_rows, split_rows
from dataplane_core.spec import WireFormat

ROUNDS = 7
FIELDS = ("input_ids", "generation_logprobs", "prev_logprobs", "reference_policy_logprobs", "advantages", "token_mask")

Rows = dict[str, list[torch.Tensor]]


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


def frame_by_cell(rows: Rows) -> dict[str, list[bytes]]:
    """A header and the bytes of every cell, one by one."""
    return {
        name: [struct.pack("<3sBBBBBq", b"DPF", 1, 1, 12, 1, 0, len(row)) + row.numpy().tobytes() for row in column]
        for name, column in rows.items()
    }


def unframe_by_cell(frames: dict[str, list[Any]], dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """A tensor of every cell, one by one, then joined."""
    return {
        name: torch.cat([torch.frombuffer(bytearray(frame), dtype=dtypes[name], offset=16) for frame in column])
        for name, column in frames.items()
    }


def run(title: str, num_samples: int, shortest: int, longest: int) -> None:
    """Measures one batch and prints it."""
    columns, lengths = make_batch(num_samples, shortest, longest)
    counts = lengths.tolist()
    packed = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=FIELDS)
    values = {name: packed.get(name).values() for name in FIELDS}
    rows = {name: list(flat.split(counts)) for name, flat in values.items()}
    dtypes = {name: flat.dtype for name, flat in values.items()}
    jagged, framing, by_rows = WireFormat(), WireFormat(bytes=True), WireFormat(ragged="rows")
    framed, specs = encode_columns(packed, num_samples, framing)
    data, offsets = join_rows([list(framed.values())])
    view, cuts = memoryview(data), offsets.tolist()
    joined = [view[start:stop] for start, stop in pairwise(cuts)]
    size_mb = sum(flat.nbytes for flat in values.values()) / 1e6

    candidates: dict[str, dict[str, Callable[[], Any]]] = {
        "pack": {
            "pack_jagged_fields": lambda: pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=FIELDS),
            "row slices, torch.cat": lambda: pack_by_slices(columns, counts),
            "row slices, as_nested_tensor": lambda: pack_by_nesting(columns, counts),
        },
        "pad": {
            "materialize": lambda: materialize(packed),
            "row by row": lambda: pad_by_rows(values, counts, longest),
            "to_padded_tensor": lambda: {n: torch.nested.to_padded_tensor(packed.get(n), 0.0) for n in FIELDS},
        },
        "frame": {
            "encode_columns, bytes": lambda: encode_columns(packed, num_samples, framing),
            "cell by cell": lambda: frame_by_cell(rows),
        },
        "unframe": {
            "decode_columns, bytes": lambda: decode_columns(framed, specs, num_samples, framing),
            "cell by cell": lambda: unframe_by_cell(framed, dtypes),
        },
        "one string per sample": {
            "join_rows": lambda: join_rows([list(framed.values())]),
            "split_rows": lambda: split_rows(joined),
        },
        "there and back": {
            "encode_columns + decode_columns, jagged": lambda: _there_and_back(packed, num_samples, jagged),
            "encode_columns + decode_columns, rows": lambda: _there_and_back(packed, num_samples, by_rows),
            "encode_columns + decode_columns, bytes": lambda: _there_and_back(packed, num_samples, framing),
        },
        "limit": {"memcpy of the rows": lambda: {name: bytearray(flat.numpy()) for name, flat in values.items()}},
    }
    times: dict[tuple[str, str], list[float]] = {}
    cpu_times: dict[tuple[str, str], list[float]] = {}
    for round_number in range(ROUNDS + 1):
        for group, members in candidates.items():
            for name, function in members.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                result = function()
                elapsed, cpu_elapsed = time.perf_counter() - start, time.process_time() - cpu_start
                del result
                if round_number:  # the first is warm-up
                    times.setdefault((group, name), []).append(elapsed)
                    cpu_times.setdefault((group, name), []).append(cpu_elapsed)

    print(f"\n{title}: {num_samples} samples, {shortest} to {longest} tokens, {len(FIELDS)} fields, {size_mb:.1f} MB")
    limit = statistics.median(times["limit", "memcpy of the rows"])
    print(f"  {'':22} {'':32} {'ms':>8} {'cpu ms':>8} {'GB/s':>7} {'x memcpy':>9} {'x ours':>7} {'(cpu)':>7}")
    for group, members in candidates.items():
        ours, *_ = (statistics.median(times[group, name]) for name in members)
        ours_cpu, *_ = (statistics.median(cpu_times[group, name]) for name in members)
        for number, name in enumerate(members):
            median, cpu = statistics.median(times[group, name]), statistics.median(cpu_times[group, name])
            print(
                f"  {group if number == 0 else '':22} {name:32} {median * 1e3:8.2f} {cpu * 1e3:8.2f} "
                f"{size_mb / 1e3 / median:7.2f} {median / limit:9.1f} {median / ours:7.1f} {cpu / ours_cpu:7.1f}"
            )


def _there_and_back(packed: TensorDict, num_samples: int, wire: WireFormat) -> dict[str, Any]:
    columns, specs = encode_columns(packed, num_samples, wire)
    return decode_columns(columns, specs, num_samples, wire)


if __name__ == "__main__":
    # as in a trainer, which has freed large tensors: from then on malloc keeps 16 MB instead of giving pages back and
    # asking for fresh ones, whose faults would take more time than anything measured here
    torch.empty(31 << 20, dtype=torch.uint8).fill_(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    run("Batch A", 512, 256, 2048)
    run("Batch B", 4096, 16, 256)
