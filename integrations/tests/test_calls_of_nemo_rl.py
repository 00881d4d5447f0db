"""Calls as the GRPO trainers of NeMo RL make them: none is a `TypeError` here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from dataplane_core import KVBatchMeta
from dataplane_core.batch import (
    BatchedDataDict,
    kv_first_write,
    materialize,
    pack_jagged_fields,
    pack_per_token_field,
    read_columns,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
    write_columns,
)
from dataplane_core.client import DataPlaneClient
from dataplane_core.schema import fields_with_optional_routed_experts
from dataplane_core.sharding import get_packer, shard_meta_for_dp
from dataplane_integrations import DataPlanePolicy, DataPlaneWorkerMixin

Batch, Meta, Client, Policy, Worker = (
    BatchedDataDict,
    KVBatchMeta,
    DataPlaneClient,
    DataPlanePolicy,
    DataPlaneWorkerMixin,
)
SELF = OBJECT = object()


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def names(*keywords: str) -> dict[str, Any]:
    return dict.fromkeys(keywords, OBJECT)


CALLS: list[tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]] = [
    (Batch.from_batches, call(OBJECT, pad_value_dict=OBJECT)),
    (Batch.all_gather, call(SELF, OBJECT)),
    (Batch.chunk, call(SELF, 0, 1)),
    (Batch.reorder_data, call(SELF, OBJECT)),
    (Batch.shard_by_batch_size, call(SELF, 2, batch_size=4)),
    (Batch.shard_by_batch_size, call(SELF, **names("shards", "batch_size", "sequence_packing_args"))),
    (Batch.shard_by_batch_size, call(SELF, 2, allow_uneven_shards=True)),
    (Batch.shard_by_batch_size, call(SELF, 2, batch_size=None, dynamic_batching_args=OBJECT)),
    (Batch.get_batch, call(SELF, **names("batch_idx", "batch_size"))),
    (Batch.slice, call(SELF, 0, 1)),
    (Batch.repeat_interleave, call(SELF, 2)),
    (Batch.repeat_interleave, call(SELF, **names("num_repeats", "share_immutable_media"))),
    (Batch.truncate_tensors, call(SELF, **names("dim", "truncated_len"))),
    (Batch.make_microbatch_iterator, call(SELF, 1)),
    (Batch.make_microbatch_iterator_with_dynamic_shapes, call(SELF, sequence_dim=1)),
    (Batch.get_microbatch_iterator_dynamic_shapes_len, call(SELF)),
    (Batch.make_microbatch_iterator_for_packable_sequences, call(SELF)),
    (Batch.get_microbatch_iterator_for_packable_sequences_len, call(SELF)),
    (Batch.to, call(SELF, "cpu")),
    (Batch.select_indices, call(SELF, OBJECT)),
    (Batch.get_dict, call(SELF)),
    (Meta, call(**names("partition_id", "task_name", "sample_ids", "fields", "sequence_lengths", "extra_info"))),
    (Meta.stamp_tags, call(SELF, OBJECT)),
    (Meta.with_fields, call(SELF, OBJECT)),
    (Meta.concat, call(SELF, OBJECT, OBJECT)),
    (
        Client.register_partition,
        call(SELF, **names("partition_id", "fields", "num_samples", "consumer_tasks", "grpo_group_size", "enums")),
    ),
    (Client.put_samples, call(SELF, **names("sample_ids", "partition_id", "fields", "tags"))),
    (Client.get_samples, call(SELF, **names("sample_ids", "partition_id", "select_fields"))),
    (Client.clear_samples, call(SELF, **names("sample_ids", "partition_id"))),
    (
        Client.claim_meta,
        call(SELF, OBJECT, OBJECT, OBJECT, 1, **names("dp_rank", "blocking", "timeout_s")),
    ),
    (Client.get_data, call(SELF, OBJECT, select_fields=OBJECT)),
    (Client.check_consumption_status, call(SELF, OBJECT, OBJECT)),
    (read_columns, call(OBJECT, OBJECT, **names("select_fields", "layout", "pad_value_dict"))),
    (write_columns, call(OBJECT, OBJECT, fields=OBJECT)),
    (
        kv_first_write,
        call(
            OBJECT,
            **names("sample_ids", "dp_client", "partition_id", "extra_info", "task_name", "pad_to_multiple", "tags"),
        ),
    ),
    (materialize, call(OBJECT, **names("layout", "pad_value_dict", "pad_to_seqlen"))),
    (pack_jagged_fields, call(OBJECT, **names("lengths", "token_aligned_fields"))),
    (pack_jagged_fields, call(OBJECT, lengths=OBJECT)),
    (pack_per_token_field, call(OBJECT, OBJECT)),
    (to_nested_by_length, call(OBJECT, OBJECT)),
    (stack_or_nest, call(OBJECT)),
    (response_from_nested, call(OBJECT, OBJECT)),
    (fields_with_optional_routed_experts, call(OBJECT, enabled=True)),
    (
        shard_meta_for_dp,
        call(OBJECT, **names("dp_world", "batch_size", "sequence_packing_args", "dynamic_batching_args")),
    ),
    (
        get_packer,
        call(**names("algorithm", "bin_capacity", "collect_metrics", "min_bin_count", "bin_count_multiple")),
    ),
    (Policy.prepare_step, call(SELF, **names("num_samples", "group_size"))),
    (Policy.prepare_step, call(SELF, 8, 4)),
    (Policy.prepare_val_partition, call(SELF, 8, partition_id=OBJECT)),
    (Policy.discard_samples, call(SELF, OBJECT, OBJECT)),
    (Policy.discard_samples, call(SELF, **names("sample_ids", "partition_id"))),
    (Policy.finish_step, call(SELF, OBJECT)),
    (Policy.read_from_dataplane, call(SELF, OBJECT, **names("select_fields", "pad_value_dict"))),
    (Policy.write_to_dataplane, call(SELF, OBJECT, fields=OBJECT)),
    (Policy.get_logprobs_from_meta, call(SELF, OBJECT, **names("micro_batch_size", "timer"))),
    (Policy.get_reference_policy_logprobs_from_meta, call(SELF, OBJECT, **names("micro_batch_size", "timer"))),
    (
        Policy.train_from_meta,
        call(SELF, OBJECT, **names("loss_fn", "eval_mode", "gbs", "mbs", "timer", "train_fields")),
    ),
    (Policy.begin_train_step, call(SELF, OBJECT, 8, 1)),
    (Policy.train_microbatches_from_meta, call(SELF, OBJECT, timer=OBJECT)),
    (Policy.finish_train_step, call(SELF)),
    (Policy.abort_train_step, call(SELF)),
    (Worker.setup_data_plane, call(SELF, cfg=OBJECT)),
    (Worker._fetch, call(SELF, OBJECT, **names("layout", "fetch_policy", "preprocess", "dp_aligned_seq_len"))),
    (Worker._attach_or_repack_pack_metadata, call(SELF, OBJECT, OBJECT)),
    (Worker._write_back, call(SELF, OBJECT, OBJECT)),
    (Worker._write_back_result_field, call(SELF, OBJECT, OBJECT, **names("result_key", "tq_field"))),
    (Worker.train_presharded, call(SELF, **names("meta", "loss_fn", "eval_mode", "gbs", "mbs"))),
    (Worker.get_logprobs_presharded, call(SELF, **names("meta", "micro_batch_size"))),
    (Worker.get_reference_policy_logprobs_presharded, call(SELF, **names("meta", "micro_batch_size"))),
    (Worker.begin_train_step_presharded, call(SELF, **names("loss_fn", "gbs", "mbs"))),
    (Worker.train_microbatch_presharded, call(SELF, meta=OBJECT)),
    (Worker.finish_train_step_presharded, call(SELF)),
    (Worker.abort_train_step_presharded, call(SELF)),
]


@pytest.mark.parametrize(("called", "arguments"), CALLS, ids=[called.__qualname__ for called, _ in CALLS])
def test_the_call_is_accepted(called: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = arguments
    inspect.signature(called).bind(*args, **kwargs)
