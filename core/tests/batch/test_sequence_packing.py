"""`shard_by_batch_size` with sequence packing: bins of a token limit, equally many on all shards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core.batch import BatchedDataDict

ALGORITHMS = ["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]
ARGS = {
    "algorithm": "concatenative",
    "max_tokens_per_microbatch": 10,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "sequence_length_pad_multiple": 1,
}


def batch_of(lengths):
    num_rows, width = len(lengths), max(*lengths, 1)
    return BatchedDataDict(
        input_ids=torch.arange(num_rows * width).reshape(num_rows, width),
        input_lengths=torch.tensor(lengths),
        names=[f"n{i}" for i in range(num_rows)],
    )


def shard(lengths, shards, batch_size=None, **changes):
    return batch_of(lengths).shard_by_batch_size(shards, batch_size, sequence_packing_args=ARGS | changes)


def bins_of(part):
    """Per chunk the lengths in each microbatch of a shard."""
    found = []
    for chunk, pairs in enumerate(part.micro_batch_indices):
        rows = part.get_batch(chunk)["input_lengths"].tolist()
        found.append([rows[start:end] for start, end in pairs])
    return found


def test_lengths_are_rounded_up_before_they_are_packed():
    shards, _ = shard([3, 5, 1], 1, max_tokens_per_microbatch=8, sequence_length_pad_multiple=4)
    assert bins_of(shards[0]) == [[[3], [5], [1]]]
    assert shards[0].micro_batch_lengths == [[4, 8, 4]]


def test_bins_are_raised_to_a_multiple_of_the_shards_with_a_row_from_the_end_of_the_fullest():
    shards, _ = shard([1, 2, 3, 4, 9, 1], 2, max_tokens_per_microbatch=11)  # bins [1 2 3 4] [9 1]
    assert [bins_of(part) for part in shards] == [[[[1, 2, 3, 4]]], [[[9, 1]]]]
    shards, _ = shard([1, 2, 3, 4, 9, 1], 3, max_tokens_per_microbatch=11)  # one more: [4]
    assert [bins_of(part) for part in shards] == [[[[1, 2, 3]]], [[[9, 1]]], [[[4]]]]
    assert [part.elem_counts_per_gb for part in shards] == [[3], [2], [1]]


def test_largest_first_sorts_the_bins_of_a_shard_and_moves_no_row_to_another_shard():
    lengths = [1, 9, 2, 8, 3, 7, 4, 6]
    shards, came_from = shard(lengths, 2, max_tokens_per_microbatch=9, microbatch_order="largest_first")
    in_packer_order, _ = shard(lengths, 2, max_tokens_per_microbatch=9, microbatch_order="packer")
    for part, other in zip(shards, in_packer_order, strict=True):
        assert part.micro_batch_lengths[0] == sorted(other.micro_batch_lengths[0], reverse=True)
        assert sorted(part["names"]) == sorted(other["names"])
        assert sorted(bins_of(part)[0]) == sorted(bins_of(other)[0])
    assert [part.micro_batch_lengths for part in in_packer_order] != [part.micro_batch_lengths for part in shards]
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(came_from)
    assert joined["input_lengths"].tolist() == lengths


def test_a_row_over_the_limit_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"11.*\b10\b"):
        shard([11, 1], 2)
    with pytest.raises(ValueError, match=r"12.*\b10\b"):  # 9 tokens, rounded up
        shard([9, 1], 2, sequence_length_pad_multiple=6)


def test_too_few_rows_for_the_shards_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"\b2 sequences.*\b3 bins"):
        shard([1, 1], 3)


@pytest.mark.parametrize("key", sorted(ARGS))
def test_a_missing_key_is_refused_by_name(key):
    args = {name: value for name, value in ARGS.items() if name != key}
    with pytest.raises(ValueError, match=key):
        batch_of([1, 2]).shard_by_batch_size(2, sequence_packing_args=args)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bins", 4),
        ("algorithm", "best_fit"),
        ("microbatch_order", "smallest_first"),
        ("max_tokens_per_microbatch", 0),
        ("sequence_length_pad_multiple", 0),
    ],
)
def test_an_unknown_key_or_value_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"{key}|{value}"):
        batch_of([1, 2]).shard_by_batch_size(2, sequence_packing_args=ARGS | {key: value})


def test_a_column_that_is_not_there_is_a_key_error():
    for key in ("input_key", "input_lengths_key"):
        with pytest.raises(KeyError, match="'tokens'"):
            batch_of([1, 2]).shard_by_batch_size(2, sequence_packing_args=ARGS | {key: "tokens"})


@st.composite
def cases(draw):
    shards, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch_size = draw(st.integers(shards * 4, 24))
    num_rows = batch_size * chunks
    lengths = draw(st.lists(st.integers(0, 32), min_size=num_rows, max_size=num_rows))
    return lengths, shards, batch_size, draw(st.integers(1, 8)), draw(st.integers(120, 300))


@given(cases(), st.sampled_from(ALGORITHMS), st.sampled_from(["packer", "largest_first"]))
def test_whatever_the_lengths_bins_are_complete_within_the_limit_and_equally_many(case, algorithm, order):
    lengths, shards, batch_size, multiple, limit = case
    batch = batch_of(lengths)
    args = ARGS | {
        "algorithm": algorithm,
        "sequence_length_pad_multiple": multiple,
        "max_tokens_per_microbatch": limit,
        "microbatch_order": order,
    }
    parts, came_from = batch.shard_by_batch_size(shards, batch_size, sequence_packing_args=args)

    assert sorted(came_from) == list(range(len(lengths)))
    joined = BatchedDataDict.from_batches(parts)
    assert joined["names"] == [f"n{row}" for row in came_from]
    joined.reorder_data(came_from)
    assert torch.equal(joined["input_ids"], batch["input_ids"])
    assert joined["names"] == batch["names"]

    for part in parts:
        assert sum(part.elem_counts_per_gb) == part.size
        assert [pairs[-1][1] for pairs in part.micro_batch_indices] == part.elem_counts_per_gb
        assert [len(pairs) for pairs in part.micro_batch_indices] == [len(p) for p in parts[0].micro_batch_indices]
        for chunk, bins in enumerate(bins_of(part)):
            assert {int(name[1:]) // batch_size for name in part.get_batch(chunk)["names"]} == {chunk}
            tokens = [sum(-(-length // multiple) * multiple for length in each) for each in bins]
            assert all(bins)
            assert tokens == part.micro_batch_lengths[chunk]
            assert max(tokens) <= limit
            if order == "largest_first":
                assert tokens == sorted(tokens, reverse=True)
