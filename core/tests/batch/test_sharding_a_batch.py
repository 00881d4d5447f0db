"""`shard_by_batch_size`: which rows a shard gets. Its plans are tested beside those of metas."""

import torch

from dataplane_core.batch import BatchedDataDict


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
