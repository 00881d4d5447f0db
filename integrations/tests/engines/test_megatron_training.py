"""Megatron workers over a store of several processes: who fetches, who writes, what is learned, in each layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from layouts import Shards, check_training, ids_of, shards_of, train_as_rank
from tiny_megatron import PAD_MULTIPLE, TinyMegatronWorker, megatron_on_cpu
from tiny_policy import batch_of

from dataplane_core import connect, kv_first_write
from dataplane_core.client import DataPlaneClient
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
LAYOUTS = {
    "TP2": {"tensor": 2, "sequence_parallel": True},
    "CP2": {"context": 2},
    "PP2": {"pipeline": 2},
    "TP2xDP2": {"tensor": 2, "sequence_parallel": True, "data": 2},
}


@pytest.fixture(scope="module")
def store() -> Iterator[DataPlaneClient]:
    """The driver's client of a private Redis server."""
    options = {"namespace": "megatron-training"}
    config = {"backend": "redis_store", "options": options, "middleware": ["metrics"], "op_timeout_s": 60}
    with connect(config) as client:
        yield client


def _run(rank: int, layout: dict[str, Any], config: Any, shards_by_way: dict[str, Shards]) -> dict[str, Any]:
    """What one rank does, padded and packed; returns what it saw."""
    with megatron_on_cpu(layout):
        return {
            way: train_as_rank(lambda way=way: TinyMegatronWorker(layout, packed=way == "packed"), config, shards)
            for way, shards in shards_by_way.items()
        }


def _train(ranks: Any, client: DataPlaneClient, layout: dict[str, Any], ways: tuple[str, ...]) -> list[dict[str, Any]]:
    dp_size = layout.get("data", 1)
    world = dp_size * max(layout.get(axis, 1) for axis in ("tensor", "context", "pipeline"))
    shards_by_way: dict[str, Shards] = {}
    for way in ways:
        client.register_partition(way, [], None, ["train"])
        meta = kv_first_write(batch_of(LENGTHS, seed=3), sample_ids=IDS, dp_client=client, partition_id=way)
        shards_by_way[way] = shards_of(meta, WAYS[way], dp_size, WIDTH)
    seen: list[dict[str, Any]] = ranks(world, _run, layout, client.config, shards_by_way, timeout_s=150)
    return seen


def _stored(client: DataPlaneClient, partition_id: str) -> list[torch.Tensor]:
    return list(client.get_samples(IDS, partition_id, ["prev_logprobs"])["prev_logprobs"].unbind())


@pytest.fixture(scope="module")
def one_process(ranks: Any, store: DataPlaneClient) -> tuple[torch.Tensor, list[float], list[float]]:
    """Logprobs of all tokens, and per step loss and gradient norm, of one process."""
    [seen] = _train(ranks, store, {}, ("padded",))
    results = seen["padded"]["results"]
    losses = [result["global_loss"].item() for result in results]
    return torch.cat(_stored(store, "padded")), losses, [result["grad_norm"].item() for result in results]


@pytest.mark.parametrize(
    "layout", ["TP2xDP2", *(pytest.param(each, marks=pytest.mark.long) for each in ("TP2", "CP2", "PP2"))]
)
def test_a_layout_trains_as_one_process_with_one_fetch_per_group_and_one_writer_per_key(
    ranks: Any, store: DataPlaneClient, one_process: Any, layout: str
) -> None:
    seen = _train(ranks, store, LAYOUTS[layout], tuple(WAYS))
    logprobs, losses, norms = one_process
    assert len(set(logprobs.tolist())) > len(LENGTHS), "the model tells tokens apart"
    dp_size = LAYOUTS[layout].get("data", 1)
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
