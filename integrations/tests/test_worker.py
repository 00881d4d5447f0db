"""What a worker fetches, padded to the length that the driver stamped, what it writes, and how it attaches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import KVBatchMeta
from dataplane_core.batch import BatchedDataDict
from dataplane_core.errors import (
    BackendUnavailableError,
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    InvalidTypeError,
)
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN
from dataplane_integrations import DataPlaneWorkerMixin

Write = Callable[..., KVBatchMeta]


def test_rows_come_in_the_order_of_the_meta(worker, write_rows):
    meta = write_rows([3, 1, 4, 2])
    fetched = worker._fetch(meta.subset([2, 0]))
    assert fetched["input_ids"].tolist() == [[3, 3, 3, 3], [1, 1, 1, 0]]
    assert fetched["input_lengths"].tolist() == [4, 3]


def test_a_recorded_pad_multiple_is_honoured(worker, write_rows):
    meta = write_rows([3, 1], pad_to_multiple=4)
    assert worker._fetch(meta, dp_aligned_seq_len=False)["input_ids"].shape == (2, 4)


def test_preprocess_sees_worker_and_batch_and_its_result_is_returned(worker, write_rows):
    def keep_ids(of, batch):
        return BatchedDataDict({"input_ids": batch["input_ids"], "of": [of] * batch.size})

    fetched = worker._fetch(write_rows([2, 1]), preprocess=keep_ids)
    assert fetched["input_ids"].tolist() == [[1, 1], [2, 0]], "padded"
    assert fetched["of"] == [worker, worker]


def test_a_broadcast_without_a_replica_group_is_refused(worker, write_rows):
    with pytest.raises(InvalidRequestError, match="'leader_broadcast', and ToyWorker has no replica group"):
        worker._fetch(write_rows([2, 1]), fetch_policy="leader_broadcast")


@pytest.mark.parametrize("policy", ["auto", "independent"])
def test_a_rank_without_siblings_reads_under_every_other_policy(worker, write_rows, policy):
    assert worker._fetch(write_rows([2, 1]), fetch_policy=policy).size == 2


def test_an_unknown_fetch_policy_is_refused(worker, write_rows):
    with pytest.raises(InvalidRequestError, match="fetch_policy is 'leader'"):
        worker._fetch(write_rows([2, 1]), fetch_policy="leader")


@pytest.mark.parametrize("length", [2, -1, "8", 8.0])
def test_a_stamped_length_that_is_none_is_refused(worker, write_rows, length):
    meta = write_rows([3, 1])
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = length
    with pytest.raises(InvalidRequestError, match="at least 3, the longest of these 2 rows"):
        worker._fetch(meta)


# --- the microbatch plan ----------------------------------------------------------------------------------------------

DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 6, "logprob_mb_tokens": 12}}


def test_the_drivers_plan_is_trusted(worker, write_rows):
    worker.cfg = DYNAMIC
    meta = write_rows([3, 1])
    meta.extra_info["micro_batch_indices"] = [[[0, 1], [1, 2]]]
    meta.extra_info["micro_batch_lengths"] = [[3, 1]]
    data, same = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta)
    assert same is meta
    assert data.micro_batch_indices == [[[0, 1], [1, 2]]]
    assert data.micro_batch_lengths == [[3, 1]]
    assert data.elem_counts_per_gb is None


def test_without_the_drivers_plan_one_is_made_and_the_meta_follows_the_rows(worker, write_rows):
    worker.cfg = DYNAMIC
    meta = write_rows([4, 1, 3, 2, 2])
    data, sorted_meta = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "train")
    assert data["input_lengths"].tolist() == [1, 2, 2, 3, 4]
    assert sorted_meta.sequence_lengths == [1, 2, 2, 3, 4]
    assert sorted_meta.sample_ids == ["p0_g1", "p1_g1", "p2_g0", "p1_g0", "p0_g0"]
    assert data.micro_batch_indices == [[[0, 3], [3, 4], [4, 5]]]
    logprob_data, _ = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "logprob")
    assert logprob_data.micro_batch_indices == [[[0, 4], [4, 5]]]


def test_a_plan_that_is_made_here_has_the_global_batches(worker, write_rows):
    worker.cfg = {"sequence_packing": {"enabled": True, "train_mb_tokens": 8}}
    meta = write_rows([1, 4, 3, 1, 2, 4, 1, 3])
    data, _ = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "train", 4)
    assert len(data.micro_batch_indices) == 2
    data, _ = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "train", 8)
    assert len(data.micro_batch_indices) == 1


def test_logprobs_of_sorted_rows_go_to_their_own_ids(worker, write_rows, client):
    worker.cfg = DYNAMIC
    meta = write_rows([4, 1, 3, 2, 2])
    assert worker.get_logprobs_presharded(meta) is None
    rows = client.get_samples(meta.sample_ids, "train", ["prev_logprobs"])["prev_logprobs"].unbind()
    assert [row.tolist() for row in rows] == [[-1.0] * 4, [-2.0], [-3.0] * 3, [-4.0] * 2, [-5.0] * 2]


def test_without_plan_and_settings_rows_stay_as_they_are(worker, write_rows):
    meta = write_rows([2, 1])
    data, same = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta)
    assert same is meta
    assert data.micro_batch_indices is None


# --- write-back ------------------------------------------------------------------------------------------------------


def _rows(client, meta, field):
    return [row.tolist() for row in client.get_samples(meta.sample_ids, "train", [field])[field].unbind()]


def test_sequence_parallel_padding_is_trimmed(worker, write_rows, client):
    meta = write_rows([3, 1])
    padded = torch.arange(16.0).reshape(2, 8)  # the forward rounded 3 up to 8
    worker._write_back(meta, {"prev_logprobs": padded})
    assert _rows(client, meta, "prev_logprobs") == [[0.0, 1.0, 2.0], [8.0]]


def test_a_row_that_repeats_is_written_once(worker, write_rows, client):
    meta = write_rows([3, 1])
    again = meta.subset([1, 0, 1])
    worker._write_back(again, {"prev_logprobs": torch.tensor([[5.0, 0, 0], [1, 2, 3], [5, 0, 0]])})
    assert _rows(client, meta, "prev_logprobs") == [[1.0, 2.0, 3.0], [5.0]]
    worker._write_back(again, TensorDict({"text": NonTensorStack("b", "a", "b")}, batch_size=[3]))
    assert client.get_samples(meta.sample_ids, "train", ["text"])["text"] == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="'values': 4"):
        worker._write_back(again, {"values": torch.zeros(4)})


def test_an_embedding_is_not_cut(worker, write_rows, client):
    meta = write_rows([3, 1])
    embedding = torch.arange(8.0).reshape(2, 4)
    worker._write_back(meta, {"embedding": embedding, "advantages": torch.ones(2, 3)})
    assert _rows(client, meta, "embedding") == embedding.tolist()
    assert _rows(client, meta, "advantages") == [[1.0] * 3, [1.0]]


def test_a_call_may_declare_other_fields(worker, write_rows, client):
    meta = write_rows([3, 1])
    worker._write_back(meta, {"values": torch.ones(2, 3)}, token_aligned_fields=["values"])
    assert _rows(client, meta, "values") == [[1.0] * 3, [1.0]]


def test_only_the_leader_writes(toy_worker, write_rows, client):
    meta = write_rows([3, 1])
    follower = toy_worker(tp_rank=1)
    follower.setup_data_plane(client)
    before = client.metrics.snapshot()["operations"]["put_samples"]["calls"]
    follower._write_back(meta, {"prev_logprobs": torch.zeros(2, 3)})
    follower._write_back_result_field(meta, {}, result_key="logprobs", tq_field="prev_logprobs")
    assert client.metrics.snapshot()["operations"]["put_samples"]["calls"] == before


def test_a_result_may_be_any_mapping_and_carry_a_graph(worker, write_rows, client):
    meta = write_rows([2, 1])
    result = UserDict({"logprobs": torch.ones(2, 2, requires_grad=True) * 2})
    worker._write_back_result_field(meta, result, result_key="logprobs", tq_field="prev_logprobs")
    assert _rows(client, meta, "prev_logprobs") == [[2.0, 2.0], [2.0]]


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ([torch.ones(2, 2)], InvalidTypeError, "returned list.*Expected a mapping"),
        ({"logits": torch.ones(2, 2)}, InvalidRequestError, "no key 'logprobs'. Found: 'logits'"),
        ({"logprobs": [[0.0]]}, InvalidTypeError, "'logprobs' is list. Expected a tensor of 2 rows"),
        ({"logprobs": torch.ones(3, 2)}, InvalidRequestError, r"shape \(3, 2\). Expected a batch size of 2"),
        ({"logprobs": torch.tensor(1.0)}, InvalidRequestError, r"shape \(\). Expected a batch size of 2"),
    ],
)
def test_a_wrong_result_is_refused(worker, write_rows, result, error, message):
    with pytest.raises(error, match=message):
        worker._write_back_result_field(write_rows([2, 1]), result, result_key="logprobs", tq_field="prev_logprobs")


def test_token_aligned_fields_without_lengths_are_refused(worker, write_rows):
    meta = replace(write_rows([2, 1]), sequence_lengths=None)
    with pytest.raises(InvalidRequestError, match=r"prev_logprobs.*sequence_lengths"):
        worker._write_back(meta, {"prev_logprobs": torch.ones(2, 2)})


def test_a_training_result_that_is_no_mapping_is_refused(worker, write_rows):
    worker.train = lambda *args, **kwargs: None
    with pytest.raises(InvalidTypeError, match="ToyWorker returned NoneType from a training step"):
        worker.train_presharded(write_rows([2, 1]), 1.0)


# --- attaching -------------------------------------------------------------------------------------------------------


def test_a_worker_that_was_not_attached_says_what_to_call(toy_worker):
    with pytest.raises(ClientClosedError, match=r"ToyWorker is not attached.*setup_data_plane"):
        toy_worker()._require_dp_client()


def test_attaching_twice_to_the_same_does_nothing(toy_worker, client):
    worker = toy_worker()
    worker.setup_data_plane(client)
    worker.setup_data_plane(client)
    assert worker._require_dp_client() is client


def test_attaching_to_something_else_is_refused(toy_worker, client):
    worker = toy_worker()
    worker.setup_data_plane(client)
    with pytest.raises(InvalidRequestError, match="attached to backend 'noop' with another config"):
        worker.setup_data_plane({"backend": "noop", "op_timeout_s": 3})


def test_attaching_never_starts_a_backend(toy_worker):
    with pytest.raises(BackendUnavailableError, match="nothing to attach to"):
        toy_worker().setup_data_plane({"backend": "noop"})


def test_closing_a_worker_leaves_a_shared_client_open(toy_worker, client):
    worker = toy_worker()
    worker.setup_data_plane(client)
    worker.close_data_plane()
    worker.close_data_plane()
    client.register_partition("still_open", ["a"], None, [])
    with pytest.raises(ClientClosedError):
        worker._require_dp_client()
    worker.setup_data_plane(client)


def test_coordinates_have_no_default():
    with pytest.raises(DataPlaneError, match=r"does not say where it stands.*_local_coords\(\)"):
        DataPlaneWorkerMixin()._is_replica_leader()


@pytest.mark.parametrize(
    ("coords", "leads"),
    [
        ({"data_parallel": 3}, True),
        ({"data_parallel": 1, "tensor_parallel": 0, "context_parallel": 0, "pipeline_parallel": 0}, True),
        ({"data_parallel": 0, "tensor_parallel": 1}, False),
        ({"data_parallel": 0, "context_parallel": 1}, False),
        ({"data_parallel": 0, "pipeline_parallel": 2}, False),
    ],
)
def test_the_leader_is_0_on_every_replicated_axis(toy_worker, coords, leads):
    worker = toy_worker()
    worker.coords = coords
    assert worker._is_replica_leader() is leads
