"""Megatron's layouts train as one process does: who fetches, who writes, what is learned, also in a split step."""

from functools import partial

import numpy as np
import pytest
import torch
from tiers import in_long
from tiny_megatron import PAD_MULTIPLE, TinyMegatronWorker, batch_of, loss_of, megatron_on_cpu

from dataplane_core import connect, kv_first_write, shard_meta_for_dp
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking
from dataplane_integrations.trainer.results import aggregate_training_results

LENGTHS = [5, 2, 7, 3, 6, 4, 7, 2]
IDS = [f"p{row // 2}_g{row % 2}" for row in range(len(LENGTHS))]
STEPS = 3
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
            way: _train_as_rank(partial(TinyMegatronWorker, spread, packed=way == "packed"), config, shards)
            for way, shards in shards_by_way.items()
        }


def _train_as_rank(make_worker, config, shards):
    """Logprobs, some training steps and a split step. Collective over all ranks.

    ``shards`` has, for all rows and for the two halves of them, the rows of each data-parallel rank.
    """
    worker = make_worker()
    worker.setup_data_plane(config)
    client, coords = worker._require_dp_client(), worker._local_coords()
    whole, *portions = (each[coords["data_parallel"]] for each in shards)
    worker.get_logprobs_presharded(whole)
    whole, *portions = (each.with_fields(["prev_logprobs"]) for each in (whole, *portions))
    seen = {"coords": coords, "leads": worker._is_replica_leader(), "ids": whole.sample_ids, "counts": worker.counts}
    seen["results"] = [worker.train_presharded(whole, loss_of) for _ in range(STEPS)]
    operations = client.middleware[0].snapshot()["operations"]
    for name in ("get_samples", "put_samples"):
        total = operations.get(name, {"calls": 0, "n_keys": 0})
        seen[name] = total["calls"], total["n_keys"]

    at_once, split = make_worker(), make_worker()  # both with the first weights
    for each in (at_once, split):
        each.setup_data_plane(client)
    expected = at_once.train_presharded(whole, loss_of)
    split.begin_train_step_presharded(loss_of)
    for portion in portions:
        split.train_microbatch_presharded(portion)
    result = split.finish_train_step_presharded()
    assert result["is_replica_leader"] == seen["leads"]
    seen["largest gradient"] = max(grad.abs().max().item() for grad in at_once.gradients().values())
    seen["apart"] = [(result["global_loss"] - expected["global_loss"]).abs().max().item(), _apart(at_once, split)]
    # the optimizer has now something to lose by a step that is aborted
    before = split.state()
    split.begin_train_step_presharded(loss_of)
    split.train_microbatch_presharded(portions[0])
    split.abort_train_step_presharded()
    assert len(before) > 2
    seen["untouched"] = all(map(torch.equal, before, split.state()))
    # nothing of that step is left in the next
    for each in (at_once, split):
        each.train_presharded(whole, loss_of)
    seen["apart"].append(_apart(at_once, split))
    worker.close_data_plane()
    return seen


def _apart(one, other):
    """The largest difference between the gradients of two workers."""
    return max((other.gradients()[name] - grad).abs().max().item() for name, grad in one.gradients().items())


def _train(ranks, client, layout, *ways):
    dp_size, world, spread = LAYOUTS[layout]
    shards_by_way = {}
    for way in ways:
        client.register_partition(way, [], None, ["train"])
        meta = kv_first_write(batch_of(LENGTHS, seed=3), sample_ids=IDS, dp_client=client, partition_id=way)
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = WIDTH
        arguments = WAYS[way].shard_args("train")
        parts = (meta, meta.slice(0, len(IDS) // 2), meta.slice(len(IDS) // 2, len(IDS)))
        shards_by_way[way] = [shard_meta_for_dp(part, dp_world=dp_size, **arguments)[0] for part in parts]
    return ranks(world, _run, spread, client.config, shards_by_way, timeout_s=150)


def _stored(client, partition_id):
    return list(client.get_samples(IDS, partition_id, ["prev_logprobs"])["prev_logprobs"].unbind())


@pytest.fixture(scope="module")
def one_process(ranks, store):
    """What one process learns: logprobs of all tokens, and per step loss and gradient norm."""
    [alone] = _train(ranks, store, "alone", "padded")
    learned = {
        name: [result[name].item() for result in alone["padded"]["results"]] for name in ("global_loss", "grad_norm")
    }
    assert learned["global_loss"][0] != learned["global_loss"][-1]
    return torch.cat(_stored(store, "padded")), learned


@pytest.mark.parametrize("layout", ["TP2xDP2", *in_long("TP2", "CP2", "PP2")])
def test_a_layout_trains_as_one_process_with_one_fetch_per_group_and_one_writer_per_key(
    ranks, store, one_process, layout
):
    seen = _train(ranks, store, layout, *WAYS)
    logprobs, learned = one_process
    assert len(set(logprobs.tolist())) > len(LENGTHS), "the model tells tokens apart"
    dp_size = LAYOUTS[layout][0]
    for way in WAYS:
        there = [rank[way] for rank in seen]
        leaders = [rank for rank in there if rank["leads"]]
        assert [rank["coords"]["data_parallel"] for rank in leaders] == list(range(dp_size))
        assert sorted(each for rank in leaders for each in rank["ids"]) == sorted(IDS), "one writer per key"
        for rank in there:
            rows = len(rank["ids"])
            assert rank["get_samples"] == ((1 + STEPS, (1 + STEPS) * rows) if rank["leads"] else (0, 0))
            assert rank["put_samples"] == ((1, rows) if rank["leads"] else (0, 0))
            assert {result["is_replica_leader"] for result in rank["results"]} == {rank["leads"]}
            for name, expected in learned.items():
                found = [result[name].item() for result in rank["results"]]
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
            assert rank["largest gradient"] > 1e-2
            assert max(rank["apart"]) <= 1e-6, "a split step, and the one after a step that was aborted"
            assert rank["untouched"]
            assert rank["counts"] == there[0]["counts"], "or the ranks would wait for each other"
            assert min(rank["counts"]) > 1

        # outputs are WIDTH wide, rows come back at their own length
        stored = _stored(store, way)
        assert [len(row) for row in stored] == LENGTHS
        np.testing.assert_allclose(torch.cat(stored), logprobs, rtol=0, atol=1e-5)

        # what the driver makes of it: replica twins report the same, and count once
        step = aggregate_training_results(
            [rank["results"][0] for rank in there], [rank["coords"]["data_parallel"] for rank in there]
        )
        assert len(step["all_mb_metrics"]["loss"]) == dp_size * there[0]["counts"][0]
        assert sum(step["all_mb_metrics"]["loss"]) / sum(LENGTHS) == pytest.approx(learned["global_loss"][0], abs=1e-5)
