"""What the helpers refuse, and how they name it."""

from functools import partial

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack

from dataplane_core import materialize, pack_jagged_fields, shard_meta_for_dp
from dataplane_core.batch import (
    BatchedDataDict,
    SlicedDataDict,
    kv_first_write,
    read_columns,
    rebuild_message_logs,
    response_from_nested,
    split_message_logs,
    stack_or_nest,
    write_columns,
)
from dataplane_core.batch.columns import to_arrow, to_nested_by_length, to_numpy
from dataplane_core.batch.transfer import pad_columns
from dataplane_core.errors import (
    DataPlaneError,
    InvalidRequestError,
    InvalidTypeError,
    MissingDataError,
    SchemaMismatchError,
)
from dataplane_core.meta import KVBatchMeta

BATCH = BatchedDataDict(t=torch.arange(6), names=[f"n{row}" for row in range(6)])
SIX_LENGTHS = BatchedDataDict(input_ids=torch.zeros(6, 8), input_lengths=torch.arange(6), floats=torch.arange(6.0))
ONE_BY_TWO = torch.zeros(1, 2, 4)
RAGGED = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5]))
RAGGED_LATER = torch.nested.nested_tensor_from_jagged(torch.zeros(2, 6), torch.tensor([0, 2, 6]), jagged_dim=2)
WITH_HOLES = torch.nested.nested_tensor_from_jagged(torch.zeros(6, 2), torch.tensor([0, 2, 6]), torch.tensor([1, 3]))
IMAGES = {"pixel_values": stack_or_nest([torch.ones(4, 3, 2), torch.ones(0, 3, 2)])}
KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
DYNAMIC = {"max_tokens_per_microbatch": 16, "sequence_length_round": 4, **KEYS}
PACKED = {"algorithm": "concatenative", "max_tokens_per_microbatch": 16, "sequence_length_pad_multiple": 1, **KEYS}
BY_TOKENS = {"dynamic_batching_args": DYNAMIC, "sequence_packing_args": PACKED}
TURN = {"role": "user", "content": "hi"}
LOGS = {
    "input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]),
    **split_message_logs([[{**TURN, "token_ids": [1, 2]}, {**TURN, "token_ids": [3]}], [{**TURN, "token_ids": [4]}]]),
}
TWO_ROWS = torch.zeros(2, 5)
PADDED = [torch.zeros(1, width, dtype=torch.uint8) for width in (2, 3)]
dense = torch.zeros(4, 2)
jagged = to_nested_by_length(torch.ones(4, 5), [3, 0, 5, 1])


def planned(*lengths_of_batches):
    """Six rows with a plan of some batches."""
    batch = SlicedDataDict(BATCH.data)
    batch.micro_batch_indices = [[[0, length]] for length in lengths_of_batches]
    batch.micro_batch_lengths = [[2] for _ in lengths_of_batches]
    return batch


def join(*batches, **words):
    return BatchedDataDict.from_batches(list(batches), **words)


def shard(batch, shards=2, **words):
    return batch.shard_by_batch_size(shards, **words)


def shard_dynamic(ids, lengths):
    return shard(BatchedDataDict(input_ids=ids, input_lengths=torch.tensor(lengths)), dynamic_batching_args=DYNAMIC)


def pack(column):
    fields = {"good": torch.ones(4, 9), "x": column}
    return pack_jagged_fields(fields, lengths=[3, 0, 5, 1], token_aligned_fields=["good", "x"])


def pad(column, value):
    return materialize({"x": column}, pad_value_dict={"x": value}, pad_to_seqlen=9)


REFUSED = [
    # columns
    (lambda: BatchedDataDict(a=[1, 2], b=torch.zeros(3)).size, ValueError, r"'a': 2, 'b': 3"),
    *((lambda odd=odd: BatchedDataDict(x=odd).size, NotImplementedError, "'x'") for odd in (7, "text", (1, 2))),
    (lambda: BatchedDataDict(x=torch.tensor(1.0)).size, NotImplementedError, "'x'"),
    (lambda: BatchedDataDict(x=RAGGED_LATER).slice(0, 1), TypeError, "'x'.*end to end"),
    (lambda: BatchedDataDict(x=WITH_HOLES).slice(0, 1), TypeError, "'x'.*end to end"),
    # rows out of a batch
    *(
        (lambda start=start, end=end: BATCH.slice(start, end), ValueError, rf"\[{start}, {end}\).*6 rows")
        for start, end in ((0, 7), (-1, 2), (4, 3))
    ),
    (lambda: BATCH.chunk(3, 3), ValueError, "rank 3 .*3 chunks"),
    (lambda: BATCH.chunk(-1, 3), ValueError, "rank -1"),
    (lambda: BATCH.chunk(0, 4), ValueError, "6 rows .*4 chunks"),
    (lambda: BATCH.chunk(0, 0), ValueError, "0 chunks"),
    (lambda: BATCH.select_indices([0, 6]), ValueError, "index 6 .*6 rows"),
    (lambda: BATCH.select_indices(torch.tensor([True] * 6)), TypeError, "nonzero"),
    (lambda: BATCH.get_batch(3, 2), ValueError, "batch 3 .*6 rows make 3 batches"),
    (lambda: BATCH.get_batch(0, 0), ValueError, "got 0"),
    (lambda: BATCH.get_batch(0), ValueError, "batch_size"),
    (lambda: planned(3, 3).get_batch(0, 2), ValueError, r"batch_size 2 .*\[3, 3\]"),
    (lambda: BATCH.repeat_interleave(-1), ValueError, "-1"),
    (lambda: BATCH.truncate_tensors(0, 1), ValueError, "0 and 1"),
    (lambda: BATCH.truncate_tensors(1, -1), ValueError, "1 and -1"),
    # microbatches; refused at once, before the first is asked for
    *((lambda size=size: BATCH.make_microbatch_iterator(size), ValueError, f"6 rows .*{size}") for size in (4, 0, -2)),
    (BATCH.make_microbatch_iterator_with_dynamic_shapes, ValueError, "no plan"),
    (BATCH.make_microbatch_iterator_for_packable_sequences, ValueError, "no plan"),
    (BATCH.get_microbatch_iterator_dynamic_shapes_len, ValueError, "no plan"),
    (BATCH.get_microbatch_iterator_for_packable_sequences_len, ValueError, "no plan"),
    (planned(3, 3).make_microbatch_iterator_with_dynamic_shapes, ValueError, "2 chunks.*get_batch"),
    # shards; the sizes of plans are refused as for metas
    (lambda: shard(SIX_LENGTHS, 0, allow_uneven_shards=True), ValueError, "shards must be .*0"),
    (lambda: shard(SIX_LENGTHS, batch_size=2, allow_uneven_shards=True), ValueError, "batch_size 2"),
    (lambda: shard(SIX_LENGTHS, **BY_TOKENS), ValueError, "dynamic_batching_args and sequence_packing_args"),
    (lambda: shard(SIX_LENGTHS, dynamic_batching_args=DYNAMIC, allow_uneven_shards=True), ValueError, "allow_uneven"),
    (lambda: shard(BatchedDataDict(a=[1, 2], b=[1]), 1), ValueError, "'a': 2, 'b': 1"),
    *(
        (lambda kind=kind, words=words, more=more: shard(SIX_LENGTHS, **{kind: words | more}), error, named)
        for kind, words in BY_TOKENS.items()
        for more, error, named in (
            ({"input_key": "tokens"}, KeyError, "tokens"),
            ({"input_lengths_key": "tokens"}, KeyError, "tokens"),
            ({"input_lengths_key": "input_ids"}, ValueError, r"\(6, 8\)"),
            ({"input_lengths_key": "floats"}, TypeError, "float"),
        )
    ),
    (lambda: shard_dynamic(["a", "b"], [1, 2]), ValueError, "input_ids.*Expected a padded"),
    (lambda: shard_dynamic(RAGGED, [2, 3]), ValueError, "'input_ids'.*nested.*Expected a padded"),
    (lambda: shard_dynamic(TWO_ROWS, [9, 1]), ValueError, r"9.*\b5\b"),
    # joins
    (lambda: join({"a": [1], "b": [2]}, {"a": [3]}), KeyError, "'b' .*batch 1"),
    (lambda: join({"a": [1], "b": [2]}, {"a": [3], "b": [1, 2]}), ValueError, "batch 1.*'a': 1, 'b': 2"),
    (lambda: join({"meta": {"a": 1}}, {"meta": {"a": 2}}), NotImplementedError, "'meta'.*dict"),
    (lambda: join({"x": [1]}, {"x": torch.tensor([1])}), NotImplementedError, "'x'.*Tensor and list"),
    (lambda: join({"e": ONE_BY_TWO}, {"e": torch.ones(1, 2)}), ValueError, "'e'"),
    (lambda: join({"e": ONE_BY_TWO}, {"e": torch.ones(1, 2, 5)}), ValueError, "'e'"),
    (lambda: join({"e": ONE_BY_TWO}, {"e": ONE_BY_TWO.to(torch.float8_e5m2)}), ValueError, "'e'"),
    (lambda: join(*({"x": part} for part in PADDED), pad_value_dict={"x": -1}), InvalidRequestError, "'x'.*uint8.*-1"),
    (lambda: join({"x": RAGGED}, {"x": RAGGED}), NotImplementedError, "'x'.*nested"),
    (lambda: join(IMAGES, IMAGES, ragged_fields=()), NotImplementedError, "'pixel_values'.*nested"),
    (lambda: join(IMAGES, {"ids": [1]}), MissingDataError, "allow_missing_packed_tensors=True"),
    (lambda: join({"ids": [1]}, IMAGES, allow_missing_packed_tensors=True), MissingDataError, "'ids'"),
    (lambda: join(IMAGES, {"pixel_values": torch.ones(1, 2, 3, 5)}), InvalidRequestError, "pixel_values"),
    (lambda: join(IMAGES, {"pixel_values": torch.ones(1, 2, 3, 2).double()}), InvalidRequestError, "pixel_values"),
    (lambda: join(IMAGES, {"pixel_values": torch.ones(1, 2, 3, 2, device="meta")}), ValueError, "cpu.* against .*meta"),
    (lambda: join({"put": [1]}, ragged_fields="input_ids_put"), InvalidTypeError, "ragged_fields.*str"),
    # lists of rows, and lengths
    (lambda: stack_or_nest([torch.tensor(1), None]), InvalidRequestError, "scalars and None"),
    (lambda: stack_or_nest([torch.zeros(2, 3), torch.zeros(2, 4)]), SchemaMismatchError, r"\(2, 3\), row 1 .*\(2, 4\)"),
    (lambda: stack_or_nest([torch.zeros(2), torch.zeros(2).double()]), SchemaMismatchError, "row 1 is float64"),
    (lambda: stack_or_nest([]), InvalidRequestError, "no rows"),
    *(
        (lambda lengths=lengths: to_nested_by_length(TWO_ROWS, lengths), InvalidRequestError, named)
        for lengths, named in (
            ([3, 6], "row 1 .*6.* 5"),
            ([3, -1], "row 1 .*-1"),
            ([3], "1 lengths for 2 rows"),
            ([1.0, 2.0], "torch.float32"),
            (torch.tensor([True, False]), "torch.bool"),
            ([None, 2], r"\[None, 2\]"),
            ({"a": 1}, "{.a.: 1}"),
            (torch.zeros(2, 5, dtype=torch.int64), r"\(2, 5\)"),
        )
    ),
    (lambda: to_nested_by_length(torch.zeros(2), [3, 6]), InvalidRequestError, r"\(2,\)"),
    (lambda: to_nested_by_length(RAGGED, [1, 4]), InvalidRequestError, "jagged already"),
    (lambda: pack(torch.ones(4, 4)), InvalidRequestError, "'x'.*row 2 .*5.* 4"),
    (lambda: pack(torch.ones(4)), InvalidRequestError, r"'x'.*\(4,\)"),
    (lambda: pack(torch.ones(3, 5)), InvalidRequestError, "'x'.*4 lengths for 3 rows"),
    (lambda: pack(["a"]), InvalidRequestError, "'x' has 1 rows.*4"),
    (lambda: pack("text"), InvalidTypeError, "'x'.*a str"),
    (lambda: pack(np.zeros(4, "M8[s]")), InvalidTypeError, "'x'.*datetime64"),
    (lambda: pack(torch.ones(4, 5, device="meta")), InvalidTypeError, "'x'.*meta"),
    (lambda: response_from_nested(RAGGED, torch.ones(2, 2)), InvalidRequestError, "row 0 .*2 tokens.* 2"),
    (lambda: response_from_nested(RAGGED, torch.ones(1, 1)), InvalidRequestError, "2 rows .* 1"),
    # padding
    *(
        (lambda column=column, value=value: pad(column, value), InvalidRequestError, f"'x' of {column.dtype}")
        for both in (dense, jagged)
        for dtype, value in (
            (torch.int64, 0.5),
            (torch.int64, float("nan")),
            (torch.uint8, 300),
            (torch.uint8, -1),
            (torch.bool, 2),
            (torch.int32, "a"),
            (torch.float16, 1e6),
        )
        for column in [both.to(dtype)]
    ),
    (lambda: materialize({}, layout="nested"), InvalidRequestError, "nested"),
    (lambda: materialize({}, pad_to_seqlen=-1), InvalidRequestError, "-1"),
    # objects without a type of Arrow's
    *(
        (lambda items=items: to_arrow({"x": NonTensorStack(*items)}), InvalidTypeError, rf"'x' holds objects .*{named}")
        for items, named in (
            *((items, r"json\.dumps") for items in (["a", 1], [{"a": 1}, "a"], [{"a": torch.zeros(1)}, None])),
            *(([item], "surrogates") for item in ("a \ud83d", ["\ud83d"])),  # half of a pair
        )
    ),
    # message logs
    (lambda: split_message_logs([[], [], [TURN, {"content": "hi"}]]), InvalidRequestError, "turn 1 of sample 2.*role"),
    (lambda: split_message_logs([[TURN | {"token_ids": torch.zeros(1, 2)}]]), InvalidRequestError, r"turn 0.*\(1, 2\)"),
    *(
        (lambda change=change: rebuild_message_logs({**LOGS, **change}), InvalidRequestError, named)
        for change, named in (
            ({"input_ids": LOGS["input_ids"][:, :2]}, "sample 0 .*3 tokens.*'input_ids'.* 2"),
            ({"input_ids": LOGS["input_ids"][:1]}, r"\[1, 2\]"),
            ({"turn_contents": [["a"], ["b"]]}, "sample 0 .*2 turn lengths, 2 roles and 1 contents"),
            ({"turn_lengths": [[3], [1]]}, "sample 0 .*1 turn lengths"),
        )
    ),
    (lambda: rebuild_message_logs(split_message_logs([[TURN]])), InvalidRequestError, "'input_ids'"),
]


@pytest.mark.parametrize(("call", "error", "named"), REFUSED, ids=[str(row[-1]) for row in REFUSED])
def test_what_is_refused_is_named(call, error, named):
    with pytest.raises(error, match=named) as refused:
        call()
    assert isinstance(refused.value, DataPlaneError)


# --- whole arguments of a wrong type ----------------------------------------------------------------------------------

META = KVBatchMeta("train", "policy", ["a", "b"], fields=["x"], sequence_lengths=[1, 1])
ROWS = {"x": torch.ones(2)}
TOKENS = BatchedDataDict(input_ids=torch.zeros(2, 1))
#: Calls by their names, with right arguments, and the names of those that get a wrong one, each by itself.
CALLS = [
    (partial(read_columns, None, meta=META), "meta select_fields"),
    (partial(pad_columns, TOKENS, meta=META), "meta pad_value_dict pad_to_seqlen ragged_fields token_aligned_fields"),
    (partial(write_columns, None, meta=META, fields=ROWS), "meta token_aligned_fields"),
    (partial(kv_first_write, ROWS, sample_ids=["a"], dp_client=None, partition_id="train"), "sample_ids extra_info"),
    (materialize, "td"),
    (partial(to_arrow, columns=ROWS), "columns ids"),
    (partial(pack_jagged_fields, fields=ROWS, lengths=[1, 1]), "fields token_aligned_fields"),
    (partial(shard_meta_for_dp, meta=META, dp_world=1), "meta dp_world sequence_packing_args"),
    (partial(BatchedDataDict(ROWS).shard_by_batch_size, shards=1), "shards batch_size"),
    (META.subset, "indices"),
    (META.stamp_tags, "columns"),
    (META.with_fields, "names"),
]


@pytest.mark.parametrize(("call", "names"), CALLS)
def test_a_wrong_argument_is_named(call, names):
    for name in names.split():
        with pytest.raises(InvalidTypeError, match=rf"\b{name} must be .*float"):
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
