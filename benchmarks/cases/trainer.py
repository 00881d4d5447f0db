"""The trainer's side: reading ahead, shards, and weights."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import bench
from benchmarks.bench import Table, case
from dataplane_core import DataPlaneClient, KVBatchMeta, connect, kv_first_write, shard_meta_for_dp, stream
from dataplane_core.batch import BatchedDataDict, pad_columns
from dataplane_core.sharding import PACKERS
from dataplane_integrations.trainer.worker import DataPlaneWorkerMixin
from dataplane_integrations.weights import WeightReader, open_weights, publish_weights

# --- reading ahead ----------------------------------------------------------------------------------------------------

ROWS = 128


class Worker(DataPlaneWorkerMixin):
    """Waits for some seconds on each portion, as for a GPU."""

    def __init__(self, client: DataPlaneClient, seconds: float) -> None:
        self.seconds = seconds
        self.setup_data_plane(client)

    def _local_coords(self) -> dict[str, int]:
        return {}

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Nothing to begin."""

    def train_microbatch(self, data: BatchedDataDict) -> None:
        """Waits."""
        time.sleep(self.seconds)

    def finish_train_step(self) -> dict[str, Any]:
        """Nothing to finish."""
        return {}

    def abort_train_step(self) -> None:
        """Nothing to drop."""


def written(client: DataPlaneClient, partition: str, batches: int) -> list[KVBatchMeta]:
    """A partition with so many batches of 128 rows."""
    client.register_partition(partition, [], ROWS * batches, ["train"])
    columns = bench.training_batch(ROWS)
    ids = [[f"p{number}x{row}_g0" for row in range(ROWS)] for number in range(batches)]
    return [kv_first_write(columns, sample_ids=rows, dp_client=client, partition_id=partition) for rows in ids]


def walk(worker: Worker, metas: list[KVBatchMeta], depth: int) -> None:
    """A split step over all portions."""
    worker.begin_train_step_presharded(None)
    worker.train_microbatches_presharded(metas, read_ahead=depth)
    worker.finish_train_step_presharded()


def consume(worker: Worker, client: DataPlaneClient, partition: str, fields: list[str], depth: int) -> None:
    """A stream over all batches, which are padded when they are used."""
    for rows in stream(client, partition, "train", fields, ROWS, prefetch=depth, clear=True):
        worker.train_microbatch(pad_columns(BatchedDataDict(rows.columns.items()), rows.meta))


@case
def read_ahead(
    backends: tuple[str, ...] = ("shm_store", "redis_store"), num_batches: int = 12, rounds: int = 7, depth: int = 1
) -> Iterator[Table]:
    """How much of a fetch reading ahead hides: portions of a split step, and the batches of a stream.

    A process reads batches of 128 rows (256 to 2048 tokens, six token-aligned fields) and computes on each as long as
    its fetch takes, which is measured first: read, decode and padding. The compute is a wait, as for a GPU. A worker
    also pads ahead; a stream pads at the batch's turn.
    """
    rows = []
    for backend in backends:
        with connect(bench.config_of(backend)) as client:
            metas, idle = written(client, "portions", num_batches), Worker(client, 0.0)
            fetch_ms, read_ms = (
                statistics.median(bench.timed_ms(partial(idle._fetch, meta, layout=layout)) for meta in metas * 3)
                for layout in ("padded", "jagged")
            )
            worker = Worker(client, fetch_ms / 1e3)
            for what in ("portions of a split step", "batches of a stream"):
                times: dict[int, list[float]] = {0: [], depth: []}
                for number, ahead in [(number, ahead) for number in range(rounds + 1) for ahead in times]:
                    step = partial(walk, worker, metas, ahead)
                    if what == "batches of a stream":
                        partition = f"stream {number} {ahead}"
                        written(client, partition, num_batches)
                        step = partial(consume, worker, client, partition, list(metas[0].fields or []), ahead)
                    times[ahead].append(bench.timed_ms(step) / num_batches)
                plain, ahead_ms = (statistics.median(kept[1:]) for kept in times.values())  # the first warms up
                hidden = f"{(plain - ahead_ms) / fetch_ms:.0%}"
                rows.append([f"`{backend}`: {what}", fetch_ms, read_ms, plain, ahead_ms, hidden])
    heads = ["fetch", "of which read", "not ahead", f"{depth} ahead", "share of the fetch that is hidden"]
    yield Table("read-ahead", ["ms per batch", *heads], rows)


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


#: Lognormal lengths in tokens: how they are called, their median, their deviation, and where they are cut.
LENGTHS = (
    ("lognormal to 8k", 1800, 0.8, 8192),
    ("heavy tail to 32k", 4096, 1.2, 32_768),
    ("heavy tail to 64k", 8192, 1.2, 65_536),
)


def packed(
    number: int, num_rows: int, spread: tuple[float, float, int], ranks: int, limit: int, balance: Any
) -> tuple[list[list[list[int]]], float]:
    """The lengths of each bin of each rank, for rows drawn with this number, and the ms of CPU for the plan."""
    median, sigma, longest = spread
    drawn = np.exp(np.random.RandomState(number).normal(np.log(median), sigma, num_rows))
    lengths = np.clip(drawn, 4, longest).astype(int).tolist()
    meta = KVBatchMeta("train", "train", [f"q{row}" for row in range(num_rows)], sequence_lengths=lengths)
    packing = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "sequence_length_pad_multiple": 1}
    packing |= {"algorithm": "modified_first_fit_decreasing", "max_tokens_per_microbatch": limit * longest}
    plan = partial(shard_meta_for_dp, meta, dp_world=ranks, sequence_packing_args=packing, balance=balance)
    times = []
    for _ in range(9):
        (shards, _), ms = bench.cpu_ms(plan)
        times.append(ms)
    bins = [
        [shard.sequence_lengths[start:end] for start, end in shard.extra_info["micro_batch_indices"][0]]
        for shard in shards
    ]
    return bins, min(times)


def over_the_mean(costs: Any) -> list[float]:
    """What a step takes over the mean of the ranks, from the costs ``(rank, microbatch)``: if ranks wait for each other
    at each microbatch, and if they wait at its end."""
    costs = np.array(costs)
    return [costs.max(0).sum() / costs.mean(0).sum(), costs.sum(1).max() / costs.sum(1).mean()]


@case
def balance(rounds: int = 11, hidden_size: int = 4096) -> Iterator[Table]:
    """Packed plans for 16 ranks, as they are and balanced by FLOPs, for 512 rows with lengths of a lognormal.

    What a step takes over the mean of the ranks, if they wait for each other at each microbatch (the sum over
    microbatches of the slowest rank), and if they wait at its end. ``limit`` is the capacity of a microbatch, in
    longest rows. Medians over the rounds, each with lengths of its own, and the worst; ms of CPU, the best of 9.
    """
    rows = []
    for name, *spread in LENGTHS:
        for limit in (2, 1):
            figures = []
            for number in range(rounds):
                figures.append([])
                for by in (None, {"cost": "flops", "hidden_size": hidden_size}):
                    bins, ms = packed(number, 512, tuple(spread), 16, limit, by)
                    flops = [[sum(n * (6 * hidden_size + n) for n in lengths) for lengths in rank] for rank in bins]
                    figures[-1] += [*over_the_mean(flops), ms]
            middle, worst = np.median(figures, 0).tolist(), np.max(figures, 0).tolist()
            cells = [(f"{middle[at]:.3f}", f"{worst[at]:.3f}") for at in (0, 3, 1, 4)]
            rows.append([name, limit, *map(" / ".join, cells), middle[2], middle[5]])
    heads = [f"{what}: {way}" for what in ("in lockstep", "whole step") for way in ("as it is", "balanced")]
    yield Table("balance", ["lengths", "limit", *heads, "ms: as it is", "balanced"], rows)


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
