"""`kv_first_write`: one put of a rollout's batch, padding cut where it is surely padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataplane_core.batch import BatchedDataDict, kv_first_write, read_columns
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, PAD_TO_MULTIPLE

IDS = [f"prompt_g{number}" for number in range(4)]
LENGTHS = [3, 6, 1, 4]
WIDTH = 8


def make_batch(**extra):
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    generator = torch.Generator().manual_seed(0)
    return BatchedDataDict(
        {
            "input_ids": torch.where(mask, torch.randint(5, 99, (4, WIDTH), generator=generator), 3),  # pad id 3
            "input_lengths": torch.tensor(LENGTHS),
            "generation_logprobs": torch.randn(4, WIDTH, generator=generator) * mask,
            "token_mask": mask,
            "sample_mask": torch.ones(4),
            "text": ["a", {"k": [1]}, None, "d"],
            **extra,
        }
    )


def write(client, batch, **kwargs):
    return kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="train", **kwargs)


def stored(client, meta, name):
    return client.get_samples(meta.sample_ids, "train", [name]).get(name)


def test_the_meta_names_rows_fields_lengths_and_tags(client):
    meta = write(client, make_batch(), extra_info={"step": 7}, pad_to_multiple=4, tags=[{"version": 1}] * 4)
    assert meta.partition_id == "train"
    assert meta.task_name == "train"
    assert meta.sample_ids == IDS
    assert meta.fields == list(make_batch())
    assert meta.sequence_lengths == LENGTHS
    assert meta.extra_info == {"step": 7, PAD_TO_MULTIPLE: 4}
    assert meta.tags == [{"version": 1, "input_lengths": length} for length in LENGTHS]


def test_every_column_is_written_in_one_put(client, monkeypatch):
    calls = []
    put = client.put_samples
    monkeypatch.setattr(client, "put_samples", lambda *args, **kwargs: calls.append(kwargs) or put(*args, **kwargs))
    meta = write(client, make_batch())
    assert len(calls) == 1
    read = read_columns(client, meta)
    assert set(read) == set(make_batch())


def test_an_unknown_column_of_the_same_width_is_cut_where_the_rest_is_zero(client):
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    scores = (torch.randn(4, WIDTH, 2, generator=torch.Generator().manual_seed(5)) * mask[..., None]).to(torch.bfloat16)
    assert (scores.view(torch.int16)[~mask] != 0).any()  # the product with a mask leaves -0.0
    meta = write(client, make_batch(scores=scores, flags=mask, numbers=mask * torch.tensor(3 + 1j)))
    for name in ("scores", "flags", "numbers"):
        assert stored(client, meta, name).offsets().diff().tolist() == LENGTHS


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fnuz, torch.complex64])
def test_a_single_value_beyond_a_row_keeps_the_column_whole(client, dtype):
    column = torch.zeros(4, WIDTH, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
    column[0, LENGTHS[0]] = 0x80 if dtype.itemsize == 1 else 1  # in float8_e4m3fnuz that byte is NaN, not -0.0
    column = column.view(dtype)
    meta = write(client, make_batch(column=column))
    assert stored(client, meta, "column").shape == (4, WIDTH)


def test_without_lengths_nothing_is_cut(client):
    batch = make_batch()
    del batch["input_lengths"]
    meta = write(client, batch)
    assert meta.sequence_lengths is None
    assert meta.tags is None
    assert stored(client, meta, "input_ids").shape == (4, WIDTH)
    with pytest.raises(InvalidRequestError, match="has no 'input_lengths' to cut them by"):
        write(client, batch, token_aligned_fields=["input_ids"])


def test_given_tags_are_not_changed_and_their_own_length_wins(client):
    tags = [{"input_lengths": 1}, {}, {}, {}]
    meta = write(client, make_batch(), tags=tags)
    assert tags == [{"input_lengths": 1}, {}, {}, {}]
    assert [row["input_lengths"] for row in meta.tags] == [1, 6, 1, 4]


def test_a_multiple_in_extra_info_stands_unless_another_is_given(client):
    assert write(client, make_batch(), extra_info={PAD_TO_MULTIPLE: 16}).extra_info == {PAD_TO_MULTIPLE: 16}
    info = {PAD_TO_MULTIPLE: 16, GLOBAL_FORWARD_PAD_SEQLEN: 32}
    assert write(client, make_batch(), extra_info=info, pad_to_multiple=8).extra_info[PAD_TO_MULTIPLE] == 8
    assert info[PAD_TO_MULTIPLE] == 16


def test_an_empty_batch_writes_nothing(client):
    batch = {"input_ids": torch.zeros(0, 8, dtype=torch.int64), "input_lengths": torch.zeros(0, dtype=torch.int64)}
    meta = kv_first_write(batch, sample_ids=[], dp_client=client, partition_id="train")
    assert meta.size == 0
    assert meta.sequence_lengths == []


def test_a_batch_without_a_required_column_is_refused_and_nothing_is_written(client):
    required = ["input_ids", "routed_experts", "audio"]
    with pytest.raises(InvalidRequestError, match="the batch has no 'routed_experts', 'audio', which is required"):
        write(client, make_batch(), required_fields=required)
    assert client.list_samples("train").size == 0
    experts = torch.zeros(4, WIDTH, 2, 2, dtype=torch.int16)
    meta = write(client, make_batch(routed_experts=experts), required_fields=required[:2])
    assert [len(row) for row in stored(client, meta, "routed_experts").unbind()] == LENGTHS


def test_ids_must_match_the_batch_size(client):
    with pytest.raises(InvalidRequestError, match=r"'input_ids' has 4 rows\. Expected 3: .* must match batch size"):
        kv_first_write(make_batch(), sample_ids=IDS[:3], dp_client=client, partition_id="train")
    with pytest.raises(ValueError, match="must match batch size"):
        write(client, make_batch(text=["a"]))


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"pad_to_multiple": 0}, "pad_to_multiple must be at least 1"),
        ({"tags": [{}]}, "tags must align 1:1"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(client, kwargs, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        write(client, make_batch(), **kwargs)


@pytest.mark.parametrize(
    ("name", "column", "error", "reason"),
    [
        ("input_lengths", torch.tensor(LENGTHS).float(), InvalidRequestError, "field 'input_lengths'.*float32"),
        ("input_lengths", torch.tensor([3, 9, 1, 4]), InvalidRequestError, "row 1 has length 9, .* padded to 8"),
        ("strange", "text", InvalidTypeError, "field 'strange' is a non-tensor column"),
        ("strange", np.zeros(4, "M8[s]"), InvalidTypeError, "field 'strange' is a non-tensor column"),
        ("strange", None, InvalidTypeError, "field 'strange' is a non-tensor column"),
        ("text", [("a",), 2, 3, 4], InvalidTypeError, "object field 'text', row 0.* of type tuple"),
    ],
)
def test_columns_that_cannot_be_written_are_refused_and_nothing_is_written(client, name, column, error, reason):
    with pytest.raises(error, match=reason):
        write(client, make_batch(**{name: column}))
    assert client.list_samples("train").size == 0
