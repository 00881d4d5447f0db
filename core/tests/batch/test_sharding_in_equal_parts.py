"""`shard_by_batch_size` without microbatches: chunks, equal parts, joined by position."""

import numpy as np
import pytest
import torch

from dataplane_core.batch import BatchedDataDict


def batch_of(num_rows):
    objects = np.array([{"row": i} for i in range(num_rows)] + [None], dtype=object)[:-1]
    return BatchedDataDict(t=torch.arange(num_rows), names=[f"n{i}" for i in range(num_rows)], o=objects)


def rows_of(shard):
    rows = shard["t"].tolist()
    assert shard["names"] == [f"n{i}" for i in rows]
    assert [item["row"] for item in shard["o"]] == rows
    return rows


def test_the_parts_of_each_chunk_are_joined_by_position():
    batch = BatchedDataDict(letters=list("AABBCCDD"))
    shards = batch.shard_by_batch_size(2, batch_size=2)
    assert [shard["letters"] for shard in shards] == [list("ABCD"), list("ABCD")]


def test_uneven_shards_let_the_last_be_smaller():
    assert [rows_of(s) for s in batch_of(7).shard_by_batch_size(3, allow_uneven_shards=True)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    sizes = [shard.size for shard in batch_of(2).shard_by_batch_size(4, allow_uneven_shards=True)]
    assert sizes == [1, 1, 0, 0]


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
        (0, {}, "shards is 0|at least 1, got 0"),
        (2, {"batch_size": 0}, "batch_size 0|got 0"),
        (0, {"allow_uneven_shards": True}, "shards is 0|at least 1, got 0"),
        (2, {"batch_size": 2, "allow_uneven_shards": True}, "batch_size 2"),
    ],
)
def test_sizes_that_are_no_multiples_are_refused_with_the_numbers(shards, arguments, said):
    with pytest.raises(ValueError, match=said):
        batch_of(6).shard_by_batch_size(shards, **arguments)


def test_columns_of_unequal_length_cannot_be_sharded():
    with pytest.raises(ValueError, match="differ in length"):
        BatchedDataDict(a=[1, 2], b=[1]).shard_by_batch_size(1)
