"""Calls as the GRPO trainers of NeMo RL make them: none is a `TypeError` here."""

import ast
import inspect

import pytest

import dataplane_core
from dataplane_core import KVBatchMeta, batch, schema, sharding
from dataplane_core.client import DataPlaneClient
from dataplane_integrations import DataPlanePolicy, DataPlaneWorkerMixin

KNOWN = {
    **{name: getattr(dataplane_core, name) for name in dataplane_core.__all__},
    **vars(batch),
    **vars(schema),
    **vars(sharding),
    "Batch": batch.BatchedDataDict,
    "Meta": KVBatchMeta,
    "Client": DataPlaneClient,
    "Policy": DataPlanePolicy,
    "Worker": DataPlaneWorkerMixin,
}
#: ``_`` is any value.
CALLS = """
Batch.from_batches(_, pad_value_dict=_)
Batch.all_gather(self, _)
Batch.chunk(self, 0, 1)
Batch.reorder_data(self, _)
Batch.shard_by_batch_size(self, 2, batch_size=4)
Batch.shard_by_batch_size(self, shards=_, batch_size=_, sequence_packing_args=_)
Batch.shard_by_batch_size(self, 2, allow_uneven_shards=True)
Batch.shard_by_batch_size(self, 2, batch_size=None, dynamic_batching_args=_)
Batch.get_batch(self, batch_idx=_, batch_size=_)
Batch.slice(self, 0, 1)
Batch.repeat_interleave(self, 2)
Batch.repeat_interleave(self, num_repeats=_, share_immutable_media=_)
Batch.truncate_tensors(self, dim=_, truncated_len=_)
Batch.make_microbatch_iterator(self, 1)
Batch.make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim=1)
Batch.get_microbatch_iterator_dynamic_shapes_len(self)
Batch.make_microbatch_iterator_for_packable_sequences(self)
Batch.get_microbatch_iterator_for_packable_sequences_len(self)
Batch.to(self, 'cpu')
Batch.select_indices(self, _)
Batch.get_dict(self)
Meta(partition_id=_, task_name=_, sample_ids=_, fields=_, sequence_lengths=_, extra_info=_)
Meta.stamp_tags(self, _)
Meta.with_fields(self, _)
Meta.concat(self, _, _)
Client.register_partition(self, partition_id=_, fields=_, num_samples=_, consumer_tasks=_, grpo_group_size=_, enums=_)
Client.put_samples(self, sample_ids=_, partition_id=_, fields=_, tags=_)
Client.get_samples(self, sample_ids=_, partition_id=_, select_fields=_)
Client.clear_samples(self, sample_ids=_, partition_id=_)
Client.claim_meta(self, _, _, _, 1, dp_rank=_, blocking=_, timeout_s=_)
Client.get_data(self, _, select_fields=_)
Client.check_consumption_status(self, _, _)
read_columns(_, _, select_fields=_, layout=_, pad_value_dict=_)
write_columns(_, _, fields=_)
kv_first_write(_, sample_ids=_, dp_client=_, partition_id=_, extra_info=_, task_name=_, pad_to_multiple=_, tags=_)
materialize(_, layout=_, pad_value_dict=_, pad_to_seqlen=_)
pack_jagged_fields(_, lengths=_, token_aligned_fields=_)
pack_jagged_fields(_, lengths=_)
pack_per_token_field(_, _)
to_nested_by_length(_, _)
stack_or_nest(_)
response_from_nested(_, _)
fields_with_optional_routed_experts(_, enabled=True)
shard_meta_for_dp(_, dp_world=_, batch_size=_, sequence_packing_args=_, dynamic_batching_args=_)
get_packer(algorithm=_, bin_capacity=_, collect_metrics=_, min_bin_count=_, bin_count_multiple=_)
Policy.prepare_step(self, num_samples=_, group_size=_)
Policy.prepare_step(self, 8, 4)
Policy.prepare_val_partition(self, 8, partition_id=_)
Policy.discard_samples(self, _, _)
Policy.discard_samples(self, sample_ids=_, partition_id=_)
Policy.finish_step(self, _)
Policy.read_from_dataplane(self, _, select_fields=_, pad_value_dict=_)
Policy.write_to_dataplane(self, _, fields=_)
Policy.get_logprobs_from_meta(self, _, micro_batch_size=_, timer=_)
Policy.get_reference_policy_logprobs_from_meta(self, _, micro_batch_size=_, timer=_)
Policy.train_from_meta(self, _, loss_fn=_, eval_mode=_, gbs=_, mbs=_, timer=_, train_fields=_)
Policy.begin_train_step(self, _, 8, 1)
Policy.train_microbatches_from_meta(self, _, timer=_)
Policy.finish_train_step(self)
Policy.abort_train_step(self)
Worker.setup_data_plane(self, cfg=_)
Worker._fetch(self, _, layout=_, fetch_policy=_, preprocess=_, dp_aligned_seq_len=_)
Worker._attach_or_repack_pack_metadata(self, _, _)
Worker._apply_packing_prep(self, _)
Worker._write_back(self, _, _)
Worker._write_back_result_field(self, _, _, result_key=_, tq_field=_)
Worker.train_presharded(self, meta=_, loss_fn=_, eval_mode=_, gbs=_, mbs=_)
Worker.get_logprobs_presharded(self, meta=_, micro_batch_size=_)
Worker.get_reference_policy_logprobs_presharded(self, meta=_, micro_batch_size=_)
Worker.begin_train_step_presharded(self, loss_fn=_, gbs=_, mbs=_)
Worker.train_microbatch_presharded(self, meta=_)
Worker.finish_train_step_presharded(self)
Worker.abort_train_step_presharded(self)
"""


@pytest.mark.parametrize("call", CALLS.split("\n")[1:-1])
def test_the_call_is_accepted(call):
    parsed = ast.parse(call, mode="eval").body
    assert isinstance(parsed, ast.Call)
    called = eval(compile(ast.Expression(parsed.func), "the call", "eval"), dict(KNOWN))
    values = dict.fromkeys(keyword.arg or "" for keyword in parsed.keywords)
    inspect.signature(called).bind(*parsed.args, **values)
