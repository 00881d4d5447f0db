"""Writes of batches: padding is cut where it is surely padding, on the side that the mask says."""

import pytest
import torch
from token_rows import form, jagged, padded, rows_of
from torch import tensor

from dataplane_core.batch import BatchedDataDict, kv_first_write, read_columns, tokens, write_columns
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, MICRO_BATCH_INDICES, PAD_TO_MULTIPLE
from dataplane_testkit._columns import check_column

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
    ids = IDS[: len(batch["input_ids"])]
    return kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train", **kwargs)


def stored(client, name):
    return client.get_samples(client.list_sample_ids("train"), "train", [name]).get(name)


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


def test_token_columns_are_cut_and_all_others_stay_whole_in_one_put(client, monkeypatch):
    calls = []
    put = client.put_samples
    monkeypatch.setattr(client, "put_samples", lambda *args, **kwargs: calls.append(kwargs) or put(*args, **kwargs))
    assert (CUT["scores"].view(torch.int16)[~INSIDE] != 0).any()
    batch = make_batch(**CUT, **WHOLE)
    meta = write(client, batch, extra_info={"step": 7}, pad_to_multiple=4, tags=[{"version": 1}] * 4)
    assert len(calls) == 1
    for name, column in CUT.items():
        check_column(stored(client, name), [row[:length] for row, length in zip(column, LENGTHS, strict=True)])
    for name, column in WHOLE.items():
        check_column(stored(client, name), list(column))
    assert set(read_columns(client, meta)) == set(batch)
    assert (meta.partition_id, meta.task_name, meta.sample_ids, meta.fields) == ("train", "train", IDS, list(batch))
    assert meta.sequence_lengths == LENGTHS
    assert meta.extra_info == {"step": 7, PAD_TO_MULTIPLE: 4}
    assert meta.tags == [{"version": 1, "input_lengths": length} for length in LENGTHS]


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
    meta = write(client, batch)
    assert (meta.size, meta.sequence_lengths) == (0, [])


# --- on which side rows are padded ------------------------------------------------------------------------------------


def rows_stored(client, name):
    return rows_of(stored(client, name))


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
    meta = write(client, batch)
    for name in ("input_ids", "generation_logprobs"):
        assert rows_stored(client, name) == tokens
    assert [[cell[1][2] for cell in row] for row in rows_stored(client, "routed_experts")] == tokens
    assert rows_stored(client, "position_ids") == [[0, 1], [0, 1, 2, 3]]
    assert rows_stored(client, "attention_mask") == [[1] * 2, [1] * 4]
    read = read_columns(client, meta)
    assert read["input_ids"].tolist() == [[7, 8, 0, 0], [1, 2, 3, 4]]
    assert torch.equal(read["embedding"], batch["embedding"])


def test_columns_written_later_are_cut_where_the_tokens_of_the_first_write_began(client):
    meta = write(client, {**LEFT, **MASK})
    assert meta.token_starts == [3, 0]
    logprobs = {"prev_logprobs": LEFT["input_ids"] / 8}
    expected = [[7 / 8, 1], [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8]]
    for columns, named in [({**logprobs, **MASK}, None), (logprobs, None), (logprobs, ["prev_logprobs"])]:
        write_columns(client, meta, columns, token_aligned_fields=named)
        assert rows_stored(client, "prev_logprobs") == expected
    turned = meta.subset([1, 0])
    write_columns(client, turned, {"prev_logprobs": -logprobs["prev_logprobs"].flip(0)})
    assert rows_stored(client, "prev_logprobs") == [[-each for each in row] for row in expected]


def test_what_is_computed_from_rows_that_were_read_begins_at_0(client):
    meta = write(client, {**LEFT, **MASK})
    read = read_columns(client, meta)
    write_columns(client, meta, {"prev_logprobs": read["input_ids"] / 8})
    assert rows_stored(client, "prev_logprobs") == [[7 / 8, 1], [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8]]


#: What is put, a column, and its rows as they are rows_stored.
ROWS = [[7, 8, 0, 0, 0], [1, 2, 3, 0, 0]]
SOME = {"attention_mask": tensor([[1, 0, 0, 0, 0], [0, 1, 1, 0, 0]])}
BESIDE = {"prev_logprobs": torch.arange(10.0).view(2, 5)}
NONE = {"attention_mask": tensor([[0, 0], [0, 1]])}
TAKEN = {
    "any padding": (batch_of([[0, 7, 9, 9, 9], [0, 2, 3, 4, 9]], [2, 4]), "input_ids", [[0, 7], [0, 2, 3, 4]]),
    "a mask that leaves out tokens": (batch_of(ROWS, [2, 3], **SOME), "input_ids", [[7, 8], [1, 2, 3]]),
    "rows without tokens": (batch_of([[0, 0], [0, 5]], [0, 1], **NONE), "input_ids", [[], [5]]),
    "anything beside right-padded ids": (
        batch_of(ROWS, [2, 3], **BESIDE),
        "prev_logprobs",
        [[0, 1], [5, 6, 7]],
    ),
    "rows that begin with the padding": (batch_of([[9, 7, 9], [1, 2, 3]], [2, 3]), "input_ids", [[9, 7], [1, 2, 3]]),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_right_padded_rows_are_cut_whatever_the_padding_is(client, kind, warnings):
    batch, name, rows = TAKEN[kind]
    write(client, batch)
    assert rows_stored(client, name) == rows
    assert not warnings()


def test_zeros_where_rows_begin_are_no_padding_if_they_end_with_some(client):
    meta = write(client, batch_of([[0, 7, 9, 9, 9], [0, 2, 3, 4, 9]], [2, 4]))
    write_columns(client, meta, {"advantages": tensor([[0.0, 1.0, 1.0, 1.0, 1.0], [0.0, -2.0, -2.0, 3.0, -0.0]])})
    assert rows_stored(client, "advantages") == [[0.0, 1.0], [0.0, -2.0, -2.0, 3.0]]


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
        write(client, batch)
    (warned,) = warnings()
    assert f"row {row} of field 'input_ids'" in warned
    assert "attention_mask" in warned


RIGHT = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "input_lengths": tensor([5, 3])}
#: What is written, arguments, and what the error must name.
REFUSED = [
    (make_batch(), {"required_fields": ["input_ids", "voice", "audio"]}, "'voice', 'audio'"),
    (make_batch(), {"pad_to_multiple": 0}, "pad_to_multiple must be at least 1"),
    (make_batch(), {"tags": [{}]}, "tags must align 1:1"),
    (make_batch(input_lengths=tensor(LENGTHS).float()), {}, "field 'input_lengths'.*float32"),
    (make_batch(input_lengths=tensor([3, 9, 1, 4])), {}, "row 1 has length 9, .* padded to 8"),
    # tokens would be lost
    ({**LEFT, **MASK, "input_lengths": tensor([1, 5])}, {}, "row 0 counts the places 3 to 4"),
    ({**LEFT, **MASK, **POSITIONS}, {}, "'position_ids' is as wide as 'input_ids', but in row 0"),
    ({**RIGHT, "generation_logprobs": torch.zeros(2, 7)}, {}, "it is 7 wide"),  # of the next tokens
    ({**RIGHT, "generation_logprobs": torch.zeros(2, 6)}, {}, "it is 6 wide"),  # of the response
    ({**RIGHT, "generation_logprobs": jagged([4, 2])}, {}, "row 0 has 4 elements and 5 tokens"),
]


@pytest.mark.parametrize(("batch", "kwargs", "named"), REFUSED)
def test_what_cannot_be_written_is_refused_and_nothing_is_written(client, batch, kwargs, named):
    with pytest.raises(InvalidRequestError, match=named):
        write(client, batch, **kwargs)
    assert client.list_samples("train").size == 0


def test_declared_columns_are_cut_whatever_they_hold(client):
    write(client, {**LEFT, **MASK, **POSITIONS}, token_aligned_fields=["input_ids", "position_ids"])
    assert rows_stored(client, "position_ids") == [[3, 4], [0, 1, 2, 3, 4]]
