"""A whole argument of a wrong type is refused by name, in our words, by every public helper."""

import pytest
import torch

from dataplane_core import (
    BatchedDataDict,
    KVBatchMeta,
    connect,
    kv_first_write,
    materialize,
    pack_jagged_fields,
    read_columns,
    shard_meta_for_dp,
    to_arrow,
    to_numpy,
    write_columns,
)
from dataplane_core.errors import InvalidTypeError

META = KVBatchMeta("p", "task", ["a", "b"], fields=["x"], sequence_lengths=[1, 1])
ROWS = {"x": torch.ones(2)}


@pytest.fixture(scope="module")
def client():
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", ["x"], None, ["task"])
        client.put_samples(["a", "b"], "p", ROWS)
        yield client


def first_write(client, **words):
    return kv_first_write(ROWS, dp_client=client, **({"sample_ids": ["a", "b"], "partition_id": "p"} | words))


CALLS = {
    "ack: meta": lambda client, odd: client.ack(odd),
    "renew: meta": lambda client, odd: client.renew(odd, 3.0),
    "get_data: meta": lambda client, odd: client.get_data(odd),
    "read_columns: meta": lambda client, odd: read_columns(client, odd, ["x"]),
    "read_columns: select_fields": lambda client, odd: read_columns(client, META, odd),
    "read_columns: pad_value_dict": lambda client, odd: read_columns(client, META, pad_value_dict=odd),
    "read_columns: pad_to_seqlen": lambda client, odd: read_columns(client, META, pad_to_seqlen=odd),
    "write_columns: meta": lambda client, odd: write_columns(client, odd, ROWS),
    "write_columns: token_aligned_fields": lambda client, odd: write_columns(
        client, META, ROWS, token_aligned_fields=odd
    ),
    "kv_first_write: sample_ids": lambda client, odd: first_write(client, sample_ids=odd),
    "kv_first_write: extra_info": lambda client, odd: first_write(client, extra_info=odd),
    "kv_first_write: pad_to_multiple": lambda client, odd: first_write(client, pad_to_multiple=odd),
    "tags must be a list": lambda client, odd: first_write(client, tags=odd),
    "materialize: td": lambda client, odd: materialize(odd),
    "to_numpy: columns": lambda client, odd: to_numpy(odd),
    "to_arrow: columns": lambda client, odd: to_arrow(odd),
    "to_arrow: ids": lambda client, odd: to_arrow(ROWS, ids=odd),
    "pack_jagged_fields: fields": lambda client, odd: pack_jagged_fields(odd, lengths=[1, 1]),
    "shard_meta_for_dp: meta": lambda client, odd: shard_meta_for_dp(odd, dp_world=1),
    "shard_meta_for_dp: dp_world": lambda client, odd: shard_meta_for_dp(META, dp_world=odd),
    "shard_meta_for_dp: sequence_packing_args": lambda client, odd: shard_meta_for_dp(
        META, dp_world=1, sequence_packing_args=odd
    ),
    "shard_by_batch_size: shards": lambda client, odd: BatchedDataDict(ROWS).shard_by_batch_size(odd),
    "KVBatchMeta.subset: indices": lambda client, odd: META.subset(odd),
    "KVBatchMeta.concat: each of others": lambda client, odd: META.concat(odd),
    "KVBatchMeta.stamp_tags: columns": lambda client, odd: META.stamp_tags(odd),
    "KVBatchMeta.with_fields: names": lambda client, odd: META.with_fields(odd),
}


@pytest.mark.parametrize("named", CALLS)
def test_a_wrong_argument_is_named(client, named):
    with pytest.raises(InvalidTypeError) as refused:
        CALLS[named](client, 2.5)
    assert named in str(refused.value)
    assert "float" in str(refused.value)


@pytest.mark.parametrize("column", [3, None, object()])
def test_a_column_that_is_no_column_is_named(column):
    for convert in (materialize, to_numpy, to_arrow):
        with pytest.raises(InvalidTypeError, match="'x'"):
            convert({"x": column})


def test_row_ids_and_names_may_come_from_an_iterator(client):
    assert first_write(client, sample_ids=iter(["a", "b"])).sample_ids == ["a", "b"]
