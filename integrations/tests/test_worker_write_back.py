"""Write-back: the leader alone, token-aligned fields cut to their rows, clear refusals."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import KVBatchMeta
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError, InvalidTypeError

Write = Callable[..., KVBatchMeta]


def _rows(client: DataPlaneClient, meta: KVBatchMeta, field: str) -> list[Any]:
    return [row.tolist() for row in client.get_samples(meta.sample_ids, "train", [field])[field].unbind()]


def test_sequence_parallel_padding_is_trimmed(worker: Any, write_rows: Write, client: DataPlaneClient) -> None:
    meta = write_rows([3, 1])
    padded = torch.arange(16.0).reshape(2, 8)  # the forward rounded 3 up to 8
    worker._write_back(meta, {"prev_logprobs": padded})
    assert _rows(client, meta, "prev_logprobs") == [[0.0, 1.0, 2.0], [8.0]]


def test_a_row_that_repeats_is_written_once(worker: Any, write_rows: Write, client: DataPlaneClient) -> None:
    meta = write_rows([3, 1])
    again = meta.subset([1, 0, 1])
    worker._write_back(again, {"prev_logprobs": torch.tensor([[5.0, 0, 0], [1, 2, 3], [5, 0, 0]])})
    assert _rows(client, meta, "prev_logprobs") == [[1.0, 2.0, 3.0], [5.0]]
    worker._write_back(again, TensorDict({"text": NonTensorStack("b", "a", "b")}, batch_size=[3]))
    assert client.get_samples(meta.sample_ids, "train", ["text"])["text"] == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="'values': 4"):
        worker._write_back(again, {"values": torch.zeros(4)})


def test_an_embedding_is_not_cut(worker: Any, write_rows: Write, client: DataPlaneClient) -> None:
    meta = write_rows([3, 1])
    embedding = torch.arange(8.0).reshape(2, 4)
    worker._write_back(meta, {"embedding": embedding, "advantages": torch.ones(2, 3)})
    assert _rows(client, meta, "embedding") == embedding.tolist()
    assert _rows(client, meta, "advantages") == [[1.0] * 3, [1.0]]


def test_a_call_may_declare_other_fields(worker: Any, write_rows: Write, client: DataPlaneClient) -> None:
    meta = write_rows([3, 1])
    worker._write_back(meta, {"values": torch.ones(2, 3)}, token_aligned_fields=["values"])
    assert _rows(client, meta, "values") == [[1.0] * 3, [1.0]]


def test_only_the_leader_writes(toy_worker: Any, write_rows: Write, client: DataPlaneClient) -> None:
    meta = write_rows([3, 1])
    follower = toy_worker(tp_rank=1)
    follower.setup_data_plane(client)
    before = client.metrics.snapshot()["operations"]["put_samples"]["calls"]
    follower._write_back(meta, {"prev_logprobs": torch.zeros(2, 3)})
    follower._write_back_result_field(meta, {}, result_key="logprobs", tq_field="prev_logprobs")
    assert client.metrics.snapshot()["operations"]["put_samples"]["calls"] == before


def test_a_result_may_be_any_mapping_and_carry_a_graph(worker: Any, write_rows: Write, client: DataPlaneClient) -> None:
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
def test_a_wrong_result_is_refused(
    worker: Any, write_rows: Write, result: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        worker._write_back_result_field(write_rows([2, 1]), result, result_key="logprobs", tq_field="prev_logprobs")


def test_token_aligned_fields_without_lengths_are_refused(worker: Any, write_rows: Write) -> None:
    meta = replace(write_rows([2, 1]), sequence_lengths=None)
    with pytest.raises(InvalidRequestError, match=r"prev_logprobs.*sequence_lengths"):
        worker._write_back(meta, {"prev_logprobs": torch.ones(2, 2)})


def test_a_training_result_that_is_no_mapping_is_refused(worker: Any, write_rows: Write) -> None:
    worker.train = lambda *args, **kwargs: None
    with pytest.raises(InvalidTypeError, match="ToyWorker returned NoneType from a training step"):
        worker.train_presharded(write_rows([2, 1]), 1.0)
