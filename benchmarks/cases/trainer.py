"""The trainer's side: shards, and weights."""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import bench
from benchmarks.bench import Table, case
from dataplane_core import KVBatchMeta, connect, shard_meta_for_dp
from dataplane_core.sharding import PACKERS
from dataplane_integrations.weights import WeightReader, open_weights, publish_weights

# --- shards -----------------------------------------------------------------------------------------------------------


def sort_and_pass(lengths: list[int]) -> int:
    """Sorts the lengths and adds them up in a loop."""
    total = 0
    for length in sorted(lengths):
        total += length
    return total


def peak_mb(run: Callable[[], object]) -> float:
    """Most memory that Python has allocated for a call, with its result."""
    tracemalloc.start()
    kept = run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return peak / 2**20


@case
def sharding(
    sizes: tuple[int, ...] = (16_384, 262_144), rounds: int = 25, limit: int = 16_384, multiple: int = 64
) -> Iterator[Table]:
    """What `shard_meta_for_dp` over 8 ranks costs, against sorting as many Python integers and adding them up.

    Rows have one tag, and lengths spread evenly over 1 to 4096 tokens, rounded up to a multiple. ``--limit`` is the
    most tokens of a microbatch. Times are the best of the rounds, of this process.
    """
    keys = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "max_tokens_per_microbatch": limit}
    ways: dict[str, Any] = {"dynamic batching": {"dynamic_batching_args": {**keys, "sequence_length_round": multiple}}}
    for name in PACKERS:
        packing = {**keys, "algorithm": name, "sequence_length_pad_multiple": multiple}
        ways[name] = {"sequence_packing_args": packing}
    rows: dict[str, list[Any]] = {}
    for size in sizes:
        lengths = np.random.RandomState(0).randint(1, 4097, size).tolist()
        ids, tags = [f"q{row // 8}_g{row % 8}" for row in range(size)], [{"input_lengths": n} for n in lengths]
        meta = KVBatchMeta("train", "train", ids, sequence_lengths=lengths, tags=tags)
        steps: dict[str, Callable[[], object]] = {"sort and one pass": partial(sort_and_pass, lengths)}
        steps |= {name: partial(shard_meta_for_dp, meta, dp_world=8, **way) for name, way in ways.items()}
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(rounds if size <= 16_384 else max(3, rounds // 5)):
            best = {name: min(best[name], bench.cpu_ms(step)[1]) for name, step in steps.items()}
        for name, ms in best.items():
            rows.setdefault(name, []).extend((ms, ms / best["sort and one pass"], peak_mb(steps[name])))
    heads = [head for size in sizes for head in (f"n = {size:,}: ms", "times the sort", "peak MB")]
    yield Table("sharding", ["", *heads], [[name, *cells] for name, cells in rows.items()])


# --- weights ----------------------------------------------------------------------------------------------------------

VOCABULARY = 2048


class Transformer(nn.Module):
    """A decoder of 4 layers; 4.2 million parameters with a width of 256."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, S, V) of tokens (N, S)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        logits: Tensor = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


def trained(kind: str, rate: float, width: int, versions: int) -> Iterator[dict[str, Tensor]]:
    """The weights after each step of AdamW in float32, on sequences whose every second token follows from the first."""
    torch.manual_seed(0)
    model = Transformer(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for _ in range(versions):
        tokens = torch.randint(0, VOCABULARY, (4, 64))
        tokens[:, 1::2] = (tokens[:, ::2] * 7 + 1) % VOCABULARY
        nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        yield {name: value.to(dtype).clone() for name, value in model.state_dict().items()}


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers."""
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


@case
def weights(
    trainings: tuple[str, ...] = ("bf16 1e-6", "bf16 1e-5", "fp32 1e-3"),
    backend: str = "shm_store",
    versions: int = 200,
    width: int = 256,
    anchor_every: int = 20,
) -> Iterator[Table]:
    """Weights published as deltas beside whole ones, while AdamW trains a small transformer, at a learning rate.

    The model learns in float32, as in mixed precision, and publishes ``bf16`` or ``fp32`` after each step;
    reinforcement learning of language models has rates of about 1e-6. Each version is read again and compared bit for
    bit. Bytes are relative to whole versions, "all rows" has the anchors too; times are ms of CPU for a version.
    """
    rows = []
    for training in trainings:
        kind, rate = training.split()
        times: dict[str, list[float]] = {}
        changed, deltas, sent, size, before = list[float](), list[int](), 0, 0, dict[str, Tensor]()

        def spend(name: str, call: Callable[[], Any], times: dict[str, list[float]] = times) -> Any:
            result, ms = bench.cpu_ms(call)
            times.setdefault(name, []).append(ms)
            return result

        with connect(bench.config_of(backend)) as client:
            ways: dict[str, Any] = {"delta": {"delta": True, "anchor_every": anchor_every}, "whole": {}}
            for name in ways:
                open_weights(client, name)
            readers = {name: WeightReader(client, "reader", name) for name in ways}
            for version, tensors in enumerate(trained(kind, float(rate), width, versions)):
                size = sum(tensor.nbytes for tensor in tensors.values())
                for name, way in ways.items():
                    publish = partial(publish_weights, client, version, tensors, partition_id=name, **way)
                    spend(f"publish, {name}", publish)
                    newest = spend(f"read, {name}", readers[name].newest)
                    if not all(torch.equal(bits(newest[key]), bits(tensor)) for key, tensor in tensors.items()):
                        raise SystemExit(f"{training}: version {version} is not what was published")
                row = client.get_samples([f"v{version}"], "delta", ["weight_bytes"])["weight_bytes"].numel()
                sent += row
                if client.list_samples("delta", sample_ids=[f"v{version}"]).tags[0]["weight_anchor"] != version:
                    deltas.append(row)
                if before:
                    differ = sum(int((bits(tensor) != bits(before[key])).sum()) for key, tensor in tensors.items())
                    changed.append(differ / sum(tensor.numel() for tensor in tensors.values()))
                before = tensors
        shares = [statistics.mean(changed), statistics.mean(deltas) / size if deltas else 1.0, sent / size / versions]
        rows.append(
            [training, size / 1e6, *(f"{share:.2%}" for share in shares), *map(statistics.median, times.values())]
        )
    heads = ["MB", "elements that change", "bytes of a delta", "of all rows", *times]
    yield Table("weights", ["weights, learning rate", *heads], rows)
