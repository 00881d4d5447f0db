"""`shard_meta_for_dp`: what travels with the rows, and the order back; plans balanced by cost take no longer."""

import copy
import hashlib
import json
import math
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dataplane_core import shard_meta_for_dp
from dataplane_core.batch import BatchedDataDict
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, padded_length
from dataplane_core.sharding import PACKERS

KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
DYNAMIC = {"max_tokens_per_microbatch": 64, "sequence_length_round": 8, **KEYS}
PACKED = {"max_tokens_per_microbatch": 64, "sequence_length_pad_multiple": 8, **KEYS}
PACKED["algorithm"] = "modified_first_fit_decreasing"
PLAN = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")
FLOPS = {"cost": "flops", "hidden_size": 16}


def flops(length, width=16):
    return length * (6 * width + length)


#: What a row costs, and the option ``balance`` that says so.
COSTS = [(flops, FLOPS), *((cost, cost) for cost in (float, lambda length: 0, lambda length: 64 - length))]


def dynamic(**changes):
    return {"dynamic_batching_args": DYNAMIC | changes}


def packed(**changes):
    return {"sequence_packing_args": PACKED | changes}


def meta_of(lengths, **extra_info):
    return KVBatchMeta(
        "train",
        "actor",
        [f"s{i}" for i in range(len(lengths))],
        fields=["input_ids"],
        sequence_lengths=list(lengths),
        extra_info=extra_info,
        tags=[{"length": length, "row": i} for i, length in enumerate(lengths)],
        lease_tokens=[f"lease {i}" for i in range(len(lengths))],
    )


@st.composite
def cases(draw):
    """Lengths, and arguments of `shard_meta_for_dp`."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kind, multiple = draw(st.sampled_from(["plain", "dynamic", *PACKERS])), draw(st.integers(1, 9))
    batch_size = ranks * draw(st.integers(5, 7))
    args, most = {"dp_world": ranks}, 64 if kind == "dynamic" else 16
    if kind == "dynamic":
        args |= dynamic(sequence_length_round=multiple)
    elif kind in PACKERS:
        if draw(st.booleans()):
            batch_size += draw(st.integers(0, ranks))  # bins are dealt, so this needs to be no multiple
        else:
            most = 64 // multiple * multiple  # rows fill bins
            batch_size = ranks * draw(st.integers(1, 7))  # as few as there are bins, also
        order = draw(st.sampled_from(["packer", "largest_first"]))
        args |= packed(algorithm=kind, microbatch_order=order, sequence_length_pad_multiple=multiple)
    args["batch_size"] = batch_size if chunks > 1 else draw(st.sampled_from([None, batch_size]))
    args["balance"] = draw(st.sampled_from([None, *(balance for _, balance in COSTS)]))
    size = batch_size * chunks
    lengths = st.one_of(st.integers(0, most), st.integers(0, 16))
    return draw(st.lists(lengths, min_size=size, max_size=size)), args


@given(cases())
def test_every_row_goes_to_one_rank_with_its_length_tags_and_lease_and_back_in_order(case):
    lengths, args = case
    shards, order = shard_meta_for_dp(meta_of(lengths), **args)
    assert len(shards) == args["dp_world"]
    ids = [each for shard in shards for each in shard.sample_ids]
    assert sorted(ids) == sorted(f"s{i}" for i in range(len(lengths)))
    for shard in shards:
        rows = [int(each[1:]) for each in shard.sample_ids]
        assert shard.sequence_lengths == [lengths[row] for row in rows]
        assert shard.tags == [{"length": lengths[row], "row": row} for row in rows]
        assert shard.lease_tokens == [f"lease {row}" for row in rows]
        assert (shard.partition_id, shard.task_name, shard.fields) == ("train", "actor", ["input_ids"])
    # the order puts the outputs of the ranks, one after the other, back
    outputs = BatchedDataDict(id=ids)
    in_order = [f"s{i}" for i in range(len(lengths))]
    assert (order is None) == (ids == in_order), "no order exactly where it did not change"
    if order is not None:
        outputs.reorder_data(order)
    assert outputs["id"] == in_order


@given(cases())
def test_microbatches_cover_each_chunk_within_the_limit_and_are_equally_many_on_all_ranks(case):
    lengths, args = case
    shards, _ = shard_meta_for_dp(meta_of(lengths), **args)
    if not {"dynamic_batching_args", "sequence_packing_args"} & set(args):
        assert not any(key in shard.extra_info for shard in shards for key in PLAN)
        return
    chunk = args["batch_size"] or len(lengths)
    counts = {tuple(len(pairs) for pairs in shard.extra_info["micro_batch_indices"]) for shard in shards}
    assert len(counts) == 1, "ranks with fewer microbatches would leave the others waiting"
    for shard in shards:
        plan = [shard.extra_info[key] for key in PLAN]
        start = 0
        for number, (pairs, tokens) in enumerate(zip(plan[0], plan[1], strict=True)):
            num_rows = chunk // args["dp_world"] if plan[2] is None else plan[2][number]
            assert [0, *(end for _, end in pairs)] == [*(begin for begin, _ in pairs), num_rows]
            ids = shard.sample_ids[start:][:num_rows]
            assert all(number * chunk <= int(each[1:]) < (number + 1) * chunk for each in ids)
            for (begin, end), length in zip(pairs, tokens, strict=True):
                rows = shard.sequence_lengths[start + begin : start + end]
                held, padded = (sum(rows), length) if plan[2] else (max(rows), length * len(rows))
                assert held <= length <= padded <= 64
            start += num_rows
        assert start == shard.size


def plans(shards):
    return [[shard.extra_info[key] for key in PLAN] for shard in shards]


def test_plans_by_hand():
    shards, order = shard_meta_for_dp(meta_of([9, 30, 17, 2]), dp_world=2, dynamic_batching_args=DYNAMIC)
    assert [shard.sample_ids for shard in shards] == [["s3", "s2"], ["s0", "s1"]]
    assert order == [3, 2, 0, 1]
    # by the longest row over both ranks: 9 -> 16, and 30 -> 30, the width
    assert plans(shards) == [[[[[0, 2]]], [[30]], None]] * 2
    packing = PACKED | {"algorithm": "first_fit_decreasing", "max_tokens_per_microbatch": 32}
    shards, order = shard_meta_for_dp(meta_of([9, 30, 17, 2, 8]), dp_world=2, sequence_packing_args=packing)
    # Rounded: 16, 32, 24, 8, 8. Bins: [1], [2, 3], [0, 4]; a fourth takes row 3 from the first of the fullest.
    assert [shard.sample_ids for shard in shards] == [["s1", "s0", "s4"], ["s2", "s3"]]
    assert order == [1, 0, 4, 2, 3]
    assert plans(shards) == [[[[[0, 1], [1, 3]]], [[32, 24]], [3]], [[[[0, 1], [1, 2]]], [[24, 8]], [2]]]
    packing = PACKED | {"algorithm": "concatenative", "microbatch_order": "largest_first"}
    shards, _ = shard_meta_for_dp(meta_of([8, 64, 64, 40, 40, 64]), dp_world=2, sequence_packing_args=packing)
    # the bins in order, which are dealt out in turn and then ordered: 8, 64, 64, 40, 40, 64
    assert [plan[1] for plan in plans(shards)] == [[[64, 40, 8]], [[64, 64, 40]]]
    assert [shard.sample_ids for shard in shards] == [["s2", "s4", "s0"], ["s1", "s5", "s3"]]


@pytest.mark.parametrize(("width", "length"), [(12, 12), (100, 16)])
def test_rows_are_rounded_up_but_not_beyond_the_common_forward_length(width, length):
    meta = meta_of([9, 9], **{GLOBAL_FORWARD_PAD_SEQLEN: width})
    shards, _ = shard_meta_for_dp(meta, dp_world=1, dynamic_batching_args=DYNAMIC)
    assert plans(shards)[0][1] == [[length]]


def test_shards_inherit_extra_info_and_what_they_change_stays_theirs():
    meta = meta_of([9, 30, 17, 2], note={"step": [1]})
    before = copy.deepcopy(meta)
    shards, _ = shard_meta_for_dp(meta, dp_world=2, dynamic_batching_args=DYNAMIC)
    assert [shard.extra_info["note"] for shard in shards] == [{"step": [1]}] * 2
    shards[0].extra_info["note"]["step"].append(2)
    shards[0].extra_info["micro_batch_indices"][0][0][0] = 7
    shards[0].extra_info["micro_batch_lengths"][0][0] = 7
    shards[0].stamp_tags({"row": [7, 7]})
    shards[0].fields.append("more")
    assert meta == before
    assert shards[1].extra_info == {
        "note": {"step": [1]},
        "micro_batch_indices": [[[0, 2]]],
        "micro_batch_lengths": [[30]],
        "elem_counts_per_gb": None,
    }


def test_a_plan_that_the_meta_carries_is_not_inherited_and_what_it_lacks_stays_lacking():
    (planned,), _ = shard_meta_for_dp(meta_of([9, 30, 17, 2]), dp_world=1, dynamic_batching_args=DYNAMIC)
    assert all(shard.extra_info == {} for shard in shard_meta_for_dp(planned, dp_world=2)[0])
    shards, _ = shard_meta_for_dp(KVBatchMeta("p", None, ["a", "b"], sequence_lengths=[1, 2]), dp_world=2)
    assert all((shard.tags, shard.lease_tokens, shard.fields) == (None, None, None) for shard in shards)


# --- plans balanced by cost -------------------------------------------------------------------------------------------


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


@given(cases().filter(lambda case: "sequence_packing_args" in case[1]), st.sampled_from(COSTS))
def test_balanced_bins_are_as_many_and_take_no_longer(case, costs):
    (lengths, args), (cost_of, balance) = case, costs
    multiple = args["sequence_packing_args"]["sequence_length_pad_multiple"]
    today, _ = shard_meta_for_dp(meta_of(lengths), **args | {"balance": None})
    shards, order = shard_meta_for_dp(meta_of(lengths), **args | {"balance": balance})
    assert [len(chunk) for chunk in bins_of(shards)] == [len(chunk) for chunk in bins_of(today)]
    assert all(rows for chunk in bins_of(shards) for ranks in chunk for rows in ranks)

    def cost(length):
        return cost_of(padded_length(length, multiple))

    assert slowest(shards, cost) <= slowest(today, cost) * (1 + 1e-12)
    for chunk in bins_of(shards):
        taken = [[sum(map(cost, rows)) for rows in ranks] for ranks in chunk]
        assert all(min(before) >= max(after) for before, after in pairwise(taken)), "costly microbatches come first"
    assert shard_meta_for_dp(meta_of(lengths), **args | {"balance": cost_of}) == (shards, order)


@pytest.mark.parametrize(("median", "sigma", "longest"), [(1800, 0.8, 8192), (4096, 1.2, 32_768), (8192, 1.2, 65_536)])
def test_ranks_that_wait_at_each_microbatch_lose_at_most_three_percent(median, sigma, longest):
    wide, lost = partial(flops, width=4096), {1: [], 2: []}
    for seed in range(3):
        lengths = np.exp(np.random.RandomState(seed).normal(np.log(median), sigma, 512)).clip(4, longest)
        meta = meta_of(lengths.astype(int).tolist())
        for rows, ratios in lost.items():
            args = packed(max_tokens_per_microbatch=rows * longest, sequence_length_pad_multiple=1)
            shards, _ = shard_meta_for_dp(meta, dp_world=16, balance=FLOPS | {"hidden_size": 4096}, **args)
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
    packings = [packed(algorithm=name, sequence_length_pad_multiple=1) for name in PACKERS]
    ways = ({}, dynamic(sequence_length_round=4), *packings)
    plans = [shard_meta_for_dp(meta, dp_world=4, batch_size=80, **args)[0] for args in ways]
    text = json.dumps([[(shard.sample_ids, shard.extra_info) for shard in shards] for shards in plans])
    assert hashlib.sha256(text.encode()).hexdigest().startswith("6942aed338b58fd5")


def test_balanced_plans_by_hand():
    meta = meta_of([40, 3, 2, 7, 60, 5])  # dynamic batching: all ranks have the same padded shapes
    same = [shard_meta_for_dp(meta, dp_world=2, **dynamic(), balance=balance) for balance in (None, FLOPS)]
    assert same[0] == same[1]
    # 64 + 16 + 1 and 49 + 25 + 4
    twice = meta_of([8, 1, 7, 2, 4, 5] * 2)
    shards, _ = shard_meta_for_dp(twice, dp_world=2, batch_size=6, balance=lambda length: length**2)
    assert [[row["row"] for row in shard.tags] for shard in shards] == [[0, 1, 4, 6, 7, 10], [2, 3, 5, 8, 9, 11]]
    plain = packed(sequence_length_pad_multiple=1)
    few, _ = shard_meta_for_dp(meta_of([64, 50, 8, 8]), dp_world=2, balance=FLOPS, **plain)
    assert bins_of(few) == [[([64], [50]), ([8], [8])]], "each bin keeps a row"
    lengths = [64, 40, 30, 30, 20, 20, 20, 10]
    shards, _ = shard_meta_for_dp(meta_of(lengths), dp_world=2, balance=FLOPS, **plain)
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
    for args in ({}, dynamic(), packed(sequence_length_pad_multiple=1)):
        with pytest.raises(error, match=said):
            shard_meta_for_dp(meta_of([4, 3, 2, 1]), dp_world=2, balance=balance, **args)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "args", "said"),
    [
        (meta_of([]), {}, r"shard_meta_for_dp\('train', 0 samples\) refused: the meta is empty"),
        (KVBatchMeta("p", None, ["a"]), {}, r"the meta has no sequence_lengths"),
        (meta_of([1, 2]), dynamic() | packed(), r"got dynamic_batching_args and sequence_packing_args\. Expected one"),
        (meta_of([1, 2, 3]), {}, r"3 rows are not a multiple of 2 shards"),
        (meta_of([1, 2, 3]), dynamic(), r"3 rows are not a multiple of 2 shards"),
        (meta_of([1, 2, 3, 4]), {"batch_size": 3}, r"4 rows are not a multiple of batch_size 3"),
        (meta_of([1, 2, 3, 4]), {"batch_size": 0}, r"batch_size must be .*0"),
        (meta_of([1, 2]), {"dp_world": 0}, r"dp_world must be .*0"),
        (meta_of([1, 70]), dynamic(), r"row 1 has 70 tokens, padded to 70\. Expected at most .*, 64"),
        (meta_of([1, 65]), packed(), r"row 1 has 65 tokens, rounded up to 72\. Expected at most .*, 64"),
        (meta_of([1, 20], **{GLOBAL_FORWARD_PAD_SEQLEN: 10}), dynamic(), "row 1 has 20 tokens, .* padded to 10"),
        (meta_of([1]), packed(), r"1 sequences are too few for 2 bins"),
        (meta_of([1, -3]), dynamic(), r"row 1 has -3 tokens"),
        *(
            (meta_of([1, 2]), dynamic(**{key: 0}), rf"{key} is 0\. Expected an integer of 1")
            for key in ("max_tokens_per_microbatch", "sequence_length_round")
        ),
        *(
            (meta_of([1, 2]), packed(**{key: value}), rf"{key} is {value!r}\. Expected {expected}")
            for key, value, expected in (
                ("algorithm", "best_fit", "one of concatenative, "),
                ("microbatch_order", "smallest_first", "one of packer"),
                ("max_tokens_per_microbatch", 0, "an integer of 1 or more"),
                ("max_tokens_per_microbatch", 64.5, "an integer"),
                ("sequence_length_pad_multiple", True, "an integer"),
                ("seed", -1, "an integer of 0 or more"),
            )
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_numbers(meta, args, said):
    with pytest.raises(ValueError, match=said):
        shard_meta_for_dp(meta, **{"dp_world": 2, **args})


@pytest.mark.parametrize("kind", ["dynamic_batching_args", "sequence_packing_args"])
def test_arguments_that_are_missing_or_unknown_are_named(kind):
    whole = PACKED if kind == "sequence_packing_args" else DYNAMIC
    batch = BatchedDataDict(input_ids=torch.zeros(2, 2), input_lengths=torch.tensor([1, 2]))
    for key in whole:
        args = {name: value for name, value in whole.items() if name != key}
        for shard in (partial(shard_meta_for_dp, meta_of([1, 2]), dp_world=1), partial(batch.shard_by_batch_size, 1)):
            with pytest.raises(ValueError, match=rf"{kind} refused: '{key}' missing"):
                shard(**{kind: args})
    with pytest.raises(ValueError, match=rf"{kind} refused: 'max_tokens' unknown"):
        batch.shard_by_batch_size(1, **{kind: whole | {"max_tokens": 3}})
