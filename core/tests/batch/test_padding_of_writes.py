"""On which side a batch is padded: writes cut by its attention mask; without one, only what looks like padding."""

from __future__ import annotations

import pytest
import torch
from token_rows import padded, rows_of
from torch import tensor

from dataplane_core import kv_first_write, read_columns, write_columns
from dataplane_core.errors import InvalidRequestError


def put(client, batch, ids="abcd", **more):
    ids = list(ids)[: len(batch["input_lengths"])]
    return kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train", **more)


def stored(client, name):
    return rows_of(client.get_samples(["a", "b"], "train", [name])[name])


LEFT = {"input_ids": tensor([[0, 0, 0, 7, 8], [1, 2, 3, 4, 5]]), "input_lengths": tensor([2, 5])}
MASK = {"attention_mask": tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])}
POSITIONS = {"position_ids": torch.arange(5).expand(2, 5)}


def batch_of(ids, lengths, **more):
    return {"input_ids": tensor(ids), "input_lengths": tensor(lengths), **more}


@pytest.mark.parametrize("sides", ["ll", "lr", "bl", "rb"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_mask_says_where_the_tokens_are(client, sides, dtype):
    tokens = [[7, 8], [1, 2, 3, 4]]
    batch = {
        "input_ids": padded(tokens, 6, sides, pad=9),
        "attention_mask": padded([[1] * 2, [1] * 4], 6, sides).to(dtype),
        "input_lengths": tensor([2, 4]),
        "generation_logprobs": padded(tokens, 6, sides).bfloat16(),
        "routed_experts": padded(tokens, 6, sides, pad=-1)[..., None, None].expand(2, 6, 2, 3),
        "position_ids": padded([[0, 1], [0, 1, 2, 3]], 6, sides, pad=1),
        "embedding": torch.arange(16.0).view(2, 8),
    }
    meta = put(client, batch)
    for name in ("input_ids", "generation_logprobs"):
        assert stored(client, name) == tokens
    assert [[cell[1][2] for cell in row] for row in stored(client, "routed_experts")] == tokens
    assert stored(client, "position_ids") == [[0, 1], [0, 1, 2, 3]]
    assert stored(client, "attention_mask") == [[1] * 2, [1] * 4]
    read = read_columns(client, meta)
    assert read["input_ids"].tolist() == [[7, 8, 0, 0], [1, 2, 3, 4]]
    assert torch.equal(read["embedding"], batch["embedding"])


def test_columns_written_later_are_cut_by_the_mask_beside_them_and_refused_without(client):
    meta = put(client, {**LEFT, **MASK})
    logprobs = {"prev_logprobs": LEFT["input_ids"] / 8}
    for named in (None, ["prev_logprobs"]):
        write_columns(client, meta, {**logprobs, **MASK}, token_aligned_fields=named)
        assert stored(client, "prev_logprobs") == [[7 / 8, 1], [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8]]
    with pytest.raises(InvalidRequestError, match=r"row 0 of field 'prev_logprobs' .* Put the column 'attention_mask'"):
        write_columns(client, meta, logprobs)


#: What is put, a column, and its rows as they are stored.
IDS = [[7, 8, 0, 0, 0], [1, 2, 3, 0, 0]]
SOME = {"attention_mask": tensor([[1, 0, 0, 0, 0], [0, 1, 1, 0, 0]])}
NOISE = {"prev_logprobs": torch.arange(10.0).view(2, 5)}
NONE = {"attention_mask": tensor([[0, 0], [0, 1]])}
TAKEN = {
    "any padding": (batch_of([[0, 7, 9, 9, 9], [0, 2, 3, 4, 9]], [2, 4]), "input_ids", [[0, 7], [0, 2, 3, 4]]),
    "a mask that leaves out tokens": (batch_of(IDS, [2, 3], **SOME), "input_ids", [[7, 8], [1, 2, 3]]),
    "rows without tokens": (batch_of([[0, 0], [0, 5]], [0, 1], **NONE), "input_ids", [[], [5]]),
    "anything beside right-padded ids": (batch_of(IDS, [2, 3], **NOISE), "prev_logprobs", [[0, 1], [5, 6, 7]]),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_right_padded_rows_are_cut_whatever_the_padding_is(client, kind):
    batch, name, rows = TAKEN[kind]
    put(client, batch)
    assert stored(client, name) == rows


def test_zeros_where_rows_begin_are_no_padding_if_they_end_with_some(client):
    meta = put(client, batch_of([[0, 7, 9, 9, 9], [0, 2, 3, 4, 9]], [2, 4]))
    write_columns(client, meta, {"advantages": tensor([[0.0, 1.0, 1.0, 1.0, 1.0], [0.0, -2.0, -2.0, 3.0, -0.0]])})
    assert stored(client, "advantages") == [[0.0, 1.0], [0.0, -2.0, -2.0, 3.0]]


REFUSED = {
    "no mask": (LEFT, r"row 0 of field 'input_ids' has 2 tokens by its length"),
    "equal tokens": (batch_of([[0, 0, 7, 7]], [2]), "row 0 of field 'input_ids'"),
    "one zero": (batch_of([[1, 2, 3], [0, 7, 8]], [3, 2]), "row 1 of field 'input_ids'"),
    "begins with the padding": (batch_of([[9, 7, 9], [1, 2, 3]], [2, 3]), "row 0 of field 'input_ids'"),
    "ends differ": (batch_of([[9, 7, 5], [9, 8, 6], [1, 2, 3]], [2, 2, 3]), "row 1 of field 'input_ids'"),
    "a mask that contradicts the lengths": (
        {**LEFT, **MASK, "input_lengths": tensor([1, 5])},
        r"row 0 counts the places 3 to 4, but its length is 1\. Expected 2",
    ),
    "a column as wide as left-padded tokens that is not padded with them": (
        {**LEFT, **MASK, **POSITIONS},
        "field 'position_ids' is as wide as 'input_ids', but in row 0",
    ),
    # what is no mask of places
    **{
        f"no mask: {mask}": ({**LEFT, "attention_mask": mask}, "does not look like padding")
        for mask in (torch.ones(2, 1, 5, 5), torch.full((2, 5), -torch.inf), torch.zeros(2, 0), ["none"] * 2)
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_rows_that_would_lose_tokens_are_refused(client, kind):
    batch, named = REFUSED[kind]
    with pytest.raises(InvalidRequestError, match=named):
        put(client, batch)
    assert client.list_samples("train").size == 0


def test_declared_columns_are_cut_whatever_they_hold(client):
    put(client, {**LEFT, **MASK, **POSITIONS}, token_aligned_fields=["input_ids", "position_ids"])
    assert stored(client, "position_ids") == [[3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("row", "place"),
    [(row, place + 355 * (row == 0 and place > 0)) for row in (0, 3) for place in (-1, -2, 255, 256, 300)],
)
def test_every_place_beyond_the_tokens_is_looked_at(client, row, place):
    lengths = tensor([600, 128, 255, 200])
    ids = torch.where(torch.arange(700) < lengths[:, None], 5, 9)
    put(client, {"input_ids": ids, "input_lengths": lengths})
    ids[row, place] = 8
    with pytest.raises(InvalidRequestError, match=f"row {row} "):
        put(client, {"input_ids": ids, "input_lengths": lengths}, ids="efgh")
