"""A driver that has only metas and a trainer that has the tensors come to the same shards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane_core.batch import BatchedDataDict
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_core.sharding import shard_meta_for_dp

KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
BATCHINGS = [
    {},
    {"dynamic_batching_args": {"max_tokens_per_microbatch": 70, "sequence_length_round": 4, **KEYS}},
    *(
        {
            "sequence_packing_args": {
                "algorithm": algorithm,
                "max_tokens_per_microbatch": 64,
                "sequence_length_pad_multiple": 4,
                "microbatch_order": order,
                **KEYS,
            }
        }
        for algorithm in (
            "concatenative",
            "first_fit_decreasing",
            "first_fit_shuffle",
            "modified_first_fit_decreasing",
        )
        for order in ("packer", "largest_first")
    ),
]


def both(lengths, width, shards, batch_size, batching):
    """The shards of the batch with their order, and those of its meta with theirs."""
    ids = [f"s{i}" for i in range(len(lengths))]
    batch = BatchedDataDict(
        input_ids=torch.zeros(len(lengths), width, dtype=torch.int64), input_lengths=torch.tensor(lengths), ids=ids
    )
    extra_info = {} if width == max(lengths) else {GLOBAL_FORWARD_PAD_SEQLEN: width}
    meta = KVBatchMeta("p", "train", ids, sequence_lengths=lengths, extra_info=extra_info)
    sharded = batch.shard_by_batch_size(shards, batch_size, **batching)
    parts, order = sharded if batching else (sharded, None)
    metas, unsorted = shard_meta_for_dp(meta, dp_world=shards, batch_size=batch_size, **batching)
    return parts, order, metas, unsorted


@st.composite
def cases(draw):
    shards = draw(st.integers(1, 4))
    batch_size = shards * draw(st.integers(4, 6))
    num_rows = batch_size * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 32), min_size=num_rows, max_size=num_rows))
    width = draw(st.sampled_from([max(lengths), 33, 50]))
    return lengths, width, shards, draw(st.sampled_from([None, batch_size]))


@settings(deadline=None)
@given(cases(), st.sampled_from(BATCHINGS))
def test_assignment_and_plan_are_the_same(case, batching):
    parts, order, metas, unsorted = both(*case, batching)
    assert [meta.sample_ids for meta in metas] == [part["ids"] for part in parts]
    assert [meta.sequence_lengths for meta in metas] == [part["input_lengths"].tolist() for part in parts]
    for meta, part in zip(metas, parts, strict=True):
        for key in ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb"):
            assert meta.extra_info.get(key) == getattr(part, key)
    if order is not None:
        assert (unsorted or list(range(len(order)))) == order


@settings(deadline=None)
@given(cases(), st.sampled_from(BATCHINGS))
def test_reordering_outputs_by_the_metas_order_restores_the_metas_ids(case, batching):
    _, _, metas, unsorted = both(*case, batching)
    outputs = BatchedDataDict.from_batches([{"ids": meta.sample_ids} for meta in metas])
    if unsorted is not None:
        outputs.reorder_data(unsorted)
    assert outputs["ids"] == [f"s{i}" for i in range(len(case[0]))]


@pytest.mark.parametrize("batching", BATCHINGS[1:3], ids=["dynamic", "packing"])
def test_a_plan_from_a_meta_fits_the_rows_that_it_names(batching):
    lengths = [8, 1, 31, 15, 2, 7, 16, 30]
    parts, _, metas, _ = both(lengths, 32, 2, None, batching)
    for part, meta in zip(parts, metas, strict=True):
        fetched = BatchedDataDict(part.data)  # as a worker reads them, without a plan
        fetched.micro_batch_indices = meta.extra_info["micro_batch_indices"]
        fetched.micro_batch_lengths = meta.extra_info["micro_batch_lengths"]
        fetched.elem_counts_per_gb = meta.extra_info["elem_counts_per_gb"]
        microbatches = list(fetched.get_batch(0).make_microbatch_iterator_with_dynamic_shapes())
        assert [name for each in microbatches for name in each["ids"]] == meta.sample_ids
        assert all(each["input_lengths"].max() <= each["input_ids"].shape[1] for each in microbatches)
