"""`kv_first_write`: one put of a rollout's batch, padding cut where it is surely padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from token_rows import form, jagged

from dataplane_core.batch import BatchedDataDict, kv_first_write, read_columns
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, MICRO_BATCH_INDICES, PAD_TO_MULTIPLE

IDS = [f"prompt_g{number}" for number in range(4)]
LENGTHS = [3, 6, 1, 4]
WIDTH = 8
INSIDE = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
NOISE = torch.randn(4, WIDTH, 2, generator=torch.Generator().manual_seed(0))


def make_batch(**extra):
    return BatchedDataDict(
        {
            "input_ids": torch.where(INSIDE, torch.arange(5, 37).view(4, WIDTH), 3),  # pad id 3
            "input_lengths": torch.tensor(LENGTHS),
            "token_mask": INSIDE,
            "sample_mask": torch.ones(4),
            "text": ["a", {"k": [1]}, None, "d"],
            **extra,
        }
    )


def write(client, batch, **kwargs):
    return kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="train", **kwargs)


def stored(client, name):
    return client.get_samples(IDS, "train", [name]).get(name)


def one_beyond(dtype):
    """Zeros, but for one value beyond the tokens of the first row."""
    column = torch.zeros(4, WIDTH, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
    column[0, LENGTHS[0]] = 0x80 if dtype.itemsize == 1 else 1  # in float8_e4m3fnuz that byte is NaN, not -0.0
    return column.view(dtype)


CUT = {
    "input_ids": make_batch()["input_ids"],
    "token_mask": INSIDE,
    "generation_logprobs": NOISE[..., 0],  # beyond the tokens, a model's outputs may hold anything
    "prev_logprobs": torch.ones(4, WIDTH + 2),  # a forward may round the width up
    "routed_experts": torch.zeros(4, WIDTH, 2, 2, dtype=torch.int16),
    "scores": (NOISE * INSIDE[..., None]).to(torch.bfloat16),  # the product with a mask leaves -0.0
    "numbers": INSIDE * torch.tensor(3 + 1j),
}
WHOLE = {
    "sample_mask": torch.ones(4),
    "advantages": torch.ones(4, 1),  # one value per sample under the name of a token column
    "embedding": torch.cat([INSIDE, torch.zeros(4, 2)], dim=1),  # its width says nothing
    "image_grid_thw": INSIDE[..., None].expand(4, WIDTH, 3).long(),  # the shared vocabulary calls it ragged
    "position_ids": torch.arange(WIDTH).expand(4, WIDTH),
    **{
        f"one value of {dtype} beyond": one_beyond(dtype)
        for dtype in (torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fnuz, torch.complex64)
    },
}


def test_token_columns_are_cut_and_all_others_stay_whole_in_one_put(client, monkeypatch, assert_rows):
    calls = []
    put = client.put_samples
    monkeypatch.setattr(client, "put_samples", lambda *args, **kwargs: calls.append(kwargs) or put(*args, **kwargs))
    assert (CUT["scores"].view(torch.int16)[~INSIDE] != 0).any()
    batch = make_batch(**CUT, **WHOLE)
    meta = write(client, batch, extra_info={"step": 7}, pad_to_multiple=4, tags=[{"version": 1}] * 4)
    assert len(calls) == 1
    for name, column in CUT.items():
        assert_rows(stored(client, name), [row[:length] for row, length in zip(column, LENGTHS, strict=True)])
    for name, column in WHOLE.items():
        assert_rows(stored(client, name), list(column))
    assert set(read_columns(client, meta)) == set(batch)
    assert (meta.partition_id, meta.task_name, meta.sample_ids, meta.fields) == ("train", "train", IDS, list(batch))
    assert meta.sequence_lengths == LENGTHS
    assert meta.extra_info == {"step": 7, PAD_TO_MULTIPLE: 4}
    assert meta.tags == [{"version": 1, "input_lengths": length} for length in LENGTHS]


@pytest.mark.parametrize(
    "beside",
    [{"input_ids": torch.ones(4, WIDTH)}, {"input_ids": jagged(LENGTHS)}, {}],
    ids=["padded", "jagged", "none"],
)
def test_named_columns_of_any_width_are_cut_wherever_the_tokens_are(client, beside):
    columns = {"prev_logprobs": CUT["prev_logprobs"], "embedding": WHOLE["embedding"]}
    write(client, {"input_lengths": LENGTHS, **beside, **columns})
    assert form(stored(client, "prev_logprobs")) == LENGTHS
    assert form(stored(client, "embedding")) == (4, WIDTH + 2)


def test_without_lengths_nothing_is_cut(client):
    batch = make_batch()
    del batch["input_lengths"]
    meta = write(client, batch)
    assert (meta.sequence_lengths, meta.tags) == (None, None)
    assert form(stored(client, "input_ids")) == (4, WIDTH)
    with pytest.raises(InvalidRequestError, match="has no 'input_lengths' to cut them by"):
        write(client, batch, token_aligned_fields=["input_ids"])


def test_given_tags_and_info_are_not_changed_and_what_the_write_shows_wins(client):
    tags, info = [{"input_lengths": 1}, {}, {}, {}], {PAD_TO_MULTIPLE: 16, GLOBAL_FORWARD_PAD_SEQLEN: 32}
    meta = write(client, make_batch(), tags=tags, extra_info=info)
    assert [row["input_lengths"] for row in meta.tags] == [3, 6, 1, 4]
    assert client.list_samples("train").tags == meta.tags
    assert meta.extra_info == info
    came_along = {GLOBAL_FORWARD_PAD_SEQLEN: 4, MICRO_BATCH_INDICES: [[[0, 1]]]}
    assert write(client, make_batch(), extra_info=came_along).extra_info == {
        GLOBAL_FORWARD_PAD_SEQLEN: 6, PAD_TO_MULTIPLE: 1
    }  # fmt: skip
    assert write(client, make_batch(), extra_info=info, pad_to_multiple=8).extra_info[PAD_TO_MULTIPLE] == 8
    assert (tags, info[PAD_TO_MULTIPLE]) == ([{"input_lengths": 1}, {}, {}, {}], 16)


def test_an_empty_batch_writes_nothing(client):
    batch = {"input_ids": torch.zeros(0, 8, dtype=torch.int64), "input_lengths": torch.zeros(0, dtype=torch.int64)}
    meta = kv_first_write(batch, sample_ids=[], dp_client=client, partition_id="train")
    assert (meta.size, meta.sequence_lengths) == (0, [])


#: Columns, arguments, the class of the error, and what it must name.
REFUSED = [
    (
        {},
        {"required_fields": ["input_ids", "routed_experts", "audio"]},
        InvalidRequestError,
        "'routed_experts', 'audio'",
    ),
    ({}, {"pad_to_multiple": 0}, InvalidRequestError, "pad_to_multiple must be at least 1"),
    ({}, {"tags": [{}]}, InvalidRequestError, "tags must align 1:1"),
    ({"text": ["a"]}, {}, InvalidRequestError, r"'text' has 1 rows\. Expected 4"),
    ({"input_lengths": torch.tensor(LENGTHS).float()}, {}, InvalidRequestError, "field 'input_lengths'.*float32"),
    ({"input_lengths": torch.tensor([3, 9, 1, 4])}, {}, InvalidRequestError, "row 1 has length 9, .* padded to 8"),
    ({"strange": "text"}, {}, InvalidTypeError, "field 'strange' is a non-tensor leaf"),
    ({"strange": np.zeros(4, "M8[s]")}, {}, InvalidTypeError, "field 'strange' is a non-tensor column"),
    ({"strange": None}, {}, InvalidTypeError, "field 'strange' is a non-tensor leaf"),
    ({"text": [("a",), 2, 3, 4]}, {}, InvalidTypeError, "object field 'text', row 0.* of type tuple"),
]


@pytest.mark.parametrize(("columns", "kwargs", "error", "named"), REFUSED)
def test_what_cannot_be_written_is_refused_and_nothing_is_written(client, columns, kwargs, error, named):
    with pytest.raises(error, match=named):
        write(client, make_batch(**columns), **kwargs)
    assert client.list_samples("train").size == 0
