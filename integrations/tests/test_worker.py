"""What a worker fetches, padded to the length that the driver stamped, what it writes, and how it attaches."""

from collections import UserDict
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

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


def _rows(client, meta, field):
    return [row.tolist() for row in client.get_samples(meta.sample_ids, "train", [field])[field].unbind()]


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


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        ("auto", None),
        ("independent", None),
        ("leader_broadcast", "'leader_broadcast', and ToyWorker has no replica group"),
        ("leader", "fetch_policy must be one of 'auto', .*, got 'leader'"),
    ],
)
def test_a_rank_without_siblings_reads_under_every_policy_but_a_broadcast(worker, write_rows, policy, refused):
    with pytest.raises(InvalidRequestError, match=refused) if refused else nullcontext():
        assert worker._fetch(write_rows([2, 1]), fetch_policy=policy).size == 2


def test_a_worker_can_name_further_ragged_fields(worker, toy_worker, write_rows, client):
    class Worker(toy_worker):
        ragged_fields = frozenset({"audio_frames"})

    other = Worker()
    other.setup_data_plane(client)
    meta = write_rows([3, 1]).with_fields(["audio_frames"])
    frames = [torch.full((length, 4), 1.0) for length in (3, 1)]  # as many frames as tokens, by chance
    client.put_samples(meta.sample_ids, "train", {"audio_frames": frames})
    fetched = [each._fetch(meta)["audio_frames"].is_nested for each in (worker, other)]
    assert fetched == [False, True]


@pytest.mark.parametrize("length", [2, -1, "8", 8.0])
def test_a_stamped_length_that_is_none_is_refused(worker, write_rows, length):
    meta = write_rows([3, 1])
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = length
    with pytest.raises(InvalidRequestError, match="at least 3, the longest of these 2 rows"):
        worker._fetch(meta)


# --- the microbatch plan ----------------------------------------------------------------------------------------------

DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 6, "logprob_mb_tokens": 12}}


def test_the_drivers_plan_is_trusted_and_without_plan_and_settings_rows_stay_as_they_are(worker, write_rows):
    meta = write_rows([3, 1])
    data, same = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta)
    assert (same, data.micro_batch_indices) == (meta, None)
    worker.cfg = DYNAMIC
    meta.extra_info["micro_batch_indices"] = [[[0, 1], [1, 2]]]
    meta.extra_info["micro_batch_lengths"] = [[3, 1]]
    data, same = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta)
    assert same is meta
    assert (data.micro_batch_indices, data.micro_batch_lengths) == ([[[0, 1], [1, 2]]], [[3, 1]])
    assert data.elem_counts_per_gb is None


def test_a_plan_of_other_rows_and_values_beside_other_tokens_are_refused(worker, write_rows, client, monkeypatch):
    meta = write_rows([3, 1])
    for plan in ([[[0, 1]]], [[[0, 1], [0, 1]]], [[[0, 2]], [[0, 2]]]):
        meta.extra_info["micro_batch_indices"] = plan
        with pytest.raises(InvalidRequestError, match="its microbatch plan covers"):
            worker.get_logprobs_presharded(meta)
    del meta.extra_info["micro_batch_indices"]
    monkeypatch.setattr(worker, "get_logprobs", lambda data, **_: {"logprobs": torch.zeros(2, 2)})
    with pytest.raises(InvalidRequestError, match="'logprobs' is 2 wide, and the tokens 3"):
        worker.get_logprobs_presharded(meta)


@pytest.mark.parametrize(
    ("call", "key"),
    [("get_logprobs", "logprobs"), ("get_reference_policy_logprobs", "reference_logprobs")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, None])
def test_a_mask_that_a_worker_returns_beside_log_probabilities_is_that_of_the_rows(
    worker, write_rows, client, monkeypatch, call, key, dtype
):
    def compute(data, **_):
        mask = data["token_mask"].clone()
        mask[0, 1] = 0
        values = torch.where(mask > 0, -1.0, -torch.inf)
        return {key: values, "token_mask": None if dtype is None else mask.to(dtype)}

    meta = write_rows([3, 1])
    before = _rows(client, meta, "token_mask")
    assert before[0][1]
    monkeypatch.setattr(worker, call, compute)
    getattr(worker, f"{call}_presharded")(meta)
    expected = before if dtype is None else [[before[0][0], 0, before[0][2]], before[1]]
    assert _rows(client, meta, "token_mask") == expected
    field = "prev_logprobs" if key == "logprobs" else "reference_policy_logprobs"
    assert _rows(client, meta, field)[0][1] == -torch.inf


def test_a_mask_that_does_not_fit_is_refused_before_anything_is_written(worker, write_rows, client, monkeypatch):
    meta = write_rows([3, 1])
    for mask, error, message in (
        (torch.ones(2, 2), InvalidRequestError, "'token_mask' is 2 wide, and the tokens 3"),
        ([[1, 1, 1], [1]], InvalidTypeError, "'token_mask' is list"),
    ):
        result = {"logprobs": torch.zeros(2, 3), "token_mask": mask}
        monkeypatch.setattr(worker, "get_logprobs", lambda data, result=result, **_: result)
        with pytest.raises(error, match=message):
            worker.get_logprobs_presharded(meta)
        assert "prev_logprobs" not in client.list_fields(meta.sample_ids, "train")[0]


def test_without_the_drivers_plan_one_is_made_and_the_meta_follows_the_rows(worker, write_rows, client):
    worker.cfg = DYNAMIC
    meta = write_rows([4, 1, 3, 2, 2])
    data, sorted_meta = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "train")
    assert data["input_lengths"].tolist() == [1, 2, 2, 3, 4]
    assert sorted_meta.sequence_lengths == [1, 2, 2, 3, 4]
    assert sorted_meta.sample_ids == ["p0_g1", "p1_g1", "p2_g0", "p1_g0", "p0_g0"]
    assert data.micro_batch_indices == [[[0, 3], [3, 4], [4, 5]]]
    prepared = worker._apply_packing_prep(worker._fetch(meta))
    assert (prepared.micro_batch_indices, prepared["input_lengths"].tolist()) == (
        data.micro_batch_indices,
        data["input_lengths"].tolist(),
    )
    logprob_data, _ = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "logprob")
    assert logprob_data.micro_batch_indices == [[[0, 4], [4, 5]]]
    assert worker.get_logprobs_presharded(meta) is None
    expected = [[-1.0] * 4, [-2.0], [-3.0] * 3, [-4.0] * 2, [-5.0] * 2]
    assert _rows(client, meta, "prev_logprobs") == expected, "those of sorted rows go to their own ids"


def test_a_plan_that_is_made_here_has_the_global_batches(worker, write_rows):
    worker.cfg = {"sequence_packing": {"enabled": True, "train_mb_tokens": 8}}
    meta = write_rows([1, 4, 3, 1, 2, 4, 1, 3])
    for size, count in ((4, 2), (8, 1)):
        data, _ = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "train", size)
        assert len(data.micro_batch_indices) == count


# --- write-back ------------------------------------------------------------------------------------------------------


def test_only_columns_of_tokens_are_cut_to_their_rows(worker, write_rows, client):
    meta = write_rows([3, 1])
    padded = torch.arange(16.0).reshape(2, 8)  # the forward rounded 3 up to 8
    embedding = torch.arange(8.0).reshape(2, 4)
    worker._write_back(meta, {"prev_logprobs": padded, "embedding": embedding, "advantages": torch.ones(2, 3)})
    worker._write_back(meta, {"values": torch.ones(2, 3)}, token_aligned_fields=["values"])
    assert _rows(client, meta, "prev_logprobs") == [[0.0, 1.0, 2.0], [8.0]]
    assert _rows(client, meta, "embedding") == embedding.tolist()
    assert _rows(client, meta, "advantages") == _rows(client, meta, "values") == [[1.0] * 3, [1.0]]


def test_a_row_that_repeats_is_written_once(worker, write_rows, client):
    meta = write_rows([3, 1])
    again = meta.subset([1, 0, 1])
    worker._write_back(again, {"prev_logprobs": torch.tensor([[5.0, 0, 0], [1, 2, 3], [5, 0, 0]])})
    assert _rows(client, meta, "prev_logprobs") == [[1.0, 2.0, 3.0], [5.0]]
    worker._write_back(again, TensorDict({"text": NonTensorStack("b", "a", "b")}, batch_size=[3]))
    assert client.get_samples(meta.sample_ids, "train", ["text"])["text"] == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="'values': 4, 'mean': 0"):
        worker._write_back(again, {"values": torch.zeros(4), "mean": torch.tensor(1.0)})


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
        ({"logprobs": torch.ones(3, 2)}, InvalidRequestError, "'prev_logprobs' has 3 rows. Expected 2"),
        ({"logprobs": torch.tensor(1.0)}, InvalidRequestError, "'prev_logprobs' has 0 rows. Expected 2"),
    ],
)
def test_a_wrong_result_is_refused(worker, write_rows, result, error, message):
    meta = write_rows([2, 1])
    with pytest.raises(error, match=message):
        worker._write_back_result_field(meta, result, result_key="logprobs", tq_field="prev_logprobs")
    with pytest.raises(InvalidRequestError, match=r"prev_logprobs.*sequence_lengths"):
        worker._write_back(replace(meta, sequence_lengths=None), {"prev_logprobs": torch.ones(2, 2)})
    worker.train = lambda *args, **kwargs: None
    with pytest.raises(InvalidTypeError, match="ToyWorker returned NoneType from a training step"):
        worker.train_presharded(meta, 1.0)


def test_calls_of_a_split_step_out_of_order_are_refused(worker, trainable_rows):
    def refused(name, *arguments):
        with pytest.raises(InvalidRequestError, match=f"{name} refused"):
            getattr(worker, name)(*arguments)

    meta = trainable_rows([2, 1])
    refused("train_microbatch_presharded", meta)
    refused("finish_train_step_presharded")
    worker.abort_train_step_presharded()  # nothing to abort
    worker.begin_train_step_presharded(1.0)
    refused("begin_train_step_presharded", 1.0)
    refused("train_presharded", meta, 1.0)
    worker.train_microbatch_presharded(meta)
    worker.abort_train_step_presharded()
    refused("finish_train_step_presharded")


# --- attaching -------------------------------------------------------------------------------------------------------


def test_a_worker_attaches_to_one_store_and_closing_leaves_a_shared_client_open(toy_worker, client):
    worker = toy_worker()
    with pytest.raises(ClientClosedError, match=r"ToyWorker is not attached.*setup_data_plane"):
        worker._require_dp_client()
    with pytest.raises(BackendUnavailableError, match="nothing to attach to"):  # it never starts a backend
        worker.setup_data_plane({"backend": "noop", "op_timeout_s": 3})
    for _ in range(2):
        worker.setup_data_plane(client)
    assert worker._require_dp_client() is client
    with pytest.raises(InvalidRequestError, match="attached to backend 'noop' with another config"):
        worker.setup_data_plane({"backend": "noop", "op_timeout_s": 3})
    for _ in range(2):
        worker.close_data_plane()
    client.register_partition("still_open", ["a"], None, [])
    with pytest.raises(ClientClosedError):
        worker._require_dp_client()
    worker.setup_data_plane(client)


def test_coordinates_have_no_default():
    with pytest.raises(DataPlaneError, match=r"does not say where it stands.*_local_coords\(\)"):
        DataPlaneWorkerMixin()._is_replica_leader()


AXES = ["tensor_parallel", "context_parallel", "pipeline_parallel"]


@pytest.mark.parametrize("coords", [{}, dict.fromkeys(AXES, 0), *({axis: 1} for axis in AXES)])
def test_the_leader_is_0_on_every_replicated_axis(toy_worker, coords):
    worker = toy_worker()
    worker.coords = {"data_parallel": 3, **coords}
    assert worker._is_replica_leader() is (not any(coords.values()))
