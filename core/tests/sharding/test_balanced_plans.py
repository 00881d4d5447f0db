"""Plans balanced by cost: the rules of plans hold, and the slowest ranks take no longer."""

import hashlib
import json
import math
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dataplane_core import KVBatchMeta, shard_meta_for_dp
from dataplane_core.batch import BatchedDataDict
from dataplane_core.schema import padded_length
from dataplane_core.sharding import PACKERS

FLOPS = {"cost": "flops", "hidden_size": 16}
KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "max_tokens_per_microbatch": 64}
DYNAMIC = {"dynamic_batching_args": {**KEYS, "sequence_length_round": 4}}


def flops(length, width=16):
    return length * (6 * width + length)


def packed(algorithm="modified_first_fit_decreasing", multiple=1):
    return {"sequence_packing_args": {**KEYS, "algorithm": algorithm, "sequence_length_pad_multiple": multiple}}


def meta_of(lengths):
    return KVBatchMeta("train", "train", [f"s{row}" for row in range(len(lengths))], sequence_lengths=list(lengths))


def rows_of(shards):
    return [[int(sample_id[1:]) for sample_id in shard.sample_ids] for shard in shards]


def bins_of(shards):
    """The lengths of each bin, by chunk, microbatch and rank."""
    by_rank = []
    for shard in shards:
        start, chunks = 0, []
        for pairs, count in zip(*map(shard.extra_info.get, ("micro_batch_indices", "elem_counts_per_gb")), strict=True):
            chunks.append([shard.sequence_lengths[start + begin : start + end] for begin, end in pairs])
            start += count
        by_rank.append(chunks)
    return [list(zip(*ranks, strict=True)) for ranks in zip(*by_rank, strict=True)]


def slowest(shards, cost):
    """What a step takes if ranks wait for each other at each microbatch."""
    return sum(max(sum(map(cost, rows)) for rows in ranks) for chunk in bins_of(shards) for ranks in chunk)


@st.composite
def packings(draw):
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    size = ranks * draw(st.integers(1, 15))  # so each bin gets a row
    lengths = st.one_of(st.integers(0, 64), st.integers(0, 16), st.just(8))
    args = packed(draw(st.sampled_from(list(PACKERS))), draw(st.sampled_from([1, 2, 4]))) | {"dp_world": ranks}
    args["sequence_packing_args"]["microbatch_order"] = draw(st.sampled_from(["packer", "largest_first"]))
    return draw(st.lists(lengths, min_size=size * chunks, max_size=size * chunks)), args | {"batch_size": size}


@given(packings(), st.sampled_from(["flops", "tokens", "none", "falling"]))
def test_balanced_bins_keep_the_limit_and_their_number_and_take_no_longer(case, name):
    lengths, args = case
    multiple, size = args["sequence_packing_args"]["sequence_length_pad_multiple"], args["batch_size"]
    costs = {"flops": flops, "tokens": float, "none": lambda _: 0, "falling": lambda length: 64 - length}
    balance = FLOPS if name == "flops" else costs[name]
    today, _ = shard_meta_for_dp(meta_of(lengths), **args)
    shards, order = shard_meta_for_dp(meta_of(lengths), balance=balance, **args)
    rows = rows_of(shards)
    assert (order or list(range(len(lengths)))) == list(chain(*rows))
    assert sorted(chain(*rows)) == list(range(len(lengths)))
    assert all(shard == sorted(shard, key=lambda row: row // size) for shard in rows), "chunk after chunk"
    assert [len(chunk) for chunk in bins_of(shards)] == [len(chunk) for chunk in bins_of(today)]
    bins = [bin_ for chunk in bins_of(shards) for ranks in chunk for bin_ in ranks]
    assert all(bin_ and sum(padded_length(length, multiple) for length in bin_) <= 64 for bin_ in bins)

    def cost(length):
        return costs[name](padded_length(length, multiple))

    assert slowest(shards, cost) <= slowest(today, cost) * (1 + 1e-12)
    for chunk in bins_of(shards):
        taken = [[sum(map(cost, bin_)) for bin_ in ranks] for ranks in chunk]
        assert all(min(before) >= max(after) for before, after in pairwise(taken)), "costly microbatches come first"
    assert shard_meta_for_dp(meta_of(lengths), balance=costs[name], **args) == (shards, order)


@pytest.mark.parametrize(("median", "sigma", "longest"), [(1800, 0.8, 8192), (4096, 1.2, 32_768), (8192, 1.2, 65_536)])
def test_ranks_that_wait_at_each_microbatch_lose_at_most_three_percent(median, sigma, longest):
    wide, lost = partial(flops, width=4096), {1: [], 2: []}
    for seed in range(3):
        lengths = np.exp(np.random.RandomState(seed).normal(np.log(median), sigma, 512)).clip(4, longest)
        meta = meta_of(lengths.astype(int).tolist())
        for rows, ratios in lost.items():
            args = packed() | {"balance": {"cost": "flops", "hidden_size": 4096}}
            args["sequence_packing_args"]["max_tokens_per_microbatch"] = rows * longest
            shards, _ = shard_meta_for_dp(meta, dp_world=16, **args)
            ratios.append(16 * slowest(shards, wide) / sum(map(wide, meta.sequence_lengths)))
    assert max(lost[2]) < 1.015
    assert np.mean(lost[1]) < 1.025, "the longest row can be a bin of its own"


@given(st.integers(1, 5), st.lists(st.integers(0, 99), min_size=1, max_size=40))
def test_equal_parts_keep_their_sizes_and_their_rows_the_order(ranks, lengths):
    batch = BatchedDataDict(row=torch.arange(len(lengths)), input_lengths=torch.tensor(lengths))
    parts = batch.shard_by_batch_size(ranks, allow_uneven_shards=True)
    shards, order = batch.shard_by_batch_size(ranks, allow_uneven_shards=True, balance=FLOPS)
    rows = [shard["row"].tolist() for shard in shards]
    assert [len(part) for part in rows] == [part.size for part in parts]
    assert rows == [sorted(part) for part in rows]
    assert order == list(chain(*rows))
    assert sorted(order) == list(range(len(lengths)))


def test_without_the_option_plans_stay_as_they_were_bit_for_bit():
    meta = meta_of(np.random.RandomState(0).randint(0, 65, 240).tolist())
    ways = ({}, DYNAMIC, *map(packed, PACKERS))
    plans = [shard_meta_for_dp(meta, dp_world=4, batch_size=80, **args)[0] for args in ways]
    text = json.dumps([[(shard.sample_ids, shard.extra_info) for shard in shards] for shards in plans])
    assert hashlib.sha256(text.encode()).hexdigest().startswith("6942aed338b58fd5")


def test_plans_by_hand():
    meta = meta_of([40, 3, 2, 7, 60, 5])  # dynamic batching: all ranks have the same padded shapes
    same = [shard_meta_for_dp(meta, dp_world=2, **DYNAMIC, balance=balance) for balance in (None, FLOPS)]
    assert same[0] == same[1]
    # 64 + 16 + 1 and 49 + 25 + 4
    twice = meta_of([8, 1, 7, 2, 4, 5] * 2)
    shards, _ = shard_meta_for_dp(twice, dp_world=2, batch_size=6, balance=lambda length: length**2)
    assert rows_of(shards) == [[0, 1, 4, 6, 7, 10], [2, 3, 5, 8, 9, 11]]
    few, _ = shard_meta_for_dp(meta_of([64, 50, 8, 8]), dp_world=2, balance=FLOPS, **packed())
    assert bins_of(few) == [[([64], [50]), ([8], [8])]], "each bin keeps a row"
    lengths = [64, 40, 30, 30, 20, 20, 20, 10]
    shards, _ = shard_meta_for_dp(meta_of(lengths), dp_world=2, balance=FLOPS, **packed())
    # 64 costs more than 4 bins do on average: with it goes 40, filled up. The rest is spread by cost
    assert bins_of(shards) == [[([64], [40, 20]), ([30, 20], [30, 20, 10])]]
    assert slowest(shards, flops) == flops(64) + sum(map(flops, [30, 20, 10]))


@pytest.mark.parametrize(
    ("balance", "error", "said"),
    [
        ({"cost": "bytes", "hidden_size": 8}, ValueError, "balance: cost must be one of 'flops', got 'bytes'"),
        ({"cost": "flops"}, ValueError, "keys are 'cost'. Expected 'cost' and 'hidden_size'"),
        ({"cost": "flops", "hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"cost": "flops", "hidden_size": "8"}, TypeError, "hidden_size must be an int, got str"),
        ("flops", TypeError, "balance must be a dict, got str"),
        *(
            (lambda length, value=value: value if length == 3 else 1, ValueError, r"gives .* for row 1 of 3 tokens")
            for value in (-1, math.nan, math.inf, 10**400, None, "far", np.ones(2))
        ),
    ],
)
def test_what_is_no_cost_is_refused_by_name(balance, error, said):
    for args in ({}, DYNAMIC, packed()):
        with pytest.raises(error, match=said):
            shard_meta_for_dp(meta_of([4, 3, 2, 1]), dp_world=2, balance=balance, **args)
