"""Workers of every layout train as one process does: who fetches, who writes, what is learned, also in a split step."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from layouts import STEPS, Shards, check_training, ids_of, shards_of, train_as_rank
from tiers import in_long
from tiny_megatron import PAD_MULTIPLE, TinyMegatronWorker, megatron_on_cpu
from tiny_policy import TinyWorker, batch_of, in_one_process

from dataplane_core import connect, kv_first_write
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking
from dataplane_integrations.trainer.results import aggregate_training_results

LENGTHS = [5, 2, 7, 3, 6, 4, 7, 2]
IDS = ids_of(LENGTHS)
#: The longest row rounded up to what sequence and context parallelism divide by.
WIDTH = 8
WAYS = {
    "padded": Batching(
        dynamic=DynamicBatching(train_mb_tokens=16, sequence_length_round=PAD_MULTIPLE), pad_multiple=PAD_MULTIPLE
    ),
    "packed": Batching(
        packing=SequencePacking(train_mb_tokens=16, sequence_length_pad_multiple=PAD_MULTIPLE),
        pad_multiple=PAD_MULTIPLE,
    ),
}
#: Data-parallel ranks, ranks in all, and what the workers are told: a mesh's (dp, cp, tp), or Megatron's sizes.
LAYOUTS: dict[str, tuple[int, int, Any]] = {
    "fsdp2 2x1x2": (2, 4, (2, 1, 2)),
    "fsdp2 1x2x2": (1, 4, (1, 2, 2)),
    "megatron TP2xDP2": (2, 4, {"tensor": 2, "sequence_parallel": True, "data": 2}),
    "megatron TP2": (1, 2, {"tensor": 2, "sequence_parallel": True}),
    "megatron CP2": (1, 2, {"context": 2}),
    "megatron PP2": (1, 2, {"pipeline": 2}),
    "megatron alone": (1, 1, {}),
}


@pytest.fixture(scope="module")
def store():
    """The driver's client of a private Redis server."""
    options = {"namespace": "layouts"}
    config = {"backend": "redis_store", "options": options, "middleware": ["metrics"], "op_timeout_s": 60}
    with connect(config) as client:
        yield client


def _run(rank, spread, config, shards_by_way):
    """What one rank does, padded and packed; returns what it saw."""
    kind, parallelism = (
        (TinyMegatronWorker, megatron_on_cpu(spread)) if isinstance(spread, dict) else (TinyWorker, nullcontext())
    )
    with parallelism:
        return {
            way: train_as_rank(partial(kind, spread, packed=way == "packed"), config, shards)
            for way, shards in shards_by_way.items()
        }


def _train(ranks, client, layout, *ways):
    dp_size, world, spread = LAYOUTS[layout]
    shards_by_way: dict[str, Shards] = {}
    for way in ways:
        client.register_partition(way, [], None, ["train"])
        meta = kv_first_write(batch_of(LENGTHS, seed=3), sample_ids=IDS, dp_client=client, partition_id=way)
        shards_by_way[way] = shards_of(meta, WAYS[way], dp_size, WIDTH)
    seen: list[dict[str, Any]] = ranks(world, _run, spread, client.config, shards_by_way, timeout_s=150)
    return seen


def _stored(client, partition_id):
    return list(client.get_samples(IDS, partition_id, ["prev_logprobs"])["prev_logprobs"].unbind())


#: Logprobs of all tokens, and per step loss and gradient norm.
Learned = tuple[torch.Tensor, list[float], list[float]]


@pytest.fixture(scope="module")
def one_process(ranks, store):
    """What one process learns: of the small model by plain PyTorch, of Megatron's by a worker alone."""
    batch = batch_of(LENGTHS, seed=3)
    losses, norms = in_one_process(batch, STEPS)
    logprobs = [row[:length] for row, length in zip(batch["prev_logprobs"], LENGTHS, strict=True)]
    [alone] = _train(ranks, store, "megatron alone", "padded")
    results = alone["padded"]["results"]
    return {
        "fsdp2": (torch.cat(logprobs), losses, norms),
        "megatron": (
            torch.cat(_stored(store, "padded")),
            *([result[name].item() for result in results] for name in ("global_loss", "grad_norm")),
        ),
    }


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp2 2x1x2",
        "megatron TP2xDP2",
        *in_long("fsdp2 1x2x2", "megatron TP2", "megatron CP2", "megatron PP2"),
    ],
)
def test_a_layout_trains_as_one_process_with_one_fetch_per_group_and_one_writer_per_key(
    ranks, store, one_process, layout
):
    seen = _train(ranks, store, layout, *WAYS)
    logprobs, losses, norms = one_process[layout.split()[0]]
    assert len(set(logprobs.tolist())) > len(LENGTHS), "the model tells tokens apart"
    dp_size = LAYOUTS[layout][0]
    for way in WAYS:
        there = [rank[way] for rank in seen]
        check_training(there, dp_size, IDS, losses, norms)

        # outputs are WIDTH wide, rows come back at their own length
        stored = _stored(store, way)
        assert [len(row) for row in stored] == LENGTHS
        np.testing.assert_allclose(torch.cat(stored), logprobs, rtol=0, atol=1e-5)
        for rank in there:
            assert rank["counts"] == there[0]["counts"], "or the ranks would wait for each other"
            assert min(rank["counts"]) > 1

        # what the driver makes of it: replica twins report the same, and count once
        step = aggregate_training_results(
            [rank["results"][0] for rank in there], [rank["coords"]["data_parallel"] for rank in there]
        )
        assert len(step["all_mb_metrics"]["loss"]) == dp_size * there[0]["counts"][0]
        assert sum(step["all_mb_metrics"]["loss"]) / sum(LENGTHS) == pytest.approx(losses[0], abs=1e-5)
