"""Megatron's layouts train as one process does: who fetches, who writes, what is learned, also in a split step."""

from functools import partial

import numpy as np
import pytest
import torch
from layouts import STEPS, check_training, ids_of, shards_of, train_as_rank
from tiers import in_long
from tiny_megatron import PAD_MULTIPLE, TinyMegatronWorker, batch_of, megatron_on_cpu

from dataplane_core import connect, kv_first_write
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking
from dataplane_integrations.trainer.results import aggregate_training_results

LENGTHS = [5, 2, 7, 3, 6, 4, 7, 2]
IDS = ids_of(LENGTHS)
#: The longest row rounded up to what sequence and context parallelism divide by.
WIDTH = 8
DYNAMIC = DynamicBatching(train_mb_tokens=16, sequence_length_round=PAD_MULTIPLE)
PACKING = SequencePacking(train_mb_tokens=16, sequence_length_pad_multiple=PAD_MULTIPLE)
WAYS = {
    "padded": Batching(dynamic=DYNAMIC, pad_multiple=PAD_MULTIPLE),
    "packed": Batching(packing=PACKING, pad_multiple=PAD_MULTIPLE),
}
#: Data-parallel ranks, ranks in all, and Megatron's sizes.
LAYOUTS = {
    "TP2xDP2": (2, 4, {"tensor": 2, "sequence_parallel": True, "data": 2}),
    "TP2": (1, 2, {"tensor": 2, "sequence_parallel": True}),
    "CP2": (1, 2, {"context": 2}),
    "PP2": (1, 2, {"pipeline": 2}),
    "alone": (1, 1, {}),
}


@pytest.fixture(scope="module")
def store(config_of):
    """The driver's client of a private Redis server."""
    with connect({**config_of("redis_store"), "middleware": ["metrics"]}) as client:
        yield client


def _run(rank, spread, config, shards_by_way):
    """What one rank does, padded and packed; returns what it saw."""
    with megatron_on_cpu(spread):
        return {
            way: train_as_rank(partial(TinyMegatronWorker, spread, packed=way == "packed"), config, shards)
            for way, shards in shards_by_way.items()
        }


def _train(ranks, client, layout, *ways):
    dp_size, world, spread = LAYOUTS[layout]
    shards_by_way = {}
    for way in ways:
        client.register_partition(way, [], None, ["train"])
        meta = kv_first_write(batch_of(LENGTHS, seed=3), sample_ids=IDS, dp_client=client, partition_id=way)
        shards_by_way[way] = shards_of(meta, WAYS[way], dp_size, WIDTH)
    return ranks(world, _run, spread, client.config, shards_by_way, timeout_s=150)


def _stored(client, partition_id):
    return list(client.get_samples(IDS, partition_id, ["prev_logprobs"])["prev_logprobs"].unbind())


@pytest.fixture(scope="module")
def one_process(ranks, store):
    """What one process learns: logprobs of all tokens, and per step loss and gradient norm."""
    [alone] = _train(ranks, store, "alone", "padded")
    results = alone["padded"]["results"]
    losses, norms = ([result[name].item() for result in results] for name in ("global_loss", "grad_norm"))
    assert len(losses) == STEPS
    return torch.cat(_stored(store, "padded")), losses, norms


@pytest.mark.parametrize("layout", ["TP2xDP2", *in_long("TP2", "CP2", "PP2")])
def test_a_layout_trains_as_one_process_with_one_fetch_per_group_and_one_writer_per_key(
    ranks, store, one_process, layout
):
    seen = _train(ranks, store, layout, *WAYS)
    logprobs, losses, norms = one_process
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
