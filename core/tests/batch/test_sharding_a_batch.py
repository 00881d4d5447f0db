"""`shard_by_batch_size`: which columns it needs, and what it refuses. Its plans are tested beside those of metas."""

import pytest
import torch

from dataplane_core.batch import BatchedDataDict

DYNAMIC = {
    "max_tokens_per_microbatch": 16,
    "sequence_length_round": 4,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}
PACKED = {
    "algorithm": "concatenative",
    "max_tokens_per_microbatch": 16,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "sequence_length_pad_multiple": 1,
}
BY_TOKENS = [{"dynamic_batching_args": DYNAMIC}, {"sequence_packing_args": PACKED}]


def batch_of(*lengths, width=8):
    tokens, names = torch.zeros(len(lengths), width), [f"n{i}" for i in range(len(lengths))]
    return BatchedDataDict(input_ids=tokens, input_lengths=torch.tensor(lengths), names=names)


def changed(by_tokens, **changes):
    return {kind: args | changes for kind, args in by_tokens.items()}


def test_the_parts_of_each_chunk_are_joined_by_position():
    shards = BatchedDataDict(letters=list("AABBCCDD")).shard_by_batch_size(2, batch_size=2)
    assert [shard["letters"] for shard in shards] == [list("ABCD"), list("ABCD")]


def test_uneven_shards_let_the_last_be_smaller():
    shards = BatchedDataDict(row=list(range(7))).shard_by_batch_size(3, allow_uneven_shards=True)
    assert [shard["row"] for shard in shards] == [[0, 1, 2], [3, 4, 5], [6]]
    shards = BatchedDataDict(row=[0, 1]).shard_by_batch_size(4, allow_uneven_shards=True)
    assert [shard["row"] for shard in shards] == [[0], [1], [], []]


def test_the_tensors_of_shards_are_copies_that_pickle_small():
    batch = BatchedDataDict(t=torch.zeros(64, 1024))
    for shards in (batch.shard_by_batch_size(64), batch.shard_by_batch_size(64, allow_uneven_shards=True)):
        assert shards[0]["t"].untyped_storage().nbytes() == 4096
        shards[0]["t"].fill_(1)
        assert not batch["t"].any()


@pytest.mark.parametrize(
    ("shards", "arguments", "said"),
    [
        (4, {}, "6 rows .* 4 shards"),
        (2, {"batch_size": 4}, "6 rows .* batch_size 4"),
        (2, {"batch_size": 3}, "3 rows .* 2 shards"),
        (0, {}, "shards is 0"),
        (0, {"allow_uneven_shards": True}, "shards is 0"),
        (2, {"batch_size": 2, "allow_uneven_shards": True}, "batch_size 2"),
        (2, {**BY_TOKENS[0], **BY_TOKENS[1]}, "dynamic_batching_args and sequence_packing_args"),
        (2, {**BY_TOKENS[0], "allow_uneven_shards": True}, "allow_uneven_shards"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_numbers(shards, arguments, said):
    with pytest.raises(ValueError, match=said):
        batch_of(*range(6)).shard_by_batch_size(shards, **arguments)


@pytest.mark.parametrize("by_tokens", BY_TOKENS, ids=lambda each: next(iter(each)))
def test_columns_that_say_no_lengths_are_refused(by_tokens):
    batch = batch_of(1, 2)
    for key in ("input_key", "input_lengths_key"):
        with pytest.raises(KeyError, match="'tokens'"):
            batch.shard_by_batch_size(2, **changed(by_tokens, **{key: "tokens"}))
    with pytest.raises(ValueError, match=r"shape \(2, 8\)"):
        batch.shard_by_batch_size(2, **changed(by_tokens, input_lengths_key="input_ids"))
    batch["input_lengths"] = torch.tensor([1.0, 2.0])
    with pytest.raises(TypeError, match=r"float"):
        batch.shard_by_batch_size(2, **by_tokens)


def test_dynamic_batching_needs_padded_tokens_that_hold_every_row():
    def shard(batch, **changes):
        batch.shard_by_batch_size(1, **changed(BY_TOKENS[0], **changes))

    with pytest.raises(ValueError, match=r"names.*Expected a padded"):
        shard(batch_of(1, 2), input_key="names")
    with pytest.raises(ValueError, match=r"9.*\b8\b"):
        shard(batch_of(9, 1))
    tokens = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5]))
    with pytest.raises(ValueError, match=r"'input_ids' names a nested tensor\. Expected a padded tensor"):
        shard(BatchedDataDict(input_ids=tokens, input_lengths=torch.tensor([2, 3])))


def test_columns_of_unequal_length_cannot_be_sharded():
    with pytest.raises(ValueError, match="differ in length"):
        BatchedDataDict(a=[1, 2], b=[1]).shard_by_batch_size(1)
