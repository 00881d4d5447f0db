"""Megatron workers over a store of several processes: who fetches, who writes, what is learned, in each layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import split_steps
import tiny_megatron
import tiny_policy
import torch
from split_steps import check_split_step, try_split_step
from tiny_megatron import PAD_MULTIPLE, TinyMegatronWorker, megatron_on_cpu
from tiny_policy import loss_of

from dataplane_core import KVBatchMeta, connect, kv_first_write, shard_meta_for_dp
from dataplane_core.client import DataPlaneClient
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking
from dataplane_integrations.trainer.results import aggregate_training_results

LENGTHS = [5, 2, 7, 3, 6, 4, 7, 2]
#: The longest row rounded up to what sequence and context parallelism divide by.
WIDTH = 8
STEPS = 2
WAYS = {
    "padded": Batching(
        dynamic=DynamicBatching(train_mb_tokens=16, sequence_length_round=PAD_MULTIPLE), pad_multiple=PAD_MULTIPLE
    ),
    "packed": Batching(
        packing=SequencePacking(train_mb_tokens=16, sequence_length_pad_multiple=PAD_MULTIPLE),
        pad_multiple=PAD_MULTIPLE,
    ),
}
#: Per data-parallel rank: all its rows, and its rows of each portion of a split step.
Shards = tuple[list[KVBatchMeta], list[list[KVBatchMeta]]]
LAYOUTS = {
    "TP2": {"tensor": 2, "sequence_parallel": True},
    "CP2": {"context": 2},
    "PP2": {"pipeline": 2},
    "TP2xDP2": {"tensor": 2, "sequence_parallel": True, "data": 2},
}


@pytest.fixture(scope="module")
def store() -> Iterator[DataPlaneClient]:
    """The driver's client of a private Redis server."""
    for module in (tiny_policy, tiny_megatron, split_steps):
        cloudpickle.register_pickle_by_value(module)
    options = {"namespace": "megatron-training"}
    config = {"backend": "redis_store", "options": options, "middleware": ["metrics"], "op_timeout_s": 60}
    with connect(config) as client:
        yield client
    for module in (tiny_policy, tiny_megatron, split_steps):
        cloudpickle.unregister_pickle_by_value(module)


def _write(client: DataPlaneClient, partition_id: str) -> KVBatchMeta:
    client.register_partition(partition_id, [], None, ["train"])
    ids = [f"p{i // 2}_g{i % 2}" for i in range(len(LENGTHS))]
    meta = kv_first_write(
        tiny_megatron.batch_of(LENGTHS, seed=3), sample_ids=ids, dp_client=client, partition_id=partition_id
    )
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = WIDTH
    return meta


def _run(rank: int, layout: dict[str, Any], config: Any, shards_of: dict[str, Shards]) -> dict[str, Any]:
    """What one rank does, padded and packed; returns what it saw."""
    seen: dict[str, Any] = {}
    with megatron_on_cpu(layout):
        for way, (shards, portions) in shards_of.items():
            worker = TinyMegatronWorker(layout, packed=way == "packed")
            worker.setup_data_plane(config)
            client = worker._require_dp_client()

            def another(packed: bool = worker.packed, client: DataPlaneClient = client) -> TinyMegatronWorker:
                fresh = TinyMegatronWorker(layout, packed)
                fresh.setup_data_plane(client)
                return fresh

            coords = worker._local_coords()
            mine = shards[coords["data_parallel"]]
            worker.get_logprobs_presharded(mine)
            mine = mine.with_fields(["prev_logprobs"])
            results = [worker.train_presharded(mine, loss_of) for _ in range(STEPS)]
            operations = client.middleware[0].snapshot()["operations"]
            seen[way] = {
                "coords": coords,
                "leads": worker._is_replica_leader(),
                "ids": mine.sample_ids,
                "results": results,
                "counts": worker.counts,
            }
            for op in ("get_samples", "put_samples"):
                total = operations.get(op, {"calls": 0, "n_keys": 0})
                seen[way][op] = (total["calls"], total["n_keys"])
            parts = [portion[coords["data_parallel"]].with_fields(["prev_logprobs"]) for portion in portions]
            seen[way]["split step"] = try_split_step(another, loss_of, mine, parts)
            worker.close_data_plane()
    return seen


def _train(ranks: Any, client: DataPlaneClient, layout: dict[str, Any], ways: tuple[str, ...]) -> list[dict[str, Any]]:
    dp_size = layout.get("data", 1)
    world = dp_size * max(layout.get(axis, 1) for axis in ("tensor", "context", "pipeline"))
    half = len(LENGTHS) // 2
    shards_of: dict[str, Shards] = {}
    for way in ways:
        meta = _write(client, way)
        meta.fields = list(tiny_megatron.batch_of(LENGTHS, seed=3))
        shards, *portions = (
            shard_meta_for_dp(part, dp_world=dp_size, **WAYS[way].shard_args("train"))[0]
            for part in (meta, meta.slice(0, half), meta.slice(half, len(LENGTHS)))
        )
        shards_of[way] = (shards, portions)
    seen: list[dict[str, Any]] = ranks(world, _run, layout, client.config, shards_of, timeout_s=150)
    return seen


def _stored(client: DataPlaneClient, partition_id: str) -> list[torch.Tensor]:
    ids = [f"p{i // 2}_g{i % 2}" for i in range(len(LENGTHS))]
    return list(client.get_samples(ids, partition_id, ["prev_logprobs"])["prev_logprobs"].unbind())


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
    assert losses[0] != losses[-1]
    assert len(set(logprobs.tolist())) > len(LENGTHS), "the model tells tokens apart"
    for way in WAYS:
        there = [rank[way] for rank in seen]

        # who asked the store, and who wrote: the leader of each replica group alone
        leaders = [rank for rank in there if rank["leads"]]
        assert [rank["coords"]["data_parallel"] for rank in leaders] == list(range(LAYOUTS[layout].get("data", 1)))
        for rank in there:
            rows = len(rank["ids"])
            assert rank["get_samples"] == ((1 + STEPS, (1 + STEPS) * rows) if rank["leads"] else (0, 0))
            assert rank["put_samples"] == ((1, rows) if rank["leads"] else (0, 0))
        assert sorted(i for rank in leaders for i in rank["ids"]) == sorted(f"p{i // 2}_g{i % 2}" for i in range(8))

        # what was computed: outputs are WIDTH wide, rows come back at their own length
        stored = _stored(store, way)
        assert [len(row) for row in stored] == LENGTHS
        np.testing.assert_allclose(torch.cat(stored), logprobs, rtol=0, atol=1e-5)
        for rank in there:
            assert rank["counts"] == there[0]["counts"], "or the ranks would wait for each other"
            assert min(rank["counts"]) > 1
            results = rank["results"]
            np.testing.assert_allclose([result["global_loss"].item() for result in results], losses, rtol=0, atol=1e-5)
            np.testing.assert_allclose([result["grad_norm"].item() for result in results], norms, rtol=0, atol=1e-5)

            check_split_step(rank["split step"])

        # what the driver makes of it: replica twins report the same, and count once
        step = aggregate_training_results(
            [rank["results"][0] for rank in there], [rank["coords"]["data_parallel"] for rank in there]
        )
        assert len(step["all_mb_metrics"]["loss"]) == len(leaders) * there[0]["counts"][0]
        tokens = sum(LENGTHS)
        assert sum(step["all_mb_metrics"]["loss"]) / tokens == pytest.approx(losses[0], abs=1e-5)
