"""Weights published as deltas beside whole ones, while AdamW trains a small transformer.

Run:  OMP_NUM_THREADS=1 python benchmarks/weights.py [--versions 200] [--backend shm_store] [--cases "bf16 1e-6"]

A transformer of 4.2 million parameters (--width) learns with AdamW in float32, as mixed-precision trainers do, and
publishes its weights as ``bf16`` or ``fp32`` after each step. The number is the learning rate; reinforcement learning
of language models uses about 1e-6. Each version is read again, and compared with what was published, bit for bit; the
program fails if one differs. Printed are the share of elements that changed, the bytes of a delta and of all rows
(anchors too) relative to whole versions, and ms of CPU for a version: to publish it and to read it, with and without
``delta``. Of the CPU, that of this process counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dataplane_core import connect
from dataplane_integrations.weights import WeightReader, open_weights, publish_weights

CASES = ["bf16 1e-6", "bf16 1e-5", "bf16 1e-3", "fp32 1e-6", "fp32 1e-3"]
VOCABULARY, TOKENS = 2048, 64


class Transformer(nn.Module):
    """A decoder of 4 layers."""

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


class Training:
    """Steps of AdamW on sequences of which every second token follows from the one before."""

    def __init__(self, width: int, rate: float) -> None:
        torch.manual_seed(0)
        self.model = Transformer(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95))

    def step(self) -> None:
        """One step."""
        tokens = torch.randint(0, VOCABULARY, (4, TOKENS))
        tokens[:, 1::2] = (tokens[:, ::2] * 7 + 1) % VOCABULARY
        logits = self.model(tokens)[:, :-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers."""
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def timed(times: list[float], call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Makes a call, and notes its ms of CPU."""
    started = time.process_time()
    result = call(*arguments, **options)
    times.append((time.process_time() - started) * 1e3)
    return result


def run(backend: str, case: str, versions: int, width: int, anchor_every: int) -> str:
    """A line of the table."""
    kind, rate = case.split()
    training = Training(width, float(rate))
    times: dict[str, list[float]] = {name: [] for name in ("delta put", "delta get", "whole put", "whole get")}
    changed: list[float] = []
    deltas: list[int] = []
    sent, size, before = 0, 0, {}
    with connect({"backend": backend}) as client:
        readers = {}
        for name in ("delta", "whole"):
            open_weights(client, name)
            readers[name] = WeightReader(client, "reader", name)
        for version in range(versions):
            training.step()
            dtype = torch.bfloat16 if kind == "bf16" else torch.float32
            weights = {name: value.to(dtype).clone() for name, value in training.model.state_dict().items()}
            size = sum(each.nbytes for each in weights.values())
            for name, options in (("delta", {"delta": True, "anchor_every": anchor_every}), ("whole", {})):
                timed(times[f"{name} put"], publish_weights, client, version, weights, partition_id=name, **options)
                found = timed(times[f"{name} get"], readers[name].newest)
                for key, value in weights.items():
                    if not torch.equal(bits(found[key]), bits(value)):
                        raise SystemExit(f"{case}: '{key}' of version {version} is not what was published")
            row = client.get_samples([f"v{version}"], "delta", ["weight_bytes"])["weight_bytes"].numel()
            sent += row
            if client.list_samples("delta", sample_ids=[f"v{version}"]).tags[0]["weight_anchor"] != version:
                deltas.append(row)
            if before:
                differ = sum(int((bits(value) != bits(before[key])).sum()) for key, value in weights.items())
                changed.append(differ / sum(each.numel() for each in weights.values()))
            before = weights
        client.clear_samples(None, "delta")
        client.clear_samples(None, "whole")
    shares = [statistics.mean(changed), statistics.mean(deltas) / size if deltas else 1.0, sent / (size * versions)]
    cells = [f"{share:.2%}" for share in shares] + [f"{statistics.median(each):.1f}" for each in times.values()]
    return f"| {case} | {size / 1e6:.1f} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--backend", default="shm_store")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--anchor-every", type=int, default=20)
    options = parser.parse_args()
    if options.versions < 2:
        parser.error(f"--versions must be at least 2, got {options.versions}: a delta needs a version before")
    print("| | MB | changed | a delta | all rows | put, delta | read, delta | put, whole | read, whole |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in options.cases:
        print(run(options.backend, case, options.versions, options.width, options.anchor_every), flush=True)


if __name__ == "__main__":
    main()
