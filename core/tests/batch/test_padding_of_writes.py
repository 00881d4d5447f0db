"""On which side a batch is padded: its mask says so, and the meta keeps it for later writes; else rows begin at 0."""

from __future__ import annotations

import pytest
import torch
from token_rows import jagged, padded, rows_of
from torch import tensor

from dataplane_core import kv_first_write, read_columns, write_columns
from dataplane_core.batch import tokens
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


def test_columns_written_later_are_cut_where_the_tokens_of_the_first_write_began(client):
    meta = put(client, {**LEFT, **MASK})
    assert meta.token_starts == [3, 0]
    logprobs = {"prev_logprobs": LEFT["input_ids"] / 8}
    expected = [[7 / 8, 1], [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8]]
    for columns, named in [({**logprobs, **MASK}, None), (logprobs, None), (logprobs, ["prev_logprobs"])]:
        write_columns(client, meta, columns, token_aligned_fields=named)
        assert stored(client, "prev_logprobs") == expected
    turned = meta.subset([1, 0])
    write_columns(client, turned, {"prev_logprobs": -logprobs["prev_logprobs"].flip(0)})
    assert stored(client, "prev_logprobs") == [[-each for each in row] for row in expected]


def test_what_is_computed_from_rows_that_were_read_begins_at_0(client):
    meta = put(client, {**LEFT, **MASK})
    read = read_columns(client, meta)
    write_columns(client, meta, {"prev_logprobs": read["input_ids"] / 8})
    assert stored(client, "prev_logprobs") == [[7 / 8, 1], [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8]]


def test_whatever_lies_beyond_right_padded_tokens_is_cut_off_later_writes(client):
    meta = put(client, batch_of([[5, 6, 7, 0, 0], [1, 2, 3, 4, 9]], [3, 5]))
    assert meta.token_starts is None
    values = torch.randn(2, 5)
    write_columns(client, meta, {"prev_logprobs": values})
    assert stored(client, "prev_logprobs") == [values[0, :3].tolist(), values[1].tolist()]


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
    "rows that begin with the padding": (batch_of([[9, 7, 9], [1, 2, 3]], [2, 3]), "input_ids", [[9, 7], [1, 2, 3]]),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_right_padded_rows_are_cut_whatever_the_padding_is(client, kind, warnings):
    batch, name, rows = TAKEN[kind]
    put(client, batch)
    assert stored(client, name) == rows
    assert not warnings()


def test_zeros_where_rows_begin_are_no_padding_if_they_end_with_some(client):
    meta = put(client, batch_of([[0, 7, 9, 9, 9], [0, 2, 3, 4, 9]], [2, 4]))
    write_columns(client, meta, {"advantages": tensor([[0.0, 1.0, 1.0, 1.0, 1.0], [0.0, -2.0, -2.0, 3.0, -0.0]])})
    assert stored(client, "advantages") == [[0.0, 1.0], [0.0, -2.0, -2.0, 3.0]]


@pytest.fixture
def warnings(caplog, monkeypatch):
    """What was warned, of this test."""
    monkeypatch.setattr(tokens, "_has_warned", False)
    return lambda: [record.message for record in caplog.records]


#: Batches without a mask of places, and the row that seems to lose tokens.
WARNED = {
    "padded on the left": (LEFT, 0),
    "one token is cut off": (batch_of([[0, 0, 7, 7]], [2]), 0),
    "tokens go on": (batch_of([[1, 2, 3], [4, 7, 8]], [3, 1]), 1),
    **{
        f"no mask: {mask}": ({**LEFT, "attention_mask": mask}, 0)
        for mask in (torch.ones(2, 1, 5, 5), torch.full((2, 5), -torch.inf), ["none"] * 2)
    },
}


@pytest.mark.parametrize("kind", WARNED)
def test_without_a_mask_it_is_warned_once_if_tokens_seem_to_be_cut_off(client, kind, warnings):
    batch, row = WARNED[kind]
    for _ in range(2):
        put(client, batch)
    (warned,) = warnings()
    assert f"row {row} of field 'input_ids'" in warned
    assert "attention_mask" in warned


RIGHT = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "input_lengths": tensor([5, 3])}
REFUSED = {
    "a mask that contradicts the lengths": (
        {**LEFT, **MASK, "input_lengths": tensor([1, 5])},
        r"row 0 counts the places 3 to 4, but its length is 1\. Expected 2",
    ),
    "a column as wide as left-padded tokens that is not padded with them": (
        {**LEFT, **MASK, **POSITIONS},
        "field 'position_ids' is as wide as 'input_ids', but in row 0",
    ),
    "logprobs of the next tokens": ({**RIGHT, "generation_logprobs": torch.zeros(2, 7)}, "it is 7 wide"),
    "logprobs of the response": ({**RIGHT, "generation_logprobs": torch.zeros(2, 6)}, "it is 6 wide"),
    "jagged rows that are one short": (
        {**RIGHT, "generation_logprobs": jagged([4, 2])},
        "row 0 has 4 elements and 5 tokens",
    ),
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
def test_every_place_beyond_the_tokens_is_looked_at(client, row, place, warnings):
    lengths = tensor([600, 128, 255, 200])
    ids = torch.where(torch.arange(700) < lengths[:, None], 5, 9)
    put(client, {"input_ids": ids, "input_lengths": lengths})
    assert not warnings()
    ids[row, place] = 8
    put(client, {"input_ids": ids, "input_lengths": lengths}, ids="efgh")
    assert f"row {row} " in warnings()[0]
