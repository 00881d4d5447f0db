"""What a worker fetches: its rows in order, padded to the length that the driver stamped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dataplane_core import KVBatchMeta
from dataplane_core.batch import BatchedDataDict
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN

Write = Callable[..., KVBatchMeta]


def test_rows_come_in_the_order_of_the_meta(worker: Any, write_rows: Write) -> None:
    meta = write_rows([3, 1, 4, 2])
    fetched = worker._fetch(meta.subset([2, 0]))
    assert fetched["input_ids"].tolist() == [[3, 3, 3, 3], [1, 1, 1, 0]]
    assert fetched["input_lengths"].tolist() == [4, 3]


def test_a_recorded_pad_multiple_is_honoured(worker: Any, write_rows: Write) -> None:
    meta = write_rows([3, 1], pad_to_multiple=4)
    assert worker._fetch(meta, dp_aligned_seq_len=False)["input_ids"].shape == (2, 4)


def test_preprocess_sees_worker_and_batch_and_its_result_is_returned(worker: Any, write_rows: Write) -> None:
    def keep_ids(of: Any, batch: BatchedDataDict) -> BatchedDataDict:
        return BatchedDataDict({"input_ids": batch["input_ids"], "of": [of] * batch.size})

    fetched = worker._fetch(write_rows([2, 1]), preprocess=keep_ids)
    assert fetched["input_ids"].tolist() == [[1, 1], [2, 0]], "padded"
    assert fetched["of"] == [worker, worker]


def test_a_broadcast_without_a_replica_group_is_refused(worker: Any, write_rows: Write) -> None:
    with pytest.raises(InvalidRequestError, match="'leader_broadcast', and ToyWorker has no replica group"):
        worker._fetch(write_rows([2, 1]), fetch_policy="leader_broadcast")


@pytest.mark.parametrize("policy", ["auto", "independent"])
def test_a_rank_without_siblings_reads_under_every_other_policy(worker: Any, write_rows: Write, policy: str) -> None:
    assert worker._fetch(write_rows([2, 1]), fetch_policy=policy).size == 2


def test_an_unknown_fetch_policy_is_refused(worker: Any, write_rows: Write) -> None:
    with pytest.raises(InvalidRequestError, match="fetch_policy is 'leader'"):
        worker._fetch(write_rows([2, 1]), fetch_policy="leader")


@pytest.mark.parametrize("length", [2, -1, "8", 8.0])
def test_a_stamped_length_that_is_none_is_refused(worker: Any, write_rows: Write, length: Any) -> None:
    meta = write_rows([3, 1])
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = length
    with pytest.raises(InvalidRequestError, match="at least 3, the longest of these 2 rows"):
        worker._fetch(meta)


# --- the microbatch plan ----------------------------------------------------------------------------------------------

DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 6, "logprob_mb_tokens": 12}}


def test_the_drivers_plan_is_trusted(worker: Any, write_rows: Write) -> None:
    worker.cfg = DYNAMIC
    meta = write_rows([3, 1])
    meta.extra_info["micro_batch_indices"] = [[[0, 1], [1, 2]]]
    meta.extra_info["micro_batch_lengths"] = [[3, 1]]
    data, same = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta)
    assert same is meta
    assert data.micro_batch_indices == [[[0, 1], [1, 2]]]
    assert data.micro_batch_lengths == [[3, 1]]
    assert data.elem_counts_per_gb is None


def test_without_the_drivers_plan_one_is_made_and_the_meta_follows_the_rows(worker: Any, write_rows: Write) -> None:
    worker.cfg = DYNAMIC
    meta = write_rows([4, 1, 3, 2, 2])
    data, sorted_meta = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "train")
    assert data["input_lengths"].tolist() == [1, 2, 2, 3, 4]
    assert sorted_meta.sequence_lengths == [1, 2, 2, 3, 4]
    assert sorted_meta.sample_ids == ["p0_g1", "p1_g1", "p2_g0", "p1_g0", "p0_g0"]
    assert data.micro_batch_indices == [[[0, 3], [3, 4], [4, 5]]]
    logprob_data, _ = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "logprob")
    assert logprob_data.micro_batch_indices == [[[0, 4], [4, 5]]]


def test_a_plan_that_is_made_here_has_the_global_batches(worker: Any, write_rows: Write) -> None:
    worker.cfg = {"sequence_packing": {"enabled": True, "train_mb_tokens": 8}}
    meta = write_rows([1, 4, 3, 1, 2, 4, 1, 3])
    data, _ = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "train", 4)
    assert len(data.micro_batch_indices) == 2
    data, _ = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta, "train", 8)
    assert len(data.micro_batch_indices) == 1


def test_logprobs_of_sorted_rows_go_to_their_own_ids(worker: Any, write_rows: Write, client: DataPlaneClient) -> None:
    worker.cfg = DYNAMIC
    meta = write_rows([4, 1, 3, 2, 2])
    assert worker.get_logprobs_presharded(meta) is None
    rows = client.get_samples(meta.sample_ids, "train", ["prev_logprobs"])["prev_logprobs"].unbind()
    assert [row.tolist() for row in rows] == [[-1.0] * 4, [-2.0], [-3.0] * 3, [-4.0] * 2, [-5.0] * 2]


def test_without_plan_and_settings_rows_stay_as_they_are(worker: Any, write_rows: Write) -> None:
    meta = write_rows([2, 1])
    data, same = worker._attach_or_repack_pack_metadata(worker._fetch(meta), meta)
    assert same is meta
    assert data.micro_batch_indices is None
