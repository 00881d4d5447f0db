"""A whole argument of a wrong type is refused by name, in our words, by every public helper."""

from functools import partial

import pytest
import torch

from dataplane_core import (
    BatchedDataDict,
    KVBatchMeta,
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

META = KVBatchMeta("train", "policy", ["a", "b"], fields=["x"], sequence_lengths=[1, 1])
ROWS = {"x": torch.ones(2)}
#: Calls by their names, with right arguments, and the names of those that get a wrong one, each by itself.
CALLS = [
    (partial(read_columns, None, meta=META), "meta select_fields pad_value_dict pad_to_seqlen ragged_fields"),
    (partial(write_columns, None, meta=META, fields=ROWS), "meta token_aligned_fields"),
    (partial(kv_first_write, ROWS, sample_ids=["a"], dp_client=None, partition_id="train"), "sample_ids extra_info"),
    (materialize, "td"),
    (partial(to_arrow, columns=ROWS), "columns ids"),
    (partial(pack_jagged_fields, lengths=[1, 1]), "fields"),
    (partial(shard_meta_for_dp, meta=META, dp_world=1), "meta dp_world sequence_packing_args"),
    (BatchedDataDict(ROWS).shard_by_batch_size, "shards"),
    (META.subset, "indices"),
    (META.stamp_tags, "columns"),
    (META.with_fields, "names"),
]


@pytest.mark.parametrize(("call", "names"), CALLS)
def test_a_wrong_argument_is_named(call, names):
    for name in names.split():
        with pytest.raises(InvalidTypeError, match=rf"\w+: {name} must be .*float"):
            call(**{name: 2.5})


def test_a_wrong_meta_of_a_clients_call_is_named(client):
    calls = {"ack: meta": client.ack, "get_data: meta": client.get_data, "each of others": META.concat}
    for named, call in (calls | {"renew: meta": partial(client.renew, lease_s=3.0)}).items():
        with pytest.raises(InvalidTypeError, match=f"{named}.*float"):
            call(2.5)


@pytest.mark.parametrize("column", [3, None, object()])
def test_a_column_that_is_no_column_is_named(column):
    for convert in (materialize, to_numpy, to_arrow):
        with pytest.raises(InvalidTypeError, match="'x'"):
            convert({"x": column})


def test_row_ids_and_names_may_come_from_an_iterator(client):
    meta = kv_first_write(ROWS, sample_ids=iter(["a", "b"]), dp_client=client, partition_id="train")
    assert meta.sample_ids == ["a", "b"]
