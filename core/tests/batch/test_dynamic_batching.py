"""`shard_by_batch_size` with dynamic batching: one plan for all shards, within the token limit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core.batch import BatchedDataDict

ARGS = {
    "max_tokens_per_microbatch": 16,
    "sequence_length_round": 4,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}


def batch_of(lengths, width=None):
    num_rows, width = len(lengths), width or max(*lengths, 1)
    return BatchedDataDict(
        input_ids=torch.arange(num_rows * width).reshape(num_rows, width),
        input_lengths=torch.tensor(lengths),
        names=[f"n{i}" for i in range(num_rows)],
    )


def shard(lengths, shards, batch_size=None, width=None, **changes):
    return batch_of(lengths, width).shard_by_batch_size(shards, batch_size, dynamic_batching_args=ARGS | changes)


def test_padded_lengths_stop_at_the_width_of_the_batch():
    shards, _ = shard([7, 6, 1, 1], 2, width=7)
    assert shards[0].micro_batch_lengths == [[7]]


def test_the_iterator_gives_every_rows_tokens_and_no_more_padding_than_planned():
    shards, _ = shard([8, 1, 5, 3, 2, 7], 2)
    seen = []
    for part in shards:
        for microbatch in part.get_batch(0, 3).make_microbatch_iterator_with_dynamic_shapes():
            rows, width = microbatch["input_ids"].shape
            assert rows * width <= 16
            assert microbatch["input_lengths"].max() <= width
            seen += microbatch["names"]
    assert sorted(seen) == [f"n{i}" for i in range(6)]


def test_a_row_over_the_limit_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"17.*16|20.*16"):
        shard([17, 1], 2, width=32)
    with pytest.raises(ValueError, match=r"8.*\b7\b"):  # 5 tokens, padded to 8
        shard([5, 1], 2, width=32, max_tokens_per_microbatch=7)
    shards, _ = shard([7, 1], 2, max_tokens_per_microbatch=7)  # the width stops the padding at 7
    assert shards[0].micro_batch_lengths == [[7]]


def test_a_row_longer_than_the_batch_is_wide_is_refused():
    with pytest.raises(ValueError, match=r"9.*\b6\b"):
        shard([9, 1], 2, width=6)


@pytest.mark.parametrize("key", sorted(ARGS))
def test_a_missing_key_is_refused_by_name(key):
    args = {name: value for name, value in ARGS.items() if name != key}
    with pytest.raises(ValueError, match=key):
        batch_of([1, 2]).shard_by_batch_size(2, dynamic_batching_args=args)


def test_an_unknown_key_is_refused_by_name():
    with pytest.raises(ValueError, match="max_tokens"):
        batch_of([1, 2]).shard_by_batch_size(2, dynamic_batching_args=ARGS | {"max_tokens": 4})


@pytest.mark.parametrize("key", ["max_tokens_per_microbatch", "sequence_length_round"])
def test_values_below_1_are_refused(key):
    with pytest.raises(ValueError, match=f"{key}.*0"):
        batch_of([1, 2]).shard_by_batch_size(2, dynamic_batching_args=ARGS | {key: 0})


def test_a_column_that_is_not_there_is_a_key_error():
    with pytest.raises(KeyError, match="'tokens'"):
        batch_of([1, 2]).shard_by_batch_size(2, dynamic_batching_args=ARGS | {"input_key": "tokens"})
    with pytest.raises(KeyError, match="'lens'"):
        batch_of([1, 2]).shard_by_batch_size(2, dynamic_batching_args=ARGS | {"input_lengths_key": "lens"})


def test_input_without_a_sequence_dim_and_lengths_of_other_forms_are_refused():
    with pytest.raises(ValueError, match=r"names.*Expected a padded"):
        batch_of([1, 2]).shard_by_batch_size(2, dynamic_batching_args=ARGS | {"input_key": "names"})
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        batch_of([1, 2]).shard_by_batch_size(2, dynamic_batching_args=ARGS | {"input_lengths_key": "input_ids"})
    batch = batch_of([1, 2])
    batch["input_lengths"] = torch.tensor([1.0, 2.0])
    with pytest.raises(TypeError, match=r"float"):
        batch.shard_by_batch_size(2, dynamic_batching_args=ARGS)


def test_it_excludes_packing_and_uneven_shards():
    with pytest.raises(ValueError, match=r"dynamic_batching_args and sequence_packing_args"):
        batch_of([1, 2]).shard_by_batch_size(2, dynamic_batching_args=ARGS, sequence_packing_args={})
    with pytest.raises(ValueError, match=r"allow_uneven_shards"):
        batch_of([1, 2]).shard_by_batch_size(2, allow_uneven_shards=True, dynamic_batching_args=ARGS)


@st.composite
def cases(draw):
    shards, per_chunk, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_rows = shards * per_chunk * chunks
    lengths = draw(st.lists(st.integers(0, 32), min_size=num_rows, max_size=num_rows))
    width = draw(st.integers(max(*lengths, 1), 40))
    return lengths, width, shards, shards * per_chunk, draw(st.integers(1, 9)), draw(st.integers(40, 160))


@given(cases())
def test_whatever_the_lengths_plans_are_equal_complete_and_within_the_limit(case):
    lengths, width, shards, batch_size, multiple, limit = case
    batch = batch_of(lengths, width)
    args = ARGS | {"sequence_length_round": multiple, "max_tokens_per_microbatch": limit}
    parts, came_from = batch.shard_by_batch_size(shards, batch_size, dynamic_batching_args=args)

    assert sorted(came_from) == list(range(len(lengths)))
    joined = BatchedDataDict.from_batches(parts)
    assert joined["names"] == [f"n{row}" for row in came_from]
    joined.reorder_data(came_from)
    assert all(torch.equal(joined[key], batch[key]) for key in ("input_ids", "input_lengths"))
    assert joined["names"] == batch["names"]

    rows_of_chunk = batch_size // shards
    for part in parts:
        assert part.micro_batch_indices == parts[0].micro_batch_indices
        assert part.micro_batch_lengths == parts[0].micro_batch_lengths
        assert part.size == len(lengths) // shards
    for chunk in range(len(lengths) // batch_size):
        pairs, widths = parts[0].micro_batch_indices[chunk], parts[0].micro_batch_lengths[chunk]
        assert [start for start, _ in pairs] == [0, *(end for _, end in pairs[:-1])]
        assert pairs[-1][1] == rows_of_chunk
        assert len(widths) == len(pairs)
        for (start, end), padded in zip(pairs, widths, strict=True):
            longest = max(int(p.get_batch(chunk, rows_of_chunk)["input_lengths"][start:end].max()) for p in parts)
            assert start < end
            assert padded == min(-(-longest // multiple) * multiple, width)
            assert (end - start) * padded <= limit
        for start, end in pairs[:-1]:  # cut no sooner than the limit demands
            longest = max(int(p.get_batch(chunk, rows_of_chunk)["input_lengths"][end]) for p in parts)
            assert (end - start + 1) * min(-(-longest // multiple) * multiple, width) > limit


def test_jagged_tokens_are_refused():
    tokens = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5]))
    batch = BatchedDataDict(input_ids=tokens, input_lengths=torch.tensor([2, 3]))
    with pytest.raises(ValueError, match=r"'input_ids' names a nested tensor\. Expected a padded tensor"):
        batch.shard_by_batch_size(1, 2, dynamic_batching_args=ARGS)
