"""Sequence packing, dynamic batching and neither: one assignment and one plan, whatever carries the rows."""

import pytest
import tiny_megatron
import torch
from bits import bits
from tiers import in_long
from tiny_megatron import batch_of

from dataplane_core import connect, kv_first_write, shard_meta_for_dp
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, PLAN_KEYS
from dataplane_integrations import DataPlaneWorkerMixin
from dataplane_integrations.trainer.batching import Batching, DynamicBatching, SequencePacking

SHARDS, GLOBAL_BATCH, ROWS = 2, 16, 32
WAYS = {
    "neither": Batching(),
    "dynamic": Batching(dynamic=DynamicBatching(train_mb_tokens=32, sequence_length_round=4)),
    "packing": Batching(packing=SequencePacking(train_mb_tokens=32, sequence_length_pad_multiple=4)),
    "packing, largest first": Batching(
        packing=SequencePacking(train_mb_tokens=24, algorithm="first_fit_decreasing", microbatch_order="largest_first")
    ),
}


class Reader(DataPlaneWorkerMixin):
    """Fetches what a rank would."""

    def _local_coords(self):
        return {"data_parallel": 0}


@pytest.fixture(scope="module", params=["noop", *in_long("tq_simple")])
def plane(request, config_of):
    with connect(config_of(request.param)) as client:
        yield client


def _batch():
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, tiny_megatron.CONTEXT + 1, (ROWS,), generator=generator)
    lengths[0] = tiny_megatron.CONTEXT
    return batch_of(lengths.tolist(), seed=12)


def _in_memory(batching):
    sharded = _batch().shard_by_batch_size(SHARDS, GLOBAL_BATCH, **batching.shard_args("train"))
    return list(sharded[0] if batching.plans else sharded)


def _over(plane, batching):
    plane.register_partition("train", [], None, ["train"])
    batch = _batch()
    ids = [f"p{i // 4}_g{i % 4}" for i in range(ROWS)]
    meta = kv_first_write(batch, sample_ids=ids, dp_client=plane, partition_id="train")
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = tiny_megatron.CONTEXT
    meta.fields = list(batch)
    metas, _ = shard_meta_for_dp(meta, dp_world=SHARDS, batch_size=GLOBAL_BATCH, **batching.shard_args("train"))
    reader = Reader()
    reader.setup_data_plane(plane)
    return [reader._attach_or_repack_pack_metadata(reader._fetch(shard), shard)[0] for shard in metas]


@pytest.mark.parametrize("way", WAYS)
def test_shards_and_plans_over_the_plane_are_those_in_memory_to_the_byte(plane, way):
    in_memory, over_plane = _in_memory(WAYS[way]), _over(plane, WAYS[way])
    assert len(over_plane) == SHARDS
    for here, there in zip(in_memory, over_plane, strict=True):
        assert dict(bits(there)) == dict(bits(here))
        for key in PLAN_KEYS:
            assert getattr(there, key) == getattr(here, key)
        assert (here.micro_batch_indices is None) == (way == "neither")
        if way == "packing":  # it saves tokens and stays in the limit
            lengths = [length for chunk in here.micro_batch_lengths for length in chunk]
            assert max(lengths) <= 32
            assert sum(lengths) < here["input_ids"].numel()
