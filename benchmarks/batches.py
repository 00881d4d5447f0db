"""The batches that the benchmarks move, and the clock they are timed with.

Batch A: 512 samples, 6 jagged fields (1 int64, 5 float32) of 256 to 2,048 tokens and 2 per-sample fields, 16 MB. Batch
B: the same up to 8,192 tokens, 61 MB. Images: 64 samples with an image of 1 MB. Experts: 512 rows of 50 to 400 tokens
with routed experts, 8 layers x 8 experts per token, int64 below 128, 59 MB.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from dataplane_core import DataPlaneClient
from dataplane_core.batch import BatchedDataDict

_FLOAT_FIELDS = (
    "generation_logprobs",
    "prev_logprobs",
    "reference_policy_logprobs",
    "advantages",
    "token_mask",
)
NUM_SAMPLES = 512
MAX_TOKENS = {"A": 2048, "B": 8192}
Step = Callable[[], Any]


ALL = (*MAX_TOKENS, "images", "experts")


def batch(name: str) -> TensorDict:
    """The columns of a batch of `ALL`."""
    if name == "images":
        return TensorDict({"image": torch.randint(0, 256, (64, 1 << 20), dtype=torch.uint8)}, batch_size=[64])
    if name == "experts":
        return routed_experts()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(256, MAX_TOKENS[name] + 1, (NUM_SAMPLES,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])

    def jagged(values: torch.Tensor) -> torch.Tensor:
        shortest, longest = int(lengths.min()), int(lengths.max())
        return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=shortest, max_seqlen=longest)

    columns = {"input_ids": jagged(torch.randint(0, 50_000, (total,), generator=generator))}
    for number in range(5):
        columns[f"column{number}"] = jagged(torch.randn(total, generator=generator))
    columns["reward"] = torch.randn(NUM_SAMPLES, generator=generator)
    columns["input_lengths"] = lengths
    return TensorDict(columns, batch_size=[NUM_SAMPLES])


def routed_experts(most_tokens: int = 400) -> TensorDict:
    """A batch with routed experts."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(most_tokens // 8, most_tokens + 1, (NUM_SAMPLES,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(0, 128, (int(offsets[-1]), 8, 8), generator=generator)
    experts = torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )
    return TensorDict({"routed_experts": experts}, batch_size=[NUM_SAMPLES])


def training_batch(num_rows: int) -> BatchedDataDict:
    """A padded training batch: rows of 256 to 2,048 tokens, six token-aligned fields."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(256, 2049, (num_rows,), generator=generator)
    inside = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    columns: dict[str, Any] = {
        name: torch.randn(inside.shape, generator=generator).where(inside, 0.0) for name in _FLOAT_FIELDS
    }
    columns["input_ids"] = torch.randint(0, 32000, inside.shape, generator=generator) * inside
    columns["input_lengths"] = lengths
    columns["sample_mask"] = torch.ones(num_rows)
    return BatchedDataDict(columns)


def size_bytes(columns: TensorDict) -> int:
    """Payload bytes."""
    values = (column.values() if column.is_nested else column for _, column in columns.items())
    return sum(column.numel() * column.element_size() for column in values)


def client_steps(client: DataPlaneClient, columns: TensorDict) -> tuple[Step, Step, Step]:
    """Put, get and clear by the client."""
    ids = [f"prompt{i // 8}_g{i % 8}" for i in range(len(columns))]
    names = list(columns.keys())
    client.register_partition("bench", names, None, ["train"])
    return (
        lambda: client.put_samples(ids, "bench", columns),
        lambda: client.get_samples(ids, "bench", names),
        lambda: client.clear_samples(ids, "bench"),
    )


def describe(name: str, columns: TensorDict) -> str:
    """A heading."""
    fields = f"{len(list(columns.keys()))} fields"
    return f"batch {name}: {len(columns)} samples, {fields}, {size_bytes(columns) / 1e6:.0f} MB"


def medians_ms(contestants: Mapping[str, tuple[Step, Step, Step]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds of put and get. Rounds are interleaved, so a busy machine slows all alike.

    Args:
        contestants: Name -> put, get and clear.
        rounds: How many count; one more before them warms up.
    """
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contestants}
    for number in range(rounds + 1):
        for name, (put, get, clear) in contestants.items():
            for step, kept in zip((put, get), times[name], strict=True):
                started = time.perf_counter()
                step()
                if number:
                    kept.append((time.perf_counter() - started) * 1e3)
            clear()
    return {name: (statistics.median(put), statistics.median(get)) for name, (put, get) in times.items()}
